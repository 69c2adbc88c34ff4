"""Local SGD of a chunk of clients: momentum and weight decay as in torch.optim.SGD, velocity fresh each round."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from ...core.backends import Batch
from ...core.settings import Count, NonNegative, Positive, Repeats
from ...core.trees import Params, expand, first_clients, per_client, subtract_
from ...errors import SettingError
from ..contract import Method, Plan, Problem, participants
from .batches import LocalData

LEARNING_RATES = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)

SCHEDULES: dict[str, Callable[[int, int], float]] = {  # factors of lr in a round (from 0), given how many there are
    "constant": lambda _round, _rounds: 1.0,
    # divided by 10 at half and at three quarters of the rounds, as in the paper's experiments
    "step": lambda round, rounds: 0.1 ** ((2 * round >= rounds) + (4 * round >= 3 * rounds)),
    "cosine": lambda round, rounds: 0.5 * (1 + math.cos(math.pi * round / rounds)),
    "inverse_sqrt": lambda round, _rounds: 1 / math.sqrt(round + 1),
}


class SGD(NamedTuple):
    """One local run."""

    lr: float
    momentum: float
    weight_decay: float
    batch_size: int | None
    epochs: int | None  # of each client's data, or so many
    steps: int | None
    purpose: str = "theta"  # runs of other purposes draw other batches

    def batches(self, data: LocalData) -> Iterable[Batch]:
        """Its batches, one for each step."""
        return data.steps(self.batch_size, self.epochs, self.steps, self.purpose)

    def count_steps(self, data: LocalData) -> Tensor:
        """How many of them each client takes, (C,)."""
        return data.count_steps(self.batch_size, self.epochs, self.steps)


class LocalTraining(Method):
    """A method whose clients run SGD on their own data, with the settings of these runs."""

    search: ClassVar[dict[str, tuple[Any, ...]]] = {"lr": LEARNING_RATES}

    lr: Positive | Literal["auto"] = "auto"  # "auto": found by short trials on training loss before the run
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    weight_decay: NonNegative = 0.0
    batch_size: Count | None = 128  # None: a client's whole data, the exact gradient
    local_epochs: Repeats | None = None  # neither this nor local_steps: one epoch
    local_steps: Repeats | None = None
    schedule: Literal["constant", "step", "cosine", "inverse_sqrt"] = "step"
    participation: Annotated[float, Field(gt=0, le=1)] = 1.0  # of the clients, in a round

    @model_validator(mode="after")
    def _one_measure_of_local_work(self) -> LocalTraining:
        if self.local_epochs is not None and self.local_steps is not None:
            raise ValueError("local_epochs and local_steps are both set; keep one of them")
        return self

    @property
    def local(self) -> LocalTraining:
        return self

    def with_local(self, **changes: Any) -> Self:
        return self.model_copy(update=changes)

    def for_trial(self, lr: float) -> Self:
        """The same method for a short run that shows whether `lr` is a good one."""
        return self.model_copy(update={"lr": lr, "schedule": "constant"})

    def schedule_factor(self, round: int, rounds: int) -> float:
        """What the step sizes of `round` (from 0) are multiplied with.

        >>> from ppfl import FedAvg
        >>> [round(FedAvg().schedule_factor(t, 8), 3) for t in range(8)]
        [1.0, 1.0, 1.0, 1.0, 0.1, 0.1, 0.01, 0.01]
        """
        return SCHEDULES[self.schedule](round, rounds)

    def step_size(self, round: int, rounds: int) -> float:
        """lr in a round (from 0)."""
        if self.lr == "auto":
            raise SettingError('lr = "auto" has not been resolved; call ppfl.server.choose_lr first, or set a number')
        return self.lr * self.schedule_factor(round, rounds)

    def sgd(self, lr: float) -> SGD:
        """The local run of a round with this step size."""
        epochs = self.local_epochs or (None if self.local_steps else 1)
        return SGD(lr, self.momentum, self.weight_decay, self.batch_size, epochs, self.local_steps)

    def plan(self, problem: Problem, server: Any, round: int) -> Plan:
        """All who take part get a task that is its step size."""
        return Plan(participants(problem, self.participation, round), self.task(round, problem.rounds))

    def task(self, round: int, rounds: int) -> Any:
        """What is to be done in a round (from 0): by default training with this step size."""
        return self.step_size(round, rounds)

    def possible_tasks(self, round: int, rounds: int, seed: int) -> tuple[Any, ...]:
        return (self.task(round, rounds),)


class TrainingLoss(NamedTuple):
    """What a local run reports of itself. Both are summed over clients, the loss weighted by samples."""

    loss: Tensor  # (C,) mean training loss
    samples: Tensor  # (C,) how many samples that mean is over

    def metrics(self) -> dict[str, Tensor]:
        """As sums over clients."""
        return {"loss": self.loss * self.samples, "samples": self.samples}


AddGradients = Callable[..., Tensor]  # values, velocity, momentum, batch -> losses


def descend(
    add_gradients: AddGradients,
    values: Params,
    data: LocalData,
    sgd: SGD,
    only: Container[str] | None = None,
    factor: Tensor | None = None,
    batches: Iterable[Batch] | None = None,
    start: Params | None = None,
) -> TrainingLoss:
    """v <- mu v + g + wd x;  x <- x - lr v, in place on `values`, leaves (C, ...); `add_gradients` does mu v + g.

    One step per batch: the run's, where no others are given. Of the leaves `only` those with these names move, and
    `add_gradients` is told so; None: all of them. factor (C,) multiplies the gradients of canonical leaves: a step of
    f lr with weight decay wd / f, and v / f in the place of v, is the same. start, leaves (C, ...): where the first
    step begins; `values` may then hold anything before it, which saves a copy. Every client takes at least one step.
    """
    if only is not None:
        add_gradients = partial(add_gradients, only=only)
    canonical = () if factor is None else data.backend.population.canonical_names
    losses_seen, samples_seen = torch.zeros_like(data.weight), torch.zeros_like(data.weight)
    moving, momentum = -1, 0.0
    with data.space.frame():
        velocity = data.space.empty_like(values)
        for batch in sgd.batches(data) if batches is None else batches:
            if len(batch.x) != moving:  # those who still have a step to take are the first ones
                moving = len(batch.x)
                x, v = first_clients(values, moving), first_clients(velocity, moving)
                moved = [name for name in x if only is None or name in only]
            before = x if start is None else start
            losses = add_gradients(before, v, momentum, batch)
            for name in moved:
                value, speed, after = before[name], v[name], x[name]
                if factor is not None and name in canonical:
                    own = per_client(factor[:moving], value)
                    if sgd.weight_decay:
                        speed.addcmul_(value, sgd.weight_decay / own)
                    torch.addcmul(value, speed, own, value=-sgd.lr, out=after)
                    continue
                if sgd.weight_decay:
                    speed.add_(value, alpha=sgd.weight_decay)
                torch.add(value, speed, alpha=-sgd.lr, out=after)
            start = None
            losses_seen[:moving].addcmul_(losses, batch.real)
            samples_seen[:moving].add_(batch.real)
            momentum = sgd.momentum
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


def part_of_start_left(data: LocalData, sgd: SGD) -> Tensor | None:
    """Which part of its start weight decay leaves of a parameter without gradients, (C,); None where all of it.

    SGD is linear, so whatever gradients do is added to that.
    """
    if sgd.weight_decay == 0:
        return None
    steps = sgd.count_steps(data)
    value, speed, after = 1.0, 0.0, [1.0]
    for _ in range(int(steps.max())):
        speed = sgd.momentum * speed + sgd.weight_decay * value
        value -= sgd.lr * speed
        after.append(value)
    return torch.tensor(after, dtype=torch.float64)[steps].to(data.weight)


class LocalRun(NamedTuple):
    """What a local run of a client's mixed models led to."""

    loss: TrainingLoss
    common: Params  # changes of the common part, leaves (C, ...)
    moves: Params  # canonical: the end, less what is left of the start; (C, K, ...), or (C, ...) without its factor c_k


