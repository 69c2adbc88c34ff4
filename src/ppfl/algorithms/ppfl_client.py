"""What a client of PPFL does: it moves its membership with theta fixed, Eq. (16), moves theta with its membership
fixed, Eq. (12), or measures how far both are from a stationary point (Section 3.2)."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ..core.population import Population
from ..core.simplex import mirror_step, raise_to_floor
from ..core.trees import Params, expand, first_clients, per_client
from ..io.codec import message
from .contract import Sum, Total, Upload
from .fedavg import mean
from .local.batches import LocalData
from .local.memberships import MembershipSteps
from .local.sgd import TrainingLoss, part_of_start_left, train_mixed_weights, train_models

if TYPE_CHECKING:
    from .ppfl import PPFL

LEAST_SHARE = 0.1  # of an even share: a model that hardly any client uses is not sped up without bound


@message
class PPFLTask(NamedTuple):
    """The blocks to move and the steps to take."""

    theta: bool
    memberships: bool
    lr: float
    membership_lr: float


def move_memberships(
    settings: PPFL, task: PPFLTask, models: Params, own: dict[str, Tensor], c: Tensor, data: LocalData
) -> tuple[Tensor, TrainingLoss]:
    """Mirror steps on the surrogate of Eq. (13), theta and the neighbours fixed."""
    weight = data.weight
    scale = 1 / weight[:, None] if settings.membership_scale == "own" else torch.ones_like(weight)[:, None]
    alone = weight[:, None] * scale  # all there is to G where no neighbour pulls
    first: Tensor | None = None
    steps = settings.membership_steps
    if steps is None:
        steps = 20 if data.backend.caches_outputs else 1
    for gradient_at in MembershipSteps(models, data, settings.membership_batch).steps(steps):
        slope, loss = gradient_at(c)
        first = loss if first is None else first
        if "degree" in own:
            pull = own["degree"], own["neighbours"], settings.penalty
            G = client_membership_gradient(slope, c, weight, *pull) * scale
        else:
            G = slope * alone
        c = raise_to_floor(mirror_step(c, G, task.membership_lr))
    assert first is not None
    return c, TrainingLoss(first, data.sizes.to(weight))


def move_theta(
    settings: PPFL, task: PPFLTask, models: Params, c: Tensor, data: LocalData
) -> tuple[dict[str, Sum], TrainingLoss]:
    """Local SGD on theta with c fixed; theta_k ends at what is left of it and a move, which goes into a sum."""
    collapse = data.backend.population.collapses
    train = train_mixed_weights if collapse else train_models
    sgd = settings.sgd(task.lr)
    run = train(models, c, data, sgd, own_pace=settings.averaging == "members")
    left = part_of_start_left(data, sgd)
    sums = {
        "common": Sum(None, run.common),
        "left": Sum(c if settings.averaging == "members" else None, {} if left is None else left - 1),
        "moves": Sum(c if collapse else None, run.moves),
    }
    return sums, run.loss


def mean_change(population: Population, models: Params, totals: dict[str, Total]) -> Params:
    """Eq. (12) for the common part; of the canonical models their moves and what is lost of them, over those who
    count."""
    common, left, moves = mean(totals["common"]), totals["left"], totals["moves"]
    counted = torch.maximum(left.weight, LEAST_SHARE / population.k * totals["common"].weight)  # (K,) or (1,)

    def canonical(theta: Tensor, move: Tensor) -> Tensor:  # move: (K, ...), or (1, K, ...) from K models per client
        change = (move if move.dim() == theta.dim() else move[0]) / per_client(counted, theta)
        return change if isinstance(left.value, dict) else change + theta * per_client(left.value / counted, theta)

    return {
        name: canonical(value, moves.value[name]) if name in population.canonical_names else common[name]
        for name, value in models.items()
    }


def client_membership_gradient(
    loss_gradient: Tensor, c: Tensor, weight: Tensor, degree: Tensor, neighbours: Tensor, penalty: float
) -> Tensor:
    """G_i as computed by a client, from its own row of `Affinity.majorant(C^t)` only: the gradient of S_t at c.

    At c = c^t it is the gradient of F. Over several steps the neighbours stay as they were at the start of the round,
    so the client descends on S_t. c, neighbours: (C, K); weight, degree: (C,).
    """
    return weight[:, None] * loss_gradient + 2 * penalty * (degree[:, None] * c - neighbours)


@message
class Stationarity(NamedTuple):
    """The task of measuring it."""

    membership_lr: float


def stationarity_upload(
    task: Stationarity, models: Params, own: dict[str, Tensor], c: Tensor, data: LocalData, penalty: float
) -> Upload:
    """The gradient for theta in a sum, and how far a mirror step would take each membership (C, K)."""
    backend = data.backend
    slopes, gradient = torch.zeros_like(c), data.space.empty_like(expand(models, len(c)))
    for leaf in gradient.values():
        leaf.zero_()
    for batch in data.everything(backend.samples_per_block(len(c), backend.population.k)):
        n = len(batch.x)
        part = batch.real / data.sizes[:n].to(batch.real)  # of its client's data
        slope, _ = backend.membership_gradients(models, c[:n], batch)
        slopes[:n] += part[:, None] * slope
        of_all = batch._replace(share=batch.share * part[:, None])
        backend.add_model_gradients(expand(models, n), first_clients(gradient, n), 1.0, c[:n], of_all)
    degree = own.get("degree", torch.zeros_like(data.weight))
    neighbours = own.get("neighbours", torch.zeros_like(c))
    G = client_membership_gradient(slopes, c, data.weight, degree, neighbours, penalty)
    moved = (c - raise_to_floor(mirror_step(c, G, task.membership_lr))).abs().sum(1)
    return Upload({"gradient": Sum(None, gradient)}, metrics={"moved": moved})
