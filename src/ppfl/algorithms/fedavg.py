"""FedAvg (McMahan et al., 2017): one model for all.

theta <- theta + sum_{i in S} p_i (theta_i - theta) / sum_{i in S} p_i, with S the clients of the round.
What leaves a client: its weighted change, in a sum.
"""

from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..core.errors import SettingError
from ..core.population import Population
from ..core.shared import Params, Shared
from .batches import LocalData
from .contract import Personal, Plan, Problem, Sum, Total, Upload, Work
from .descent import LocalTraining, descend_networks


class FedAvgServer(NamedTuple):
    shared: Shared


class FedAvg(LocalTraining):
    """FedAvg on a population with one canonical model."""

    name: ClassVar[str] = "fedavg"

    def check(self, problem: Problem) -> None:
        one_model_only(self.name, problem)

    def init(self, problem: Problem) -> tuple[FedAvgServer, dict[str, Tensor]]:
        return FedAvgServer(problem.population.initial(problem.seed)), {}

    def work(self, population: Population, task: float, shared: Shared, own: Any, client: Any, data: LocalData) -> Work:
        start = one_model(shared)
        ends = start.copies(len(data.weight), data.space)
        met = descend_networks(population, ends, data, self, lr=task)
        change = ends.map(Tensor.sub_, start)
        return Work(client, Upload({"change": Sum(None, change)}, {}), *met)

    def merge(
        self, problem: Problem, server: FedAvgServer, plan: Plan, totals: dict[str, Total], rows: Any
    ) -> FedAvgServer:
        change: Shared = mean(totals["change"])
        return FedAvgServer(
            pytree.tree_map(torch.add, server.shared, change._replace(canonical=with_k(change.canonical)))
        )

    def personal(self, server: FedAvgServer, clients: Any) -> Personal:
        return Personal(server.shared, None, own=False)


def mean(total: Total) -> Any:
    """sum_i weight_i value_i / sum_i weight_i of a sum with one weight a client."""
    return pytree.tree_map(lambda leaf: leaf[0] / total.weight[0], total.value)


def one_model(shared: Shared, k_at: int = 0) -> Shared:
    """A population's one canonical model without its dimension K."""
    return shared._replace(canonical={name: theta.select(k_at, 0) for name, theta in shared.canonical.items()})


def with_k(canonical: Params, k_at: int = 0) -> Params:
    return {name: theta.unsqueeze(k_at) for name, theta in canonical.items()}


def one_model_only(name: str, problem: Problem) -> None:
    if problem.population.k != 1:
        raise SettingError(f"{name} trains one model, the population has k = {problem.population.k}; set k = 1")
