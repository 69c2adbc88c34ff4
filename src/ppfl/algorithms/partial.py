"""Partial personalization: one part of the network is shared by all, the other is each client's own.

u <- u + sum_{i in S} p_i (u_i - u) / sum_{i in S} p_i for the shared part u; the personal part v_i stays where it is.
The methods differ in which part is personal, and in how a client trains the two. With nothing personal this is
FedAvg, with everything Local; a network of one layer has no other split.

| method | personal | training |
|---|---|---|
| FedSim (Pillutla et al., ICML 2022) | any part | both parts at once |
| FedPer (Arivazhagan et al., 2019) | the last layers | both parts at once |
| LG-FedAvg (Liang et al., 2020) | all but the last layers | both parts at once |
| FedAlt (Pillutla et al., ICML 2022) | any part | v_i with u fixed, then u with the new v_i fixed |
| FedRep (Collins et al., ICML 2021) | the last layers | many epochs on v_i, then local SGD on u |

What leaves a client: its weighted change of the shared part u, in a sum. Its personal part v_i stays.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from pydantic import model_validator
from torch import nn

from ..core.backends import Backend, Batch
from ..core.parts import Names, Part, parameters_of
from ..core.population import Models, Networks, OneNetwork, Population
from ..core.settings import Repeats
from ..core.trees import Params, expand, subtract_
from .contract import MethodDefaults, Problem, Rows, Sum, Total, Upload, Work
from .fedavg import NetworkServer, mean, one_model_only
from .local.batches import LocalData
from .local.sgd import LocalTraining, TrainingLoss, train_networks
from .server_optimizers import OptimizedTraining


class Partial(MethodDefaults, OptimizedTraining):
    """What these methods have in common. The state of a client is its personal part, and never leaves it."""

    name: ClassVar[str]

    @abstractmethod
    def personal_parameters(self, net: nn.Module) -> Names:
        """Those that stay with a client."""

    def train(self, backend: Backend, networks: Params, personal: Names, data: LocalData, lr: float) -> TrainingLoss:
        """A client's local run, in place on its whole network: both parts at once."""
        return train_networks(backend, networks, data, self, lr)

    def check(self, problem: Problem) -> None:
        one_model_only(self.name, problem)
        self.personal_parameters(problem.population.net)

    def init_server(self, problem: Problem) -> NetworkServer:
        personal = self.personal_parameters(problem.population.net)
        start = problem.population.initial_network()
        shared = {name: value for name, value in start.items() if name not in personal}
        return NetworkServer(shared, self.optimizer_state(shared))

    def merge(
        self, problem: Problem, server: NetworkServer, task: Any, totals: dict[str, Total], rows: Rows
    ) -> NetworkServer:
        return NetworkServer(*self.server_step(server, mean(totals["change"])))

    def init_client(self, population: Population) -> Params:
        personal = self.personal_parameters(population.net)
        start = population.initial_network()
        return {name: value for name, value in start.items() if name in personal}

    def work(self, backend: Backend, task: float, shared: Params, own: Any, client: Params, data: LocalData) -> Work:
        ends = data.space.copies(shared, len(data.weight))
        mine = data.space.empty_like(client)
        for name, leaf in client.items():
            mine[name].copy_(leaf)
        loss = self.train(backend, ends | mine, Names(mine), data, task)
        change = Sum(None, subtract_(ends, shared))
        return Work(mine, Upload({"change": change}, metrics=loss.metrics()))

    def model(self, backend: Backend, shared: Params, own: Any, client: Params) -> Models:
        if not client:
            return OneNetwork(shared)
        return Networks(expand(shared, len(next(iter(client.values())))) | client)


class FedSim(Partial):
    """Any part is personal, and both parts are trained at once. An adapter is a submodule like any other.

    >>> from torch import nn
    >>> from ppfl import Population, fit
    >>> from ppfl.data import digits_federation
    >>> net = nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
    >>> fit(Population(net, k=1), digits_federation(), FedSim(lr=0.1, personal_part='0'), rounds=2)
    <Fitted FedSim(lr=0.1, personal_part='0'), 2 rounds, 40 clients, accuracy ...%>
    """

    name: ClassVar[str] = "fedsim"
    title: ClassVar[str] = "FedSim"

    personal_part: Part = "output"

    def personal_parameters(self, net: nn.Module) -> Names:
        return parameters_of(net, self.personal_part, "personal_part")


