"""The likelihood of linear gaussian models, from sufficient statistics of each client."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple, Self

import torch
from torch import Tensor

from ..errors import SettingError
from .designs import DenseDesign
from .families import GaussianFamily, HeteroscedasticGaussianFamily
from .families.heteroscedastic import derivatives_of_sums, log_density_of_sums
from .gaussian_scores import sums_of_scores
from .likelihoods import CHUNK_SIZE, Blocks, Chunk, Coefficients, Likelihood, LikelihoodValues, Scores, ScoreSums
from .residual_sums import ResidualSums, SumDerivatives, products_of
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
    def of(cls, rows: ClientRows) -> Self:
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

    def subset(self, clients: Tensor) -> Self:
        return type(self)(*(t[clients] for t in self))

    def chunks(self, memberships: int) -> Iterator[Chunk]:
        max_clients = max(1, CHUNK_SIZE // (8 * memberships))
        for some in torch.split(torch.arange(self.n_clients), max_clients):
            yield Chunk(some, type(self)(*(t[some[0] : some[-1] + 1] for t in self)))

    def client_log_likelihoods(self, coefficients: Coefficients, c: Tensor) -> Tensor:
        return self._log_density(coefficients, self.residual_sums(coefficients).at(c))

    def conditional_log_likelihoods(self, coefficients: Coefficients, c: Tensor, given: Likelihood) -> Tensor:
        return self.client_log_likelihoods(coefficients, c)

    def evaluate(self, coefficients: Coefficients, c: Tensor) -> LikelihoodValues:
        """The residual sum of squares is a quadratic polynomial in c, so its mean needs two moments of c only."""
        sums = self.residual_sums(coefficients)
        logs = self._log_density(coefficients.detach(), sums.detach().at(c))

        def expectation(weights: Tensor) -> Tensor:
            total = weights.sum(1)
            if len(c) == 1:
                first, second = weights @ c[0].T, (weights @ products_of(c[0]).T).view_as(sums.products)
            else:
                first, second = torch.bmm(c, weights[..., None])[..., 0], torch.bmm(c * weights[:, None], c.mT)
            mean = total * self.squares - 2 * (first * sums.fits).sum(1) + (second * sums.products).sum((1, 2))
            return self._log_density(coefficients, mean, total).sum()

        return LikelihoodValues(logs, expectation)

    @property
    def has_scores(self) -> bool:
        return True

    def scores(self, coefficients: Coefficients, c: Tensor) -> Scores:
        c = c.expand(self.n_clients, -1, -1)
        residuals = self.residual_sums(coefficients)
        found = self._derivatives(coefficients, residuals.at(c))

        def derivatives(weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            f, q = len(coefficients.shared), coefficients.canonical.shape[1]
            own = torch.matmul(coefficients.canonical[..., 0].T, c)
            shared = coefficients.shared[:, 0, None].expand(len(c), -1, c.shape[2])
            # X' times the residuals, (M, d, G)
            columns = torch.baddbmm(self.cross[..., None], self.gram, torch.cat([own, shared], 1), alpha=-1)
            shares = torch.cat([c, torch.ones_like(c[:, :1])], 1)
            second = torch.bmm(shares * (weights * found.precision)[:, None], shares.mT)  # (M, K + 1, K + 1)
            blocks = Blocks(q, f, c.shape[1], len(found.nuisance))
            by_pair = second.flatten(1).T @ self.gram.flatten(1)
            by_pair = by_pair.view(*second.shape[1:], *self.gram.shape[1:])
            information = blocks.of_columns(lambda k, other: by_pair[k, other])
            if found.bend is not None:
                each = torch.cat([(c[:, :, None] * columns[:, None, :q]).flatten(1, 2), columns[:, q:]], 1)
                bent = torch.bmm(each * (weights * found.bend)[:, None], each.mT).sum(0)
                information[: blocks.n_columns, : blocks.n_columns] -= bent
            for i, cross in enumerate(found.crosses):
                blocks.add_cross(information, i, torch.bmm(shares * (weights * cross)[:, None], columns.mT).sum(0))
                for j, both in enumerate(found.seconds[i]):
                    information[blocks.n_columns + i, blocks.n_columns + j] = (both * weights).sum()
            return columns.mul_(found.precision[:, None]), torch.stack(found.nuisance, 1), information

        def own_sums(weights: Tensor, others: Tensor, client_weight: Tensor | None) -> ScoreSums:
            return sums_of_scores(self.gram, self.cross, residuals, coefficients, c, weights, others, client_weight)

        is_quadratic = found.bend is None  # the log density is linear in the residual sum of squares
        return Scores(found.logs, derivatives, c, coefficients.canonical.shape[1], own_sums if is_quadratic else None)

    def residual_sums(self, coefficients: Coefficients) -> ResidualSums:
        canonical, shared = coefficients.canonical[..., 0], coefficients.shared[:, 0]
        models = torch.cat([canonical, shared.expand(len(canonical), -1)], 1)  # (K, d)
        return ResidualSums(models @ self.gram @ models.T, self.cross @ models.T, self.squares, self.size)

    def _log_density(self, coefficients: Coefficients, residuals: Tensor, weight: Tensor | None = None) -> Tensor:
        """Of residual sums of squares (M, ...), each counted `weight` times."""
        log_dispersion = coefficients.nuisance[0]
        level = self.size * (log_dispersion + math.log(2 * math.pi))
        level = level[:, None] if weight is None else level * weight
        return -0.5 * (residuals * torch.exp(-log_dispersion) + level)

    def _derivatives(self, coefficients: Coefficients, sums: Tensor) -> SumDerivatives:
        precision = torch.exp(-coefficients.nuisance[0]).expand(1, 1)
        half = 0.5 * precision * sums
        in_dispersion = half - 0.5 * self.size[:, None]
        return SumDerivatives(
            self._log_density(coefficients, sums), precision, None, [in_dispersion], [precision], [[half]]
        )


class HeteroscedasticMoments(GaussianMoments):
    """The same statistics, where each client has its own variance, which is integrated out."""

    def conditional_log_likelihoods(self, coefficients: Coefficients, c: Tensor, given: Likelihood) -> Tensor:
        """The other rows say something about the client's variance."""
        assert isinstance(given, HeteroscedasticMoments)
        both = HeteroscedasticMoments(*(a + b for a, b in zip(self, given, strict=True)))
        return both.client_log_likelihoods(coefficients, c) - given.client_log_likelihoods(coefficients, c)

    def evaluate(self, coefficients: Coefficients, c: Tensor) -> LikelihoodValues:
        logs = self.client_log_likelihoods(coefficients, c)
        return LikelihoodValues(logs.detach(), lambda weights: torch.dot(weights.flatten(), logs.flatten()))

    def _log_density(self, coefficients: Coefficients, residuals: Tensor, weight: Tensor | None = None) -> Tensor:
        assert weight is None
        return log_density_of_sums(residuals, self.size[:, None], coefficients.nuisance)

    def _derivatives(self, coefficients: Coefficients, sums: Tensor) -> SumDerivatives:
        return derivatives_of_sums(sums, self.size[:, None], coefficients.nuisance)


