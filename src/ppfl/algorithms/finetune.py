"""Fine-tuning (as in Yu et al., 2020; Cheng et al., 2021): any method, and then some local steps for every client.

W_i <- local SGD on f_i from the client's personal model, in the last round, in which everyone takes part; all rounds
before it are the inner method's, and its schedule ends there. What is personal must be one network per client: a
population that mixes weights, or outputs of affine parts, gives W_i = sum_k c_ik theta_k; the others are refused. A
client that is lost in the last round keeps the model it would have started from. With `part` only that part of the
network moves in the last round: a personal bias, say.
What leaves a client: what the inner method sends, and in the last round nothing but its training loss.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import torch
from pydantic import ConfigDict, model_validator
from torch import Tensor

from ..core.backends import Backend
from ..core.parts import Part, parameters_of
from ..core.population import Mixture, Models, Networks, Population
from ..core.settings import Positive, Repeats, RepeatsOrZero, Settings
from ..core.trees import Params, Tree, map_params
from ..errors import SettingError
from ..io.codec import message
from .contract import Method, Plan, Problem, Roster, Rows, Total, Upload, Work
from .fedavg import FedAvg
from .local.batches import LocalData
from .local.own_model import OwnModel, as_state, models_of, no_model_yet
from .local.sgd import (
    LEARNING_RATES,
    LocalTraining,
    TrainingLoss,
    train_networks,
)
from .registry import MethodByName


class FineTuneClient(NamedTuple):
    inner: Tree
    own: OwnModel  # the model after the last round


@message
class LastRound(NamedTuple):
    """The task of a client that fine-tunes; any other is the inner method's."""

    lr: float


