"""SCAFFOLD (Karimireddy et al., ICML 2020): FedAvg whose local steps are corrected for the drift of each client.

y_i <- y_i - lr (g_i(y_i) - c_i + c)  for the steps of a round, from y_i = theta;
c_i+ = c_i - c + (theta - y_i) / (steps_i lr)                            (option II of the paper)
theta <- theta + server_lr mean_i (y_i - theta);   c <- c + sum_{i in S} p_i (c_i+ - c_i), with all p_i summing to 1.
The paper weights all clients alike; here they count by p_i, as in every other method, so that c stays the mean of the
c_i. Local steps are plain SGD: with momentum the step count in c_i+ would not be the length of the way.
What leaves a client: its weighted change of theta and of its control variate, in sums. Its c_i stays with it.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from ..core.backends import Backend, Batch
from ..core.population import Models, OneNetwork, Population
from ..core.settings import Positive
from ..core.trees import Params, map_params, per_client, subtract_
from .contract import MethodDefaults, Problem, Rows, Sum, Total, Upload, Work
from .fedavg import mean, one_model_only
from .local.batches import LocalData
from .local.sgd import LocalTraining, descend


class ScaffoldServer(NamedTuple):
    shared: dict[str, Params]  # "model" and "control", the paper's x and c: both are sent to all


class Scaffold(MethodDefaults, LocalTraining):
    """FedAvg with control variates.

    >>> from torch import nn
    >>> from ppfl import Population, fit
    >>> from ppfl.data import digits_federation
    >>> fit(Population(nn.Linear(64, 10), k=1), digits_federation(), Scaffold(lr=0.1), rounds=2)
    <Fitted Scaffold(lr=0.1), 2 rounds, 40 clients, accuracy ...%>
    """

    name: ClassVar[str] = "scaffold"
    title: ClassVar[str] = "SCAFFOLD"

    momentum: Literal[0] = 0
    server_lr: Positive = 1.0

    def check(self, problem: Problem) -> None:
        one_model_only(self.name, problem)

    def init_server(self, problem: Problem) -> ScaffoldServer:
        start = problem.population.initial_network()
        return ScaffoldServer({"model": start, "control": map_params(torch.zeros_like, start)})

    def merge(
        self, problem: Problem, server: ScaffoldServer, task: float, totals: dict[str, Total], rows: Rows
    ) -> ScaffoldServer:
        change, control = mean(totals["change"]), totals["control"].value  # p_i sum to 1 over all clients
        model = map_params(lambda x, d: x + self.server_lr * d, server.shared["model"], change)
        return ScaffoldServer(
            {"model": model, "control": map_params(lambda c, d: c + d[0], server.shared["control"], control)}
        )

    def global_network(self, server: ScaffoldServer) -> Params:
        return server.shared["model"]

    def init_client(self, population: Population) -> Params:
        return map_params(torch.zeros_like, population.initial_network())

    def work(
        self, backend: Backend, task: float, shared: dict[str, Params], own: Any, client: Params, data: LocalData
    ) -> Work:
        start, control = shared["model"], shared["control"]
        drift = map_params(torch.sub, client, control)  # c_i - c

        def add_corrected(at: Params, velocity: Params, momentum: float, batch: Batch) -> Tensor:
            losses = backend.add_gradients(at, velocity, momentum, batch)
            map_params(lambda v, d: v.sub_(d[: len(v)]), velocity, drift)
            return losses

        ends = data.space.copies(start, len(data.weight))
        loss = descend(add_corrected, ends, data, self, lr=task)
        change = subtract_(ends, start)
        per_step = -1 / (task * self.count_steps(data).to(data.weight))
        mine = map_params(lambda d, moved: d + per_client(per_step, moved) * moved, drift, change)
        sums = {"change": Sum(None, change), "control": Sum(None, map_params(torch.sub, mine, client))}
        return Work(mine, Upload(sums, metrics=loss.metrics()))

    def model(self, backend: Backend, shared: dict[str, Params], own: Any, client: Any) -> Models:
        return OneNetwork(shared["model"])
