"""Points under a standard normal distribution: spread evenly by quasi-random numbers, or on regular grids.

Every client has its own set, a shift of the others, so that the errors of many clients do not add up.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from scipy import special
from scipy.stats import qmc
from torch import Tensor

_MOST_SETS = 1024
_POINTS_OF_ALL_SETS = 1 << 17
_EDGE = 1e-12
_REACH, _REACH_OF_FEW = 5.5, 1.25  # of a regular grid, in standard deviations; the second times the root of its side


class NormalPoints:
    """Sets (d, count) of points spread evenly under a standard normal distribution; count is a power of 2.

    All sets are the same points of the unit cube, each shifted by another vector. Each is made when it is first used.
    """

    def __init__(self, dimensions: int, count: int, seed: int) -> None:
        sets = max(1, min(_MOST_SETS, _POINTS_OF_ALL_SETS // count))
        self.cube = qmc.Sobol(dimensions, rng=seed).random(count).T if dimensions else np.zeros((0, count))
        self.shift = np.random.default_rng(seed).random((sets, dimensions, 1))
        self.points = torch.empty(sets, dimensions, count, dtype=torch.float64)
        self.is_made = torch.zeros(sets, dtype=torch.bool)

    def __getitem__(self, position: Tensor) -> Tensor:
        """The sets (M, d, count) at these positions, which start again after the last set."""
        chosen = position % len(self.points)
        is_made = self.is_made[chosen]
        if not bool(is_made.all()):
            new = torch.unique(chosen[~is_made])
            shifted = (self.cube + self.shift[new.numpy()]) % 1
            self.points[new] = torch.from_numpy(special.ndtri(shifted.clip(_EDGE, 1 - _EDGE)))
            self.is_made[new] = True
        return self.points[chosen]


@lru_cache(maxsize=128)
def normal_points(dimensions: int, count: int, seed: int) -> NormalPoints:
    return NormalPoints(dimensions, count, seed)


class RegularGrid(NamedTuple):
    points: Tensor  # (d, side^d), around 0
    cell: float  # the distance of neighbours
    log_weight: float  # of each point, for a standard normal density


@lru_cache(maxsize=64)
def grid_points(dimensions: int, side: int) -> RegularGrid:
    reach = min(_REACH, _REACH_OF_FEW * math.sqrt(side))
    axis = torch.linspace(-reach, reach, side, dtype=torch.float64)
    points = torch.stack(torch.meshgrid([axis] * dimensions, indexing="ij")).flatten(1)
    cell = 2 * reach / (side - 1)
    return RegularGrid(points, cell, dimensions * (math.log(cell) - 0.5 * math.log(2 * math.pi)))


def grid_shifts(dimensions: int, position: Tensor) -> Tensor:
    """By how many cells the grids of a client and of the population are shifted: (M, 2 d, 1), between -1/2 and 1/2."""
    return _all_shifts(dimensions)[position % _MOST_SETS]


@lru_cache(maxsize=4)
def _all_shifts(dimensions: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng(0).random((_MOST_SETS, 2 * dimensions, 1)) - 0.5)
