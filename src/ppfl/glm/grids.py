"""Memberships to integrate over: a grid on the whole simplex, shrunk for each client to where its data put it.

A client with many rows knows its membership to a hundredth, and a grid for everybody would miss it. So a client has a
part of the simplex, p >= floor, which is a simplex itself: p = floor + (1 - sum floor) u, with u on the grid.
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
_LAYOUT = (0.15, 1.0)  # half the grid each by these Dirichlet parameters: faces, where pure clients are, and the middle
_EDGE = 1e-9  # densities are infinite at the faces for alpha < 1: they are taken this far inside
_LEAST = 1e-12  # a membership on the grid is never quite 0, as its logarithm is taken
_MOST_ALIKE = 10.0
_REACH = 5.0  # standard deviations a client's part reaches from its best membership


def grid_size(k: int) -> int:
    """How many memberships are integrated over."""
    return 64 if k == 2 else 256 * (k - 1)


def even_memberships(k: int, count: int) -> Tensor:
    """About `count` of them (G, K), of low discrepancy: near the faces and in the middle there are enough.

    >>> even_memberships(2, 6)[:, 0].round(decimals=2)
    tensor([0.0000, 0.5000, 1.0000, 0.1700, 0.5000, 0.8300], dtype=torch.float64)
    """
    if k == 1:
        return torch.ones(1, 1, dtype=torch.float64)
    each = -(-count // len(_LAYOUT))
    return torch.from_numpy(np.vstack([_by_breaking_sticks(_even_cube(k - 1, each), alpha) for alpha in _LAYOUT]))


def _even_cube(d: int, count: int) -> Array:
    """The Kronecker sequence of the generalised golden ratio, g^(d + 1) = g + 1: even like a lattice."""
    if d == 1:
        return (np.arange(count)[:, None] + 0.5) / count
    ratio = 2.0
    for _ in range(60):
        ratio = (1 + ratio) ** (1 / (d + 1))
    steps = ratio ** -np.arange(1.0, d + 1)
    return np.asarray((0.5 + np.arange(1, count + 1)[:, None] * steps) % 1)


def _by_breaking_sticks(cube: Array, alpha: float) -> Array:
    """Dirichlet(alpha, ..., alpha) quantiles (G, K): each share is a beta part of what is left."""
    k = cube.shape[1] + 1
    left = np.ones(len(cube))
    shares = []
    for at in range(k - 1):
        part = special.betaincinv(alpha, (k - 1 - at) * alpha, cube[:, at])
        shares.append(left * part)
        left = left * (1 - part)
    return np.asarray(np.maximum(np.stack([*shares, left], 1), _LEAST))


def concentration(log_alpha: Tensor) -> Tensor:
    """alpha (K,), below a bound: where clients are more alike, canonical models are, and the grid is as fine."""
    bound = math.log(_MOST_ALIKE)
    return torch.exp(bound - torch.nn.functional.softplus(bound - log_alpha))


@dataclass(frozen=True)
class Grid:
    """Memberships of M clients to integrate over, (M, G, K) without being held."""

    atoms: Tensor  # (G, K), on the whole simplex
    floor: Tensor  # (M, K)

    @classmethod
    def whole(cls, k: int, count: int, clients: int) -> Grid:
        """The same for everybody."""
        return cls(even_memberships(k, count), torch.zeros(clients, k, dtype=torch.float64))

    @cached_property
    def scale(self) -> Tensor:
        """(M,), how large a client's part of the simplex is."""
        return 1 - self.floor.sum(1)

    def of(self, clients: slice | Tensor) -> Grid:
        return Grid(self.atoms, self.floor[clients])

    @cached_property
    def is_narrow(self) -> Tensor:
        """(M,), whose part is not the whole simplex."""
        return (self.floor > 0).any(1)

    @cached_property
    def any_narrow(self) -> bool:
        return bool(self.is_narrow.any())

    def around(self, best: Tensor, deviation: Tensor) -> Grid:
        """Shrunk to what clients' data leave open, where that is little: best memberships (M, K), give or take."""
        floor = (best - _REACH * deviation).clamp_min(0)
        is_little = deviation.amin(1) < 1.2 * self.spacing
        return Grid(self.atoms, torch.where(is_little[:, None], floor, 0.0))

    @cached_property
    def powers(self) -> Tensor:
        """(K K + K + 1, G), of the whole simplex: second, first, none."""
        second = (self.atoms[:, :, None] * self.atoms[:, None]).flatten(1)
        return torch.cat([second, self.atoms, torch.ones_like(self.atoms[:, :1])], 1).T

    @property
    def spacing(self) -> float:
        """Of neighbours on the whole simplex, about."""
        count, k = self.atoms.shape
        return math.pow(count, -1 / max(1, k - 1))

    def differs(self, other: Grid) -> bool:
        """Whether a client's part has moved by more than a tenth of its size."""
        return bool(((self.floor - other.floor).abs().amax(1) > 0.1 * self.scale).any())

    def mean(self, weights: Tensor) -> Tensor:
        """(M, K), by weights (M, G)."""
        return self.floor + self.scale[:, None] * (weights @ self.atoms)

    def combine(self, parts: Tensor) -> Tensor:
        """Parts (n, K, p) of n rows, this grid having a line for each, under all memberships: (n, G, p)."""
        n, k, p = parts.shape
        everywhere = (parts.transpose(1, 2).reshape(n * p, k) @ self.atoms.T).reshape(n, p, -1).transpose(1, 2)
        if not self.any_narrow:
            return everywhere
        return torch.addcmul(self.floor[:, None] @ parts, self.scale[:, None, None], everywhere)


class Prior(NamedTuple):
    """Dirichlet weights on a grid, relative to the density by which it is laid out; logarithms are taken once."""

    logs: Tensor  # (G, K), of the whole grid
    density: Tensor  # (G,)
    inside: Tensor  # (M, G, K), of the clients' own parts of the simplex; (0, G, K) where all have the whole
    size: Tensor  # (M, 1), the logarithm of how much of the simplex they are

    @classmethod
    def of(cls, grid: Grid) -> Prior:
        k = grid.atoms.shape[1]
        total = grid.atoms.log().sum(1)
        laid = [(alpha - 1) * total + math.lgamma(k * alpha) - k * math.lgamma(alpha) for alpha in _LAYOUT]
        floor, scale = grid.floor, grid.scale
        if not grid.any_narrow:
            floor, scale = floor[:0], scale[:0]
        inside = torch.addcmul(floor[:, None] + _EDGE, scale[:, None, None], grid.atoms).log_()
        logs = (grid.atoms + _EDGE).log()
        return cls(logs, torch.logsumexp(torch.stack(laid), 0), inside, (k - 1) * scale[:, None].log())

    def log_weights(self, log_alpha: Tensor) -> Tensor:
        """(M, G), or (1, G) where they are the same for everybody."""
        power = concentration(log_alpha) - 1
        whole = self.logs @ power - self.density
        if len(self.inside) == 0:
            return torch.log_softmax(whole, 0)[None]
        return self.inside @ power - self.density + self.size - torch.logsumexp(whole, 0)
