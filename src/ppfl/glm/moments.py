"""The likelihood of linear gaussian models, from sums of products of each client's columns.

Given its membership c, a client's log-likelihood is a quadratic polynomial in c, whatever its number of rows. The
residual effect u_i = s L z_i is integrated out in closed form: the covariance of y_i is s^2 (I + Z L L' Z'), and
`whitened` sums of products turn it into s^2 I. So nothing but memberships needs points.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple, Self

import torch
from torch import Tensor

from .likelihood import CHUNK_SIZE, Chunk, Layout, Parameters, ScoreSums, residual_basis
from .rows import DenseDesign, RowLikelihood

_MAX_MOMENTS = 1 << 26  # numbers in the products of columns of all clients


class MomentLikelihood(NamedTuple):
    """Sums of products per client of a linear gaussian model."""

    gram: Tensor  # (M, d, d), X'X of varying and shared columns together
    cross: Tensor  # (M, d), X'y
    squares: Tensor  # (M,), y'y
    size: Tensor  # (M,)
    log_determinant: Tensor  # (M,), of the covariance of y in units of s^2: 0 but for whitened moments

    @property
    def n_clients(self) -> int:
        return len(self.size)

    @property
    def n_samples(self) -> float:
        return float(self.size.sum())

    @property
    def integrates_residual(self) -> bool:
        return True

    @classmethod
    def of(cls, rows: RowLikelihood) -> Self:
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
            start,
        )

    def subset(self, clients: Tensor) -> Self:
        return type(self)(*(t[clients] for t in self))

    def chunks(self, numbers: int) -> Iterator[Chunk]:
        max_clients = max(1, CHUNK_SIZE // (8 * numbers))
        for some in torch.split(torch.arange(self.n_clients), max_clients):
            yield Chunk(some, type(self)(*(t[some[0] : some[-1] + 1] for t in self)))

    def at(self, layout: Layout, parameters: Parameters) -> MomentsAt:
        return MomentsAt(self, layout, parameters)

    def whitened(self, loadings: Tensor) -> Self:
        """The moments of y and X times the root of (I + Z L L' Z')^-1, for loadings L' (s, q), or (M, s, q) by client.

        With A = I + L' G L = R R' and W = R^-1 L' [G, X'y], they are smaller by W'W.
        """
        q = loadings.shape[-1]
        if not loadings.shape[-2]:
            return self
        both = torch.cat([self.gram[:, :q], self.cross[:, :q, None]], 2)
        explained = torch.matmul(loadings, both)  # (M, s, d + 1)
        factor = torch.linalg.cholesky(_plus_identity(torch.matmul(explained[..., :q], loadings.mT)))
        root = torch.linalg.solve_triangular(factor, explained, upper=False)
        own, target = root[..., :-1], root[..., -1:]
        return self._replace(
            gram=torch.baddbmm(self.gram, own.mT, own, alpha=-1),
            cross=self.cross - (own * target).sum(1),
            squares=self.squares - target.square().sum((1, 2)),
            log_determinant=self.log_determinant + 2 * factor.diagonal(dim1=1, dim2=2).log().sum(1),
        )

    def __add__(self, other: MomentLikelihood) -> MomentLikelihood:  # type: ignore[override]
        """The rows of both, client by client."""
        return MomentLikelihood(*(a + b for a, b in zip(self, other, strict=True)))


class MomentsAt:
    """At one point of the parameter space: the residual sum of squares is c'S c, because memberships sum to 1.

    `models` (M or 1, K, d) are the canonical models with the shared coefficients.
    """

    def __init__(self, data: MomentLikelihood, layout: Layout, at: Parameters, models: Tensor | None = None) -> None:
        self.layout, self.loadings, self.log_dispersion = layout, at.residual, at.nuisance[0]
        self.data = data.whitened(at.residual)
        self.models = models_of(at)[None] if models is None else models
        fitted = torch.matmul(self.models, self.data.gram)  # (M, K, d)
        self.products = torch.matmul(fitted, self.models.mT)  # (M, K, K)
        self.fits = torch.matmul(self.models, self.data.cross[..., None])[..., 0]  # (M, K)
        self.unexplained = self.data.cross[..., None] - fitted.mT  # (M, d, K): X'r is this matrix times c
        self.precision = torch.exp(-self.log_dispersion)

    def log_likelihoods(self, shares: Tensor, derivatives: bool = False) -> Tensor:
        data = self.data
        if len(shares) == 1:
            polynomials = torch.cat([self.products.flatten(1), -2 * self.fits], 1)
            points = torch.cat([(shares[0, :, None] * shares[0]).flatten(0, 1), shares[0]])
            sums = torch.addmm(data.squares[:, None], polynomials, points)
        else:
            slopes = torch.baddbmm(self.fits[..., None], self.products, shares, beta=-2)
            sums = slopes.mul_(shares).sum(1).add_(data.squares[:, None])
        level = data.size * (self.log_dispersion + math.log(2 * math.pi)) + data.log_determinant
        return sums.mul_(self.precision).add_(level[:, None]).mul_(-0.5)

    def score_sums(self, shares: Tensor, weights: Tensor, more: Tensor) -> ScoreSums:
        """All scores are quadratic polynomials in c. So they need no derivative at any point, but only the means and
        products of all c_k c_l, of which there are K (K + 1) / 2: fewer than parameters.
        """
        k = shares.shape[1]
        first, second, _, _ = _pairs(k)
        mean, products = _pair_moments(shares, weights, more)
        slopes = self._slopes()  # (M, P, T)
        count = len(first)
        mean_scores = torch.cat([torch.bmm(slopes, mean[:, :count, None])[..., 0], mean[:, count:]], 1)
        own = torch.tensordot(torch.bmm(slopes, products[:, :count, :count]), slopes, dims=([0, 2], [0, 2]))
        both = torch.tensordot(slopes, products[:, :count, count:], dims=([0, 2], [0, 1]))
        rest = products[:, count:, count:].sum(0)
        pairs = torch.empty(len(mean), k, k, dtype=mean.dtype)
        pairs[:, first, second] = pairs[:, second, first] = mean[:, :count]
        total = mean_scores[:, : slopes.shape[1]].sum(0)
        return ScoreSums(
            mean_scores,
            torch.cat([torch.cat([own, both], 1), torch.cat([both.T, rest], 1)]),
            self._information(pairs, total),
        )

    def _slopes(self) -> Tensor:
        """The coefficients (M, P, T) of all scores in the products c_k c_l, k <= l."""
        q, k = self.layout.varying, self.models.shape[1]
        first, second, times, is_pair = _pairs(k)
        m, count = len(self.unexplained), len(first)
        unexplained = self.unexplained * self.precision
        canonical = torch.matmul(is_pair, unexplained[:, :q].mT)  # (M, K T, q)
        canonical = canonical.view(m, k, count, q).mT.flatten(1, 2)
        shared = unexplained[:, q:, first] + unexplained[:, q:, second] * (times - 1)
        squares = self.products - self.fits[:, :, None] - self.fits[:, None] + self.data.squares[:, None, None]
        dispersion = 0.5 * (self.precision * squares - self.data.size[:, None, None])
        parts = [canonical, shared, (dispersion[:, first, second] * times)[:, None]]
        if self.layout.n_residual:
            own = self.unexplained[:, None, :q]  # (M, 1, q, K)
            loaded = torch.matmul(self.loadings, self.unexplained[:, :q])[:, :, None]  # (M, s, 1, K)
            both = own[..., first] * loaded[..., second] + own[..., second] * loaded[..., first] * (times - 1)
            each = both * self.precision - self._covered()[..., None] * times  # (M, s, q, T)
            parts.append(torch.tensordot(residual_basis(self.layout), each, ([1, 2], [1, 2])).transpose(0, 1))
        return torch.cat(parts, 1)

    def _covered(self) -> Tensor:
        """L' times the varying columns' products, (M, s, q)."""
        q = self.layout.varying
        return torch.matmul(self.loadings, self.data.gram[:, :q, :q])

    def _information(self, pairs: Tensor, total: Tensor) -> Tensor:
        """Minus the mean second derivatives, from the means (M, K, K) of c_k c_l and the sums of all scores."""
        layout, gram, k = self.layout, self.data.gram, pairs.shape[1]
        q, f, at = layout.varying, layout.shared, layout.n_coefficients
        found = gram.new_zeros(len(total), len(total))
        shares = torch.cat([pairs, pairs.sum(2, keepdim=True)], 2)  # of a column that all clients share, it is 1
        shares = torch.cat([shares, shares.sum(1, keepdim=True)], 1) * self.precision
        by_pair = (shares.flatten(1).T @ gram.flatten(1)).view(k + 1, k + 1, q + f, q + f)
        found[: k * q, : k * q] = by_pair[:k, :k, :q, :q].permute(0, 2, 1, 3).reshape(k * q, k * q)
        found[: k * q, k * q : at] = by_pair[:k, k, :q, q:].reshape(k * q, f)
        found[k * q : at, : k * q] = found[: k * q, k * q : at].T
        found[k * q : at, k * q : at] = by_pair[k, k, q:, q:]
        found[at, :at] = found[:at, at] = total[:at]
        found[at, at] = total[at] + 0.5 * self.data.size.sum()
        if layout.n_residual:
            self._add_residual(found, pairs, at)
        return found

    def _add_residual(self, found: Tensor, pairs: Tensor, at: int) -> None:
        """The second derivatives in L, with r = X'(whitened residuals): r is `unexplained` times c."""
        gram, q, k = self.data.gram, self.layout.varying, pairs.shape[1]
        basis = residual_basis(self.layout).flatten(1)  # (n, s q)
        loadings, own = self.loadings, self.unexplained[:, :q]
        mean = torch.bmm(own, pairs)  # (M, q, K), of r c_k
        squares = torch.bmm(mean, own.mT) * self.precision  # (M, q, q), of r r'
        covered, square = self._covered(), torch.matmul(loadings, squares)  # (M, s, q)
        mean = torch.cat([mean, mean.sum(2, keepdim=True)], 2) * self.precision
        columns = torch.matmul(loadings, gram[:, :q])  # (M, s, d)
        crosses = torch.einsum("ija,ibk->kjba", gram[:, :, :q], torch.matmul(loadings, mean))
        crosses = (crosses + torch.einsum("ibj,iak->kjba", columns, mean)).flatten(2) @ basis.T  # (K + 1, d, n)
        cross = torch.cat([crosses[:k, :q].flatten(0, 1), crosses[k, q:], (basis @ square.sum(0).flatten())[None]])
        inside = _plus_identity(-torch.matmul(covered, loadings.mT))  # (M, s, s)
        twice = torch.matmul(square, loadings.mT)
        one = torch.einsum("iac,ibd->badc", gram[:, :q, :q], inside + twice)
        one = one - torch.einsum("iac,ibd->badc", squares, inside)
        mixed = torch.einsum("ida,ibc->badc", covered, square)
        mixed = mixed + torch.einsum("ida,ibc->badc", square, covered)
        mixed = mixed - torch.einsum("ida,ibc->badc", covered, covered)
        size = basis.shape[1]
        found[at + 1 :, at + 1 :] = basis @ (one + mixed).reshape(size, size) @ basis.T
        found[: at + 1, at + 1 :] = cross
        found[at + 1 :, : at + 1] = cross.T