class FedPer(FedSim):
    """FedSim with the last layer personal; name more of them in `personal_part` for more personalization layers.

    >>> from torch import nn
    >>> from ppfl import Population, fit
    >>> from ppfl.data import digits_federation
    >>> net = nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
    >>> fit(Population(net, k=1), digits_federation(), FedPer(lr=0.1), rounds=2)
    <Fitted FedPer(lr=0.1), 2 rounds, 40 clients, accuracy ...%>
    """

    name: ClassVar[str] = "fedper"
    title: ClassVar[str] = "FedPer"


class LGFedAvg(Partial):
    """FedSim with everything personal but the head. A network of one layer is all head: then it is FedAvg.

    >>> from torch import nn
    >>> from ppfl import Population, fit
    >>> from ppfl.data import digits_federation
    >>> net = nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
    >>> fit(Population(net, k=1), digits_federation(), LGFedAvg(lr=0.1), rounds=2)
    <Fitted LGFedAvg(lr=0.1), 2 rounds, 40 clients, accuracy ...%>
    """

    name: ClassVar[str] = "lg-fedavg"
    title: ClassVar[str] = "LG-FedAvg"

    shared_part: Part = "output"

    def personal_parameters(self, net: nn.Module) -> Names:
        trained = Names(name for name, p in net.named_parameters() if p.requires_grad)
        return trained - parameters_of(net, self.shared_part, "shared_part")


class FedAlt(FedSim):
    """The personal part first, then the shared part with the new personal part.

    >>> from torch import nn
    >>> from ppfl import Population, fit
    >>> from ppfl.data import digits_federation
    >>> net = nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
    >>> fit(Population(net, k=1), digits_federation(), FedAlt(lr=0.1, personal_steps=3), rounds=2)
    <Fitted FedAlt(lr=0.1, personal_steps=3), 2 rounds, 40 clients, accuracy ...%>
    """

    name: ClassVar[str] = "fedalt"
    title: ClassVar[str] = "FedAlt"

    personal_epochs: Repeats | None = None  # neither: as much as on the shared part
    personal_steps: Repeats | None = None

    @model_validator(mode="after")
    def _one_measure_of_personal_work(self) -> FedAlt:
        if self.personal_epochs is not None and self.personal_steps is not None:
            raise ValueError("personal_epochs and personal_steps are both set; keep one of them")
        return self

    def train(self, backend: Backend, networks: Params, personal: Names, data: LocalData, lr: float) -> TrainingLoss:
        epochs, steps = self.personal_epochs, self.personal_steps
        if epochs is None and steps is None:
            epochs, steps = self.local_epochs, self.local_steps
        first = PersonalTraining.like(self, epochs, steps)
        return train_in_turn(backend, networks, personal, data, lr, first, self)


class FedRep(FedSim):
    """FedAlt with the last layer personal, and many passes over it for one over the representation.

    >>> from torch import nn
    >>> from ppfl import Population, fit
    >>> from ppfl.data import digits_federation
    >>> net = nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
    >>> fit(Population(net, k=1), digits_federation(), FedRep(lr=0.1, head_epochs=2), rounds=2)
    <Fitted FedRep(lr=0.1, head_epochs=2), 2 rounds, 40 clients, accuracy ...%>
    """

    name: ClassVar[str] = "fedrep"
    title: ClassVar[str] = "FedRep"

    head_epochs: Repeats = 10

    def train(self, backend: Backend, networks: Params, personal: Names, data: LocalData, lr: float) -> TrainingLoss:
        first = PersonalTraining.like(self, epochs=self.head_epochs, steps=None)
        return train_in_turn(backend, networks, personal, data, lr, first, self)


class PersonalTraining(LocalTraining):
    """A run on the personal part, with batches of its own: those of the shared part are others."""

    @classmethod
    def like(cls, method: LocalTraining, epochs: int | None, steps: int | None) -> PersonalTraining:
        """The same optimizer, for so long."""
        return cls(
            momentum=method.momentum,
            weight_decay=method.weight_decay,
            batch_size=method.batch_size,
            local_epochs=epochs,
            local_steps=steps,
        )

    def batches(self, data: LocalData) -> Iterable[Batch]:
        return data.steps(self.batch_size, self._epochs(), self.local_steps, purpose="personal")


def train_in_turn(
    backend: Backend,
    networks: Params,
    personal: Names,
    data: LocalData,
    lr: float,
    first: LocalTraining,
    then: LocalTraining,
) -> TrainingLoss:
    """The personal part with the shared one fixed, then the shared part with the personal one fixed, in place."""
    shared = Names(networks) - personal
    runs = [
        train_networks(backend, networks, data, settings, lr, only=names)
        for settings, names in ((first, personal), (then, shared))
        if names
    ]
    loss, samples = (torch.stack(both) for both in zip(*runs, strict=True))
    total = samples.sum(dim=0)
    return TrainingLoss((loss * samples).sum(dim=0) / total, total)
