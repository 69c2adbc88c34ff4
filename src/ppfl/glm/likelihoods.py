"""Log-likelihoods of all clients for many memberships at once.

A client's log-likelihood is a sum over its own rows, which is all that it would have to send to a server.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from .designs import DenseDesign, Design
from .families import Family, GaussianFamily, combine

_CHUNK_SIZE = 1 << 18  # numbers (rows x memberships x parameters) that fit in the cache
_SMALL_CHUNK = 1 << 15  # below this the number of chunks costs more than padding
_MAX_MOMENTS = 1 << 26  # numbers in the Gram matrices of all clients


class Coefficients(NamedTuple):
    """Coefficients of the canonical models, and those that all clients share."""

    canonical: Tensor  # (K, q, m)
    shared: Tensor  # (f, m)
    nuisance: Tensor  # (r,), of the family: the log dispersion of gaussian targets

    def detach(self) -> Coefficients:
        return Coefficients(*(part.detach() for part in self))


class Chunk(NamedTuple):
    """Some clients with their data."""

    clients: Tensor  # positions
    data: Likelihood


class LikelihoodValues(NamedTuple):
    """Log-likelihoods, and their derivatives when they are needed."""

    logs: Tensor  # (M, G), detached
    expectation: Callable[[Tensor], Tensor]  # from weights (M, G) to the weighted sum of logs, which has a gradient


class Scores(NamedTuple):
    """First and second derivatives of log-likelihoods, for memberships with weights (M, G)."""

    logs: Tensor  # (M, G)
    # from the weights to derivatives (M, d, G) in the client's own coefficients, those in the nuisance parameters
    # (M, r, G), and minus the mean second derivatives (P, P) in all coefficients and nuisance parameters
    derivatives: Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]


class Likelihood(Protocol):
    """The data of M clients."""

    @property
    def n_clients(self) -> int: ...

    @property
    def n_samples(self) -> float:
        """The sum of all sample weights."""

    def chunks(self, memberships: int) -> Iterator[Chunk]:
        """All clients in chunks that fit in the cache with this number of memberships, in any order."""

    def subset(self, clients: Tensor) -> Likelihood:
        """The data of the clients at these positions, which must be increasing."""

    def client_log_likelihoods(self, coefficients: Coefficients, c: Tensor) -> Tensor:
        """(M, G) for memberships (M, K, G) of every client, or (1, K, G) if all clients have the same ones."""

    def evaluate(self, coefficients: Coefficients, c: Tensor) -> LikelihoodValues:
        """The same for gradients in the coefficients."""

    @property
    def has_scores(self) -> bool:
        """Whether `scores` works for these data."""

    def scores(self, coefficients: Coefficients, c: Tensor) -> Scores:
        """For memberships (M, K, G), with one linear predictor and mixed weights."""


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
            combine(c, self.predictors(coefficients))[..., 0], self.y, coefficients.nuisance
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
            blocks = _Blocks(self.varying.columns, self.shared.columns, c.shape[1], len(found.nuisance))
            information = blocks.of_columns(lambda k, other: x.T @ (x * curvature[:, k, other, None]))
            for i, cross in enumerate(found.crosses):
                mean = torch.bmm(cross.view(m, r, -1) * weight, weighted.mT).view(m * r, -1)
                blocks.add_cross(information, i, mean.T @ x)
                for j in range(len(found.nuisance)):
                    second = torch.bmm(weight.mT, found.seconds[i][j].view(m, r, -1))[:, 0]
                    information[blocks.n_columns + i, blocks.n_columns + j] = (second * weights).sum()
            return columns, nuisance, information

        return Scores(logs, derivatives)

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
            count = max(1, _CHUNK_SIZE // (largest * each))
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


class GaussianMoments(NamedTuple):
    """Sufficient statistics per client of a linear gaussian model, so that the number of rows no longer matters."""

    gram: Tensor  # (M, d, d), X'X of varying and shared columns together
    cross: Tensor  # (M, d), X'y
    squares: Tensor  # (M,), y'y
    size: Tensor  # (M,)

    @property
    def n_clients(self) -> int:
        return len(self.size)

    @property
    def n_samples(self) -> float:
        return float(self.size.sum())

    @classmethod
    def of(cls, rows: ClientRows) -> GaussianMoments:
        """The moments of all rows, computed in chunks."""
        assert isinstance(rows.varying, DenseDesign)
        assert isinstance(rows.shared, DenseDesign)
        x = torch.cat([rows.varying.x, rows.shared.x], 1)
        y = rows.y if rows.offset is None else rows.y - rows.offset
        d = x.shape[1]
        gram = x.new_zeros(rows.n_clients, d, d)
        weighted = x * rows.weight[:, None]
        for chunk in torch.split(torch.arange(len(x)), max(1, _CHUNK_SIZE // (d * d))):
            gram.index_add_(0, rows.client[chunk], weighted[chunk, :, None] * x[chunk, None])
        start = x.new_zeros(rows.n_clients)
        return cls(
            gram,
            x.new_zeros(rows.n_clients, d).index_add_(0, rows.client, weighted * y[:, None]),
            start.index_add(0, rows.client, rows.weight * y.square()),
            start.index_add(0, rows.client, rows.weight),
        )

    def subset(self, clients: Tensor) -> GaussianMoments:
        return GaussianMoments(*(t[clients] for t in self))

    def chunks(self, memberships: int) -> Iterator[Chunk]:
        max_clients = max(1, _CHUNK_SIZE // (4 * memberships))
        for some in torch.split(torch.arange(self.n_clients), max_clients):
            yield Chunk(some, GaussianMoments(*(t[some[0] : some[-1] + 1] for t in self)))

    def client_log_likelihoods(self, coefficients: Coefficients, c: Tensor) -> Tensor:
        products, fits = self._products(coefficients)
        return self._log_density(coefficients, self._residuals(products, fits, c))

    def evaluate(self, coefficients: Coefficients, c: Tensor) -> LikelihoodValues:
        """The residual sum of squares is a quadratic polynomial in c, so its mean needs two moments of c only."""
        products, fits = self._products(coefficients)
        residuals = self._residuals(products.detach(), fits.detach(), c)
        logs = self._log_density(coefficients.detach(), residuals)

        def expectation(weights: Tensor) -> Tensor:
            total = weights.sum(1)
            if len(c) == 1:
                first, second = weights @ c[0].T, (weights @ _products_of(c[0]).T).view_as(products)
            else:
                first, second = torch.bmm(c, weights[..., None])[..., 0], torch.bmm(c * weights[:, None], c.mT)
            mean = total * self.squares - 2 * (first * fits).sum(1) + (second * products).sum((1, 2))
            return self._log_density(coefficients, mean, total).sum()

        return LikelihoodValues(logs, expectation)

    @property
    def has_scores(self) -> bool:
        return True

    def scores(self, coefficients: Coefficients, c: Tensor) -> Scores:
        c = c.expand(self.n_clients, -1, -1)
        products, fits = self._products(coefficients)
        residuals = self._residuals(products, fits, c)
        precision = torch.exp(-coefficients.nuisance[0])

        def derivatives(weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            f, q = len(coefficients.shared), coefficients.canonical.shape[1]
            own = torch.matmul(coefficients.canonical[..., 0].T, c)
            shared = coefficients.shared[:, 0, None].expand(len(c), -1, c.shape[2])
            columns = torch.baddbmm(self.cross[..., None], self.gram, torch.cat([own, shared], 1), alpha=-1)
            columns.mul_(precision)
            in_dispersion = 0.5 * (residuals * precision - self.size[:, None])
            shares = torch.cat([c, torch.ones_like(c[:, :1])], 1)
            weighted = shares * weights[:, None]
            second = torch.bmm(weighted, shares.mT)  # (M, K + 1, K + 1)
            blocks = _Blocks(q, f, c.shape[1], 1)
            by_pair = (second.flatten(1).T @ self.gram.flatten(1)) * precision
            by_pair = by_pair.view(*second.shape[1:], *self.gram.shape[1:])
            information = blocks.of_columns(lambda k, other: by_pair[k, other])
            blocks.add_cross(information, 0, torch.bmm(weighted, columns.mT).sum(0))
            information[-1, -1] = 0.5 * precision * (residuals * weights).sum()
            return columns, in_dispersion[:, None], information

        return Scores(self._log_density(coefficients, residuals), derivatives)

    def _products(self, coefficients: Coefficients) -> tuple[Tensor, Tensor]:
        """H (M, K, K), the products of the canonical models' predictions in each client's data, and with y (M, K)."""
        canonical, shared = coefficients.canonical[..., 0], coefficients.shared[:, 0]
        models = torch.cat([canonical, shared.expand(len(canonical), -1)], 1)  # (K, d)
        return models @ self.gram @ models.T, self.cross @ models.T

    def _residuals(self, products: Tensor, fits: Tensor, c: Tensor) -> Tensor:
        """Residual sums of squares (M, G): y'y - 2 c'f + c'Hc."""
        if len(c) == 1:
            polynomials = torch.cat([products.flatten(1), -2 * fits], 1)
            return torch.addmm(self.squares[:, None], polynomials, torch.cat([_products_of(c[0]), c[0]]))
        slopes = torch.baddbmm(fits[..., None], products, c, beta=-2)
        return slopes.mul_(c).sum(1).add_(self.squares[:, None])

    def _log_density(self, coefficients: Coefficients, residuals: Tensor, weight: Tensor | None = None) -> Tensor:
        """Of residual sums of squares (M, ...), each counted `weight` times."""
        log_dispersion = coefficients.nuisance[0]
        level = self.size * (log_dispersion + math.log(2 * math.pi))
        level = level[:, None] if weight is None else level * weight
        return -0.5 * (residuals * torch.exp(-log_dispersion) + level)


