"""The marginal log-likelihood to a known precision, for comparisons between models.

The solvers use few points per client, because an error that is the same along the way does no harm. Here every client
gets mixtures of normal distributions and as many points as its integral needs: clients whose independent estimates
differ are repeated with four times as many points. There are eight estimates, because two would often agree by chance.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ..likelihoods import Coefficients, Likelihood
from ..proposals import Draw, Proposals, memberships_of
from ..stick_breaking import StickBreaking
from .adaptation import adapt_proposals

_TOLERANCE = 0.003  # of the log integral of one client
_FIRST, _LAST = 1024, 32768  # half of the points of all estimates
_MANY_CLIENTS = 1000
_COMPONENTS = 4
_INFLATION = 2.5  # of covariances: the tails that narrow mixtures miss show in no difference between two estimates
_KNOTS = 16385  # a client that knows its membership well feels the distance between knots
_MAX_WORK = 2e8  # points x rows of one pass
_SEEDS = tuple(range(200, 280, 10))
_GRIDS = {2: (64, 96), 3: (961, 1681)}  # points of two regular grids, by K


class LogLikelihood(NamedTuple):
    value: float
    error: float  # the standard error of the value


def marginal_log_likelihood(data: Likelihood, coefficients: Coefficients, alpha: Tensor) -> LogLikelihood:
    """With memberships integrated out over Dirichlet(alpha)."""
    value, error = client_log_integrals(data, coefficients, alpha)
    return LogLikelihood(float(value.sum()), float(error.square().sum().sqrt()))


def client_log_integrals(data: Likelihood, coefficients: Coefficients, alpha: Tensor) -> tuple[Tensor, Tensor]:
    """The log-likelihood (M,) of every client, and its standard error (M,)."""
    coefficients, k = coefficients.detach(), len(alpha)
    if k == 1:
        ones = torch.ones(1, 1, 1, dtype=torch.float64)
        value = data.client_log_likelihoods(coefficients, ones)[:, 0]
        return value, torch.zeros_like(value)
    breaking = StickBreaking.of(alpha, _KNOTS)
    value = torch.empty(data.n_clients, dtype=torch.float64)
    error = torch.empty_like(value)
    # the likelihoods of many clients differ by more between models, so each of them may have a larger error
    tolerance = _TOLERANCE * math.sqrt(max(1.0, data.n_clients / 100))
    remaining, points = torch.arange(data.n_clients), _FIRST if data.n_clients <= _MANY_CLIENTS else _FIRST // 4
    while len(remaining):
        some = data if len(remaining) == data.n_clients else data.subset(remaining)
        value[remaining], error[remaining] = _estimate(some, coefficients, breaking, points)
        points *= 4
        per_client = float(data.n_samples) / data.n_clients
        remaining = remaining[error[remaining] > tolerance]
        if points > _LAST or len(remaining) * per_client * points > _MAX_WORK:
            break
    return value, error


def _estimate(
    data: Likelihood, coefficients: Coefficients, breaking: StickBreaking, points: int
) -> tuple[Tensor, Tensor]:
    value = torch.empty(data.n_clients, dtype=torch.float64)
    error = torch.empty_like(value)
    for chunk in data.chunks(points):

        def log_joint(draw: Draw, some: Likelihood = chunk.data) -> Tensor:
            c = memberships_of(breaking.log_memberships(draw.scores))
            return some.client_log_likelihoods(coefficients, c) + draw.log_weight

        proposals = adapt_proposals(chunk.data, coefficients, breaking, chunk.clients)
        if grids := _GRIDS.get(len(breaking.alpha)) if points <= _FIRST else None:
            first, second = (torch.logsumexp(log_joint(proposals.regular_grid(n, chunk.clients)), 1) for n in grids)
            value[chunk.clients], error[chunk.clients] = second, (second - first).abs()
            continue
        for i in range(2):
            draw = proposals.draw(min(points, 4096), chunk.clients, 80 + 10 * i)
            weights = torch.softmax(log_joint(draw), 1)
            proposals = Proposals.split(draw.scores, weights, _COMPONENTS, _INFLATION)
        each = 2 * points // len(_SEEDS)
        draws = (proposals.draw(each, chunk.clients, seed) for seed in _SEEDS)
        logs = torch.stack([torch.logsumexp(log_joint(draw), 1) for draw in draws])
        value[chunk.clients] = total = torch.logsumexp(logs, 0) - math.log(len(logs))
        error[chunk.clients] = (logs - total).exp().std(0) / math.sqrt(len(logs))
    return value, error
