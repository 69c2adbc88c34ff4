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

from ..core.backends import Backend
from ..core.population import Models, Population
from ..core.settings import Positive, Repeats
from ..core.trees import Params, first_clients, map_params, subtract_
from ..io.codec import message
from .contract import Plan, Problem, Rows, Sum, Total, Upload, Work
from .fedavg import FedAvg, NetworkServer, mean
from .local.batches import LocalData
from .local.own_model import OwnModel, as_state, models_of, no_model_yet, to_train
from .local.schedules import factor
from .local.sgd import (
    LEARNING_RATES,
    TrainingLoss,
    descend,
    proximal,
)


@message
class PFedMeSteps(NamedTuple):
    lr: float  # of theta_i
    pace: float  # how much of the way to theta_i its w_i goes


class PFedMe(FedAvg):
    """A shared model that is near everyone's own.

    >>> from torch import nn
    >>> from ppfl import Population, fit
    >>> from ppfl.data import digits_federation
    >>> fit(Population(nn.Linear(64, 10), k=1), digits_federation(), PFedMe(lr=0.1), rounds=2)
    <Fitted PFedMe(lr=0.1), 2 rounds, 40 clients, accuracy ...%>
    """

    name: ClassVar[str] = "pfedme"
    title: ClassVar[str] = "pFedMe"
    search: ClassVar[dict[str, tuple[Any, ...]]] = {
        "lr": LEARNING_RATES,
        "mu": (1.0, 5.0, 15.0),
        "outer_lr": (0.005, 0.03),
    }

    lr: Positive | Literal["auto"] = 0.05  # of theta_i: the step along the gradient of f_i, as in other methods
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0  # fresh for every batch
    mu: Positive = 15.0  # the paper's lambda
    outer_lr: Positive = 0.005  # the paper's eta, of w_i
    inner_steps: Repeats = 5  # the paper's K
    beta: Positive = 1.0

    @model_validator(mode="after")
    def _outer_steps_come_nearer(self) -> PFedMe:
        if self.outer_lr * self.mu >= 2:
            raise ValueError(
                f"outer_lr times mu is {self.outer_lr * self.mu:g}, and each step would take the shared model farther "
                f"from the clients' own; keep it below 2, best at most 1"
            )
        return self

    def plan(self, problem: Problem, server: NetworkServer, round: int) -> Plan:
        plan = super().plan(problem, server, round)
        pace = self.outer_lr * self.mu * factor(self.schedule, round, problem.rounds)
        return plan._replace(task=PFedMeSteps(lr=plan.task, pace=pace))

    def merge(
        self, problem: Problem, server: NetworkServer, task: Any, totals: dict[str, Total], rows: Rows
    ) -> NetworkServer:
        change = map_params(lambda d: self.beta * d, mean(totals["change"]))
        return NetworkServer(*self.server_step(server, change))

    def global_network(self, server: Any) -> None:
        """None: what clients use is their own."""

    def init_client(self, population: Population) -> OwnModel:
        return no_model_yet(population)

    def work(self, backend: Backend, task: Any, shared: Params, own: Any, client: OwnModel, data: LocalData) -> Work:
        theta = to_train(client, shared)
        w = data.space.copies(shared, len(data.weight))
        near_w = proximal(backend.add_gradients, w, self.mu)
        loss, samples = torch.zeros_like(data.weight), torch.zeros_like(data.weight)
        for batch in self.batches(data):
            found = descend(near_w, theta, data, self, task.lr, batches=repeat(batch, self.inner_steps))
            moving = len(batch.x)
            pairs = first_clients(w, moving), first_clients(theta, moving)
            map_params(lambda leaf, to: leaf.lerp_(to, task.pace), *pairs)
            loss.addcmul_(found.loss, found.samples)
            samples.add_(found.samples)
        change = Sum(None, subtract_(w, shared))
        mean = TrainingLoss(loss / samples.clamp_min(1), samples)
        return Work(as_state(theta), Upload({"change": change}, metrics=mean.metrics()))

    def model(self, backend: Backend, shared: Params, own: Any, client: OwnModel) -> Models:
        return models_of(client, shared)
