"""Fit each client's proposals to its membership given the data, and draw the sample of memberships from them.

The weights of the points are raised to a small power first, so that enough points count, and to larger powers as the
points follow them. No derivatives are needed, so it works for all families.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..likelihoods import Coefficients, Likelihood
from ..proposals import Draw, MembershipSample, Proposals, memberships_of
from ..stick_breaking import StickBreaking
from .parameters import ParameterShape

_ENOUGH, _USABLE = 0.2, 0.1  # the share of points that count: effective number of points / number of points
_MAX_STEPS = 12
_POWERS = 0.6 ** torch.arange(1, 29, dtype=torch.float64)  # to which weights are raised
INFLATION = 1.3
_POINTS = {2: 32, 3: 64, 4: 64}  # to fit the proposals, by K
MANY_CLIENTS = 2000
_SEED = 10  # the points that fit a proposal are not those that are used afterwards


def sample_size(k: int, clients: int) -> int:
    """The number of points per client; with few clients the error of each counts more, and points are cheap."""
    if k <= 2:
        return 1 if k == 1 else 48 if clients > MANY_CLIENTS else 128
    return 128 if clients > MANY_CLIENTS or (k == 3 and clients > 200) else 256 if clients > 50 else 512


def adapt_proposals(
    data: Likelihood,
    coefficients: Coefficients,
    breaking: StickBreaking,
    position: Tensor,
    start: Proposals | None = None,
) -> Proposals:
    """One normal distribution per client. Positions (M,) choose the sets of points; `start` is from before."""
    k = len(breaking.alpha)
    count, prior = _POINTS.get(k, 128), Proposals.prior(data.n_clients, k)
    proposals, passes = prior, 2  # with all points at full weight; the second because the first began far away
    if start is not None:
        fits = _effective_share(_log_joint(data, coefficients, breaking, start.draw(count, position, _SEED))) >= _USABLE
        proposals = start.where(fits, prior)  # a narrow distribution cannot follow a client that has moved away
        passes = 1 if bool(fits.all()) else 2
    for _ in range(_MAX_STEPS):
        draw = proposals.draw(count, position, _SEED)
        logs = _log_joint(data, coefficients, breaking, draw)
        power = _largest_power(logs)
        proposals = Proposals.fitted(draw.scores, torch.softmax(power[:, None] * logs, 1), INFLATION)
        passes -= bool((power == 1).all())
        if passes == 0:
            break
    return proposals


def _log_joint(data: Likelihood, coefficients: Coefficients, breaking: StickBreaking, draw: Draw) -> Tensor:
    """The log-likelihood of each point plus its log weight, (M, G)."""
    return (
        data.client_log_likelihoods(coefficients, memberships_of(breaking.log_memberships(draw.scores)))
        + draw.log_weight
    )


def draw_sample(
    proposals: Proposals, breaking: StickBreaking, position: Tensor, count: int, turn: int = 0
) -> MembershipSample:
    return MembershipSample.of(proposals.final_draw(count, position, turn), breaking)


def _effective_share(logs: Tensor) -> Tensor:
    """Of the points in the last dimension."""
    weights = torch.softmax(logs, -1)
    return 1 / (weights.square().sum(-1) * logs.shape[-1])


def _largest_power(logs: Tensor) -> Tensor:
    """The largest power (M,), at most 1, to which the weights of a client's points can be raised so that enough count.

    It carries points from a distribution to another one far away in several steps.
    """
    power = torch.ones(len(logs), dtype=logs.dtype)
    far = (_effective_share(logs) < _USABLE).nonzero()[:, 0]
    if len(far):
        is_enough = _effective_share(_POWERS[:, None] * logs[far, None]) >= _ENOUGH  # (far, powers)
        power[far] = _POWERS[is_enough.int().argmax(1)] * is_enough.any(1)
    return power


def choose_sets(data: Likelihood, shape: ParameterShape) -> Tensor:
    """A number (M,) for each client that only its data determine, so that names and order have no effect on its points.

    The log-likelihood of an arbitrary model is such a number; its last digits are as good as random.
    """
    any_model = torch.cos(torch.arange(shape.varying * shape.outputs, dtype=torch.float64))
    coefficients = Coefficients(
        any_model.view(1, shape.varying, shape.outputs),
        torch.zeros(shape.shared, shape.outputs, dtype=torch.float64),
        torch.zeros(shape.nuisance, dtype=torch.float64),
    )
    one = torch.ones(1, 1, 1, dtype=torch.float64)
    logs = data.client_log_likelihoods(coefficients, one)[:, 0]
    return (logs.nan_to_num().abs() * 1e6).remainder(1e9).long()
