"""Sums of scores of linear gaussian models over the points of each client, from moments of the memberships.

All derivatives of a client's gaussian log-likelihood are quadratic polynomials in its membership. So means and products
of them need no derivative at any point, but only the means and products of all c_k c_l. There are K (K + 1) / 2 of
these, which is fewer than there are parameters.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from .likelihoods import Blocks, Coefficients, ScoreSums
from .residual_sums import ResidualSums


def sums_of_scores(
    gram: Tensor,  # (M, d, d)
    cross: Tensor,  # (M, d)
    residuals: ResidualSums,
    coefficients: Coefficients,
    c: Tensor,  # (M, K, G)
    weights: Tensor,  # (M, G)
    others: Tensor,  # (M, E, G), more scores
    client_weight: Tensor | None,  # (M, 1)
) -> ScoreSums:
    """In the order of the parameters: canonical, shared, log dispersion, others."""
    m, k, _ = c.shape
    q = coefficients.canonical.shape[1]
    first, second, times, is_pair = _pairs(k)
    count = len(first)
    root = weights.sqrt()
    features = c.new_empty(m, count + others.shape[1], c.shape[2])  # times the root of the weights
    rooted, done = c * root[:, None], 0
    for each in range(k):  # all pairs whose first member is this one
        torch.mul(rooted[:, each : each + 1], c[:, each:], out=features[:, done : done + k - each])
        done += k - each
    torch.mul(others.expand(m, -1, -1), root[:, None], out=features[:, count:])
    mean = torch.bmm(features, root[..., None])[..., 0]
    products = torch.bmm(features, features.mT)

    precision = torch.exp(-coefficients.nuisance[0])
    importance = precision if client_weight is None else precision * client_weight[..., None]
    models = torch.cat([coefficients.canonical[..., 0], coefficients.shared[:, 0].expand(k, -1)], 1)  # (K, d)
    unexplained = (cross[..., None] - gram @ models.T) * importance  # (M, d, K): X'r is this matrix times c
    canonical = torch.matmul(is_pair, unexplained[:, :q].mT)  # (M, K T, q)
    canonical = canonical.view(m, k, count, q).mT.flatten(1, 2)
    shared = unexplained[:, q:, first] + unexplained[:, q:, second] * (times - 1)
    dispersion = 0.5 * (precision * residuals.as_quadratic_form() - residuals.size[:, None, None])
    if client_weight is not None:
        dispersion = dispersion * client_weight[..., None]
    slopes = torch.cat([canonical, shared, (dispersion[:, first, second] * times)[:, None]], 1)  # (M, P, T)

    mean_pairs, mean_others = mean[:, :count], mean[:, count:]
    mean_scores = torch.cat([torch.bmm(slopes, mean_pairs[..., None])[..., 0], mean_others], 1)
    own = torch.tensordot(torch.bmm(slopes, products[:, :count, :count]), slopes, dims=([0, 2], [0, 2]))
    both = torch.tensordot(slopes, products[:, :count, count:], dims=([0, 2], [0, 1]))
    all_products = torch.cat([torch.cat([own, both], 1), torch.cat([both.T, products[:, count:, count:].sum(0)], 1)])

    blocks = Blocks(q, len(coefficients.shared), k, 1)
    pairs = torch.empty(m, k, k, dtype=c.dtype)
    pairs[:, first, second] = pairs[:, second, first] = mean_pairs
    shares = torch.cat([pairs, pairs.sum(2, keepdim=True)], 2)  # of a column that all clients share, the share is 1
    shares = torch.cat([shares, shares.sum(1, keepdim=True)], 1) * importance
    by_pair = (shares.flatten(1).T @ gram.flatten(1)).view(k + 1, k + 1, *gram.shape[1:])
    information = blocks.of_columns(lambda one, other: by_pair[one, other])
    total = mean_scores[:, : blocks.n_columns + 1].sum(0)
    at = blocks.n_columns
    information[at, :at] = information[:at, at] = total[:at]
    size = residuals.size if client_weight is None else residuals.size * client_weight[:, 0]
    information[at, at] = total[at] + 0.5 * size.sum()
    return ScoreSums(mean_scores, all_products, information)


@lru_cache(maxsize=16)
def _pairs(k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Both members of each pair (T,), how often a square has it (T,), and which k it has with which l (K T, K)."""
    first, second = torch.triu_indices(k, k)
    place = torch.arange(len(first))
    is_pair = torch.zeros(k, len(first), k, dtype=torch.float64)
    is_pair[first, place, second] = is_pair[second, place, first] = 1.0
    return first, second, 1.0 + (first != second).double(), is_pair.flatten(0, 1)
