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

from .likelihood import Layout, Matrix, Parameters, Vector, concentration

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
        """Value, gradient and Hessian, by automatic differentiation in all parameters but L, which has no penalty."""
        places = layout.places
        free = np.r_[tuple(places[name] for name in Parameters._fields if name != "residual")]
        some = torch.from_numpy(vector[free]).requires_grad_()

        def value(part: Tensor) -> Tensor:
            whole = torch.from_numpy(vector).index_copy(0, torch.from_numpy(free), part)
            return self.value(layout, layout.unpack(whole))

        with torch.enable_grad():
            found = value(some)
            (slope,) = torch.autograd.grad(found, some, create_graph=True)
            basis = torch.eye(len(free), dtype=torch.float64)
            (curvature,) = torch.autograd.grad(slope, some, basis, is_grads_batched=True)
        gradient, hessian = np.zeros(len(vector)), np.zeros((len(vector), len(vector)))
        gradient[free], hessian[np.ix_(free, free)] = slope.detach().numpy(), curvature.numpy()
        return found.item(), gradient, hessian
