"""The likelihood of linear gaussian models, from sufficient statistics of each client."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .designs import DenseDesign
from .families import GaussianFamily
from .likelihoods import CHUNK_SIZE, Blocks, Chunk, Coefficients, Likelihood, LikelihoodValues, Scores
from .sample_rows import ClientRows

_MAX_MOMENTS = 1 << 26  # numbers in the Gram matrices of all clients


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
        for chunk in torch.split(torch.arange(len(x)), max(1, CHUNK_SIZE // (d * d))):
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
        max_clients = max(1, CHUNK_SIZE // (4 * memberships))
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
            blocks = Blocks(q, f, c.shape[1], 1)
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


NO_CLIENTS: Likelihood = GaussianMoments(*(torch.zeros(0, *[0] * n, dtype=torch.float64) for n in (2, 1, 0, 0)))


def fastest_form(rows: ClientRows) -> Likelihood:
    """The same likelihood in the form that is fastest to evaluate."""
    d = rows.varying.columns + rows.shared.columns
    is_linear = isinstance(rows.family, GaussianFamily) and rows.family.link == "identity"
    fits_in_memory = d * d * rows.n_clients <= min(_MAX_MOMENTS, 64 * d * len(rows.y))
    if is_linear and fits_in_memory and isinstance(rows.varying, DenseDesign):
        return GaussianMoments.of(rows)
    return rows
