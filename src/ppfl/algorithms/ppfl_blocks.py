"""The two blocks of PPFL: memberships with theta fixed, Eq. (16), and theta with the memberships fixed, Eq. (12)."""

from __future__ import annotations

import torch
from torch import Tensor

from ..core.population import Population
from ..core.simplex import inside, mirror_step
from ..core.trees import Params, per_client
from .contract import Sum, Total
from .fedavg import mean
from .local.batches import LocalData
from .local.memberships import MembershipSteps, client_membership_gradient
from .local.sgd import TrainingLoss, part_of_start_left, train_mixed_weights, train_models
from .ppfl_settings import PPFLSettings, PPFLTask

LEAST_SHARE = 0.1  # of an even share: a model that hardly any client uses is not sped up without bound


def move_memberships(
    settings: PPFLSettings,
    task: PPFLTask,
    models: Params,
    own: dict[str, Tensor],
    c: Tensor,
    data: LocalData,
) -> tuple[Tensor, TrainingLoss]:
    """Mirror steps on the surrogate of Eq. (13), theta and the neighbours fixed."""
    weight = data.weight
    scale = 1 / weight[:, None] if settings.membership_scale == "own" else torch.ones_like(weight)[:, None]
    alone = weight[:, None] * scale  # all there is to G where no neighbour pulls
    first: Tensor | None = None
    steps = (
        (20 if data.backend.caches_outputs else 1) if settings.membership_steps is None else settings.membership_steps
    )
    for gradient_at in MembershipSteps(models, data, settings.membership_batch).steps(steps):
        slope, loss = gradient_at(c)
        first = loss if first is None else first
        if "degree" in own:
            pull = own["degree"], own["neighbours"], settings.penalty
            G = client_membership_gradient(slope, c, weight, *pull) * scale
        else:
            G = slope * alone
        c = inside(mirror_step(c, G, task.membership_lr))
    assert first is not None
    return c, TrainingLoss(first, data.sizes.to(weight))


def move_theta(
    settings: PPFLSettings, task: PPFLTask, models: Params, c: Tensor, data: LocalData
) -> tuple[dict[str, Sum], TrainingLoss]:
    """Local SGD on theta with c fixed; theta_k ends at what is left of it and a move, which goes into a sum."""
    collapse = settings.collapse and data.backend.population.collapses
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
