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

from typing import Any, ClassVar

import torch
from pydantic import model_validator
from torch import Tensor, nn

from ..core.backends import Backend
from ..core.parts import Names, Part, parameters_of
from ..core.population import Models, Networks, OneNetwork, Population
from ..core.settings import Repeats
from ..core.trees import Params, expand, subtract_
from .contract import Problem, Sum, Upload, Work
from .fedavg import Averaging, NetworkServer
from .local.batches import LocalData
from .local.sgd import SGD, TrainingLoss, descend


class Partial(Averaging):
    """What these methods have in common. The state of a client is its personal part, and never leaves it."""

    def personal_parameters(self, net: nn.Module) -> Names:
        """Those that stay with a client."""
        raise NotImplementedError

    def train(self, networks: Params, personal: Names, data: LocalData, sgd: SGD) -> TrainingLoss:
        """A client's local run, in place on its whole network: both parts at once."""
        return descend(data.backend.add_gradients, networks, data, sgd)

    def check(self, problem: Problem) -> None:
        super().check(problem)
        self.personal_parameters(problem.population.net)

    def init_server(self, problem: Problem) -> NetworkServer:
        personal = self.personal_parameters(problem.population.net)
        start = problem.population.initial_network()
        return self.server_from({name: value for name, value in start.items() if name not in personal})

    def init_client(self, population: Population) -> Params:
        personal = self.personal_parameters(population.net)
        start = population.initial_network()
        return {name: value for name, value in start.items() if name in personal}

    def work(self, task: Any, shared: Params, own: dict[str, Tensor], state: Params, data: LocalData) -> Work:
        ends, mine = data.copies(shared), data.space.empty_like(state)
        for name, leaf in state.items():
            mine[name].copy_(leaf)
        loss = self.train(ends | mine, Names(mine), data, self.sgd(task))
        return Work(mine, Upload({"change": Sum(None, subtract_(ends, shared))}, metrics=loss.metrics()))

    def model(self, backend: Backend, shared: Params, own: dict[str, Tensor], state: Params) -> Models:
        if not state:
            return OneNetwork(shared)
        return Networks(expand(shared, len(next(iter(state.values())))) | state)


class FedSim(Partial):
    """Any part is personal, and both parts are trained at once. An adapter is a submodule like any other."""

    personal_part: Part = "output"

    def personal_parameters(self, net: nn.Module) -> Names:
        return parameters_of(net, self.personal_part, "personal_part")


class FedPer(FedSim):
    """FedSim with the last layer personal; name more of them in `personal_part` for more personalization layers."""


class LGFedAvg(Partial):
    """FedSim with everything personal but the head. A network of one layer is all head: then it is FedAvg."""

    name: ClassVar[str] = "lg-fedavg"
    title: ClassVar[str] = "LG-FedAvg"

    shared_part: Part = "output"

    def personal_parameters(self, net: nn.Module) -> Names:
        trained = Names(name for name, p in net.named_parameters() if p.requires_grad)
        return trained - parameters_of(net, self.shared_part, "shared_part")


class FedAlt(FedSim):
    """The personal part first, then the shared part with the new personal part."""

    personal_epochs: Repeats | None = None  # neither: as much as on the shared part
    personal_steps: Repeats | None = None

    @model_validator(mode="after")
    def _one_measure_of_personal_work(self) -> FedAlt:
        if self.personal_epochs is not None and self.personal_steps is not None:
            raise ValueError("personal_epochs and personal_steps are both set; keep one of them")
        return self

    def train(self, networks: Params, personal: Names, data: LocalData, sgd: SGD) -> TrainingLoss:
        first = sgd._replace(purpose="personal")
        if self.personal_epochs is not None or self.personal_steps is not None:
            first = first._replace(epochs=self.personal_epochs, steps=self.personal_steps)
        return train_in_turn(networks, personal, data, first, sgd)


class FedRep(FedSim):
    """FedAlt with the last layer personal, and many passes over it for one over the representation."""

    head_epochs: Repeats = 10

    def train(self, networks: Params, personal: Names, data: LocalData, sgd: SGD) -> TrainingLoss:
        first = sgd._replace(purpose="personal", epochs=self.head_epochs, steps=None)
        return train_in_turn(networks, personal, data, first, sgd)


def train_in_turn(networks: Params, personal: Names, data: LocalData, first: SGD, then: SGD) -> TrainingLoss:
    """The personal part with the shared one fixed, then the shared part with the personal one fixed, in place."""
    shared, add_gradients = Names(networks) - personal, data.backend.add_gradients
    runs = [
        descend(add_gradients, networks, data, sgd, only=names)
        for sgd, names in ((first, personal), (then, shared))
        if names
    ]
    loss, samples = (torch.stack(both) for both in zip(*runs, strict=True))
    total = samples.sum(dim=0)
    return TrainingLoss((loss * samples).sum(dim=0) / total, total)
