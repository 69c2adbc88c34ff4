"""Local SGD of a chunk of clients: momentum and weight decay as in torch.optim.SGD, velocity fresh each round."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from ..core.errors import SettingError
from ..core.population import Population
from ..core.settings import Settings
from ..core.shared import Params, Shared, mixed_weights
from .batches import Batch, LocalData
from .contract import Plan, Problem, participants
from .schedules import ScheduleName, factor

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]


LEARNING_RATES = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)


class LocalTraining(Settings):
    """Settings of a client's local run, shared by all methods that have one."""

    by_client: ClassVar[tuple[str, ...]] = ()
    search: ClassVar[dict[str, tuple[Any, ...]]] = {"lr": LEARNING_RATES}

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

    def plan(self, problem: Problem, server: Any, round: int) -> Plan:
        """The round of a method that sends its shared state to all who take part, and whose task is its step."""
        who = participants(problem, self.participation, round)
        return Plan(who, self.step_size(round, problem.rounds), server.shared, {})

    def batches(self, data: LocalData) -> Iterable[Batch]:
        """The batches of one round: one epoch where nothing else is said."""
        return data.steps(self.batch_size, self._epochs(), self.local_steps)

    def count_steps(self, data: LocalData) -> Tensor:
        """How many of them each client takes, (C,)."""
        return data.count_steps(self.batch_size, self._epochs(), self.local_steps)

    def _epochs(self) -> int | None:
        return self.local_epochs or (None if self.local_steps else 1)


class Met(NamedTuple):
    """What a local run met on its way."""

    loss: Tensor  # (C,) mean training loss
    samples: Tensor  # (C,) how many samples that mean is over


def per_client(scalar: Tensor, like: Tensor) -> Tensor:
    """(C,) shaped to multiply (C, ...)."""
    return scalar.reshape(-1, *(1 for _ in like.shape[1:]))


Push = Callable[[Shared, Shared, float, Batch], Tensor]  # values, velocity, momentum, batch -> losses


def descend(
    push: Push,
    values: Shared,
    data: LocalData,
    settings: LocalTraining,
    lr: float,
    only: Container[str] | None = None,
    batches: Iterable[Batch] | None = None,
) -> Met:
    """v <- mu v + g + wd x;  x <- x - lr v, in place on `values`, leaves (C, ...); `push` does mu v + g.

    One step a batch: the round's, where no others are given. Of the leaves `only` those with these names move; None:
    all of them.
    """
    velocity = values.room(data.space, "velocity")
    lost, met = torch.zeros_like(data.weight), torch.zeros_like(data.weight)
    moving, momentum = -1, 0.0
    for batch in settings.batches(data) if batches is None else batches:
        if len(batch.x) != moving:  # those who still have a step to take are the first ones
            moving = len(batch.x)
            x, v = values.first(moving), velocity.first(moving)
            speeds = v.by_name()
            pairs = [(leaf, speeds[n]) for n, leaf in x.by_name().items() if only is None or n in only]
        losses = push(x, v, momentum, batch)
        for value, speed in pairs:
            if settings.weight_decay:
                speed.add_(value, alpha=settings.weight_decay)
            value.add_(speed, alpha=-lr)
        lost[:moving].addcmul_(losses, batch.real)
        met[:moving].add_(batch.real)
        momentum = settings.momentum
    return Met(lost / met.clamp_min(1), met)


def pulled(push: Push, anchor: Shared, strength: float) -> Push:
    """The push of f + strength/2 |x - anchor|^2 from that of f, anchor (C, ...); the losses stay those of f."""
    if strength == 0:
        return push
    anchors = anchor.leaves()

    def push_and_pull(at: Shared, velocity: Shared, momentum: float, batch: Batch) -> Tensor:
        losses = push(at, velocity, momentum, batch)
        for v, x, a in zip(velocity.leaves(), at.leaves(), anchors, strict=True):
            v.add_(x, alpha=strength).sub_(a[: len(x)], alpha=strength)
        return losses

    return push_and_pull


