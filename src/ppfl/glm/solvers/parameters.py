"""All parameters in one vector, their regularization, and the protocol of objectives."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from ..client_memberships import ClientMemberships
from ..likelihoods import Coefficients, Likelihood

Vector = np.ndarray[Any, np.dtype[np.float64]]
LARGEST_ALPHA = 10.0


class ParameterShape(NamedTuple):
    """The layout of the vector of all parameters."""

    k: int
    varying: int
    shared: int
    outputs: int
    nuisance: int

    @property
    def size(self) -> int:
        return (self.k * self.varying + self.shared) * self.outputs + self.nuisance + self.k

    @property
    def free_parameters(self) -> int:
        """Coefficients and nuisance parameters, without those that the sum of class probabilities fixes."""
        free = self.outputs - (self.outputs > 1)
        return (self.k * self.varying + self.shared) * free + self.nuisance

    def unpack(self, vector: Tensor) -> tuple[Coefficients, Tensor]:
        """Coefficients, and log alpha (K,)."""
        n_canonical, n_shared = self.k * self.varying * self.outputs, self.shared * self.outputs
        canonical = vector[:n_canonical].reshape(self.k, self.varying, self.outputs)
        shared = vector[n_canonical : n_canonical + n_shared].reshape(self.shared, self.outputs)
        nuisance, log_alpha = torch.split(vector[n_canonical + n_shared :], [self.nuisance, self.k])
        return Coefficients(canonical, shared, nuisance), log_alpha

    def pack(self, coefficients: Coefficients, log_alpha: Tensor) -> Vector:
        canonical, shared, nuisance = (part.flatten() for part in coefficients)
        return torch.cat([canonical, shared, nuisance, log_alpha]).numpy()


def log_concentration(alpha: Tensor) -> Tensor:
    """The inverse of `concentration`.

    >>> log_concentration(concentration(torch.tensor([-1.0, 0.5])))
    tensor([-1.0000,  0.5000])
    """
    bound = math.log(LARGEST_ALPHA)
    return bound - torch.log(torch.expm1((bound - alpha.log()).clamp_min(1e-12)))


def concentration(log_alpha: Tensor) -> Tensor:
    """alpha (K,), smoothly bounded by 10: data can hardly tell larger ones apart."""
    bound = math.log(LARGEST_ALPHA)
    return torch.exp(bound - torch.nn.functional.softplus(bound - log_alpha))


def concentration_derivatives(log_alpha: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """alpha, and its first two derivatives in log alpha, (K,) each; alpha' / alpha is between 0 and 1."""
    alpha = concentration(log_alpha)
    share = 1 - alpha / LARGEST_ALPHA
    return alpha, alpha * share, alpha * share * (2 * share - 1)


def block_diagonal(*blocks: Tensor) -> Tensor:
    found: Tensor = torch.block_diag(*blocks)  # type: ignore[no-untyped-call]
    return found


class Regularization(NamedTuple):
    """A ridge that shrinks slopes to 0, and one that shrinks canonical models to their mean."""

    ridge: float
    spread: float
    slopes: Tensor  # (q,), 1 where the ridge applies, 0 for intercepts
    shared: Tensor  # (f,), the same for shared columns
    samples: float = 0.0  # the number of samples if there is a dispersion, which is kept above 1e-8
    nuisance: Callable[[Tensor], Tensor] | None = None  # a penalty of the family on its nuisance parameters

    def scaled(self, fraction: float) -> Regularization:
        """The regularization of a subset with this fraction of the clients."""
        return self._replace(
            ridge=fraction * self.ridge, spread=fraction * self.spread, samples=fraction * self.samples
        )

    def value(self, coefficients: Coefficients) -> Tensor:
        differences = coefficients.canonical - coefficients.canonical.mean(0)
        size = (coefficients.canonical.square() * self.slopes[:, None]).sum()
        size = size + (coefficients.shared.square() * self.shared[:, None]).sum()
        # the 1e-3 keeps a canonical model without any clients from drifting away
        penalty = self.ridge * size + (self.spread + 1e-3 * self.ridge) * differences.square().sum()
        if self.samples:
            penalty = penalty + 1e-8 * self.samples * torch.exp(-coefficients.nuisance[0])
        own = 0.0 if self.nuisance is None else self.nuisance(coefficients.nuisance)
        return 0.5 * penalty + own

    def derivatives(self, coefficients: Coefficients) -> tuple[Tensor, Tensor]:
        """Gradient (P,) and Hessian (P, P) of `value` in canonical, shared and nuisance parameters, for one output."""
        canonical = coefficients.canonical[..., 0]
        k, q = canonical.shape
        spread = self.spread + 1e-3 * self.ridge
        together = torch.eye(k, dtype=torch.float64) - 1 / k
        by_column = torch.kron(spread * together, torch.eye(q, dtype=torch.float64))
        gradient = self.ridge * self.slopes * canonical + spread * (canonical - canonical.mean(0))
        slope, curvature = self._nuisance_derivatives(coefficients.nuisance.detach())
        shared = self.ridge * self.shared
        return (
            torch.cat([gradient.flatten(), shared * coefficients.shared[:, 0], slope]),
            block_diagonal(by_column + (self.ridge * self.slopes).repeat(k).diag(), shared.diag(), curvature),
        )

    def _nuisance_derivatives(self, nuisance: Tensor) -> tuple[Tensor, Tensor]:
        slope, curvature = torch.zeros_like(nuisance), torch.zeros(len(nuisance), len(nuisance), dtype=nuisance.dtype)
        with torch.enable_grad():
            at = nuisance.clone().requires_grad_()
            own = at.new_zeros(()) if self.nuisance is None else self.nuisance(at)
            if own.requires_grad:  # many families have no penalty
                (found,) = torch.autograd.grad(own, at, create_graph=True)
                slope = found.detach()
                curvature = torch.stack([torch.autograd.grad(each, at, retain_graph=True)[0] for each in found])
        if self.samples:
            below = 0.5e-8 * self.samples * torch.exp(-nuisance[0])
            slope[0] -= below
            curvature[0, 0] += below
        return slope, curvature


class Objective(Protocol):
    """A function of the parameter vector that is minimised, per sample. It finds memberships by itself."""

    data: Likelihood

    def __call__(self, vector: Vector) -> tuple[float, Vector]:
        """Value and gradient."""

    def log_likelihood(self, vector: Vector) -> float: ...

    def find_memberships(self, vector: Vector, data: Likelihood) -> ClientMemberships: ...

    def prior(self, vector: Vector) -> ClientMemberships:
        """The membership of one client without data."""

    def without_data(self) -> Objective:
        """A copy that can still find the memberships of other clients."""