class ResidualGiven(NamedTuple):
    """The residual scores of clients given their memberships: z ~ N(slope c, covariance)."""

    slope: Tensor  # (M, s, K)
    covariance: Tensor  # (M, s, s)


def residual_given(data: MomentLikelihood, at: Parameters) -> ResidualGiven:
    """From the rows of each client."""
    q = at.residual.shape[1]
    models, scale = models_of(at), torch.exp(0.5 * at.nuisance[0])
    loaded = torch.matmul(at.residual, data.gram[:, :q, :q])
    precision = _plus_identity(torch.matmul(loaded, at.residual.T))
    unexplained = data.cross[:, :q, None] - torch.matmul(data.gram[:, :q], models.T)
    covariance = torch.linalg.inv(precision)
    return ResidualGiven(covariance @ torch.matmul(at.residual, unexplained) / scale, covariance)


def given_other_rows(
    test: MomentLikelihood, data: MomentLikelihood, layout: Layout, at: Parameters, wider: float
) -> MomentsAt:
    """The likelihood of other rows of the same clients, whose residual effects have been learnt from these.

    `wider` is added to the log dispersion of the other rows.
    """
    found = residual_given(data, at)
    scale = math.exp(0.5 * float(at.nuisance[0]))
    models = models_of(at).expand(data.n_clients, -1, -1).clone()
    models[..., : layout.varying] += scale * torch.matmul(found.slope.mT, at.residual)
    loadings = torch.matmul(torch.linalg.cholesky(found.covariance).mT, at.residual) * math.exp(-0.5 * wider)
    return MomentsAt(test, layout, at._replace(nuisance=at.nuisance + wider, residual=loadings), models)


