"""Local: every client alone, no collaboration.

theta_i <- local SGD on f_i. What leaves a client: nothing.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor

from ..core.population import Population
from ..core.shared import Shared
from .batches import LocalData
from .contract import Personal, Plan, Problem, Total, Tree, Upload, Work, participants
from .descent import LocalTraining, descend_networks
from .fedavg import one_model, one_model_only, with_k


class Local(LocalTraining):
    """A model of its own for every client, from common start values."""

    name: ClassVar[str] = "local"

    def check(self, problem: Problem) -> None:
        one_model_only(self.name, problem)

    def init(self, problem: Problem) -> tuple[dict[str, Tensor], Shared]:
        return {}, problem.population.initial(problem.seed).spread(problem.n_clients)

    def plan(self, problem: Problem, server: Tree, round: int) -> Plan:
        lr = self.step_size(round, problem.rounds)
        return Plan(participants(problem, self.participation, round), lr, {}, {})

    def work(self, population: Population, task: float, shared: Any, own: Any, client: Shared, data: LocalData) -> Work:
        mine = one_model(client, k_at=1).map(torch.clone)
        met = descend_networks(population, mine, data, self, lr=task)
        return Work(mine._replace(canonical=with_k(mine.canonical, k_at=1)), Upload({}, {}), *met)

    def merge(self, problem: Problem, server: Tree, plan: Plan, totals: dict[str, Total], rows: Any) -> Tree:
        return server

    def personal(self, server: Tree, clients: Shared) -> Personal:
        return Personal(clients, None, own=True)
