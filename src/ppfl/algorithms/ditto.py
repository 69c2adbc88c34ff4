"""Ditto (Li et al., 2021): a model for all by FedAvg, and beside it one for every client that stays near it.

v_i <- local SGD on f_i(v) + mu/2 |v - w|^2, with w the shared model as the client received it in this round.
The larger mu, the nearer to FedAvg; with mu = 0 it is Local. Both runs of a round see the same batches. The default
mu = 1 is the paper's for clients that cannot choose; those that can choose among 0.1, 1 and 2.
What leaves a client: its weighted change of the shared model, in a sum; its own model never does.
"""

from __future__ import annotations

from typing import Any, ClassVar

from ..core.backends import Backend
from ..core.population import Models, Population
from ..core.settings import NonNegative
from ..core.trees import Params, expand
from .contract import Work
from .fedavg import FedAvg
from .local.batches import LocalData
from .local.own_model import OwnModel, as_state, models_of, no_model_yet, to_train
from .local.sgd import LEARNING_RATES, descend, proximal


class Ditto(FedAvg):
    """FedAvg, and a model of its own for every client.

    >>> from torch import nn
    >>> from ppfl import Population, fit
    >>> from ppfl.data import digits_federation
    >>> fit(Population(nn.Linear(64, 10), k=1), digits_federation(), Ditto(lr=0.1, mu=0.5), rounds=2)
    <Fitted Ditto(lr=0.1, mu=0.5), 2 rounds, 40 clients, accuracy ...%>
    """

    name: ClassVar[str] = "ditto"
    title: ClassVar[str] = "Ditto"
    search: ClassVar[dict[str, tuple[Any, ...]]] = {"lr": LEARNING_RATES, "mu": (0.1, 1.0, 2.0)}

    mu: NonNegative = 1.0  # the paper's lambda

    def global_network(self, server: Any) -> None:
        """None: what clients use is their own."""

    def init_client(self, population: Population) -> OwnModel:
        return no_model_yet(population)

    def work(self, backend: Backend, task: float, shared: Params, own: Any, client: OwnModel, data: LocalData) -> Work:
        for_all = super().work(backend, task, shared, own, {}, data)
        mine = to_train(client, shared)
        near = proximal(backend.add_gradients, expand(shared, len(data.weight)), self.mu)
        loss = descend(near, mine, data, self, lr=task)
        return Work(as_state(mine), for_all.upload._replace(metrics=loss.metrics()))

    def model(self, backend: Backend, shared: Params, own: Any, client: OwnModel) -> Models:
        return models_of(client, shared)
