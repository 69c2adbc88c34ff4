"""Fine-tuning (as in Yu et al., 2020; Cheng et al., 2021): any method, and then some local steps for every client.

W_i <- local SGD on f_i from the client's personal model, in the last round, in which everyone takes part; all rounds
before it are the inner method's, and its schedule ends there. What is personal must be one network a client: a
population that mixes weights, or outputs of affine parts, gives W_i = sum_k c_ik theta_k; the others are refused. A
client that is lost in the last round keeps the model it would have started from.
What leaves a client: what the inner method sends, and in the last round nothing.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import torch
from pydantic import ConfigDict, Field, model_validator
from torch import Tensor

from ..core.errors import SettingError
from ..core.population import Population
from ..core.settings import Settings
from ..core.shared import Shared, mixed_weights
from ..core.workspace import Workspace
from .batches import LocalData
from .choice import Method
from .contract import Algorithm, Personal, Plan, Problem, Total, Tree, Upload, Work, field_of, with_fields
from .descent import LEARNING_RATES, LocalTraining, Met, Positive, descend_networks
from .fedavg import FedAvg, one_model, with_k
from .own import Own, kept, nobody_yet, personal


class FineTuneServer(NamedTuple):
    inner: Tree
    tuned: Tensor  # (), 1 after the last round


class FineTuneClient(NamedTuple):
    inner: Tree
    own: Own  # the model after the last round


class LastRound(NamedTuple):
    """The task of a client that fine-tunes; any other is the inner method's."""

    lr: float


class FineTune(Settings):
    """A method, and local steps at its end: `steps` of them, or `epochs`, or one epoch where neither is set.

    Batches, momentum and weight decay are the inner method's.
    """

    model_config = ConfigDict(defer_build=True)  # until all methods are known

    name: ClassVar[str] = "finetune"
    search: ClassVar[dict[str, tuple[Any, ...]]] = {"lr": LEARNING_RATES}

    method: Annotated[Algorithm, Method(besides="finetune")] = FedAvg()
    lr: Positive | Literal["auto"] = "auto"  # "auto": the inner method's in its first round
    steps: Annotated[int, Field(ge=0)] | None = None
    epochs: Annotated[int, Field(ge=1)] | None = None

    @model_validator(mode="after")
    def _one_measure_of_local_work(self) -> FineTune:
        if self.epochs is not None and self.steps is not None:
            raise ValueError("epochs and steps are both set; keep one of them")
        return self

    @property
    def by_client(self) -> tuple[str, ...]:
        """The inner method's, where its state now is."""
        return tuple(f"inner.{name}" for name in self.method.by_client)

    @property
    def batch_size(self) -> int | None:
        """The inner method's, by which engines cut their chunks."""
        return self._training.batch_size

    @property
    def penalty(self) -> float:
        """The inner method's, by which affinities are made and objectives measured."""
        return float(getattr(self.method, "penalty", 0.0))

    @property
    def _training(self) -> LocalTraining:
        """The local run at the end."""
        assert isinstance(self.method, LocalTraining), "every method to choose from trains locally"
        epochs = self.epochs or (1 if self.steps is None else None)
        return self.method.model_copy(update={"local_epochs": epochs, "local_steps": self.steps})

    def check(self, problem: Problem) -> None:
        if problem.rounds < 2:
            raise SettingError("finetune takes the last round for itself, which leaves none to train; set rounds >= 2")
        if problem.population.k > 1 and not problem.population.collapses:
            raise SettingError(
                f"finetune needs one network a client, and mix = {problem.population.mix.name!r} leaves it with "
                f"{problem.population.k}; set mix = 'weights'"
            )
        self.method.check(_before_last(problem))

    # ------------------------------------------------------------------ server

    def init(self, problem: Problem) -> tuple[FineTuneServer, FineTuneClient]:
        server, clients = self.method.init(_before_last(problem))
        initial = problem.population.initial(problem.seed)
        model = initial._replace(canonical={name: theta[:1] for name, theta in initial.canonical.items()})
        return (
            FineTuneServer(server, problem.weights.new_zeros(())),
            FineTuneClient(clients, nobody_yet(problem, model)),
        )

    def plan(self, problem: Problem, server: FineTuneServer, round: int) -> Plan:
        if round < problem.rounds - 1:
            return self.method.plan(_before_last(problem), server.inner, round)
        task = LastRound(self._training.step_size(0, problem.rounds) if self.lr == "auto" else self.lr)
        rows = {name: field_of(server.inner, name) for name in self.method.by_client}
        nobodys = {name: leaf[:0] for name, leaf in rows.items()}
        return Plan(torch.arange(problem.n_clients), task, with_fields(server.inner, nobodys), rows)

    def merge(
        self, problem: Problem, server: FineTuneServer, plan: Plan, totals: dict[str, Total], rows: dict[str, Tensor]
    ) -> FineTuneServer:
        if isinstance(plan.task, LastRound):
            return server._replace(tuned=torch.ones_like(server.tuned))
        return server._replace(inner=self.method.merge(_before_last(problem), server.inner, plan, totals, rows))

    def personal(self, server: FineTuneServer, clients: FineTuneClient) -> Personal:
        inner = self.method.personal(server.inner, clients.inner)
        if not bool(server.tuned):
            return inner
        if bool(clients.own.exists.all()):
            return Personal(clients.own.model, None, own=True)
        untuned = network_of_each(inner, len(clients.own.exists), None)
        return personal(clients.own, untuned._replace(canonical=with_k(untuned.canonical, k_at=1)))

    # ------------------------------------------------------------------ client

    def work(
        self,
        population: Population,
        task: Any,
        shared: Tree,
        own: dict[str, Tensor],
        client: FineTuneClient,
        data: LocalData,
    ) -> Work:
        if not isinstance(task, LastRound):
            work = self.method.work(population, task, shared, own, client.inner, data)
            return work._replace(client=client._replace(inner=work.client))
        start = self.method.personal(with_fields(shared, own), client.inner)
        mine = network_of_each(start, len(data.weight), data.space)
        met = Met(torch.zeros_like(data.weight), torch.zeros_like(data.weight))
        if self.steps != 0:
            met = descend_networks(population, mine, data, self._training, task.lr)
        return Work(client._replace(own=kept(mine)), Upload({}, {}), *met)


def network_of_each(personal: Personal, clients: int, space: Workspace | None) -> Shared:
    """The personal models of a chunk as one plain network a client, to be written to."""
    shared, c = personal.shared, personal.memberships
    if personal.own and c is None:
        return one_model(shared.map(torch.clone), k_at=1)
    if personal.own:
        mixed = {name: torch.einsum("ck,ck...->c...", c, theta) for name, theta in shared.canonical.items()}
        return Shared({name: leaf.clone() for name, leaf in shared.common.items()}, mixed)
    if c is None:
        return one_model(shared).copies(clients, space)
    common = shared._replace(canonical={}).copies(clients, space).common
    return Shared(common, mixed_weights(shared.canonical, c, space))


def _before_last(problem: Problem) -> Problem:
    """The problem as the inner method knows it."""
    return problem._replace(rounds=problem.rounds - 1)
