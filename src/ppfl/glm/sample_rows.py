"""The likelihood of any family, from the rows of all clients."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .designs import DenseDesign, Design
from .families import Family, combine
from .likelihoods import CHUNK_SIZE, Blocks, Chunk, Coefficients, Likelihood, LikelihoodValues, Scores

_SMALL_CHUNK = 1 << 15  # below this the number of chunks costs more than padding


class ClientRows(NamedTuple):
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

    def predictors(self, coefficients: Coefficients) -> Tensor:
        """Linear predictors of every canonical model, (n, K, m)."""
        eta = self.varying.predictors(coefficients.canonical)
        if self.shared.columns:
            eta = eta + self.shared.predictors(coefficients.shared[None])
        return eta if self.offset is None else eta + self.offset[:, None, None]

    def mean_parameters(self, coefficients: Coefficients, c: Tensor) -> Tensor:
        """The family's mean parameters (n, G, p), for memberships (n, K, G) of every row."""
        eta = self.predictors(coefficients)
        if self.mix == "weights":
            return self.family.mean_parameters(combine(c, eta))
        return self.family.mix(c, self.family.mean_parameters(eta))

    def log_densities(self, coefficients: Coefficients, c: Tensor) -> Tensor:
        """The log density of each row for each membership, (n, G)."""
        eta = self.predictors(coefficients)
        if self.mix == "weights":
            return self.family.log_density_of_predictors(combine(c, eta), self.y, coefficients.nuisance)
        parameters = self.family.mean_parameters(eta)
        return self.family.mixed_log_density(c, parameters, self.y, coefficients.nuisance)

    def client_log_likelihoods(self, coefficients: Coefficients, c: Tensor) -> Tensor:
        if self.rows_each or len(c) == 1:
            densities = self.log_densities(coefficients, c)
        else:
            densities = self.log_densities(coefficients, c[self.client])
        if self.rows_each:
            shape = (self.n_clients, self.rows_each)
            return torch.bmm(self.weight.view(shape)[:, None], densities.view(*shape, -1))[:, 0]
        start = densities.new_zeros(self.n_clients, densities.shape[1])
        return start.index_add(0, self.client, densities * self.weight[:, None])

    def conditional_log_likelihoods(self, coefficients: Coefficients, c: Tensor, given: Likelihood) -> Tensor:
        return self.client_log_likelihoods(coefficients, c)

    def evaluate(self, coefficients: Coefficients, c: Tensor) -> LikelihoodValues:
        logs = self.client_log_likelihoods(coefficients, c)
        return LikelihoodValues(logs.detach(), lambda weights: torch.dot(weights.flatten(), logs.flatten()))

    @property
    def has_scores(self) -> bool:
        is_dense = isinstance(self.varying, DenseDesign) and isinstance(self.shared, DenseDesign)
        return is_dense and self.mix == "weights" and self.family.outputs == 1

    def scores(self, coefficients: Coefficients, c: Tensor) -> Scores:
        """For clients with the same number of rows, as in `chunks`."""
        assert isinstance(self.varying, DenseDesign)
        assert isinstance(self.shared, DenseDesign)
        m, r = self.n_clients, self.rows_each
        c = c.expand(m, -1, -1)
        x = torch.cat([self.varying.x, self.shared.x], 1)
        weight = self.weight.view(m, r, 1)
        found = self.family.derivatives(
            combine(c, self.predictors(coefficients)), self.y, coefficients.nuisance
        )
        found = found._replace(
            slope=found.slope[:, 0], curvature=found.curvature[:, 0, 0], crosses=[each[:, 0] for each in found.crosses]
        )
        logs = torch.bmm(weight.mT, found.log.view(m, r, -1))[:, 0]

        def derivatives(weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            slope = found.slope.view(m, r, -1) * weight
            columns = torch.bmm(x.view(m, r, -1).mT, slope)
            parts = [torch.bmm(weight.mT, each.view(m, r, -1)) for each in found.nuisance]
            nuisance = torch.cat(parts, 1) if parts else slope.new_zeros(m, 0, logs.shape[1])
            shares = torch.cat([c, torch.ones_like(c[:, :1])], 1)  # shared columns have a share of 1
            weighted = shares * weights[:, None]
            products = (weighted[:, :, None] * shares[:, None]).flatten(1, 2)
            curvature = torch.bmm(found.curvature.view(m, r, -1) * weight, products.mT)
            curvature = curvature.view(m * r, *[shares.shape[1]] * 2)
            blocks = Blocks(self.varying.columns, self.shared.columns, c.shape[1], len(found.nuisance))
            information = blocks.of_columns(lambda k, other: x.T @ (x * curvature[:, k, other, None]))
            for i, cross in enumerate(found.crosses):
                mean = torch.bmm(cross.view(m, r, -1) * weight, weighted.mT).view(m * r, -1)
                blocks.add_cross(information, i, mean.T @ x)
                for j in range(len(found.nuisance)):
                    second = torch.bmm(weight.mT, found.seconds[i][j].view(m, r, -1))[:, 0]
                    information[blocks.n_columns + i, blocks.n_columns + j] = (second * weights).sum()
            return columns, nuisance, information

        return Scores(logs, derivatives, c, self.varying.columns)

    def numbers_per_row(self, memberships: int) -> int:
        return memberships * max(2, self.family.outputs)

    def chunks(self, memberships: int) -> Iterator[Chunk]:
        """Clients of similar sizes, each padded with rows of weight 0 to the size of the largest."""
        sizes = torch.bincount(self.client, minlength=self.n_clients)
        first_row = sizes.cumsum(0) - sizes
        order = torch.argsort(sizes, descending=True, stable=True)
        each, done = self.numbers_per_row(memberships), 0
        while done < len(order):
            largest = max(1, int(sizes[order[done]]))
            count = max(1, CHUNK_SIZE // (largest * each))
            some = order[done : done + count]
            is_similar = (largest <= 1.5 * sizes[some] + 4) | (torch.arange(len(some)) * largest * each < _SMALL_CHUNK)
            some = some[: int(is_similar.long().cumprod(0).sum())].sort().values
            yield Chunk(some, self._pad(some, first_row[some], sizes[some], largest))
            done += len(some)

    def _pad(self, clients: Tensor, first_row: Tensor, sizes: Tensor, rows: int) -> ClientRows:
        place = torch.arange(rows)
        is_real = (place < sizes[:, None]).flatten()
        index = (first_row[:, None] + torch.minimum(place, (sizes[:, None] - 1).clamp_min(0))).flatten()
        index = index.clamp(max=len(self.y) - 1)
        padded = self.take(index)
        client = torch.arange(len(clients)).repeat_interleave(rows)
        return padded._replace(weight=padded.weight * is_real, client=client, n_clients=len(clients), rows_each=rows)

    def subset(self, clients: Tensor) -> ClientRows:
        position = torch.full((self.n_clients,), -1)
        position[clients] = torch.arange(len(clients))
        client = position[self.client]
        rows = (client >= 0).nonzero()[:, 0]
        return self.take(rows)._replace(client=client[rows], n_clients=len(clients), rows_each=0)

    def take(self, rows: Tensor) -> ClientRows:
        """Some of the rows; those of a prediction have no targets, weights or clients."""
        offset = None if self.offset is None else self.offset[rows]
        return self._replace(
            varying=self.varying.take(rows), shared=self.shared.take(rows), offset=offset,
            y=self.y[rows] if len(self.y) else self.y, weight=self.weight[rows] if len(self.y) else self.weight,
        )  # fmt: skip
