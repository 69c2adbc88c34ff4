"""The data of a fit with its parameters and regularization, and the objectives made from them."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from ...core.affinity import Affinity
from ..likelihoods import Likelihood
from ..sample_rows import ClientRows
from .lbfgs import Solution
from .marginal import Marginal
from .newton_steps import minimize
from .parameters import ParameterShape, Regularization, Vector
from .profile import Profile

_FEW_POINTS = 64
SPREAD = 1.0  # shrinks canonical models to their mean if memberships are points, like a normal prior of unit variance


class GLMProblem(NamedTuple):
    """The data are stored as rows, which the starts need, and in the fastest form, which everything else uses."""

    rows: ClientRows
    data: Likelihood
    shape: ParameterShape
    regularization: Regularization
    points: int = 0  # per client; 0 for as many as a precise fit needs

    def marginal(self, k: int, count: int = 0) -> Marginal:
        """With this number of points that are the same for all clients."""
        return Marginal.of(self.data, self.shape._replace(k=k), self.regularization, count or self.points * (k > 1))

    def roughly(self) -> GLMProblem:
        """The same problem with few points."""
        return self._replace(points=_FEW_POINTS)

    def with_k(self, k: int) -> GLMProblem:
        return self._replace(shape=self.shape._replace(k=k))

    def subset(self, clients: np.ndarray[Any, np.dtype[np.int64]]) -> GLMProblem:
        """The problem of these clients only, with the same regularization per client."""
        if len(clients) == self.data.n_clients:
            return self
        some = torch.from_numpy(np.sort(clients))
        rows = self.rows.subset(some)
        data = rows if self.data is self.rows else self.data.subset(some)
        fraction = len(clients) / self.data.n_clients
        return self._replace(rows=rows, data=data, regularization=self.regularization.scaled(fraction))

    def profile(self, tol: float, affinity: Affinity | None = None, penalty: float = 0.0) -> Profile:
        uniform = torch.full((self.data.n_clients, self.shape.k), 1 / self.shape.k, dtype=torch.float64)
        regularization = self.regularization._replace(spread=SPREAD)
        return Profile(self.data, self.shape, regularization, affinity, penalty, tol, uniform)

    def pooled(self, tol: float, max_iter: int) -> Solution:
        """One model for all clients."""
        shape, rows = self.shape._replace(k=1), self.rows
        start = torch.zeros(shape.size, dtype=torch.float64)
        if rows.family.nuisance:
            zero, _ = shape.unpack(start)
            ones = torch.ones(len(rows.y), 1, 1, dtype=torch.float64)
            mean = rows.family.mean(rows.mean_parameters(zero, ones), zero.nuisance)[:, 0]
            start[-1 - shape.nuisance : -1] = torch.tensor(rows.family.initial_nuisance(mean, rows.y))
        return self.pooled_from(start.numpy(), tol, max_iter)

    def pooled_from(self, start: Vector, tol: float, max_iter: int) -> Solution:
        """One model for all clients, from a start."""
        return minimize(self.marginal(1), start, tol, max_iter)