def train_models(models: Params, c: Tensor, data: LocalData, sgd: SGD, *, own_pace: bool) -> LocalRun:
    """A local run of all K canonical models, whichever way they are mixed.

    own_pace: the gradient for theta_k has a factor c_k, and so has what theta_k does to the output: a client's network
    moves |c|^2 as fast as one that is not mixed. Here its canonical gradients are over |c|^2, and moves times |c|^2.
    """
    norm = c.square().sum(dim=1)

    def add_gradients(at: Params, velocity: Params, momentum: float, batch: Batch) -> Tensor:
        return data.backend.add_model_gradients(at, velocity, momentum, c[: len(batch.x)], batch)

    start = expand(models, len(c))
    ends = data.space.empty_like(start)
    loss = descend(add_gradients, ends, data, sgd, factor=1 / norm if own_pace else None, start=start)
    left = part_of_start_left(data, sgd)
    common, moves = data.backend.population.split(ends)
    for name, end in moves.items():
        end.sub_(models[name] if left is None else per_client(left, end) * models[name])
        if own_pace:
            end.mul_(per_client(norm, end))
    return LocalRun(loss, subtract_(common, models), moves)


def train_mixed_weights(models: Params, c: Tensor, data: LocalData, sgd: SGD, *, own_pace: bool) -> LocalRun:
    """The same for mixed weights, exactly, at the cost of one model whatever K is (short cut 1).

    The gradient for theta_k is c_k G, so W = sum_k c_k theta_k moves by |c|^2 G, or by G at its own pace: SGD with
    momentum and weight decay, being linear, takes W along exactly as if it were the parameter and that its gradient.
    """
    norm = None if own_pace else c.square().sum(dim=1)
    W = data.backend.mixed_weights(models, c)
    loss = descend(data.backend.add_gradients, W, data, sgd, factor=norm)
    left = part_of_start_left(data, sgd)
    of_start = c if left is None else left[:, None] * c
    common, moves = data.backend.population.split(W)
    for name, end in moves.items():
        move = end.flatten(1).addmm_(of_start, models[name].flatten(1), alpha=-1)
        if norm is not None:
            move.div_(norm[:, None])
    return LocalRun(loss, subtract_(common, models), moves)