def _products_of(c: Tensor) -> Tensor:
    """All products of memberships (K, G): (K K, G)."""
    return (c[:, None] * c).flatten(0, 1)


class _Blocks(NamedTuple):
    """The places of coefficients in a matrix of second derivatives: K canonical models, shared columns, nuisance."""

    varying: int
    shared: int
    k: int
    nuisance: int

    @property
    def n_columns(self) -> int:
        return self.k * self.varying + self.shared

    def place(self, share: int) -> tuple[slice, slice]:
        """Where the parameters with this share are, and which columns of the design they belong to."""
        if share == self.k:
            return slice(self.k * self.varying, self.n_columns), slice(self.varying, self.varying + self.shared)
        return slice(share * self.varying, (share + 1) * self.varying), slice(0, self.varying)

    def of_columns(self, block: Callable[[int, int], Tensor]) -> Tensor:
        """The whole matrix from blocks (d, d) for each pair of shares, with 0 for the nuisance parameters."""
        found = torch.zeros(self.n_columns + self.nuisance, self.n_columns + self.nuisance, dtype=torch.float64)
        for k in range(self.k + (self.shared > 0)):
            for other in range(k + 1):
                (rows, a), (columns, b) = self.place(k), self.place(other)
                part = block(k, other)[a, b]
                found[rows, columns] = part
                found[columns, rows] = part.T
        return found

    def add_cross(self, found: Tensor, nuisance: int, block: Tensor) -> None:
        """The derivatives in the coefficients and one nuisance parameter, (K + 1, d)."""
        at = self.n_columns + nuisance
        for k in range(self.k + (self.shared > 0)):
            rows, a = self.place(k)
            found[rows, at] = found[at, rows] = block[k, a]


NO_CLIENTS: Likelihood = GaussianMoments(*(torch.zeros(0, *[0] * n, dtype=torch.float64) for n in (2, 1, 0, 0)))


def fastest_form(rows: ClientRows) -> Likelihood:
    """The same likelihood in the form that is fastest to evaluate."""
    d = rows.varying.columns + rows.shared.columns
    is_linear = isinstance(rows.family, GaussianFamily) and rows.family.link == "identity"
    fits_in_memory = d * d * rows.n_clients <= min(_MAX_MOMENTS, 64 * d * len(rows.y))
    if is_linear and fits_in_memory and isinstance(rows.varying, DenseDesign):
        return GaussianMoments.of(rows)
    return rows
