"""pFedMe (Dinh et al., 2020): the shared model descends the clients' Moreau envelopes.

For every batch:  theta_i ~ argmin f_i(theta; batch) + mu/2 |theta - w_i|^2,  by `inner_steps` steps of SGD,
                  w_i <- w_i - outer_lr mu (w_i - theta_i),
on the server:    w <- (1 - beta) w + beta sum_{i in S} p_i w_i / sum_{i in S} p_i.
A client predicts with theta_i. The paper asks for theta_i to some accuracy and leaves open where its steps begin:
here they go on from where it last was, from batch to batch and from round to round, so that short steps still find
it. The schedule shortens both kinds of steps.
What leaves a client: its weighted change of w, in a sum; theta_i never does.
"""

from __future__ import annotations

from itertools import repeat
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import torch
from pydantic import Field, model_validator
from torch import Tensor

from ..core.population import Population
from ..core.shared import Shared
from .batches import LocalData
from .contract import Personal, Plan, Problem, Sum, Total, Upload, Work
from .descent import LEARNING_RATES, Met, Positive, descend, network_push, pulled
from .fedavg import FedAvg, FedAvgServer, one_model
from .own import Own, kept, networks, nobody_yet, personal
from .schedules import factor


class Steps(NamedTuple):
    lr: float  # of theta_i
    pace: float  # how much of the way to theta_i its w_i goes


class PFedMe(FedAvg):
    """A shared model that is near everyone's own."""

    name: ClassVar[str] = "pfedme"
    search: ClassVar[dict[str, tuple[Any, ...]]] = {
        "lr": LEARNING_RATES,
        "mu": (1.0, 5.0, 15.0),
        "outer_lr": (0.005, 0.03),
    }

    lr: Positive | Literal["auto"] = 0.05  # of theta_i: the step along the gradient of f_i, as in other methods
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0  # fresh for every batch
    mu: Positive = 15.0  # the paper's lambda
    outer_lr: Positive = 0.005  # the paper's eta, of w_i
    inner_steps: Annotated[int, Field(ge=1)] = 5  # the paper's K
    beta: Positive = 1.0

    @model_validator(mode="after")
    def _outer_steps_come_nearer(self) -> PFedMe:
        if self.outer_lr * self.mu >= 2:
            raise ValueError(
                f"outer_lr times mu is {self.outer_lr * self.mu:g}, and each step would take the shared model farther "
                f"from the clients' own; keep it below 2, best at most 1"
            )
        return self

    def init(self, problem: Problem) -> tuple[FedAvgServer, Any]:
        server, _ = super().init(problem)
        return server, nobody_yet(problem, server.shared)

    def plan(self, problem: Problem, server: FedAvgServer, round: int) -> Plan:
        plan = super().plan(problem, server, round)
        pace = self.outer_lr * self.mu * factor(self.schedule, round, problem.rounds)
        return plan._replace(task=Steps(lr=plan.task, pace=pace))

    def work(self, population: Population, task: Any, shared: Shared, own: Any, client: Own, data: LocalData) -> Work:
        start, theta = one_model(shared), networks(client, shared)
        w = start.copies(len(data.weight), data.space)
        near_w = pulled(network_push(population, data), w, self.mu)
        lost, met = torch.zeros_like(data.weight), torch.zeros_like(data.weight)
        for batch in self.batches(data):
            found = descend(near_w, theta, data, self, task.lr, batches=repeat(batch, self.inner_steps))
            moving = len(batch.x)
            w.first(moving).map(lambda leaf, to: leaf.lerp_(to, task.pace), theta.first(moving))
            lost.addcmul_(found.loss, found.samples)
            met.add_(found.samples)
        change = Sum(None, w.map(Tensor.sub_, start))
        return Work(kept(theta), Upload({"change": change}, {}), *Met(lost / met.clamp_min(1), met))

    def merge(
        self, problem: Problem, server: FedAvgServer, plan: Plan, totals: dict[str, Total], rows: Any
    ) -> FedAvgServer:
        mean = super().merge(problem, server, plan, totals, rows).shared
        return FedAvgServer(server.shared.map(lambda w, mean: torch.lerp(w, mean, self.beta), mean))

    def personal(self, server: FedAvgServer, clients: Own) -> Personal:
        return personal(clients, server.shared)
