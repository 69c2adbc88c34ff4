"""Log-likelihoods of all clients for many memberships at once.

A client's log-likelihood is a sum over its own rows, which is all that it would have to send to a server.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from .designs import DenseDesign, Design
from .families import Family, GaussianFamily, Memberships, combine
from .membership_grid import Grid

_CHUNK_SIZE = 1 << 18  # numbers (rows x memberships x parameters) that fit in the cache
_MAX_MOMENTS = 1 << 26  # numbers in the Gram matrices of all clients


class Coefficients(NamedTuple):
    """Coefficients of the canonical models, and those that all clients share."""

    canonical: Tensor  # (K, q, m)
    shared: Tensor  # (f, m)
    log_dispersion: Tensor  # ()


class Likelihood(Protocol):
    """The data of M clients."""

    @property
    def n_clients(self) -> int: ...

    @property
    def n_samples(self) -> float:
        """The sum of all sample weights."""

    def chunks(self, memberships: int) -> Iterator[Likelihood]:
        """All clients, in order, in chunks that fit in the cache with this number of memberships."""

    def subset(self, clients: Tensor) -> Likelihood:
        """The data of the clients at these positions, which must be increasing."""

    def client_log_likelihoods(self, coefficients: Coefficients, c: Memberships) -> Tensor:
        """Log-likelihoods (M, G) for each client's grid, or (M, 1) for one membership per client (M, 1, K)."""


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

    @property
    def n_samples(self) -> float:
        return float(self.weight.sum())

    def predictors(self, coefficients: Coefficients) -> Tensor:
        """Linear predictors of every canonical model, (n, K, m)."""
        eta = self.varying.predictors(coefficients.canonical)
        return eta + self.shared.predictors(coefficients.shared[None]) if self.shared.columns else eta

    def mean_parameters(self, coefficients: Coefficients, c: Memberships) -> Tensor:
        """The family's mean parameters for each row and membership, (n, G, p)."""
        eta = self.predictors(coefficients)
        if self.mix == "weights":
            return self.family.mean_parameters(combine(c, eta))
        return self.family.mix(c, self.family.mean_parameters(eta))

    def log_densities(self, coefficients: Coefficients, c: Memberships) -> Tensor:
        """The log density of each row for each membership, (n, G)."""
        eta = self.predictors(coefficients)
        if self.mix == "weights":
            return self.family.log_density_of_predictors(combine(c, eta), self.y, coefficients.log_dispersion)
        parameters = self.family.mean_parameters(eta)
        return self.family.mixed_log_density(c, parameters, self.y, coefficients.log_dispersion)

    def client_log_likelihoods(self, coefficients: Coefficients, c: Memberships) -> Tensor:
        by_row = c.subset(self.client) if isinstance(c, Grid) else c[self.client]
        densities = self.log_densities(coefficients, by_row)
        start = densities.new_zeros(self.n_clients, densities.shape[1])
        return start.index_add(0, self.client, densities * self.weight[:, None])

    def rows_per_chunk(self, memberships: int) -> int:
        """The number of rows that fit in the cache with this number of memberships."""
        return max(1, _CHUNK_SIZE // (memberships * max(2, self.family.outputs)))

    def chunks(self, memberships: int) -> Iterator[ClientRows]:
        max_rows = self.rows_per_chunk(memberships)
        ends = torch.bincount(self.client, minlength=self.n_clients).cumsum(0)
        first_client, first_row = 0, 0
        while first_client < self.n_clients:
            last = int(torch.searchsorted(ends, first_row + max_rows, right=True))
            last = min(max(last, first_client + 1), self.n_clients)
            end = int(ends[last - 1])
            yield self._slice(slice(first_row, end), first_client, last)
            first_client, first_row = last, end

    def subset(self, clients: Tensor) -> ClientRows:
        position = torch.full((self.n_clients,), -1)
        position[clients] = torch.arange(len(clients))
        client = position[self.client]
        rows = (client >= 0).nonzero()[:, 0]
        return ClientRows(
            self.varying.take(rows), self.shared.take(rows), self.y[rows], self.weight[rows], client[rows],
            len(clients), self.family, self.mix,
        )  # fmt: skip

    def _slice(self, rows: slice, first: int, end: int) -> ClientRows:
        """These rows, which are all the rows of clients first, ..., end - 1."""
        if rows == slice(0, len(self.y)):
            return self
        return ClientRows(
            self.varying.take(rows), self.shared.take(rows), self.y[rows], self.weight[rows],
            self.client[rows] - first, end - first, self.family, self.mix,
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
        d = x.shape[1]
        gram = x.new_zeros(rows.n_clients, d, d)
        weighted = x * rows.weight[:, None]
        for chunk in torch.split(torch.arange(len(x)), max(1, _CHUNK_SIZE // (d * d))):
            gram.index_add_(0, rows.client[chunk], weighted[chunk, :, None] * x[chunk, None])
        start = x.new_zeros(rows.n_clients)
        return cls(
            gram,
            x.new_zeros(rows.n_clients, d).index_add_(0, rows.client, weighted * rows.y[:, None]),
            start.index_add(0, rows.client, rows.weight * rows.y.square()),
            start.index_add(0, rows.client, rows.weight),
        )

    def subset(self, clients: Tensor) -> GaussianMoments:
        return GaussianMoments(*(t[clients] for t in self))

    def chunks(self, memberships: int) -> Iterator[GaussianMoments]:
        max_clients = max(1, _CHUNK_SIZE // memberships)
        for tensors in zip(*(torch.split(t, max_clients) for t in self), strict=True):
            yield GaussianMoments(*tensors)

    def client_log_likelihoods(self, coefficients: Coefficients, c: Memberships) -> Tensor:
        """From c'Hc, where H (K, K) are the products of the canonical models' predictions in the client's data."""
        canonical, shared = coefficients.canonical[..., 0], coefficients.shared[:, 0]
        models = torch.cat([canonical, shared.expand(len(canonical), -1)], 1)  # (K, d)
        products = models @ self.gram @ models.T  # (M, K, K)
        fits = self.cross @ models.T  # (M, K)
        level, squares = self.size * (coefficients.log_dispersion + math.log(2 * math.pi)), self.squares
        precision = torch.exp(-coefficients.log_dispersion)
        if isinstance(c, Grid):
            # c = floor + scale u, so the log-likelihood is a quadratic polynomial in u with its own coefficients for
            # each client, and one matrix product evaluates all polynomials at all grid points
            across = (products @ c.floor[..., None])[..., 0]
            squares = squares + ((across - 2 * fits) * c.floor).sum(1)
            quadratic, linear = products * c.scale.square()[:, None, None], 2 * (across - fits) * c.scale[:, None]
            polynomials = torch.cat([quadratic.flatten(1), linear, squares[:, None]], 1)
            return torch.addmm((-0.5 * level)[:, None], polynomials * (-0.5 * precision), c.powers)
        linear, quadratic = (c @ fits[:, :, None])[..., 0], (c @ products @ c.mT)[..., 0]
        return -0.5 * ((squares[:, None] - 2 * linear + quadratic) * precision + level[:, None])


NO_CLIENTS: Likelihood = GaussianMoments(*(torch.zeros(0, *[0] * n, dtype=torch.float64) for n in (2, 1, 0, 0)))


def fastest_form(rows: ClientRows) -> Likelihood:
    """The same likelihood in the form that is fastest to evaluate."""
    d = rows.varying.columns + rows.shared.columns
    is_linear = isinstance(rows.family, GaussianFamily) and rows.family.link == "identity"
    fits_in_memory = d * d * rows.n_clients <= min(_MAX_MOMENTS, 64 * d * len(rows.y))
    if is_linear and fits_in_memory and isinstance(rows.varying, DenseDesign):
        return GaussianMoments.of(rows)
    return rows
