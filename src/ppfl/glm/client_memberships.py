"""Memberships after a fit: one point per client, or a distribution over a grid."""

from __future__ import annotations

from typing import NamedTuple, Protocol, Self

import torch
from torch import Tensor

from .likelihoods import ClientRows, Coefficients
from .membership_grid import Grid


class ClientMemberships(Protocol):
    """The memberships of M clients."""

    @property
    def mean(self) -> Tensor:
        """(M, K)."""

    def concat(self, other: Self) -> Self:
        """These clients, followed by the others."""

    def reorder(self, order: Tensor) -> Self:
        """The same clients with the canonical models in another order."""

    def predict(self, rows: ClientRows, coefficients: Coefficients, client: Tensor) -> Tensor:
        """Means (n,) or class probabilities (n, m) of rows whose clients have these positions (n,)."""


class PointMemberships(NamedTuple):
    """One membership per client."""

    mean: Tensor  # (M, K)

    def average(self) -> PointMemberships:
        """The average of all clients, for a client without data."""
        return PointMemberships(self.mean.mean(0, keepdim=True))

    def concat(self, other: PointMemberships) -> PointMemberships:
        return PointMemberships(torch.cat([self.mean, other.mean]))

    def reorder(self, order: Tensor) -> PointMemberships:
        return PointMemberships(self.mean[:, order])

    def predict(self, rows: ClientRows, coefficients: Coefficients, client: Tensor) -> Tensor:
        return rows.family.mean(rows.mean_parameters(coefficients, self.mean[client][:, None]))[:, 0]


class GridMemberships(NamedTuple):
    """A distribution over the grid for each client, weights (M, G). Predictions are means over this distribution."""

    grid: Grid
    weights: Tensor

    @property
    def mean(self) -> Tensor:
        return self.grid.mean(self.weights)

    def concat(self, other: GridMemberships) -> GridMemberships:
        floor = torch.cat([self.grid.floor, other.grid.floor])
        return GridMemberships(Grid(self.grid.atoms, floor), torch.cat([self.weights, other.weights]))

    def reorder(self, order: Tensor) -> GridMemberships:
        return GridMemberships(Grid(self.grid.atoms[:, order], self.grid.floor[:, order]), self.weights)

    def predict(self, rows: ClientRows, coefficients: Coefficients, client: Tensor) -> Tensor:
        found = []
        for chunk in torch.split(torch.arange(len(client)), rows.rows_per_chunk(len(self.grid.atoms))):
            some = rows._replace(varying=rows.varying.take(chunk), shared=rows.shared.take(chunk))
            grid = self.grid.subset(client[chunk])
            mean = rows.family.mean(some.mean_parameters(coefficients, grid))  # (n, G) or (n, G, m)
            weights = self.weights[client[chunk]]
            found.append((weights * mean).sum(1) if mean.ndim == 2 else (weights[:, None] @ mean)[:, 0])
        return torch.cat(found)
