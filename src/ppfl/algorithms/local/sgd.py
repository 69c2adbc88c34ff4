"""Local SGD of a chunk of clients: momentum and weight decay as in torch.optim.SGD, velocity fresh each round."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from ...core.backends import Backend, Batch
from ...core.settings import Count, NonNegative, Positive, Repeats, Settings
from ...core.trees import Params, first_clients, per_client, subtract_
from ...errors import SettingError
from .batches import LocalData
from .schedules import ScheduleName, factor

LEARNING_RATES = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)


class LocalTraining(Settings):
    """Settings of a client's local run, shared by all methods that have one."""

    search: ClassVar[dict[str, tuple[Any, ...]]] = {"lr": LEARNING_RATES}

    lr: Positive | Literal["auto"] = "auto"  # "auto": found by short trials on training loss before the run
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    weight_decay: NonNegative = 0.0
    batch_size: Count | None = 128  # None: a client's whole data, the exact gradient
    local_epochs: Repeats | None = None
    local_steps: Repeats | None = None
    schedule: ScheduleName = "step"
    participation: Annotated[float, Field(gt=0, le=1)] = 1.0  # of the clients, in a round

    @model_validator(mode="after")
    def _one_measure_of_local_work(self) -> LocalTraining:
        if self.local_epochs is not None and self.local_steps is not None:
            raise ValueError("local_epochs and local_steps are both set; keep one of them")
        return self

    @property
    def needs_lr(self) -> bool:
        """Whether lr is still to be found by trials."""
        return self.lr == "auto"

    def with_lr(self, lr: float) -> Self:
        """The same method with the lr that trials found."""
        return self.model_copy(update={"lr": lr})

    def trial(self, lr: float) -> Self:
        """The same method for a short run that shows whether `lr` is a good one."""
        return self.model_copy(update={"lr": lr, "schedule": "constant"})

    def with_everyone(self) -> Self:
        """The same method with all clients in every round."""
        return self.model_copy(update={"participation": 1.0})

    def step_size(self, round: int, rounds: int) -> float:
        """lr in a round (from 0)."""
        if self.lr == "auto":
            raise SettingError('lr = "auto" has not been resolved; call ppfl.server.choose_lr first, or set a number')
        return self.lr * factor(self.schedule, round, rounds)

    def batches(self, data: LocalData) -> Iterable[Batch]:
        """The batches of one round: one epoch where nothing else is said."""
        return data.steps(self.batch_size, self._epochs(), self.local_steps)

    def count_steps(self, data: LocalData) -> Tensor:
        """How many of them each client takes, (C,)."""
        return data.count_steps(self.batch_size, self._epochs(), self.local_steps)

    def _epochs(self) -> int | None:
        return self.local_epochs or (None if self.local_steps else 1)


class TrainingLoss(NamedTuple):
    """What a local run reports of itself. Both are summed over clients, the loss weighted by samples."""

    loss: Tensor  # (C,) mean training loss
    samples: Tensor  # (C,) how many samples that mean is over

    def metrics(self) -> dict[str, Tensor]:
        """As sums over clients."""
        return {"loss": self.loss * self.samples, "samples": self.samples}


AddGradients = Callable[[Params, Params, float, Batch], Tensor]  # values, velocity, momentum, batch -> losses


def descend(
    add_gradients: AddGradients,
    values: Params,
    data: LocalData,
    settings: LocalTraining,
    lr: float,
    only: Container[str] | None = None,
    batches: Iterable[Batch] | None = None,
) -> TrainingLoss:
    """v <- mu v + g + wd x;  x <- x - lr v, in place on `values`, leaves (C, ...); `add_gradients` does mu v + g.

    One step per batch: the round's, where no others are given. Of the leaves `only` those with these names move;
    None: all of them.
    """
    losses_seen, samples_seen = torch.zeros_like(data.weight), torch.zeros_like(data.weight)
    moving, momentum = -1, 0.0
    with data.space.frame():
        velocity = data.space.empty_like(values)
        for batch in settings.batches(data) if batches is None else batches:
            if len(batch.x) != moving:  # those who still have a step to take are the first ones
                moving = len(batch.x)
                x, v = first_clients(values, moving), first_clients(velocity, moving)
                pairs = [(leaf, v[name]) for name, leaf in x.items() if only is None or name in only]
            losses = add_gradients(x, v, momentum, batch)
            for value, speed in pairs:
                if settings.weight_decay:
                    speed.add_(value, alpha=settings.weight_decay)
                value.add_(speed, alpha=-lr)
            losses_seen[:moving].addcmul_(losses, batch.real)
            samples_seen[:moving].add_(batch.real)
            momentum = settings.momentum
    return TrainingLoss(losses_seen / samples_seen.clamp_min(1), samples_seen)