def kept_of_start(data: LocalData, settings: LocalTraining, lr: float) -> Tensor | None:
    """Which part of its start weight decay leaves of a parameter without gradients, (C,); None where all of it.

    SGD is linear, so whatever gradients do is added to that.
    """
    if settings.weight_decay == 0:
        return None
    steps = settings.count_steps(data)
    value, speed, after = 1.0, 0.0, [1.0]
    for _ in range(int(steps.max())):
        speed = settings.momentum * speed + settings.weight_decay * value
        value -= lr * speed
        after.append(value)
    return torch.tensor(after, dtype=torch.float64)[steps].to(data.weight)


def network_push(population: Population, data: LocalData, scale: Tensor | None = None) -> Push:
    """The push of one plain network a client, canonical leaves (C, ...) without K; gradients of these times `scale`
    (C,)."""

    def push(at: Shared, velocity: Shared, momentum: float, batch: Batch) -> Tensor:
        own = None if scale is None else scale[: len(batch.x)]
        return population.push_networks(at, velocity, momentum, *batch[:3], data.space, own)

    return push


def descend_networks(
    population: Population,
    networks: Shared,
    data: LocalData,
    settings: LocalTraining,
    lr: float,
    scale: Tensor | None = None,
    only: Container[str] | None = None,
) -> Met:
    """A local run of one plain network a client, in place. `only`: the parameters that move, where not all do."""
    return descend(network_push(population, data, scale), networks, data, settings, lr, only)


def descend_models(
    population: Population,
    shared: Shared,
    c: Tensor,
    data: LocalData,
    settings: LocalTraining,
    lr: float,
    *,
    as_alone: bool,
) -> tuple[Met, Params, Params]:
    """A local run of all K canonical models, whichever way they are mixed: the changes of the common part (C, ...),
    and the canonical pushes (C, K, ...): the end, less what was kept of the start.

    as_alone: the gradient for theta_k has a factor c_k, and so has what theta_k does to the output: a client's network
    moves |c|^2 as fast as one that is not mixed. Here its canonical gradients are over |c|^2, and pushes times |c|^2.
    """
    norm = c.square().sum(dim=1)
    scale = 1 / norm if as_alone else None

    def push(at: Shared, velocity: Shared, momentum: float, batch: Batch) -> Tensor:
        n = len(batch.x)
        own = None if scale is None else scale[:n]
        return population.push_models(at, velocity, momentum, c[:n], *batch[:3], data.space, own)

    ends = shared.copies(len(c), data.space)
    met = descend(push, ends, data, settings, lr)
    kept = kept_of_start(data, settings, lr)
    for name, theta in shared.canonical.items():
        end = ends.canonical[name]
        end.sub_(theta if kept is None else per_client(kept, end) * theta)
        if as_alone:
            end.mul_(per_client(norm, end))
    return met, changes(ends.common, shared.common), ends.canonical


def descend_mixed_weights(
    population: Population,
    shared: Shared,
    c: Tensor,
    data: LocalData,
    settings: LocalTraining,
    lr: float,
    *,
    as_alone: bool,
) -> tuple[Met, Params, Params]:
    """The same for mixed weights, exactly, at the cost of one model whatever K is (short cut 1).

    The gradient for theta_k is c_k G, so W = sum_k c_k theta_k moves by |c|^2 G, or by G `as_alone`: SGD with momentum
    and weight decay, being linear, takes W along exactly as if it were the parameter and that its gradient. The pushes
    (C, ...) are those of theta_k, but for its factor c_k.
    """
    norm = None if as_alone else c.square().sum(dim=1)
    common = shared._replace(canonical={}).copies(len(c), data.space).common
    W = Shared(common, mixed_weights(shared.canonical, c, data.space))
    met = descend_networks(population, W, data, settings, lr, scale=norm)
    kept = kept_of_start(data, settings, lr)
    of_start = c if kept is None else kept[:, None] * c
    for name, theta in shared.canonical.items():
        push = W.canonical[name].flatten(1).addmm_(of_start, theta.flatten(1), alpha=-1)
        if norm is not None:
            push.div_(norm[:, None])
    return met, changes(W.common, shared.common), W.canonical


def changes(ends: Params, start: Params) -> Params:
    """ends - start, in place on the ends (C, ...)."""
    return {name: end.sub_(start[name]) for name, end in ends.items()}