def has_moments(rows: RowLikelihood) -> bool:
    """Whether sums of products say all about these rows, and are not much larger than the rows."""
    d = rows.varying.columns + rows.shared.columns
    fits_in_memory = d * d * rows.n_clients <= min(_MAX_MOMENTS, max(64 * d * len(rows.y), 1 << 20))
    return rows.family.name == "gaussian" and isinstance(rows.varying, DenseDesign) and fits_in_memory


def fastest_form(rows: RowLikelihood) -> MomentLikelihood | RowLikelihood:
    """The same likelihood in the form that is fastest to evaluate."""
    return MomentLikelihood.of(rows) if has_moments(rows) else rows


def models_of(at: Parameters) -> Tensor:
    """Canonical models with the shared coefficients, (K, d)."""
    canonical = at.canonical[..., 0]
    return torch.cat([canonical, at.shared[:, 0].expand(len(canonical), -1)], 1)


def _plus_identity(matrices: Tensor) -> Tensor:
    return matrices + torch.eye(matrices.shape[-1], dtype=matrices.dtype)


def _pair_moments(shares: Tensor, weights: Tensor, more: Tensor) -> tuple[Tensor, Tensor]:
    """Weighted means (M, T + E) and products (M, T + E, T + E) of all c_k c_l, k <= l, and of more numbers."""
    _, k, g = shares.shape
    count = k * (k + 1) // 2
    root = weights.sqrt()
    features = shares.new_empty(len(weights), count + more.shape[1], g)  # times the root of the weights
    rooted, done = shares * root[:, None], 0
    for each in range(k):  # all pairs whose first member is this one
        torch.mul(rooted[:, each : each + 1], shares[:, each:], out=features[:, done : done + k - each])
        done += k - each
    torch.mul(more.expand(len(weights), -1, -1), root[:, None], out=features[:, count:])
    return torch.bmm(features, root[..., None])[..., 0], torch.bmm(features, features.mT)


@lru_cache(maxsize=16)
def _pairs(k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Both members of each pair (T,), how often a square has it (T,), and which k it has with which l (K T, K)."""
    first, second = torch.triu_indices(k, k)
    place = torch.arange(len(first))
    is_pair = torch.zeros(k, len(first), k, dtype=torch.float64)
    is_pair[first, place, second] = is_pair[second, place, first] = 1.0
    return first, second, 1.0 + (first != second).double(), is_pair.flatten(0, 1)
