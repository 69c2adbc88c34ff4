"""Methods that average, and their edges: one model for all, and a model for every client alone.

FedAvg (McMahan et al., 2017):  theta <- theta + sum_{i in S} p_i (theta_i - theta) / sum_{i in S} p_i,
with theta_i the end of local SGD on f_i, and S the clients of the round; or a step of the server's optimizer along that
mean change (server_optimizers.py). FedAvgM, FedAdagrad, FedAdam and FedYogi (Reddi et al., 2021) are FedAvg with one of
these optimizers; FedAvgM(local_steps=1, momentum=0) is SGD on pooled data, one step per round.

FedProx (Li et al., Federated Optimization in Heterogeneous Networks, MLSys 2020): local SGD on
f_i(theta) + mu/2 |theta - theta_t|^2, with theta_t the shared model as the client received it; with mu = 0, FedAvg.

Local: theta_i <- local SGD on f_i, no collaboration.

What leaves a client: its weighted change, in a sum; with Local nothing but its training loss, in a sum.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ..core.backends import Backend
from ..core.population import Models, Networks, OneNetwork, Population
from ..core.settings import NonNegative
from ..core.trees import Params, Tree, expand, map_params, subtract_, tree_map
from .contract import Problem, Rows, Sum, Total, Upload, Work
from .local.batches import LocalData
from .local.sgd import LEARNING_RATES, AddGradients, LocalTraining, descend, proximal
from .server_optimizers import Adagrad, Adam, Momentum, OptimizerByName, Yogi


class NetworkServer(NamedTuple):
    """Server state of methods that send the same models to all."""

    shared: Params
    optimizer: Any = {}  # the state of its optimizer


class Averaging(LocalTraining):
    """A method whose server adds the mean change of its clients to `server.shared`, or lets an optimizer do so."""

    server_optimizer: OptimizerByName = None  # None: the models plus their mean change

    def init_server(self, problem: Problem) -> Any:
        return self.server_from(problem.population.initial_network())

    def server_from(self, start: Params) -> NetworkServer:
        """The server state before the first round, with these models."""
        return NetworkServer(start, self.optimizer_state(start))

    def optimizer_state(self, shared: Params) -> Tree:
        """The optimizer's state before the first round; empty where there is none."""
        return {} if self.server_optimizer is None else self.server_optimizer.start(shared)

    def step(self, server: Any, change: Params) -> Any:
        """The next server state, from the mean change of its models."""
        if self.server_optimizer is None:
            return server._replace(shared=map_params(torch.add, server.shared, change))
        shared, optimizer = self.server_optimizer.step(server.shared, change, server.optimizer)
        return server._replace(shared=shared, optimizer=optimizer)

    def merge(self, problem: Problem, server: Any, task: Any, totals: dict[str, Total], rows: Rows) -> Any:
        return self.step(server, mean(totals["change"]))


class FedAvg(Averaging):
    """FedAvg on a population with one canonical model.

    >>> from torch import nn
    >>> from ppfl import Population, fit
    >>> from ppfl.data import digits_federation
    >>> fit(Population(nn.Linear(64, 10), k=1), digits_federation(), FedAvg(lr=0.1, local_epochs=2), rounds=2)
    <Fitted FedAvg(lr=0.1, local_epochs=2), 2 rounds, 40 clients, accuracy ...%>
    """

    def work(self, task: Any, shared: Params, own: dict[str, Tensor], state: Any, data: LocalData) -> Work:
        return self.train_copies(data.backend.add_gradients, task, shared, state, data)

    def train_copies(self, add_gradients: AddGradients, lr: float, shared: Params, state: Any, data: LocalData) -> Work:
        """Everyone's local run from the shared model, and what it changed."""
        start = expand(shared, len(data.weight))
        ends = data.space.empty_like(start)
        loss = descend(add_gradients, ends, data, self.sgd(lr), start=start)
        return Work(state, Upload({"change": Sum(None, subtract_(ends, shared))}, metrics=loss.metrics()))

    def model(self, backend: Backend, shared: Params, own: dict[str, Tensor], state: Any) -> Models:
        return OneNetwork(shared)


class FedAvgM(FedAvg):
    """FedAvg with momentum at the server."""

    search: ClassVar[dict[str, tuple[Any, ...]]] = {"lr": LEARNING_RATES, "server_optimizer.lr": (0.1, 0.3, 1.0)}
    server_optimizer: Momentum = Momentum()


ADAPTIVE_SEARCH = {"lr": LEARNING_RATES, "server_optimizer.lr": (0.001, 0.003, 0.01, 0.03, 0.1)}


class FedAdagrad(FedAvg):
    """FedAvg with Adagrad at the server."""

    search: ClassVar[dict[str, tuple[Any, ...]]] = ADAPTIVE_SEARCH
    server_optimizer: Adagrad = Adagrad()


class FedAdam(FedAvg):
    """FedAvg with Adam at the server."""

    search: ClassVar[dict[str, tuple[Any, ...]]] = ADAPTIVE_SEARCH
    server_optimizer: Adam = Adam()


class FedYogi(FedAvg):
    """FedAvg with Yogi at the server."""

    search: ClassVar[dict[str, tuple[Any, ...]]] = ADAPTIVE_SEARCH
    server_optimizer: Yogi = Yogi()


class FedProx(FedAvg):
    """FedAvg with a proximal term in every client's loss."""

    search: ClassVar[dict[str, tuple[Any, ...]]] = {"lr": LEARNING_RATES, "mu": (0.001, 0.01, 0.1, 1.0)}

    mu: NonNegative = 0.01

    def work(self, task: Any, shared: Params, own: dict[str, Tensor], state: Any, data: LocalData) -> Work:
        near = proximal(data.backend.add_gradients, expand(shared, len(data.weight)), self.mu)
        return self.train_copies(near, task, shared, state, data)


class Local(LocalTraining):
    """A model of its own for every client, from common start values."""

    def init_server(self, problem: Problem) -> Any:
        return NetworkServer({})

    def merge(self, problem: Problem, server: Any, task: Any, totals: dict[str, Total], rows: Rows) -> Any:
        return server

    def init_client(self, population: Population) -> Params:
        return population.initial_network()

    def work(self, task: Any, shared: Any, own: dict[str, Tensor], state: Params, data: LocalData) -> Work:
        mine = map_params(Tensor.clone, state)
        loss = descend(data.backend.add_gradients, mine, data, self.sgd(task))
        return Work(mine, Upload(metrics=loss.metrics()))

    def model(self, backend: Backend, shared: Any, own: dict[str, Tensor], state: Params) -> Models:
        return Networks(state)


def mean(total: Total) -> Any:
    """sum_i weight_i value_i / sum_i weight_i of a sum with one weight per client."""
    return tree_map(lambda leaf: leaf[0] / total.weight[0], total.value)
