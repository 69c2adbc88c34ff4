"""The likelihood of any family, from the rows of all clients.

A row has one or several linear predictors: one for numbers and two classes, one for each class or alternative else.
With `mix = "weights"` a client's predictors are mixed from those of the canonical models; its residual scores z join
its membership as further shares, of models L. With `mix = "predictions"` the predictions are mixed.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple, Protocol, Self

import torch
from torch import Tensor

from .family import Derivatives, Family, combine, derivatives_of_mixture
from .likelihood import CHUNK_SIZE, Chunk, Layout, Parameters, ScoreSums, residual_basis

_SMALL_CHUNK = 1 << 15  # below this the number of chunks costs more than padding
_NOT_AVAILABLE = -1e30  # the utility of an alternative that cannot be chosen


class Design(Protocol):
    """n rows with q columns and p linear predictors."""

    def __len__(self) -> int: ...

    @property
    def columns(self) -> int:
        """q."""

    def outputs(self, predictors: int) -> int:
        """m, the number of coefficients per column for this number of predictors."""

    def predictors(self, coefficients: Tensor) -> Tensor:
        """(n, K, p) of K models with coefficients (K, q, m)."""

    def scores(self, slopes: Tensor, clients: int, weight: Tensor) -> Tensor:
        """From slopes (n, p, G) in the predictors to weighted sums over the rows of each client: (M, q m, G)."""

    def information(self, other: Design, curvature: Tensor) -> Tensor:
        """The sum over rows of x' C y, (T, q m, q' m), for T curvatures (n, p, p, T) and another design's columns."""

    def take(self, rows: slice | Tensor) -> Self:
        """Some of the rows."""


class DenseDesign(NamedTuple):
    """A dense matrix, the same for all predictors."""

    x: Tensor  # (n, q)

    def __len__(self) -> int:
        return self.x.shape[0]

    @property
    def columns(self) -> int:
        return self.x.shape[1]

    def outputs(self, predictors: int) -> int:
        return predictors

    def predictors(self, coefficients: Tensor) -> Tensor:
        k, q, m = coefficients.shape
        return (self.x @ coefficients.permute(1, 0, 2).reshape(q, k * m)).reshape(-1, k, m)

    def scores(self, slopes: Tensor, clients: int, weight: Tensor) -> Tensor:
        n, p, g = slopes.shape
        rows, x = n // max(1, clients), self.x * weight[:, None]
        found = torch.bmm(x.view(clients, rows, self.columns).mT, slopes.reshape(clients, rows, p * g))
        return found.view(clients, self.columns * p, g)

    def information(self, other: Design, curvature: Tensor) -> Tensor:
        assert isinstance(other, DenseDesign)
        _, p, _, t = curvature.shape
        products = (self.x[:, :, None] * other.x[:, None]).flatten(1)
        found = (products.T @ curvature.flatten(1)).view(self.columns, other.columns, p, p, t)
        return found.permute(4, 0, 2, 1, 3).reshape(t, self.columns * p, other.columns * p)

    def take(self, rows: slice | Tensor) -> DenseDesign:
        return DenseDesign(self.x[rows])


class ChoiceDesign(NamedTuple):
    """Situations with up to J alternatives each. The same coefficients give the utility of every alternative."""

    x: Tensor  # (n, J, q), 0 for alternatives that are not available
    available: Tensor  # (n, J), False for places that a situation with fewer than J alternatives does not use

    def __len__(self) -> int:
        return self.x.shape[0]

    @property
    def columns(self) -> int:
        return self.x.shape[2]

    def outputs(self, predictors: int) -> int:
        return 1

    def predictors(self, coefficients: Tensor) -> Tensor:
        return torch.einsum("njq,kq->nkj", self.x, coefficients[..., 0])

    def scores(self, slopes: Tensor, clients: int, weight: Tensor) -> Tensor:
        n, p, g = slopes.shape
        rows, x = n // max(1, clients) * p, self.x * weight[:, None, None]
        return torch.bmm(x.view(clients, rows, self.columns).mT, slopes.reshape(clients, rows, g))

    def information(self, other: Design, curvature: Tensor) -> Tensor:
        assert isinstance(other, ChoiceDesign)
        weighted = torch.einsum("njkt,nkr->njtr", curvature, other.x)
        found = self.x.flatten(0, 1).T @ weighted.flatten(0, 1).flatten(1)
        return found.view(self.columns, curvature.shape[-1], other.columns).transpose(0, 1)

    def take(self, rows: slice | Tensor) -> ChoiceDesign:
        return ChoiceDesign(self.x[rows], self.available[rows])


