"""All parameters in one vector, their regularization, and the protocol of objectives."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from ..client_memberships import ClientMemberships
from ..likelihoods import Coefficients, Likelihood

Vector = np.ndarray[Any, np.dtype[np.float64]]


class ParameterShape(NamedTuple):
    """The layout of the vector of all parameters."""

    k: int
    varying: int
    shared: int
    outputs: int

    @property
    def size(self) -> int:
        return (self.k * self.varying + self.shared) * self.outputs + 1 + self.k

    def unpack(self, vector: Tensor) -> tuple[Coefficients, Tensor]:
        """Coefficients, and log alpha (K,)."""
        n_canonical, n_shared = self.k * self.varying * self.outputs, self.shared * self.outputs
        canonical = vector[:n_canonical].reshape(self.k, self.varying, self.outputs)
        shared = vector[n_canonical : n_canonical + n_shared].reshape(self.shared, self.outputs)
        return Coefficients(canonical, shared, vector[n_canonical + n_shared]), vector[n_canonical + n_shared + 1 :]

    def pack(self, coefficients: Coefficients, log_alpha: Tensor) -> Vector:
        canonical, shared, dispersion = (part.flatten() for part in coefficients)
        return torch.cat([canonical, shared, dispersion, log_alpha]).numpy()


class Regularization(NamedTuple):
    """A ridge that shrinks slopes to 0, and one that shrinks canonical models to their mean."""

    ridge: float
    spread: float
    slopes: Tensor  # (q,), 1 where the ridge applies, 0 for intercepts
    shared: Tensor  # (f,), the same for shared columns
    samples: float = 0.0  # the number of samples if there is a dispersion, which is kept above 1e-8

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
        return 0.5 * (penalty + 1e-8 * self.samples * torch.exp(-coefficients.log_dispersion))


class Objective(Protocol):
    """A function of the parameter vector that is minimised, per sample. It finds memberships by itself."""

    def __call__(self, vector: Vector) -> tuple[float, Vector]:
        """Value and gradient."""

    def log_likelihood(self, vector: Vector) -> float: ...

    def find_memberships(self, vector: Vector, data: Likelihood) -> ClientMemberships: ...

    def prior(self, vector: Vector) -> ClientMemberships:
        """The membership of one client without data."""

    def without_data(self) -> Objective:
        """A copy that can still find the memberships of other clients."""
