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
from .contract import Problem, Rows, Sum, Total, Upload, Work
from .fedavg import mean
from .local.batches import LocalData
from .local.sgd import LocalTraining, descend


class ScaffoldServer(NamedTuple):
    shared: dict[str, Params]  # "model" and "control", the paper's x and c: both are sent to all


class Scaffold(LocalTraining):
    """FedAvg with control variates."""

    title: ClassVar[str] = "SCAFFOLD"

    momentum: Literal[0] = 0
    server_lr: Positive = 1.0

    def init_server(self, problem: Problem) -> ScaffoldServer:
        start = problem.population.initial_network()
        return ScaffoldServer({"model": start, "control": map_params(torch.zeros_like, start)})

    def merge(self, problem: Problem, server: Any, task: Any, totals: dict[str, Total], rows: Rows) -> ScaffoldServer:
        change, control = mean(totals["change"]), totals["control"].value  # p_i sum to 1 over all clients
        model = map_params(lambda x, d: x + self.server_lr * d, server.shared["model"], change)
        return ScaffoldServer(
            {"model": model, "control": map_params(lambda c, d: c + d[0], server.shared["control"], control)}
        )

    def init_client(self, population: Population) -> Params:
        return map_params(torch.zeros_like, population.initial_network())

    def work(self, task: Any, shared: Any, own: dict[str, Tensor], state: Params, data: LocalData) -> Work:
        start, control = shared["model"], shared["control"]
        drift = map_params(torch.sub, state, control)  # c_i - c

        def add_corrected(at: Params, velocity: Params, momentum: float, batch: Batch) -> Tensor:
            losses = data.backend.add_gradients(at, velocity, momentum, batch)
            map_params(lambda v, d: v.sub_(d[: len(v)]), velocity, drift)
            return losses

        ends, sgd = data.copies(start), self.sgd(task)
        loss = descend(add_corrected, ends, data, sgd)
        change = subtract_(ends, start)
        per_step = -1 / (task * sgd.count_steps(data).to(data.weight))
        mine = map_params(lambda d, moved: d + per_client(per_step, moved) * moved, drift, change)
        sums = {"change": Sum(None, change), "control": Sum(None, map_params(torch.sub, mine, state))}
        return Work(mine, Upload(sums, metrics=loss.metrics()))

    def model(self, backend: Backend, shared: Any, own: dict[str, Tensor], state: Params) -> Models:
        return OneNetwork(shared["model"])