def proximal(add_gradients: AddGradients, anchor: Params, strength: float) -> AddGradients:
    """Gradients of f + strength/2 |x - anchor|^2 from those of f, anchor (C, ...); the losses stay those of f."""
    if strength == 0:
        return add_gradients

    def add_both(at: Params, velocity: Params, momentum: float, batch: Batch) -> Tensor:
        losses = add_gradients(at, velocity, momentum, batch)
        for name, v in velocity.items():
            x = at[name]
            v.add_(x, alpha=strength).sub_(anchor[name][: len(x)], alpha=strength)
        return losses

    return add_both


def part_of_start_left(data: LocalData, settings: LocalTraining, lr: float) -> Tensor | None:
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


def train_networks(
    backend: Backend,
    networks: Params,
    data: LocalData,
    settings: LocalTraining,
    lr: float,
    scale: Tensor | None = None,
    only: Container[str] | None = None,
) -> TrainingLoss:
    """A local run of one network per client, in place. scale (C,) multiplies the gradients of the canonical part;
    `only`: the parameters that move, where not all do."""

    def add_gradients(at: Params, velocity: Params, momentum: float, batch: Batch) -> Tensor:
        own = None if scale is None else scale[: len(batch.x)]
        return backend.add_gradients(at, velocity, momentum, batch, own, only)

    return descend(add_gradients, networks, data, settings, lr, only)


class LocalRun(NamedTuple):
    """What a local run of a client's mixed models led to."""

    loss: TrainingLoss
    common: Params  # changes of the common part, leaves (C, ...)
    moves: Params  # canonical: the end, less what is left of the start; (C, K, ...), or (C, ...) without its factor c_k


def train_models(
    backend: Backend,
    models: Params,
    c: Tensor,
    data: LocalData,
    settings: LocalTraining,
    lr: float,
    *,
    own_pace: bool,
) -> LocalRun:
    """A local run of all K canonical models, whichever way they are mixed.

    own_pace: the gradient for theta_k has a factor c_k, and so has what theta_k does to the output: a client's network
    moves |c|^2 as fast as one that is not mixed. Here its canonical gradients are over |c|^2, and moves times |c|^2.
    """
    norm = c.square().sum(dim=1)
    scale = 1 / norm if own_pace else None

    def add_gradients(at: Params, velocity: Params, momentum: float, batch: Batch) -> Tensor:
        n = len(batch.x)
        own = None if scale is None else scale[:n]
        return backend.add_model_gradients(at, velocity, momentum, c[:n], batch, own)

    ends = data.space.copies(models, len(c))
    loss = descend(add_gradients, ends, data, settings, lr)
    left = part_of_start_left(data, settings, lr)
    common, moves = backend.population.split(ends)
    for name, end in moves.items():
        end.sub_(models[name] if left is None else per_client(left, end) * models[name])
        if own_pace:
            end.mul_(per_client(norm, end))
    return LocalRun(loss, subtract_(common, models), moves)


def train_mixed_weights(
    backend: Backend,
    models: Params,
    c: Tensor,
    data: LocalData,
    settings: LocalTraining,
    lr: float,
    *,
    own_pace: bool,
) -> LocalRun:
    """The same for mixed weights, exactly, at the cost of one model whatever K is (short cut 1).

    The gradient for theta_k is c_k G, so W = sum_k c_k theta_k moves by |c|^2 G, or by G at its own pace: SGD with
    momentum and weight decay, being linear, takes W along exactly as if it were the parameter and that its gradient.
    """
    norm = None if own_pace else c.square().sum(dim=1)
    W = backend.mixed_weights(models, c)
    loss = train_networks(backend, W, data, settings, lr, scale=norm)
    left = part_of_start_left(data, settings, lr)
    of_start = c if left is None else left[:, None] * c
    common, moves = backend.population.split(W)
    for name, end in moves.items():
        move = end.flatten(1).addmm_(of_start, models[name].flatten(1), alpha=-1)
        if norm is not None:
            move.div_(norm[:, None])
    return LocalRun(loss, subtract_(common, models), moves)
