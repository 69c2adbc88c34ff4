"""Methods around another method, and fine-tuning (as in Yu et al., 2020; Cheng et al., 2021) as one of them: any
method, and then some local steps for every client.

W_i <- local SGD on f_i from the client's personal model, in the last round, in which everyone takes part; all rounds
before it are the inner method's, and its schedule ends there. What is personal must be one network per client: a
population that mixes weights, or outputs of affine parts, gives W_i = sum_k c_ik theta_k; the others are refused. A
client that is lost in the last round keeps the model it would have started from. With `part` only that part of the
network moves in the last round: a personal bias, say.
What leaves a client: what the inner method sends, and in the last round nothing but its training loss.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self

import torch
from pydantic import ConfigDict, model_validator
from torch import Tensor

from ..core.backends import Backend
from ..core.parts import Part, parameters_of
from ..core.population import Mixture, Models, Networks, Population
from ..core.settings import Positive, Repeats, RepeatsOrZero
from ..core.trees import Params, Tree, map_params
from ..errors import SettingError
from ..io.codec import message
from .contract import Method, MethodByName, Plan, Problem, Rows, Total, Upload, Work
from .fedavg import FedAvg
from .local.batches import LocalData
from .local.sgd import LEARNING_RATES, LocalTraining, TrainingLoss, descend
from .own_models import OwnModel


class Wrapper(Method):
    """Another method's answers to everything. A subclass changes what it wants, and adds a state of its own."""

    model_config = ConfigDict(defer_build=True)  # until all methods are known

    method: Annotated[Method, MethodByName(excluded="finetune")] = FedAvg()

    def inner(self, problem: Problem) -> Problem:
        """The problem as the inner method knows it."""
        return problem

    @property
    def shows(self) -> tuple[str, ...]:
        return self.method.shows

    @property
    def uses_affinity(self) -> bool:
        return self.method.uses_affinity

    @property
    def local(self) -> LocalTraining:
        return self.method.local

    def with_local(self, **changes: Any) -> Self:
        return self.model_copy(update={"method": self.method.with_local(**changes)})


def _forwarded(name: str) -> Callable[..., Any]:
    """A function of the contract that asks the inner method, which has a problem of its own."""
    takes_problem = "problem" in inspect.signature(getattr(Method, name)).parameters

    def forward(self: Wrapper, *given: Any) -> Any:
        if takes_problem:
            given = self.inner(given[0]), *given[1:]
        return getattr(self.method, name)(*given)

    return forward


for _name, _function in vars(Method).items():
    if inspect.isfunction(_function) and not _name.startswith("_") and _name not in vars(Wrapper):
        setattr(Wrapper, _name, _forwarded(_name))


class FineTuneClient(NamedTuple):
    inner: Tree
    own: OwnModel  # the model after the last round


@message
class LastRound(NamedTuple):
    """The task of a client that fine-tunes; any other is the inner method's."""

    lr: float


class FineTune(Wrapper):
    """A method, and local steps at its end: `steps` of them, or `epochs`, or one epoch where neither is set.

    Batches, momentum and weight decay are the inner method's.

    >>> from torch import nn
    >>> from ppfl import FedAvg, Population, fit
    >>> from ppfl.data import digits_federation
    >>> fit(Population(nn.Linear(64, 10), k=1), digits_federation(), FineTune(method=FedAvg(lr=0.1), steps=5), rounds=2)
    <Fitted FineTune(method=FedAvg(lr=0.1), steps=5), 2 rounds, 40 clients, accuracy ...%>
    """

    title: ClassVar[str] = "Fine-tuned"
    search: ClassVar[dict[str, tuple[Any, ...]]] = {"lr": LEARNING_RATES}

    lr: Positive | Literal["auto"] = "auto"  # "auto": the inner method's in its first round
    steps: RepeatsOrZero | None = None
    epochs: Repeats | None = None
    part: Part | None = None  # what becomes a client's own, such as "classifier.bias"; None: the whole network

    @model_validator(mode="after")
    def _one_measure_of_local_work(self) -> FineTune:
        if self.epochs is not None and self.steps is not None:
            raise ValueError("epochs and steps are both set; keep one of them")
        return self

    def inner(self, problem: Problem) -> Problem:
        return problem._replace(rounds=problem.rounds - 1)

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
        super().check(problem)

    # ------------------------------------------------------------------ server

    def plan(self, problem: Problem, server: Any, round: int) -> Plan:
        if round < problem.rounds - 1:
            return super().plan(problem, server, round)
        return Plan(None, self._last_task(problem.rounds))

    def possible_tasks(self, round: int, rounds: int, seed: int) -> tuple[Any, ...]:
        if round < rounds - 1:
            return self.method.possible_tasks(round, rounds - 1, seed)
        return (self._last_task(rounds),)

    def _last_task(self, rounds: int) -> LastRound:
        return LastRound(self.local.step_size(0, rounds) if self.lr == "auto" else self.lr)

    def send(
        self, problem: Problem, server: Any, ids: tuple[str, ...] | None, task: Any
    ) -> tuple[Tree, dict[str, Tensor]]:
        return super().send(problem, server, ids, None if isinstance(task, LastRound) else task)

    def merge(self, problem: Problem, server: Any, task: Any, totals: dict[str, Total], rows: Rows) -> Any:
        return server if isinstance(task, LastRound) else super().merge(problem, server, task, totals, rows)

    def newcomer_plans(self, problem: Problem, server: Any) -> list[Plan]:
        return [*super().newcomer_plans(problem, server), self.plan(problem, server, problem.rounds)]

    # ------------------------------------------------------------------ client

    def init_client(self, population: Population) -> FineTuneClient:
        return FineTuneClient(super().init_client(population), OwnModel.none_yet(population))

    def work(self, task: Any, shared: Any, own: dict[str, Tensor], state: FineTuneClient, data: LocalData) -> Work:
        if not isinstance(task, LastRound):
            work = super().work(task, shared, own, state.inner, data)
            return work._replace(client=state._replace(inner=work.client))
        backend = data.backend
        mine = network_of_each(backend, super().model(backend, shared, own, state.inner), len(data.weight))
        loss = TrainingLoss(torch.zeros_like(data.weight), torch.zeros_like(data.weight))
        if self.steps != 0:
            only = None if self.part is None else parameters_of(backend.population.net, self.part, "part")
            epochs = self.epochs or (1 if self.steps is None else None)
            sgd = self.local.sgd(task.lr)._replace(epochs=epochs, steps=self.steps)
            loss = descend(backend.add_gradients, mine, data, sgd, only)
        return Work(state._replace(own=OwnModel.of(mine)), Upload(metrics=loss.metrics()))

    def model(self, backend: Backend, shared: Any, own: dict[str, Tensor], state: FineTuneClient) -> Models:
        tuned = state.own.exists > 0
        if bool(tuned.all()):
            return Networks(state.own.model)
        models = super().model(backend, shared, own, state.inner)
        if not bool(tuned.any()):
            return models
        with backend.space.frame():
            return Networks(state.own.or_shared(network_of_each(backend, models, len(tuned))))


def network_of_each(backend: Backend, models: Models, clients: int) -> Params:
    """The personal models of a chunk as one network per client, to be written to, in this thread's workspace."""
    if isinstance(models, Mixture):
        return backend.mixed_weights(*models)
    if isinstance(models, Networks):
        return map_params(Tensor.clone, models.values)
    return backend.space.copies(models.values, clients)