class RowLikelihood(NamedTuple):
    """The samples of all clients, sorted by client."""

    varying: Design  # columns with one coefficient per canonical model
    shared: Design  # columns with the same coefficient for all clients
    y: Tensor  # (n,)
    weight: Tensor  # (n,)
    client: Tensor  # (n,), 0, 0, ..., 1, ...
    n_clients: int
    family: Family
    mix: str
    offset: Tensor | None = None  # (n,), added to every linear predictor
    rows_each: int = 0  # the number of rows of every client if all have the same, else 0

    @property
    def n_samples(self) -> float:
        return float(self.weight.sum())

    @property
    def integrates_residual(self) -> bool:
        return False

    def predictors(self, at: Parameters) -> Tensor:
        """Linear predictors of every canonical model and every residual score, (n, K + s, p)."""
        eta = self.varying.predictors(at.canonical)
        if self.shared.columns:
            eta = eta + self.shared.predictors(at.shared[None])
        if self.offset is not None:
            eta = eta + self.offset[:, None, None]
        if isinstance(self.varying, ChoiceDesign):
            eta = eta.masked_fill(~self.varying.available[:, None], _NOT_AVAILABLE)
        return torch.cat([eta, self.varying.predictors(at.residual[..., None])], 1) if len(at.residual) else eta

    def mean_parameters(self, at: Parameters, shares: Tensor) -> Tensor:
        """The family's mean parameters (n, G, p), for shares (n, K + s, G) of every row."""
        eta = self.predictors(at)
        if self.mix == "weights":
            return self.family.mean_parameters(combine(shares, eta))
        return self.family.mix(shares, self.family.mean_parameters(eta))

    def at(self, layout: Layout, parameters: Parameters) -> RowsAt:
        return RowsAt(self, layout, parameters)

    def numbers_per_row(self, points: int) -> int:
        return points * max(2, self.family.outputs) * (1 if self.mix == "weights" else 4)

    def chunks(self, numbers: int) -> Iterator[Chunk]:
        """Clients of similar sizes, each padded with rows of weight 0 to the size of the largest."""
        sizes = torch.bincount(self.client, minlength=self.n_clients)
        first_row = sizes.cumsum(0) - sizes
        order = torch.argsort(sizes, descending=True, stable=True)
        each, done = self.numbers_per_row(numbers), 0
        while done < len(order):
            largest = max(1, int(sizes[order[done]]))
            count = max(1, CHUNK_SIZE // (largest * each))
            some = order[done : done + count]
            is_similar = (largest <= 1.5 * sizes[some] + 4) | (torch.arange(len(some)) * largest * each < _SMALL_CHUNK)
            some = some[: int(is_similar.long().cumprod(0).sum())].sort().values
            yield Chunk(some, self._pad(some, first_row[some], sizes[some], largest))
            done += len(some)

    def _pad(self, clients: Tensor, first_row: Tensor, sizes: Tensor, rows: int) -> RowLikelihood:
        place = torch.arange(rows)
        is_real = (place < sizes[:, None]).flatten()
        index = (first_row[:, None] + torch.minimum(place, (sizes[:, None] - 1).clamp_min(0))).flatten()
        index = index.clamp(max=len(self.y) - 1)
        padded = self.take(index)
        client = torch.arange(len(clients)).repeat_interleave(rows)
        return padded._replace(weight=padded.weight * is_real, client=client, n_clients=len(clients), rows_each=rows)

    def subset(self, clients: Tensor) -> RowLikelihood:
        position = torch.full((self.n_clients,), -1)
        position[clients] = torch.arange(len(clients))
        client = position[self.client]
        rows = (client >= 0).nonzero()[:, 0]
        return self.take(rows)._replace(client=client[rows], n_clients=len(clients), rows_each=0)

    def take(self, rows: slice | Tensor) -> RowLikelihood:
        """Some of the rows; those of a prediction have no targets, weights or clients."""
        offset = None if self.offset is None else self.offset[rows]
        return self._replace(
            varying=self.varying.take(rows), shared=self.shared.take(rows), offset=offset,
            y=self.y[rows] if len(self.y) else self.y, weight=self.weight[rows] if len(self.y) else self.weight,
        )  # fmt: skip


class RowsAt:
    """At one point of the parameter space.

    Blocks of parameters are the canonical models, the residual scores, and the shared columns, in this order.
    """

    def __init__(self, rows: RowLikelihood, layout: Layout, at: Parameters) -> None:
        self.rows, self.layout, self.nuisance = rows, layout, at.nuisance
        self.eta = rows.predictors(at)  # (n, K + s, p)
        self.found: Derivatives | None = None

    def log_likelihoods(self, shares: Tensor, derivatives: bool = False) -> Tensor:
        rows = self.rows
        if not rows.rows_each:
            logs = self._log_densities(shares if len(shares) == 1 else shares[rows.client])
            start = logs.new_zeros(rows.n_clients, logs.shape[1])
            return start.index_add(0, rows.client, logs * rows.weight[:, None])
        if not derivatives:
            return self._by_client(self._log_densities(shares))
        self.found = self._derivatives(shares.expand(rows.n_clients, -1, -1))
        return self._by_client(self.found.log)

    def _log_densities(self, shares: Tensor) -> Tensor:
        """(n, G)."""
        rows = self.rows
        if rows.mix == "weights":
            return rows.family.log_density_of_predictors(combine(shares, self.eta), rows.y, self.nuisance)
        parameters = rows.family.mean_parameters(self.eta)
        return rows.family.mixed_log_density(shares, parameters, rows.y, self.nuisance)

    def _derivatives(self, shares: Tensor) -> Derivatives:
        rows = self.rows
        if rows.mix == "weights":
            return rows.family.derivatives(combine(shares, self.eta), rows.y, self.nuisance)
        return derivatives_of_mixture(rows.family, shares, self.eta, rows.y, self.nuisance)

    def _by_client(self, values: Tensor) -> Tensor:
        """Sums (M, G) of values (n, G) with the rows' weights."""
        m, r = self.rows.n_clients, self.rows.rows_each
        return torch.bmm(self.rows.weight.view(m, 1, r), values.reshape(m, r, -1))[:, 0]

    def score_sums(self, shares: Tensor, weights: Tensor, more: Tensor) -> ScoreSums:
        """For clients with the same number of rows, as in `chunks`."""
        assert self.found is not None
        found, m = self.found, self.rows.n_clients
        shares = shares.expand(m, -1, -1)
        nuisance = [self._by_client(each)[:, None] for each in found.nuisance]
        canonical, shared, residual = self._columns(found.slope, shares)
        each = torch.cat([canonical, shared, *nuisance, residual, more.expand(m, -1, -1)], 1)  # (M, P, G)
        products = torch.bmm(each * weights[:, None], each.mT).sum(0)
        mean = torch.bmm(each, weights[..., None])[..., 0]
        return ScoreSums(mean, products, self._information(found, shares, weights))

    def _columns(self, slope: Tensor, shares: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The scores (M, ., G) of canonical models, shared columns and the free numbers in L."""
        rows, layout = self.rows, self.layout
        given = rows.n_clients, rows.weight
        if rows.mix == "predictions":  # every canonical model has predictors of its own
            own = slope.reshape(len(slope), layout.k, -1, slope.shape[2])
            found = [rows.varying.scores(own[:, k], *given) for k in range(layout.k)]
            return torch.cat(found, 1), rows.shared.scores(own.sum(1), *given), found[0][:, :0]
        varying, shared = (design.scores(slope, *given) for design in (rows.varying, rows.shared))
        canonical = (shares[:, : layout.k, None] * varying[:, None]).flatten(1, 2)
        if not layout.n_residual:
            return canonical, shared, canonical[:, :0]
        each = (shares[:, layout.k :, None] * varying[:, None]).flatten(1, 2)
        return canonical, shared, torch.matmul(residual_basis(layout).flatten(1), each)

    def _information(self, found: Derivatives, shares: Tensor, weights: Tensor) -> Tensor:
        """Minus the mean second derivatives."""
        rows, layout, r = self.rows, self.layout, len(found.nuisance)
        size, f = rows.varying.columns * layout.outputs, rows.shared.columns * layout.outputs
        blocks = layout.k + layout.n_effects
        first, second = torch.triu_indices(blocks + (f > 0), blocks + (f > 0))
        curvature = self._mean_curvature(found.curvature, shares, weights, first, second)
        whole = curvature.new_zeros(blocks * size + f + r, blocks * size + f + r)
        places = [slice(k * size, (k + 1) * size) for k in range(blocks)] + [slice(blocks * size, blocks * size + f)]
        for is_shared in ((False, False), (False, True), (True, True))[: 3 if f else 1]:
            some = ((first == blocks) == is_shared[0]) & ((second == blocks) == is_shared[1])
            one, other = (rows.shared if each else rows.varying for each in is_shared)
            parts = one.information(other, curvature[..., some])
            for part, k, j in zip(parts, first[some].tolist(), second[some].tolist(), strict=True):
                whole[places[k], places[j]] = part
                whole[places[j], places[k]] = part.T
        for i in range(r):
            by_block = self._mean_slope(found.crosses[i], shares, weights)  # (n, p, blocks + 1)
            for k, place in enumerate(places):
                design = rows.shared if k == blocks else rows.varying
                summed = design.scores(by_block[..., k : k + 1], 1, rows.weight)[0, :, 0]
                whole[place, i - r] = whole[i - r, place] = summed
            for j in range(r):
                whole[i - r, j - r] = (self._by_client(found.seconds[i][j]) * weights).sum()
        change = _from_blocks(layout, r)
        return change @ whole @ change.T

    def _mean_curvature(
        self, curvature: Tensor, shares: Tensor, weights: Tensor, first: Tensor, second: Tensor
    ) -> Tensor:
        """Over points, for pairs of blocks: (n, p, p, T)."""
        rows, p = self.rows, curvature.shape[1]
        by_client = curvature.reshape(rows.n_clients, -1, curvature.shape[-1])
        weight = rows.weight[:, None, None, None]
        if rows.mix == "weights":
            shares = torch.cat([shares, torch.ones_like(shares[:, :1])], 1)
            products = (shares * weights[:, None])[:, first] * shares[:, second]  # (M, T, G)
            return torch.bmm(by_client, products.mT).view(-1, p, p, len(first)) * weight
        k = self.layout.k
        mean = torch.bmm(by_client, weights[..., None]).view(-1, k, p // k, k, p // k)
        mean = torch.cat([mean, mean.sum(1, keepdim=True)], 1)
        mean = torch.cat([mean, mean.sum(3, keepdim=True)], 3)
        return mean.permute(0, 2, 4, 1, 3)[..., first, second] * weight

    def _mean_slope(self, slope: Tensor, shares: Tensor, weights: Tensor) -> Tensor:
        """Over points, for every block: (n, p, blocks + 1)."""
        rows, k, p = self.rows, self.layout.k, slope.shape[1]
        by_client = slope.reshape(rows.n_clients, -1, slope.shape[-1])
        if rows.mix == "weights":
            shares = torch.cat([shares, torch.ones_like(shares[:, :1])], 1) * weights[:, None]
            return torch.bmm(by_client, shares.mT).view(-1, p, shares.shape[1])
        mean = torch.bmm(by_client, weights[..., None]).view(-1, k, p // k)
        return torch.cat([mean, mean.sum(1, keepdim=True)], 1).mT


@lru_cache(maxsize=64)
def _from_blocks(layout: Layout, nuisance: int) -> Tensor:
    """The matrix from the order of blocks to the order of the vector, in which L has fewer free numbers."""
    canonical, shared = layout.k * layout.varying * layout.outputs, layout.shared * layout.outputs
    residual = layout.n_effects * layout.varying
    eye = torch.eye(canonical + residual + shared + nuisance, dtype=torch.float64)
    first, loadings, rest = torch.split(eye, [canonical, residual, shared + nuisance])
    return torch.cat([first, rest, residual_basis(layout).flatten(1) @ loadings])
