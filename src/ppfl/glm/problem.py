"""Data, and what is to be fitted to them."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from ..core.affinity import Affinity
from .descent import Solution, descend
from .grids import Grid
from .likelihoods import Likelihood, Rows
from .marginal import Marginal
from .profile import Profile
from .vectors import Hold, Shape

SPREAD = 1.0  # holds canonical models together where memberships are points, as a normal prior of unit variance does


class Problem(NamedTuple):
    """Data as rows, for the starts, and in the form that is fastest, for all else."""

    rows: Rows
    data: Likelihood
    shape: Shape
    hold: Hold

    def marginal(self, k: int, points: int) -> Marginal:
        grid = Grid.whole(k, points, self.data.n_clients)
        return Marginal(self.data, self.shape._replace(k=k), grid, self.hold)

    def of_some(self, clients: np.ndarray[Any, np.dtype[np.int64]]) -> Problem:
        """Of some of the clients only, held as they are among all."""
        if len(clients) == self.data.n_clients:
            return self
        data = self.data.of_some(torch.from_numpy(np.sort(clients)))
        return self._replace(data=data, hold=self.hold.share(len(clients) / self.data.n_clients))

    def profile(self, tol: float, affinity: Affinity | None = None, penalty: float = 0.0) -> Profile:
        level = torch.full((self.data.n_clients, self.shape.k), 1 / self.shape.k, dtype=torch.float64)
        hold = self.hold._replace(spread=SPREAD)
        return Profile(self.data, self.shape, hold, affinity, penalty, tol, level)

    def pooled(self, tol: float, max_iter: int) -> Solution:
        """One model for all."""
        shape, rows = self.shape._replace(k=1), self.rows
        start = torch.zeros(shape.size, dtype=torch.float64)
        if rows.family.has_dispersion:
            zero, _ = shape.unpack(start)
            mean = rows.family.mean(rows.parts(zero, torch.ones(len(rows.y), 1, 1, dtype=torch.float64)))[:, 0]
            start[-2] = rows.family.first_dispersion(mean, rows.y)
        return descend(self.marginal(1, 1), start.numpy(), tol, max_iter)
