"""Local SGD of a chunk of clients: momentum and weight decay as in torch.optim.SGD, velocity fresh each round."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Annotated, Literal, NamedTuple, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor
from torch.utils import _pytree as pytree

from ..core.errors import SettingError
from ..core.mixing import mixed_weights
from ..core.population import Params, Population, Shared
from ..core.settings import Settings
from ..core.simplex import uniform
from .batches import Batch, LocalData
from .contract import Tree
from .schedules import ScheduleName, factor

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class LocalTraining(Settings):
    """Settings of a client's local run, shared by all methods that have one."""

    lr: Positive | Literal["auto"] = "auto"  # "auto": found by short trials on training loss before the run
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    weight_decay: NonNegative = 0.0
    batch_size: Annotated[int, Field(ge=1)] | None = 128  # None: a client's whole data, the exact gradient
    local_epochs: Annotated[int, Field(ge=1)] | None = None
    local_steps: Annotated[int, Field(ge=1)] | None = None
    schedule: ScheduleName = "step"
    participation: Annotated[float, Field(gt=0, le=1)] = 1.0

    @model_validator(mode="after")
    def _one_measure_of_local_work(self) -> LocalTraining:
        if self.local_epochs is not None and self.local_steps is not None:
            raise ValueError("local_epochs and local_steps are both set; keep one of them")
        return self

    def step_size(self, round: int, rounds: int) -> float:
        """lr in a round (from 0)."""
        if self.lr == "auto":
            raise SettingError(
                'lr = "auto" has not been resolved; call ppfl.engines.with_chosen_lr first, or set a number'
            )
        return self.lr * factor(self.schedule, round, rounds)

    def trial(self, lr: float) -> Self:
        """The same method for a short run that tells whether `lr` is a good one."""
        return self.model_copy(update={"lr": lr, "schedule": "constant"})

    def batches(self, data: LocalData) -> Iterable[Batch]:
        """The batches of one round: one epoch where nothing else is said."""
        epochs = self.local_epochs or (None if self.local_steps else 1)
        return data.steps(self.batch_size, epochs, self.local_steps)


class Descent(NamedTuple):
    """Where a local run ended, and the mean training loss it met."""

    values: Tree  # leaves (C, ...)
    loss: Tensor  # (C,)
    samples: Tensor  # (C,)


class Meter:
    """Mean loss of each client over the batches it saw, weighted by their samples."""

    def __init__(self) -> None:
        self.total: Tensor | float = 0.0
        self.samples: Tensor | float = 0.0

    def add(self, loss: Tensor, batch: Batch) -> None:
        count = batch.weight.sum(dim=1)
        self.total = self.total + loss * count
        self.samples = self.samples + count

    def mean(self) -> tuple[Tensor, Tensor]:
        total, samples = torch.as_tensor(self.total), torch.as_tensor(self.samples)
        return total / samples.clamp_min(1), samples


def spread(tree: Tree, clients: int) -> Tree:
    """The same values for each of `clients` clients, without copying."""
    return pytree.tree_map(lambda leaf: leaf.expand(clients, *leaf.shape), tree)


def per_client(scalar: Tensor, like: Tensor) -> Tensor:
    """(C,) shaped to multiply (C, ...)."""
    return scalar.reshape(-1, *(1 for _ in like.shape[1:]))


def descend(
    gradients: Callable[[Tree, Batch], tuple[Tree, Tensor]],
    start: Tree,
    batches: Iterable[Batch],
    settings: LocalTraining,
    lr: float,
) -> Descent:
    """v <- mu v + g + wd x;  x <- x - lr v, from `start` (leaves (C, ...), not written to)."""
    values, structure = pytree.tree_flatten(start)
    velocity: list[Tensor] = []
    meter = Meter()
    for batch in batches:
        tree, loss = gradients(pytree.tree_unflatten(values, structure), batch)
        meter.add(loss, batch)
        pushes = pytree.tree_leaves(tree)
        if settings.weight_decay:
            pushes = [g.add_(x, alpha=settings.weight_decay) for g, x in zip(pushes, values, strict=True)]
        first = not velocity
        velocity = (
            pushes if first else [v.mul_(settings.momentum).add_(g) for v, g in zip(velocity, pushes, strict=True)]
        )
        move = torch.addcmul if first else Tensor.addcmul_  # after the first step the values are ours to write to
        # a client without a batch takes a step of length 0; its velocity is never used again
        values = [move(x, v, per_client(batch.active, v), value=-lr) for x, v in zip(values, velocity, strict=True)]
    return Descent(pytree.tree_unflatten(values, structure), *meter.mean())


def descend_model(
    population: Population, start: Shared, data: LocalData, settings: LocalTraining, lr: float
) -> Descent:
    """A local run of plain networks (populations with one canonical model): FedAvg's, and Local's."""
    ones = uniform(len(data.weight), 1).to(data.weight)
    return descend(
        lambda shared, batch: population.theta_gradients(shared, ones, batch.x, batch.y, batch.weight),
        start,
        settings.batches(data),
        settings,
        lr,
    )


class Moved(NamedTuple):
    """Where a local run took theta: weight decay kept a part of the start, gradients pushed away from it."""

    common: Params  # leaves (C, ...): where the common part ended
    kept: Tensor  # (C,), a
    moved: Params  # theta_k = a theta_k(0) + moved_k, leaves (C, K, ...); with mixed weights + c_k moved, (C, ...)


def descend_models(
    population: Population, shared: Shared, c: Tensor, data: LocalData, settings: LocalTraining, lr: float
) -> Descent:
    """A local run of all K canonical models, whichever way they are mixed."""

    def gradients(at: tuple[Shared, Tensor], batch: Batch) -> tuple[tuple[Shared, Tensor], Tensor]:
        gradient, loss = population.theta_gradients(at[0], c, batch.x, batch.y, batch.weight)
        return (gradient, torch.zeros_like(at[1])), loss

    start = spread(shared, len(c)), torch.ones_like(data.weight)
    end = descend(gradients, start, settings.batches(data), settings, lr)
    values, kept = end.values  # kept follows the recursion of a parameter without a gradient
    moved = {name: torch.addcmul(v, per_client(kept, v), start[0].canonical[name], value=-1)
             for name, v in values.canonical.items()}  # fmt: skip
    return end._replace(values=Moved(values.common, kept, moved))


def descend_mixed_weights(
    population: Population, shared: Shared, c: Tensor, data: LocalData, settings: LocalTraining, lr: float
) -> Descent:
    """The same for mixed weights, exactly, at the cost of one model whatever K is (short cut 1).

    The gradient for theta_k is c_k G, and SGD with momentum and weight decay is linear, so (a, A) follow the
    same recursion as parameters with gradients (0, G) would, seen at W = a W(0) + |c|^2 A.
    """
    start = mixed_weights(shared.canonical, c)
    norm = c.square().sum(dim=1)

    def gradients(at: Moved, batch: Batch) -> tuple[Moved, Tensor]:
        W = {
            name: torch.addcmul(per_client(at.kept, W0) * W0, per_client(norm, W0), at.moved[name])
            for name, W0 in start.items()
        }
        (common, G), loss = population.mixed_gradients(at.common, W, batch.x, batch.y, batch.weight)
        return Moved(common, torch.zeros_like(norm), G), loss

    still = {name: torch.zeros_like(W0) for name, W0 in start.items()}
    origin = Moved(spread(shared.common, len(c)), torch.ones_like(norm), still)
    return descend(gradients, origin, settings.batches(data), settings, lr)