NO_CLIENTS: Likelihood = GaussianMoments(*(torch.zeros(0, *[0] * n, dtype=torch.float64) for n in (2, 1, 0, 0)))


def fastest_form(rows: ClientRows) -> Likelihood:
    """The same likelihood in the form that is fastest to evaluate."""
    d = rows.varying.columns + rows.shared.columns
    if isinstance(rows.family, HeteroscedasticGaussianFamily):
        _check_for_moments(rows, d)
        return HeteroscedasticMoments.of(rows)
    is_linear = isinstance(rows.family, GaussianFamily) and rows.family.link == "identity"
    fits_in_memory = d * d * rows.n_clients <= min(_MAX_MOMENTS, 64 * d * len(rows.y))
    if is_linear and fits_in_memory and isinstance(rows.varying, DenseDesign):
        return GaussianMoments.of(rows)
    return rows


def _check_for_moments(rows: ClientRows, columns: int) -> None:
    """Raise a SettingError if there can be no moments: variances are integrated out of nothing else."""
    name = rows.family.name
    if not isinstance(rows.varying, DenseDesign):
        raise SettingError(f"family {name!r} needs a dense table, and X is sparse; use X.toarray(), or 'gaussian'")
    if columns * columns * rows.n_clients > _MAX_MOMENTS:
        raise SettingError(
            f"family {name!r} needs the products of all columns for every client, and {columns} columns of "
            f"{rows.n_clients} clients have more than {_MAX_MOMENTS} of them; use fewer columns, or 'gaussian'"
        )
