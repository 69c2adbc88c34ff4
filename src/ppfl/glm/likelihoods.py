"""Log-likelihoods of whole clients, for many memberships at once: all that a fit needs to know of the data.

A client's own sum is what it would send; nothing here looks at two clients together.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from .designs import Dense, Design
from .families import Family, Gaussian, Memberships, combine
from .grids import Grid

_NUMBERS_AT_ONCE = 1 << 18  # rows times memberships times parts in one gradient: what a cache holds
_MOMENTS_AT_MOST = 1 << 26  # numbers in the clients' Gram matrices


class Coefficients(NamedTuple):
    """Of the canonical models, and those that all clients share."""

    canonical: Tensor  # (K, q, m)
    shared: Tensor  # (f, m)
    log_dispersion: Tensor  # ()


class Likelihood(Protocol):
    """Data of M clients."""

    @property
    def n_clients(self) -> int: ...

    @property
    def n_samples(self) -> float:
        """With their weights."""

    def pieces(self, memberships: int) -> Iterator[Likelihood]:
        """All clients, in order, in parts that fit in memory with so many memberships to try."""

    def of_some(self, clients: Tensor) -> Likelihood:
        """The data of some clients, whose positions are given in order."""

    def of_clients(self, coefficients: Coefficients, c: Memberships) -> Tensor:
        """Log-likelihood (M, G) of every client on its grid, or (M, 1) for a membership of its own, (M, 1, K)."""


class Rows(NamedTuple):
    """Samples of clients, those of a client side by side."""

    varying: Design  # columns with a coefficient for each canonical model
    shared: Design  # columns with one coefficient for everybody
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
        """Of every canonical model, (n, K, m)."""
        eta = self.varying.times(coefficients.canonical)
        return eta + self.shared.times(coefficients.shared[None]) if self.shared.columns else eta

    def parts(self, coefficients: Coefficients, c: Memberships) -> Tensor:
        """What the family says of every row under its memberships, (n, G, p)."""
        eta = self.predictors(coefficients)
        if self.mix == "weights":
            return self.family.parts(combine(c, eta))
        return self.family.mix(c, self.family.parts(eta))

    def log_densities(self, coefficients: Coefficients, c: Memberships) -> Tensor:
        """(n, G)."""
        eta = self.predictors(coefficients)
        if self.mix == "weights":
            return self.family.log_density_at(combine(c, eta), self.y, coefficients.log_dispersion)
        parts = self.family.parts(eta)
        return self.family.mixed_log_density(c, parts, self.y, coefficients.log_dispersion)

    def of_clients(self, coefficients: Coefficients, c: Memberships) -> Tensor:
        of_rows = c.of(self.client) if isinstance(c, Grid) else c[self.client]
        densities = self.log_densities(coefficients, of_rows)
        start = densities.new_zeros(self.n_clients, densities.shape[1])
        return start.index_add(0, self.client, densities * self.weight[:, None])

    def at_once(self, memberships: int) -> int:
        """How many rows a cache holds with so many memberships to try."""
        return max(1, _NUMBERS_AT_ONCE // (memberships * max(2, self.family.outputs)))

    def pieces(self, memberships: int) -> Iterator[Rows]:
        rows_at_once = self.at_once(memberships)
        ends = torch.bincount(self.client, minlength=self.n_clients).cumsum(0)
        first_client, first_row = 0, 0
        while first_client < self.n_clients:
            last = int(torch.searchsorted(ends, first_row + rows_at_once, right=True))
            last = min(max(last, first_client + 1), self.n_clients)
            end = int(ends[last - 1])
            yield self._cut(slice(first_row, end), first_client, last)
            first_client, first_row = last, end

    def of_some(self, clients: Tensor) -> Rows:
        place = torch.full((self.n_clients,), -1)
        place[clients] = torch.arange(len(clients))
        client = place[self.client]
        rows = (client >= 0).nonzero()[:, 0]
        return Rows(
            self.varying.take(rows), self.shared.take(rows), self.y[rows], self.weight[rows], client[rows],
            len(clients), self.family, self.mix,
        )  # fmt: skip

    def _cut(self, rows: slice, first: int, end: int) -> Rows:
        if rows == slice(0, len(self.y)):
            return self
        return Rows(
            self.varying.take(rows), self.shared.take(rows), self.y[rows], self.weight[rows],
            self.client[rows] - first, end - first, self.family, self.mix,
        )  # fmt: skip


class GaussianMoments(NamedTuple):
    """Rows of the gaussian family with the identity link, as sums: how many rows there were no longer matters."""

    gram: Tensor  # (M, d, d), of varying and shared columns together
    cross: Tensor  # (M, d), with y
    squares: Tensor  # (M,), of y
    size: Tensor  # (M,)

    @property
    def n_clients(self) -> int:
        return len(self.size)

    @property
    def n_samples(self) -> float:
        return float(self.size.sum())

    @classmethod
    def of(cls, rows: Rows) -> GaussianMoments:
        """Of all rows; the outer products of a piece at a time."""
        assert isinstance(rows.varying, Dense)
        assert isinstance(rows.shared, Dense)
        x = torch.cat([rows.varying.x, rows.shared.x], 1)
        d = x.shape[1]
        gram = x.new_zeros(rows.n_clients, d, d)
        weighted = x * rows.weight[:, None]
        for piece in torch.split(torch.arange(len(x)), max(1, _NUMBERS_AT_ONCE // (d * d))):
            gram.index_add_(0, rows.client[piece], weighted[piece, :, None] * x[piece, None])
        start = x.new_zeros(rows.n_clients)
        return cls(
            gram,
            x.new_zeros(rows.n_clients, d).index_add_(0, rows.client, weighted * rows.y[:, None]),
            start.index_add(0, rows.client, rows.weight * rows.y.square()),
            start.index_add(0, rows.client, rows.weight),
        )

    def of_some(self, clients: Tensor) -> GaussianMoments:
        return GaussianMoments(*(t[clients] for t in self))

    def pieces(self, memberships: int) -> Iterator[GaussianMoments]:
        at_once = max(1, _NUMBERS_AT_ONCE // memberships)
        for parts in zip(*(torch.split(t, at_once) for t in self), strict=True):
            yield GaussianMoments(*parts)

    def of_clients(self, coefficients: Coefficients, c: Memberships) -> Tensor:
        """By c'Hc, with H the canonical models' products in the client's own data."""
        canonical, shared = coefficients.canonical[..., 0], coefficients.shared[:, 0]
        models = torch.cat([canonical, shared.expand(len(canonical), -1)], 1)  # (K, d)
        products = models @ self.gram @ models.T  # (M, K, K)
        fits = self.cross @ models.T  # (M, K)
        level, squares = self.size * (coefficients.log_dispersion + math.log(2 * math.pi)), self.squares
        precision = torch.exp(-coefficients.log_dispersion)
        if isinstance(c, Grid):
            # c = floor + scale u, so all clients' polynomials in u meet the grid in one product
            across = (products @ c.floor[..., None])[..., 0]
            squares = squares + ((across - 2 * fits) * c.floor).sum(1)
            quadratic, linear = products * c.scale.square()[:, None, None], 2 * (across - fits) * c.scale[:, None]
            of_each = torch.cat([quadratic.flatten(1), linear, squares[:, None]], 1)
            return torch.addmm((-0.5 * level)[:, None], of_each * (-0.5 * precision), c.powers)
        linear, quadratic = (c @ fits[:, :, None])[..., 0], (c @ products @ c.mT)[..., 0]
        return -0.5 * ((squares[:, None] - 2 * linear + quadratic) * precision + level[:, None])


NOBODY: Likelihood = GaussianMoments(*(torch.zeros(0, *[0] * n, dtype=torch.float64) for n in (2, 1, 0, 0)))


def fastest(rows: Rows) -> Likelihood:
    """The same likelihood in the form that is quickest to evaluate."""
    d = rows.varying.columns + rows.shared.columns
    is_linear = isinstance(rows.family, Gaussian) and rows.family.link == "identity"
    fits = d * d * rows.n_clients <= min(_MOMENTS_AT_MOST, 64 * d * len(rows.y))
    if is_linear and fits and isinstance(rows.varying, Dense):
        return GaussianMoments.of(rows)
    return rows
