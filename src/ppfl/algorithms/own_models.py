"""Methods with a model that stays with its client, beside the one that all share.

Ditto (Li et al., 2021): a model for all by FedAvg, and beside it one for every client that stays near it,
v_i <- local SGD on f_i(v) + mu/2 |v - w|^2, with w the shared model as the client received it in this round.
The larger mu, the nearer to FedAvg; with mu = 0 it is Local. Both runs of a round see the same batches. The default
mu = 1 is the paper's for clients that cannot choose; those that can choose among 0.1, 1 and 2.

pFedMe (Dinh et al., 2020): the shared model descends the clients' Moreau envelopes.
For every batch:  theta_i ~ argmin f_i(theta; batch) + mu/2 |theta - w_i|^2,  by `inner_steps` steps of SGD,
                  w_i <- w_i - outer_lr mu (w_i - theta_i),
on the server:    w <- (1 - beta) w + beta sum_{i in S} p_i w_i / sum_{i in S} p_i.
A client predicts with theta_i. The paper asks for theta_i to some accuracy and leaves open where its steps begin:
here they go on from where it last was, from batch to batch and from round to round, so that short steps still find
it. The schedule shortens both kinds of steps.

What leaves a client: its weighted change of the shared model, in a sum; its own model never does.
"""

from __future__ import annotations

from itertools import repeat
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import torch
from pydantic import Field, model_validator
from torch import Tensor

from ..core.backends import Backend
from ..core.population import Models, Networks, Population
from ..core.settings import NonNegative, Positive, Repeats
from ..core.trees import Params, expand, first_clients, map_params, per_client, subtract_
from ..io.codec import message
from .contract import Problem, Rows, Sum, Total, Upload, Work
from .fedavg import FedAvg, mean
from .local.batches import LocalData
from .local.sgd import LEARNING_RATES, TrainingLoss, descend, proximal


class OwnModel(NamedTuple):
    """Client state of methods with one model per client."""

    model: Params  # leaves (C, ...)
    exists: Tensor  # (C,), 1 or 0; a client without one starts from what the server sends

    @classmethod
    def none_yet(cls, population: Population) -> OwnModel:
        """The state of one client before its first round."""
        return cls(population.initial_network(), torch.zeros((), dtype=population.dtype))

    @classmethod
    def of(cls, networks: Params) -> OwnModel:
        """The clients' networks as their state."""
        leaf = next(iter(networks.values()))
        return cls(networks, leaf.new_ones(len(leaf)))

    def or_shared(self, shared: Params) -> Params:
        """One network per client: its own, or `shared` for those that have none yet."""
        if bool(self.exists.all()):
            return self.model

        def chosen(mine: Tensor, all_: Tensor) -> Tensor:
            return torch.where(per_client(self.exists > 0, mine), mine, all_)

        return map_params(chosen, self.model, shared)


class _OwnModels(FedAvg):
    """FedAvg whose clients use models of their own."""

    def init_client(self, population: Population) -> OwnModel:
        return OwnModel.none_yet(population)

    def model(self, backend: Backend, shared: Params, own: dict[str, Tensor], state: OwnModel) -> Models:
        return Networks(state.or_shared(shared))


class Ditto(_OwnModels):
    """FedAvg, and a model of its own for every client."""

    search: ClassVar[dict[str, tuple[Any, ...]]] = {"lr": LEARNING_RATES, "mu": (0.1, 1.0, 2.0)}

    mu: NonNegative = 1.0  # the paper's lambda

    def work(self, task: Any, shared: Params, own: dict[str, Tensor], state: OwnModel, data: LocalData) -> Work:
        for_all = super().work(task, shared, own, state, data)
        mine = map_params(Tensor.clone, state.or_shared(shared))
        near = proximal(data.backend.add_gradients, expand(shared, len(data.weight)), self.mu)
        loss = descend(near, mine, data, self.sgd(task))
        return Work(OwnModel.of(mine), for_all.upload._replace(metrics=loss.metrics()))


@message
class PFedMeSteps(NamedTuple):
    lr: float  # of theta_i
    pace: float  # how much of the way to theta_i its w_i goes


class PFedMe(_OwnModels):
    """A shared model that is near everyone's own."""

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

    def task(self, round: int, rounds: int) -> PFedMeSteps:
        pace = self.outer_lr * self.mu * self.schedule_factor(round, rounds)
        return PFedMeSteps(lr=self.step_size(round, rounds), pace=pace)

    def merge(self, problem: Problem, server: Any, task: Any, totals: dict[str, Total], rows: Rows) -> Any:
        return self.step(server, map_params(lambda d: self.beta * d, mean(totals["change"])))

    def work(self, task: Any, shared: Params, own: dict[str, Tensor], state: OwnModel, data: LocalData) -> Work:
        theta = map_params(Tensor.clone, state.or_shared(shared))
        w, sgd = data.copies(shared), self.sgd(task.lr)
        near_w = proximal(data.backend.add_gradients, w, self.mu)
        loss, samples = torch.zeros_like(data.weight), torch.zeros_like(data.weight)
        for batch in sgd.batches(data):
            found = descend(near_w, theta, data, sgd, batches=repeat(batch, self.inner_steps))
            moving = len(batch.x)
            pairs = first_clients(w, moving), first_clients(theta, moving)
            map_params(lambda leaf, to: leaf.lerp_(to, task.pace), *pairs)
            loss.addcmul_(found.loss, found.samples)
            samples.add_(found.samples)
        seen = TrainingLoss(loss / samples.clamp_min(1), samples)
        upload = Upload({"change": Sum(None, subtract_(w, shared))}, metrics=seen.metrics())
        return Work(OwnModel.of(theta), upload)
