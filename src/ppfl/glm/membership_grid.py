"""The grid of memberships that the marginal likelihood sums over.

A client with many rows determines its membership to a hundredth, which a grid over the whole simplex would miss. So
each client's grid can be shrunk to a smaller simplex {p : p >= floor}, with points p = floor + (1 - sum floor) u, where
u is a point of the full grid.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy import special
from torch import Tensor

Array = np.ndarray[Any, np.dtype[np.float64]]
# Half of the grid follows each of these Dirichlet distributions: one is dense near the faces, the other in the middle.
_LAYOUT = (0.15, 1.0)
_EDGE = 1e-9  # a Dirichlet density with alpha < 1 is infinite at the faces, so it is evaluated this far inside
_SMALLEST = 1e-12  # grid memberships are never exactly 0, because their logarithms are taken
_LARGEST_ALPHA = 10.0
_REACH = 5.0  # standard deviations between a client's best membership and the edge of its grid


def grid_size(k: int) -> int:
    """The number of memberships in a grid for K canonical models."""
    return 64 if k == 2 else 256 * (k - 1)


def spread_memberships(k: int, count: int) -> Tensor:
    """About `count` memberships (G, K) of low discrepancy, some near the faces and some in the middle.

    >>> spread_memberships(2, 6)[:, 0].round(decimals=2)
    tensor([0.0000, 0.5000, 1.0000, 0.1700, 0.5000, 0.8300], dtype=torch.float64)
    """
    if k == 1:
        return torch.ones(1, 1, dtype=torch.float64)
    each = -(-count // len(_LAYOUT))
    return torch.from_numpy(np.vstack([_stick_breaking(_low_discrepancy_points(k - 1, each), a) for a in _LAYOUT]))


def _low_discrepancy_points(d: int, count: int) -> Array:
    """Points (count, d) in the unit cube: the Kronecker sequence of the generalised golden ratio g^(d + 1) = g + 1."""
    if d == 1:
        return (np.arange(count)[:, None] + 0.5) / count
    ratio = 2.0
    for _ in range(60):
        ratio = (1 + ratio) ** (1 / (d + 1))
    steps = ratio ** -np.arange(1.0, d + 1)
    return np.asarray((0.5 + np.arange(1, count + 1)[:, None] * steps) % 1)


def _stick_breaking(cube: Array, alpha: float) -> Array:
    """Quantiles (G, K) of Dirichlet(alpha, ..., alpha): each share is a beta quantile of what the others leave."""
    k = cube.shape[1] + 1
    remaining = np.ones(len(cube))
    shares = []
    for i in range(k - 1):
        fraction = special.betaincinv(alpha, (k - 1 - i) * alpha, cube[:, i])
        shares.append(remaining * fraction)
        remaining = remaining * (1 - fraction)
    return np.asarray(np.maximum(np.stack([*shares, remaining], 1), _SMALLEST))


def concentration(log_alpha: Tensor) -> Tensor:
    """alpha (K,), smoothly bounded by 10: for more concentrated memberships the grid would be too coarse."""
    bound = math.log(_LARGEST_ALPHA)
    return torch.exp(bound - torch.nn.functional.softplus(bound - log_alpha))


@dataclass(frozen=True)
class Grid:
    """G memberships for each of M clients, stored without the (M, G, K) tensor."""

    atoms: Tensor  # (G, K), on the whole simplex
    floor: Tensor  # (M, K), the lower corner of each client's part of the simplex

    @classmethod
    def full(cls, k: int, count: int, clients: int) -> Grid:
        """The whole simplex for every client."""
        return cls(spread_memberships(k, count), torch.zeros(clients, k, dtype=torch.float64))

    @cached_property
    def scale(self) -> Tensor:
        """(M,), the size of each client's part of the simplex."""
        return 1 - self.floor.sum(1)

    def subset(self, clients: slice | Tensor) -> Grid:
        return Grid(self.atoms, self.floor[clients])

    @cached_property
    def is_shrunk(self) -> Tensor:
        """(M,), whether a client's grid covers only a part of the simplex."""
        return (self.floor > 0).any(1)

    @cached_property
    def any_shrunk(self) -> bool:
        return bool(self.is_shrunk.any())

    def shrink_around(self, best: Tensor, deviation: Tensor) -> Grid:
        """Shrunk to best (M, K) plus or minus a few standard deviations (M, K), for clients where these are small."""
        floor = (best - _REACH * deviation).clamp_min(0)
        is_small = deviation.amin(1) < 1.2 * self.spacing
        return Grid(self.atoms, torch.where(is_small[:, None], floor, 0.0))

    @cached_property
    def powers(self) -> Tensor:
        """Products, values and ones of the atoms, (K K + K + 1, G): all terms of a quadratic polynomial in them."""
        second = (self.atoms[:, :, None] * self.atoms[:, None]).flatten(1)
        return torch.cat([second, self.atoms, torch.ones_like(self.atoms[:, :1])], 1).T

    @property
    def spacing(self) -> float:
        """The approximate distance between neighbours on the whole simplex."""
        count, k = self.atoms.shape
        return math.pow(count, -1 / max(1, k - 1))

    def differs(self, other: Grid) -> bool:
        """Whether any client's part has moved by more than a tenth of its size."""
        return bool(((self.floor - other.floor).abs().amax(1) > 0.1 * self.scale).any())

    def mean(self, weights: Tensor) -> Tensor:
        """Mean memberships (M, K) under weights (M, G)."""
        return self.floor + self.scale[:, None] * (weights @ self.atoms)

    def combine(self, values: Tensor) -> Tensor:
        """Weighted sums over K models of values (n, K, p), for a grid with one client per row: (n, G, p)."""
        n, k, p = values.shape
        full = (values.transpose(1, 2).reshape(n * p, k) @ self.atoms.T).reshape(n, p, -1).transpose(1, 2)
        if not self.any_shrunk:
            return full
        return torch.addcmul(self.floor[:, None] @ values, self.scale[:, None, None], full)


class DirichletPrior(NamedTuple):
    """Dirichlet densities on a grid, divided by the density of the grid points. Logarithms are taken once."""

    logs: Tensor  # (G, K), of the full grid
    density: Tensor  # (G,), log density of the full grid's points
    shrunk_logs: Tensor  # (M, G, K), of the clients' own grids; (0, G, K) if all of them are full
    log_volume: Tensor  # (M, 1), of the clients' parts, relative to the simplex

    @classmethod
    def of(cls, grid: Grid) -> DirichletPrior:
        k = grid.atoms.shape[1]
        total = grid.atoms.log().sum(1)
        layout = [(alpha - 1) * total + math.lgamma(k * alpha) - k * math.lgamma(alpha) for alpha in _LAYOUT]
        floor, scale = grid.floor, grid.scale
        if not grid.any_shrunk:
            floor, scale = floor[:0], scale[:0]
        shrunk_logs = torch.addcmul(floor[:, None] + _EDGE, scale[:, None, None], grid.atoms).log_()
        logs = (grid.atoms + _EDGE).log()
        return cls(logs, torch.logsumexp(torch.stack(layout), 0), shrunk_logs, (k - 1) * scale[:, None].log())

    def log_weights(self, log_alpha: Tensor) -> Tensor:
        """(M, G), or (1, G) if all clients have the full grid."""
        power = concentration(log_alpha) - 1
        full = self.logs @ power - self.density
        if len(self.shrunk_logs) == 0:
            return torch.log_softmax(full, 0)[None]
        return self.shrunk_logs @ power - self.density + self.log_volume - torch.logsumexp(full, 0)
