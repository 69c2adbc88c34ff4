"""Centralized: what SGD on pooled data does, a round a step (FedSGD of McMahan et al., 2017; FedAvg with E = 1).

v <- momentum v + sum_{i in S} p_i g_i / sum_{i in S} p_i + weight_decay theta;  theta <- theta - lr v,
with g_i the gradient of f_i on one batch. A client's own velocity would not outlive its one step, so it is the
server that has it. With whole batches and everyone in S this is gradient descent on sum_i p_i f_i.
What leaves a client: its weighted gradient, in a sum.
"""

from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from ..core.population import Population
from ..core.shared import Shared
from .batches import LocalData
from .contract import Personal, Plan, Problem, Sum, Total, Upload, Work
from .descent import LocalTraining, network_push
from .fedavg import mean, one_model, one_model_only, with_k


class CentralizedServer(NamedTuple):
    shared: Shared
    velocity: Shared


class Centralized(LocalTraining):
    """One step a round on everyone's gradients."""

    name: ClassVar[str] = "centralized"

    local_epochs: None = None
    local_steps: Literal[1] = 1

    def check(self, problem: Problem) -> None:
        one_model_only(self.name, problem)

    def init(self, problem: Problem) -> tuple[CentralizedServer, dict[str, Tensor]]:
        shared = problem.population.initial(problem.seed)
        return CentralizedServer(shared, shared.map(torch.zeros_like)), {}

    def work(self, population: Population, task: float, shared: Shared, own: Any, client: Any, data: LocalData) -> Work:
        (batch,) = self.batches(data)
        at = one_model(shared).copies(len(data.weight), data.space)
        gradient = at.room(data.space, "velocity")
        losses = network_push(population, data)(at, gradient, 0.0, batch)
        return Work(client, Upload({"gradient": Sum(None, gradient)}, {}), losses, batch.real)

    def merge(
        self, problem: Problem, server: CentralizedServer, plan: Plan, totals: dict[str, Total], rows: Any
    ) -> CentralizedServer:
        gradient: Shared = mean(totals["gradient"])
        gradient = gradient._replace(canonical=with_k(gradient.canonical))
        velocity = server.velocity.map(
            lambda v, g, theta: self.momentum * v + g + self.weight_decay * theta, gradient, server.shared
        )
        return CentralizedServer(server.shared.map(lambda theta, v: theta - plan.task * v, velocity), velocity)

    def personal(self, server: CentralizedServer, clients: Any) -> Personal:
        return Personal(server.shared, None, own=False)
