"""Centralized: what SGD on pooled data does, one step per round (FedSGD of McMahan et al., 2017; FedAvg with E = 1).

v <- momentum v + sum_{i in S} p_i g_i / sum_{i in S} p_i + weight_decay theta;  theta <- theta - lr v,
with g_i the gradient of f_i on one batch. A client's own velocity would not outlive its one step, so it is the
server that has it. With whole batches and everyone in S this is gradient descent on sum_i p_i f_i.
What leaves a client: its weighted gradient, in a sum.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal, NamedTuple

import torch

from ..core.backends import Backend
from ..core.population import Models, OneNetwork
from ..core.trees import Params, map_params
from .contract import MethodDefaults, Problem, Rows, Sum, Total, Upload, Work
from .fedavg import mean, one_model_only
from .local.batches import LocalData
from .local.sgd import LocalTraining, TrainingLoss


class CentralizedServer(NamedTuple):
    shared: Params
    velocity: Params


class Centralized(MethodDefaults, LocalTraining):
    """One step per round on everyone's gradients.

    >>> from torch import nn
    >>> from ppfl import Population, fit
    >>> from ppfl.data import digits_federation
    >>> fit(Population(nn.Linear(64, 10), k=1), digits_federation(), Centralized(lr=0.1), rounds=2)
    <Fitted Centralized(lr=0.1), 2 rounds, 40 clients, accuracy ...%>
    """

    name: ClassVar[str] = "centralized"
    title: ClassVar[str] = "Centralized"

    local_epochs: None = None
    local_steps: Literal[1] = 1

    def check(self, problem: Problem) -> None:
        one_model_only(self.name, problem)

    def init_server(self, problem: Problem) -> CentralizedServer:
        start = problem.population.initial_network()
        return CentralizedServer(start, map_params(torch.zeros_like, start))

    def merge(
        self, problem: Problem, server: CentralizedServer, task: float, totals: dict[str, Total], rows: Rows
    ) -> CentralizedServer:
        def next_velocity(v: torch.Tensor, g: torch.Tensor, theta: torch.Tensor) -> torch.Tensor:
            return self.momentum * v + g + self.weight_decay * theta

        velocity = map_params(next_velocity, server.velocity, mean(totals["gradient"]), server.shared)
        return CentralizedServer(map_params(lambda theta, v: theta - task * v, server.shared, velocity), velocity)

    def global_network(self, server: CentralizedServer) -> Params:
        return server.shared

    def work(self, backend: Backend, task: float, shared: Params, own: Any, client: Any, data: LocalData) -> Work:
        (batch,) = self.batches(data)
        at = data.space.copies(shared, len(data.weight))
        gradient = data.space.empty_like(at)
        losses = backend.add_gradients(at, gradient, 0.0, batch)
        loss = TrainingLoss(losses, batch.real)
        return Work(client, Upload({"gradient": Sum(None, gradient)}, metrics=loss.metrics()))

    def model(self, backend: Backend, shared: Params, own: Any, client: Any) -> Models:
        return OneNetwork(shared)
