"""Where clients are on the simplex: at a point each, or spread over several with weights."""

from __future__ import annotations

from typing import NamedTuple, Protocol, Self

import torch
from torch import Tensor

from .grids import Grid
from .likelihoods import Coefficients, Rows


class Placement(Protocol):
    """Of M clients."""

    @property
    def mean(self) -> Tensor:
        """Memberships (M, K)."""

    def join(self, other: Self) -> Self:
        """These clients, then those."""

    def take(self, order: Tensor) -> Self:
        """The same clients with canonical models in another order."""

    def predict(self, rows: Rows, coefficients: Coefficients, line: Tensor) -> Tensor:
        """Means (n,) or (n, m) of rows, each of the client in its line (n,)."""


class Points(NamedTuple):
    """A membership each."""

    mean: Tensor  # (M, K)

    def middle(self) -> Points:
        """One client of which nothing is known: the mean one."""
        return Points(self.mean.mean(0, keepdim=True))

    def join(self, other: Points) -> Points:
        return Points(torch.cat([self.mean, other.mean]))

    def take(self, order: Tensor) -> Points:
        return Points(self.mean[:, order])

    def predict(self, rows: Rows, coefficients: Coefficients, line: Tensor) -> Tensor:
        return rows.family.mean(rows.parts(coefficients, self.mean[line][:, None]))[:, 0]


class Spread(NamedTuple):
    """Weights (M, G) over a grid of memberships: predictions are means over all that are likely."""

    grid: Grid
    weights: Tensor

    @property
    def mean(self) -> Tensor:
        return self.grid.mean(self.weights)

    def join(self, other: Spread) -> Spread:
        floor = torch.cat([self.grid.floor, other.grid.floor])
        return Spread(Grid(self.grid.atoms, floor), torch.cat([self.weights, other.weights]))

    def take(self, order: Tensor) -> Spread:
        return Spread(Grid(self.grid.atoms[:, order], self.grid.floor[:, order]), self.weights)

    def predict(self, rows: Rows, coefficients: Coefficients, line: Tensor) -> Tensor:
        found = []
        for piece in torch.split(torch.arange(len(line)), rows.at_once(len(self.grid.atoms))):
            some = rows._replace(varying=rows.varying.take(piece), shared=rows.shared.take(piece))
            mean = rows.family.mean(some.parts(coefficients, self.grid.of(line[piece])))  # (n, G) or (n, G, m)
            share = self.weights[line[piece]]
            found.append((share * mean).sum(1) if mean.ndim == 2 else (share[:, None] @ mean)[:, 0])
        return torch.cat(found)
