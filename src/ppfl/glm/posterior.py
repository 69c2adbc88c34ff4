"""Where clients are, given their rows: weighted points of memberships and residual scores."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from .likelihood import Parameters
from .moments import ResidualGiven
from .points import LatentPoints, Proposals
from .rows import RowLikelihood
from .stick_breaking import StickBreaking

_CLIENTS_AT_ONCE = 500
_NUMBERS_AT_ONCE = 1 << 18


@dataclass(frozen=True)
class Posterior:
    """Weighted points for each of M clients.

    The points are drawn again from the proposals whenever they are needed, because they take more memory. For gaussian
    targets z is normal given c (`residual`), so points are memberships; for others they are pairs (c, z). A fit with a
    penalty has one point per client (`of_points`).
    """

    weights: Tensor  # (M, G), which sum to 1 for every client
    count: int = 1  # of points, as in Proposals.final_draw
    position: Tensor | None = None  # (M,), which choose the sets of points
    proposals: Proposals | None = None
    breaking: StickBreaking | None = None
    order: Tensor | None = None  # (K,), of the canonical models
    residual: ResidualGiven | None = None
    memberships: Tensor | None = None  # (M, K), of a posterior with one point per client

    @classmethod
    def of_points(cls, memberships: Tensor) -> Posterior:
        """One membership (M, K) per client."""
        return cls(torch.ones(len(memberships), 1, dtype=torch.float64), memberships=memberships)

    def __len__(self) -> int:
        """M."""
        return len(self.weights)

    @property
    def k(self) -> int:
        if self.memberships is not None:
            return self.memberships.shape[1]
        assert self.breaking is not None
        return self.breaking.k

    def shares(self, clients: Tensor) -> Tensor:
        """(m, K + s, G): memberships, followed by z, or by its mean given c for gaussian targets."""
        if self.memberships is not None:
            return self.memberships[clients][..., None]
        assert self.proposals is not None
        assert self.position is not None
        assert self.breaking is not None
        draw = self.proposals.subset(clients).final_draw(self.count, self.position[clients])
        found, k = LatentPoints.of(draw, self.breaking).shares, self.k
        if self.order is not None:
            found = torch.cat([found[:, : self.k][:, self.order], found[:, k:]], 1)
        if self.residual is None:
            return found
        return torch.cat([found, torch.bmm(self.residual.slope[clients], found)], 1)

    def points(self, clients: Tensor) -> Tensor:
        """Memberships (m, G, K) of the clients at these positions."""
        return self.shares(clients)[:, : self.k].mT

    @cached_property
    def _mean_shares(self) -> Tensor:
        found = [
            torch.bmm(self.shares(some), self.weights[some][..., None])[..., 0] for some in self._clients_in_parts()
        ]
        return torch.cat(found) if found else torch.zeros(0, self.k, dtype=torch.float64)

    def _clients_in_parts(self) -> Iterator[Tensor]:
        yield from torch.split(torch.arange(len(self)), _CLIENTS_AT_ONCE) if len(self) else ()

    @property
    def mean(self) -> Tensor:
        """Memberships (M, K)."""
        return self._mean_shares[:, : self.k]

    @property
    def residual_mean(self) -> Tensor:
        """The mean residual scores z (M, s)."""
        return self._mean_shares[:, self.k :]

    def coefficients(self, at: Parameters) -> Tensor:
        """The mean of b_i, every client's own coefficients of the varying columns: (M, q, m)."""
        models = torch.cat([at.canonical, self.loadings(at)[..., None]]) if len(at.residual) else at.canonical
        found: Tensor = torch.tensordot(self._mean_shares, models, 1)
        return found

    def loadings(self, at: Parameters) -> Tensor:
        """L' (s, q) in the units of standardised coefficients."""
        return at.residual if self.residual is None else at.residual * torch.exp(0.5 * at.nuisance[0])

    def sample(self, clients: Tensor, count: int, random: np.random.Generator) -> Tensor:
        """Draws of memberships and residual scores (m, K + s, count) of the clients at these positions."""
        shares, total = self.shares(clients), self.weights[clients].cumsum(1)
        place = torch.searchsorted(total, torch.from_numpy(random.random((len(clients), count))) * total[:, -1:])
        place = place.clamp(max=shares.shape[2] - 1)
        found = shares.gather(2, place[:, None].expand(-1, shares.shape[1], -1)).clone()
        if self.residual is not None:
            factor = torch.linalg.cholesky(self.residual.covariance[clients])
            noise = torch.from_numpy(random.normal(size=(len(clients), factor.shape[1], count)))
            found[:, self.k :] += factor @ noise
        return found

    def concat(self, other: Posterior) -> Posterior:
        """These clients, followed by the others, whose points are of the same fit."""
        both = torch.cat([self.weights, other.weights])
        if self.memberships is not None and other.memberships is not None:
            return replace(self, weights=both, memberships=torch.cat([self.memberships, other.memberships]))
        assert self.proposals is not None
        assert self.position is not None
        assert other.proposals is not None
        assert other.position is not None
        residual = None
        if self.residual is not None and other.residual is not None:
            parts = zip(self.residual, other.residual, strict=True)
            residual = ResidualGiven(*(torch.cat(pair) for pair in parts))
        return replace(
            self, weights=both, position=torch.cat([self.position, other.position]),
            proposals=self.proposals.concat(other.proposals), residual=residual,
        )  # fmt: skip

    def first(self, count: int) -> Posterior:
        """The first clients."""
        some = torch.arange(count)
        if self.memberships is not None:
            return replace(self, weights=self.weights[some], memberships=self.memberships[some])
        assert self.proposals is not None
        assert self.position is not None
        residual = None if self.residual is None else ResidualGiven(*(part[some] for part in self.residual))
        return replace(
            self, weights=self.weights[some], position=self.position[some], proposals=self.proposals.subset(some),
            residual=residual,
        )  # fmt: skip

    def reorder(self, order: Tensor) -> Posterior:
        """The same clients with the canonical models in another order."""
        if self.memberships is not None:
            return replace(self, memberships=self.memberships[:, order])
        residual = None
        if self.residual is not None:
            residual = self.residual._replace(slope=self.residual.slope[..., order])
        return replace(self, order=order if self.order is None else self.order[order], residual=residual)

    def predict(self, rows: RowLikelihood, at: Parameters, client: Tensor) -> Tensor:
        """Means (n,) or class probabilities (n, m) of rows whose clients have these positions (n,)."""
        n, g = len(client), self.weights.shape[1]
        at = at._replace(residual=self.loadings(at))
        order = torch.argsort(client, stable=True)  # so that the points of a client are drawn for all its rows
        parts = []
        for some in torch.split(order, max(1, _NUMBERS_AT_ONCE // rows.numbers_per_row(g))):
            which, place = torch.unique(client[some], return_inverse=True)
            parameters = rows.take(some).mean_parameters(at, self.shares(which)[place])
            mean = rows.family.mean(parameters, at.nuisance)
            weights = self.weights[client[some]]
            parts.append((weights * mean).sum(1) if mean.ndim == 2 else (weights[:, None] @ mean)[:, 0])
        found = torch.cat(parts)
        return torch.empty_like(found).index_copy_(0, order, found) if n else found
