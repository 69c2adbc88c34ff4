"""Penalties that keep parameters finite, in nats.

They do not change when a canonical model is split into two equal ones with half of its alpha each, so that a model with
more canonical models can never be worse: the ridge weighs every model by its share alpha_k / sum(alpha), and the prior
of alpha is one of sum(alpha).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .likelihood import LARGEST_ALPHA, Layout, Matrix, Parameters, Vector, concentration

_CENTRE = math.log(2.0)  # of log sum(alpha), which has a variance of 1, because a few clients say little about it
_EMPTY = 0.005  # precision of log(alpha_k / sum(alpha)): so weak that a split costs less than 0.05 nats
_SMALLEST_DISPERSION = 1e-8


class Regularization(NamedTuple):
    """A ridge on slopes, and weak priors on alpha and on nuisance parameters."""

    ridge: float
    slopes: Tensor  # (q,), 1 where the ridge applies, 0 for intercepts
    shared: Tensor  # (f,), the same for shared columns
    samples: float = 0.0  # the number of samples if there is a dispersion, which is kept above 1e-8
    nuisance: Callable[[Tensor], Tensor] | None = None  # a penalty of the family on its nuisance parameters
    fraction: float = 1.0  # of the clients or rows of the whole problem: everything is scaled by it

    def scaled(self, fraction: float) -> Regularization:
        """That of a part of the clients or rows."""
        return self._replace(fraction=fraction * self.fraction)

    def value(self, layout: Layout, at: Parameters) -> Tensor:
        share, prior = torch.ones(1, dtype=torch.float64), torch.zeros((), dtype=torch.float64)
        if layout.n_alpha:
            alpha = concentration(at.log_alpha)
            share = alpha / alpha.sum()
            prior = 0.5 * (alpha.sum().log() - _CENTRE).square() + 0.5 * _EMPTY * share.log().square().sum()
        sizes = (at.canonical.square() * self.slopes[:, None]).sum((1, 2))
        penalty = 0.5 * self.ridge * ((share * sizes).sum() + (at.shared.square() * self.shared[:, None]).sum())
        if self.samples:
            penalty = penalty + 0.5 * _SMALLEST_DISPERSION * self.samples * torch.exp(-at.nuisance[0])
        if self.nuisance is not None:
            penalty = penalty + self.nuisance(at.nuisance)
        return self.fraction * (penalty + prior)

    def derivatives(self, layout: Layout, vector: Vector) -> tuple[float, Vector, Matrix]:
        """Value, gradient and Hessian. L has no penalty."""
        at, places = layout.unpack(vector), layout.places
        gradient, hessian = np.zeros(layout.size), np.zeros((layout.size, layout.size))
        ridge = self.ridge * np.repeat(self.slopes.numpy(), layout.outputs)
        canonical = at.canonical.flatten(1).numpy()  # (K, q m)
        share = np.ones(1)
        if layout.n_alpha:
            alpha, chain, bend = (each.numpy() for each in concentration_derivatives(at.log_alpha))
            share = alpha / alpha.sum()
            slope, curvature = _of_alpha(alpha, (ridge * canonical**2).sum(1))
            place = places["log_alpha"]
            gradient[place] = slope * chain
            hessian[place, place] = curvature * chain[:, None] * chain + np.diag(slope * bend)
            change = (np.eye(layout.k) - share[:, None]) / alpha.sum() * chain  # of the shares, (K, K)
            cross = ((ridge * canonical)[:, :, None] * change[:, None]).reshape(-1, layout.k)
            hessian[places["canonical"], place], hessian[place, places["canonical"]] = cross, cross.T
        weights = np.concatenate([np.outer(share, ridge).ravel(), self.ridge * self._shared(layout)])
        coefficients = slice(0, layout.n_coefficients)
        gradient[coefficients] = weights * vector[coefficients]
        hessian[coefficients, coefficients] += np.diag(weights)
        nuisance = places["nuisance"]
        gradient[nuisance], hessian[nuisance, nuisance] = self._of_nuisance(at.nuisance)
        value = float(self.value(layout, at))
        return value, self.fraction * gradient, self.fraction * hessian

    def _shared(self, layout: Layout) -> Vector:
        return np.asarray(np.repeat(self.shared.numpy(), layout.outputs))

    def _of_nuisance(self, nuisance: Tensor) -> tuple[Vector, Matrix]:
        """Gradient and Hessian of the family's penalty, by automatic differentiation, and of that of dispersions."""
        slope, curvature = np.zeros(len(nuisance)), np.zeros((len(nuisance), len(nuisance)))
        if self.nuisance is not None:
            with torch.enable_grad():
                at = nuisance.clone().requires_grad_()
                own = self.nuisance(at)
                if own.requires_grad:  # many families have no penalty
                    (found,) = torch.autograd.grad(own, at, create_graph=True)
                    slope = found.detach().numpy().copy()
                    rows = [torch.autograd.grad(each, at, retain_graph=True)[0] for each in found]
                    curvature = torch.stack(rows).numpy().copy()
        if self.samples:
            below = 0.5 * _SMALLEST_DISPERSION * self.samples * math.exp(-float(nuisance[0]))
            slope[0] -= below
            curvature[0, 0] += below
        return slope, curvature


def _of_alpha(alpha: Vector, sizes: Vector) -> tuple[Vector, Matrix]:
    """Gradient and Hessian in alpha of the prior, and of the ridge on canonical models of these sizes."""
    k, total = len(alpha), alpha.sum()
    share, log_total = alpha / total, math.log(total) - _CENTRE
    logs, apart = np.log(share), sizes - share @ sizes
    gradient = 0.5 * apart / total + log_total / total + _EMPTY * (logs / alpha - logs.sum() / total)
    hessian = (1 - log_total - 0.5 * (apart[:, None] + apart)) / total**2
    empty = (k + logs.sum()) / total**2 - (1 / alpha[:, None] + 1 / alpha) / total
    return gradient, hessian + _EMPTY * (empty + np.diag((1 - logs) / alpha**2))


def concentration_derivatives(log_alpha: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """alpha, and its first two derivatives in log alpha, (K,) each; alpha' / alpha is between 0 and 1."""
    alpha = concentration(log_alpha)
    share = 1 - alpha / LARGEST_ALPHA
    return alpha, alpha * share, alpha * share * (2 * share - 1)
