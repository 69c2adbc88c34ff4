"""FedAvg (McMahan et al., 2017): one model for all.

theta <- theta + sum_{i in S} p_i (theta_i - theta) / sum_{i in S} p_i, with S the clients of the round.
What leaves a client: its weighted change, in a sum.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch

from ..core.backends import Backend
from ..core.errors import SettingError
from ..core.models import Models, OneNetwork
from ..core.params import Params, map_params, subtract_
from ..core.trees import Tree, tree_map
from .contract import MethodDefaults, Problem, Rows, Sum, Total, Upload, Work
from .local.batches import LocalData
from .local.sgd import LocalTraining, train_networks


class NetworkServer(NamedTuple):
    """Server state of methods with one model for all."""

    shared: Params


class FedAvg(MethodDefaults, LocalTraining):
    """FedAvg on a population with one canonical model.

    >>> from torch import nn
    >>> from ppfl import Population, fit
    >>> from ppfl.data import digits_federation
    >>> fit(Population(nn.Linear(64, 10), k=1), digits_federation(), FedAvg(lr=0.1, local_epochs=2), rounds=2)
    <Fitted FedAvg(lr=0.1, local_epochs=2), 2 rounds, 40 clients, accuracy ...%>
    """

    name: ClassVar[str] = "fedavg"
    title: ClassVar[str] = "FedAvg"

    # ------------------------------------------------------------------ server

    def check(self, problem: Problem) -> None:
        one_model_only(self.name, problem)

    def init_server(self, problem: Problem) -> Tree:
        return NetworkServer(problem.population.initial_network())

    def merge(self, problem: Problem, server: Tree, task: Any, totals: dict[str, Total], rows: Rows) -> Tree:
        return NetworkServer(map_params(torch.add, server.shared, mean(totals["change"])))

    def global_network(self, server: Any) -> Params | None:
        network: Params = server.shared
        return network

    # ------------------------------------------------------------------ client

    def work(self, backend: Backend, task: float, shared: Params, own: Any, client: Any, data: LocalData) -> Work:
        ends = data.space.copies(shared, len(data.weight))
        loss = train_networks(backend, ends, data, self, lr=task)
        change = Sum(None, subtract_(ends, shared))
        return Work(client, Upload({"change": change}, metrics=loss.metrics()))

    def model(self, backend: Backend, shared: Params, own: Any, client: Any) -> Models:
        return OneNetwork(shared)


def mean(total: Total) -> Tree:
    """sum_i weight_i value_i / sum_i weight_i of a sum with one weight per client."""
    return tree_map(lambda leaf: leaf[0] / total.weight[0], total.value)


def one_model_only(name: str, problem: Problem) -> None:
    """Refuse a population of several canonical models."""
    if problem.population.k != 1:
        raise SettingError(f"{name} trains one model, the population has k = {problem.population.k}; set k = 1")
