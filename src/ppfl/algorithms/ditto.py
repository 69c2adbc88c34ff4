"""Ditto (Li et al., 2021): a model for all by FedAvg, and beside it one for every client that stays near it.

v_i <- local SGD on f_i(v) + mu/2 |v - w|^2, with w the shared model as the client received it in this round.
The larger mu, the nearer to FedAvg; with mu = 0 it is Local. Both runs of a round see the same batches. The default
mu = 1 is the paper's for clients that cannot choose; those that can choose among 0.1, 1 and 2.
What leaves a client: its weighted change of the shared model, in a sum; its own model never does.
"""

from typing import Any, ClassVar

from ..core.population import Population
from ..core.shared import Shared
from .batches import LocalData
from .contract import Personal, Problem, Work
from .descent import LEARNING_RATES, NonNegative, descend, network_push, pulled
from .fedavg import FedAvg, FedAvgServer, one_model
from .own import Own, kept, networks, nobody_yet, personal


class Ditto(FedAvg):
    """FedAvg, and a model of its own for every client."""

    name: ClassVar[str] = "ditto"
    search: ClassVar[dict[str, tuple[Any, ...]]] = {"lr": LEARNING_RATES, "mu": (0.1, 1.0, 2.0)}

    mu: NonNegative = 1.0  # the paper's lambda

    def init(self, problem: Problem) -> tuple[FedAvgServer, Any]:
        server, _ = super().init(problem)
        return server, nobody_yet(problem, server.shared)

    def work(self, population: Population, task: float, shared: Shared, own: Any, client: Own, data: LocalData) -> Work:
        for_all = super().work(population, task, shared, own, {}, data)
        mine = networks(client, shared)
        near = pulled(network_push(population, data), one_model(shared).spread(len(data.weight)), self.mu)
        met = descend(near, mine, data, self, lr=task)
        return Work(kept(mine), for_all.upload, *met)

    def personal(self, server: FedAvgServer, clients: Own) -> Personal:
        return personal(clients, server.shared)
