"""All parameters in one vector, as optimisers want them, and what holds them."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from .likelihoods import Coefficients, Likelihood
from .placement import Placement

Vector = np.ndarray[Any, np.dtype[np.float64]]


class Shape(NamedTuple):
    """Of a vector of all parameters."""

    k: int
    varying: int
    shared: int
    outputs: int

    @property
    def size(self) -> int:
        return (self.k * self.varying + self.shared) * self.outputs + 1 + self.k

    def unpack(self, vector: Tensor) -> tuple[Coefficients, Tensor]:
        """Coefficients, and log alpha (K,)."""
        many, few = self.k * self.varying * self.outputs, self.shared * self.outputs
        canonical = vector[:many].reshape(self.k, self.varying, self.outputs)
        shared = vector[many : many + few].reshape(self.shared, self.outputs)
        return Coefficients(canonical, shared, vector[many + few]), vector[many + few + 1 :]

    def pack(self, coefficients: Coefficients, log_alpha: Tensor) -> Vector:
        canonical, shared, dispersion = (part.flatten() for part in coefficients)
        return torch.cat([canonical, shared, dispersion, log_alpha]).numpy()


class Hold(NamedTuple):
    """What keeps coefficients from running away: a ridge to 0, and one to the canonical models' own mean."""

    ridge: float
    spread: float
    slopes: Tensor  # (q,), 1 where the ridge applies, 0 for intercepts
    shared: Tensor  # (f,), the same for shared columns
    samples: float = 0.0  # that have a dispersion, which stays above a hundred-millionth

    def share(self, part: float) -> Hold:
        """What holds as much where only this part of the clients is looked at."""
        return self._replace(ridge=part * self.ridge, spread=part * self.spread, samples=part * self.samples)

    def value(self, coefficients: Coefficients) -> Tensor:
        apart = coefficients.canonical - coefficients.canonical.mean(0)
        size = (coefficients.canonical.square() * self.slopes[:, None]).sum()
        size = size + (coefficients.shared.square() * self.shared[:, None]).sum()
        # the sliver on all differences keeps a canonical model that nobody uses from drifting
        held = self.ridge * size + (self.spread + 1e-3 * self.ridge) * apart.square().sum()
        return 0.5 * (held + 1e-8 * self.samples * torch.exp(-coefficients.log_dispersion))


class Objective(Protocol):
    """What is minimised over the vector, per sample; how memberships follow from it is its own affair."""

    def __call__(self, vector: Vector) -> tuple[float, Vector]:
        """Value and gradient."""

    def log_likelihood(self, vector: Vector) -> float: ...

    def place(self, vector: Vector, data: Likelihood) -> Placement: ...

    def anybody(self, vector: Vector) -> Placement: ...

    def without_data(self) -> Objective:
        """What can still place other clients."""