class FineTune(Settings):
    """A method, and local steps at its end: `steps` of them, or `epochs`, or one epoch where neither is set.

    Batches, momentum and weight decay are the inner method's.

    >>> from torch import nn
    >>> from ppfl import FedAvg, Population, fit
    >>> from ppfl.data import digits_federation
    >>> fit(Population(nn.Linear(64, 10), k=1), digits_federation(), FineTune(method=FedAvg(lr=0.1), steps=5), rounds=2)
    <Fitted FineTune(method=FedAvg(lr=0.1), steps=5), 2 rounds, 40 clients, accuracy ...%>
    """

    model_config = ConfigDict(defer_build=True)  # until all methods are known

    name: ClassVar[str] = "finetune"
    title: ClassVar[str] = "Fine-tuned"
    search: ClassVar[dict[str, tuple[Any, ...]]] = {"lr": LEARNING_RATES}

    method: Annotated[Method, MethodByName(besides="finetune")] = FedAvg()
    lr: Positive | Literal["auto"] = "auto"  # "auto": the inner method's in its first round
    steps: RepeatsOrZero | None = None
    epochs: Repeats | None = None
    part: Part | None = None  # what becomes a client's own, such as "classifier.bias"; None: the whole network

    @model_validator(mode="after")
    def _one_measure_of_local_work(self) -> FineTune:
        if self.epochs is not None and self.steps is not None:
            raise ValueError("epochs and steps are both set; keep one of them")
        return self

    # ------------------------------------------------------------------ what the inner method answers

    @property
    def batch_size(self) -> int | None:
        return self.method.batch_size

    @property
    def visible_rows(self) -> tuple[str, ...]:
        return self.method.visible_rows

    @property
    def membership_penalty(self) -> float:
        return self.method.membership_penalty

    def penalty_value(self, problem: Problem, server: Tree) -> float:
        return self.method.penalty_value(_before_last(problem), server)

    @property
    def needs_lr(self) -> bool:
        return self.method.needs_lr

    def with_lr(self, lr: float) -> FineTune:
        return self.model_copy(update={"method": self.method.with_lr(lr)})

    def trial(self, lr: float) -> Any:
        """The inner method's: the steps at the end tell nothing of its lr."""
        return self.method.trial(lr)

    def with_everyone(self) -> FineTune:
        return self.model_copy(update={"method": self.method.with_everyone()})

    def step_size(self, round: int, rounds: int) -> float:
        return self.method.step_size(round, rounds)

    @property
    def theta_probability(self) -> float:
        return self.method.theta_probability

    def measure_task(self, problem: Problem, server: Tree) -> Any:
        return self.method.measure_task(_before_last(problem), server)

    def measured(self, totals: dict[str, Total], metrics: dict[str, float]) -> dict[str, float]:
        return self.method.measured(totals, metrics)

    # ------------------------------------------------------------------ server

    def check(self, problem: Problem) -> None:
        if problem.rounds < 2:
            raise SettingError("finetune takes the last round for itself, which leaves none to train; set rounds >= 2")
        if problem.population.k > 1 and not problem.population.collapses:
            raise SettingError(
                f"finetune needs one network per client, and mix = {problem.population.mix.name!r} leaves it with "
                f"{problem.population.k}; set mix = 'weights'"
            )
        if self.part is not None:
            parameters_of(problem.population.net, self.part, "part")
        self.method.check(_before_last(problem))

    def init_server(self, problem: Problem) -> Tree:
        return self.method.init_server(_before_last(problem))

    def plan(self, problem: Problem, server: Tree, round: int) -> Plan:
        if round < problem.rounds - 1:
            return self.method.plan(_before_last(problem), server, round)
        return Plan(None, LastRound(self.step_size(0, problem.rounds) if self.lr == "auto" else self.lr))

    def send(
        self, problem: Problem, server: Tree, ids: tuple[str, ...] | None, task: Any
    ) -> tuple[Tree, dict[str, Tensor]]:
        inner = None if isinstance(task, LastRound) else task
        return self.method.send(_before_last(problem), server, ids, inner)

    def merge(self, problem: Problem, server: Tree, task: Any, totals: dict[str, Total], rows: Rows) -> Tree:
        if isinstance(task, LastRound):
            return server
        return self.method.merge(_before_last(problem), server, task, totals, rows)

    def global_network(self, server: Tree) -> None:
        """None: what clients use is their own."""

    def newcomer_plans(self, problem: Problem, server: Tree) -> list[Plan]:
        return [*self.method.newcomer_plans(_before_last(problem), server), self.plan(problem, server, problem.rounds)]

    def move_server(self, server: Tree, before: Roster, after: Roster) -> Tree:
        return self.method.move_server(server, before, after)

    # ------------------------------------------------------------------ client

    def init_client(self, population: Population) -> FineTuneClient:
        return FineTuneClient(self.method.init_client(population), no_model_yet(population))

    def work(
        self,
        backend: Backend,
        task: Any,
        shared: Tree,
        own: dict[str, Tensor],
        client: FineTuneClient,
        data: LocalData,
    ) -> Work:
        if not isinstance(task, LastRound):
            work = self.method.work(backend, task, shared, own, client.inner, data)
            return work._replace(client=client._replace(inner=work.client))
        mine = network_of_each(backend, self.method.model(backend, shared, own, client.inner), len(data.weight))
        loss = TrainingLoss(torch.zeros_like(data.weight), torch.zeros_like(data.weight))
        if self.steps != 0:
            only = None if self.part is None else parameters_of(backend.population.net, self.part, "part")
            loss = train_networks(backend, mine, data, self._training, task.lr, only=only)
        return Work(client._replace(own=as_state(mine)), Upload(metrics=loss.metrics()))

    def model(self, backend: Backend, shared: Tree, own: dict[str, Tensor], client: FineTuneClient) -> Models:
        tuned = client.own.exists > 0
        if not bool(tuned.any()):
            return self.method.model(backend, shared, own, client.inner)
        if bool(tuned.all()):
            return Networks(client.own.model)
        with backend.space.frame():
            untuned = network_of_each(backend, self.method.model(backend, shared, own, client.inner), len(tuned))
            return models_of(client.own, untuned)

    @property
    def _training(self) -> LocalTraining:
        """The local run at the end."""
        assert isinstance(self.method, LocalTraining), "every method to choose from trains locally"
        epochs = self.epochs or (1 if self.steps is None else None)
        return self.method.model_copy(update={"local_epochs": epochs, "local_steps": self.steps})


def network_of_each(backend: Backend, models: Models, clients: int) -> Params:
    """The personal models of a chunk as one network per client, to be written to, in this thread's workspace."""
    if isinstance(models, Mixture):
        return backend.mixed_weights(*models)
    if isinstance(models, Networks):
        return map_params(Tensor.clone, models.values)
    return backend.space.copies(models.values, clients)


def _before_last(problem: Problem) -> Problem:
    """The problem as the inner method knows it."""
    return problem._replace(rounds=problem.rounds - 1)
