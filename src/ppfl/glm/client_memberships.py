"""Memberships after a fit: one point per client, or a distribution over a grid."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, Protocol, Self

import torch
from torch import Tensor

from .likelihoods import Coefficients
from .proposals import Proposals, memberships_of
from .sample_rows import ClientRows
from .stick_breaking import StickBreaking

_CLIENTS_AT_ONCE = 500
_NUMBERS_AT_ONCE = 1 << 18


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
        parameters = rows.mean_parameters(coefficients, self.mean[client][..., None])
        return rows.family.mean(parameters, coefficients.nuisance)[:, 0]


@dataclass(frozen=True)
class SampledMemberships:
    """A weighted sample of memberships per client. Predictions are means over it.

    The points are drawn again from the proposals whenever they are needed, because they take more memory.
    """

    proposals: Proposals
    breaking: StickBreaking
    count: int  # of points, as in Proposals.draw
    position: Tensor  # (M,), of the clients when their points were drawn
    weights: Tensor  # (M, G), which sum to 1 for every client
    order: Tensor | None = None  # (K,), of the canonical models

    def points(self, clients: Tensor) -> Tensor:
        """Memberships (m, G, K) of the clients at these positions."""
        return self._points(clients).mT

    def _points(self, clients: Tensor) -> Tensor:
        """The same as (m, K, G), which is faster to compute with."""
        proposals = self.proposals.subset(clients)
        draw = proposals.final_draw(self.count, self.position[clients])
        logs = self.breaking.log_memberships(draw.scores)
        return memberships_of(logs if self.order is None else logs[:, self.order])

    @cached_property
    def mean(self) -> Tensor:
        found = [torch.zeros(0, len(self.breaking.alpha), dtype=torch.float64)]
        for clients in torch.split(torch.arange(len(self.weights)), _CLIENTS_AT_ONCE):
            found.append(torch.bmm(self._points(clients), self.weights[clients][..., None])[..., 0])
        return torch.cat(found)

    def concat(self, other: SampledMemberships) -> SampledMemberships:
        return SampledMemberships(
            self.proposals.concat(other.proposals), self.breaking, self.count,
            torch.cat([self.position, other.position]), torch.cat([self.weights, other.weights]), self.order,
        )  # fmt: skip

    def reorder(self, order: Tensor) -> SampledMemberships:
        return replace(self, order=order if self.order is None else self.order[order])

    def predict(self, rows: ClientRows, coefficients: Coefficients, client: Tensor) -> Tensor:
        n, g = len(client), self.weights.shape[1]
        order = torch.argsort(client, stable=True)  # so that the points of a client are drawn for all its rows
        parts = []
        for some in torch.split(order, max(1, _NUMBERS_AT_ONCE // rows.numbers_per_row(g))):
            which, place = torch.unique(client[some], return_inverse=True)
            parameters = rows.take(some).mean_parameters(coefficients, self._points(which)[place])
            mean = rows.family.mean(parameters, coefficients.nuisance)
            weights = self.weights[client[some]]
            parts.append((weights * mean).sum(1) if mean.ndim == 2 else (weights[:, None] @ mean)[:, 0])
        found = torch.cat(parts)
        return torch.empty_like(found).index_copy_(0, order, found) if n else found
