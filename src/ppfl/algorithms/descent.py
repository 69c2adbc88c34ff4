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
    """A local run of populations with one canonical model, leaves (C, 1, ...): FedAvg's, and Local's."""
    networks = start._replace(canonical={name: theta[:, 0] for name, theta in start.canonical.items()})
    end = descend_networks(population, networks, None, data, settings, lr)
    ended: Shared = end.values.shared
    return end._replace(
        values=ended._replace(canonical={name: theta[:, None] for name, theta in ended.canonical.items()})
    )


def descend_networks(
    population: Population, start: Shared, scale: Tensor | None, data: LocalData, settings: LocalTraining, lr: float
) -> Descent:
    """A local run of one plain network a client, canonical leaves without K; gradients of these times `scale` (C,)."""

    def gradients(at: tuple[Shared, Tensor], batch: Batch) -> tuple[tuple[Shared, Tensor], Tensor]:
        gradient, loss = population.network_gradients(at[0], batch.x, batch.y, batch.weight)
        if scale is not None:
            for g in gradient.canonical.values():
                g.mul_(per_client(scale, g))
        return (gradient, torch.zeros_like(at[1])), loss

    kept = torch.ones_like(data.weight)
    end = descend(gradients, (start, kept), settings.batches(data), settings, lr)
    return end._replace(values=Moved(*end.values))


class Moved(NamedTuple):
    """Where a local run ended, and which part of its start weight decay kept.

    `kept` follows the recursion of a parameter that is 1 at first and has no gradient.
    """

    shared: Shared  # leaves (C, ...)
    kept: Tensor  # (C,)

    def pushes(self, start: Params) -> Params:
        """What gradients alone did to the canonical part: the end, less what was kept of the start."""
        return {
            name: torch.addcmul(end, per_client(self.kept, end), start[name], value=-1)
            for name, end in self.shared.canonical.items()
        }


def descend_models(
    population: Population, shared: Shared, c: Tensor, data: LocalData, settings: LocalTraining, lr: float
) -> tuple[Descent, Params]:
    """A local run of all K canonical models, whichever way they are mixed, and its pushes (C, K, ...)."""

    def gradients(at: tuple[Shared, Tensor], batch: Batch) -> tuple[tuple[Shared, Tensor], Tensor]:
        gradient, loss = population.theta_gradients(at[0], c, batch.x, batch.y, batch.weight)
        return (gradient, torch.zeros_like(at[1])), loss

    start = spread(shared, len(c))
    end = descend(gradients, (start, torch.ones_like(data.weight)), settings.batches(data), settings, lr)
    moved = Moved(*end.values)
    return end._replace(values=moved), moved.pushes(start.canonical)


def descend_mixed_weights(
    population: Population, shared: Shared, c: Tensor, data: LocalData, settings: LocalTraining, lr: float
) -> tuple[Descent, Params]:
    """The same for mixed weights, exactly, at the cost of one model whatever K is (short cut 1).

    The gradient for theta_k is c_k G, so W = sum_k c_k theta_k moves by |c|^2 G: SGD with momentum and weight decay,
    being linear, takes W along exactly as if it were the parameter and its gradient |c|^2 G. The pushes (C, ...) are
    those of theta_k, but for its factor c_k.
    """
    W = mixed_weights(shared.canonical, c)
    norm = c.square().sum(dim=1)
    start = Shared(spread(shared.common, len(c)), W)
    end = descend_networks(population, start, norm, data, settings, lr)
    pushes = {name: push.div_(per_client(norm, push)) for name, push in end.values.pushes(W).items()}
    return end, pushes
