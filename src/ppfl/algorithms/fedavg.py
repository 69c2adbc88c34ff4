"""FedAvg (McMahan et al., 2017): one model for all.

theta <- theta + sum_{i in S} p_i (theta_i - theta) / sum_{i in S} p_i, with S the clients of the round; or a step of
the server's optimizer along that mean change (server_optimizers.py).
What leaves a client: its weighted change, in a sum.

FedAvgM, FedAdagrad, FedAdam and FedYogi (Reddi et al., 2021) are FedAvg with one of these optimizers.
FedAvgM(local_steps=1, momentum=0) is SGD on pooled data, one step per round.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

from ..core.backends import Backend
from ..core.population import Models, OneNetwork
from ..core.trees import Params, Tree, subtract_, tree_map
from ..errors import SettingError
from .contract import MethodDefaults, Problem, Rows, Sum, Total, Upload, Work
from .local.batches import LocalData
from .local.sgd import LEARNING_RATES, train_networks
from .server_optimizers import Adagrad, Adam, Momentum, OptimizedTraining, Yogi


class NetworkServer(NamedTuple):
    """Server state of methods with one model for all."""

    shared: Params
    optimizer: Any = {}  # the state of its optimizer


class FedAvg(MethodDefaults, OptimizedTraining):
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
        start = problem.population.initial_network()
        return NetworkServer(start, self.optimizer_state(start))

    def merge(self, problem: Problem, server: Tree, task: Any, totals: dict[str, Total], rows: Rows) -> Tree:
        return NetworkServer(*self.server_step(server, mean(totals["change"])))

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


class FedAvgM(FedAvg):
    """FedAvg with momentum at the server.

    >>> FedAvgM(lr=0.1, server_optimizer={"lr": 0.5}).server_optimizer
    Momentum(lr=0.5)
    """

    name: ClassVar[str] = "fedavgm"
    title: ClassVar[str] = "FedAvgM"
    search: ClassVar[dict[str, tuple[Any, ...]]] = {"lr": LEARNING_RATES, "server_optimizer.lr": (0.1, 0.3, 1.0)}
    server_optimizer: Momentum = Momentum()


ADAPTIVE_SEARCH = {"lr": LEARNING_RATES, "server_optimizer.lr": (0.001, 0.003, 0.01, 0.03, 0.1)}


class FedAdagrad(FedAvg):
    """FedAvg with Adagrad at the server.

    >>> FedAdagrad(server_optimizer={"lr": 0.1}).server_optimizer
    Adagrad(lr=0.1)
    """

    name: ClassVar[str] = "fedadagrad"
    title: ClassVar[str] = "FedAdagrad"
    search: ClassVar[dict[str, tuple[Any, ...]]] = ADAPTIVE_SEARCH
    server_optimizer: Adagrad = Adagrad()


class FedAdam(FedAvg):
    """FedAvg with Adam at the server.

    >>> FedAdam(server_optimizer={"lr": 0.1}).server_optimizer
    Adam(lr=0.1)
    """

    name: ClassVar[str] = "fedadam"
    title: ClassVar[str] = "FedAdam"
    search: ClassVar[dict[str, tuple[Any, ...]]] = ADAPTIVE_SEARCH
    server_optimizer: Adam = Adam()


class FedYogi(FedAvg):
    """FedAvg with Yogi at the server.

    >>> FedYogi(server_optimizer={"lr": 0.1}).server_optimizer
    Yogi(lr=0.1)
    """

    name: ClassVar[str] = "fedyogi"
    title: ClassVar[str] = "FedYogi"
    search: ClassVar[dict[str, tuple[Any, ...]]] = ADAPTIVE_SEARCH
    server_optimizer: Yogi = Yogi()


def mean(total: Total) -> Tree:
    """sum_i weight_i value_i / sum_i weight_i of a sum with one weight per client."""
    return tree_map(lambda leaf: leaf[0] / total.weight[0], total.value)


def one_model_only(name: str, problem: Problem) -> None:
    """Refuse a population of several canonical models."""
    if problem.population.k != 1:
        raise SettingError(f"{name} trains one model, the population has k = {problem.population.k}; set k = 1")
