"""FedProx (Li et al., Federated Optimization in Heterogeneous Networks, MLSys 2020): FedAvg whose clients stay near.

theta_i <- local SGD on f_i(theta) + mu/2 |theta - theta_t|^2, with theta_t the shared model as the client received it;
theta <- theta + sum_{i in S} p_i (theta_i - theta) / sum_{i in S} p_i. With mu = 0 it is FedAvg.
What leaves a client: its weighted change, in a sum.
"""

from __future__ import annotations

from typing import Any, ClassVar

from ..core.backends import Backend
from ..core.settings import NonNegative
from ..core.trees import Params, expand, subtract_
from .contract import Sum, Upload, Work
from .fedavg import FedAvg
from .local.batches import LocalData
from .local.sgd import LEARNING_RATES, descend, proximal


class FedProx(FedAvg):
    """FedAvg with a proximal term in every client's loss.

    >>> from torch import nn
    >>> from ppfl import Population, fit
    >>> from ppfl.data import digits_federation
    >>> fit(Population(nn.Linear(64, 10), k=1), digits_federation(), FedProx(lr=0.1, mu=0.1), rounds=2)
    <Fitted FedProx(lr=0.1, mu=0.1), 2 rounds, 40 clients, accuracy ...%>
    """

    name: ClassVar[str] = "fedprox"
    title: ClassVar[str] = "FedProx"
    search: ClassVar[dict[str, tuple[Any, ...]]] = {"lr": LEARNING_RATES, "mu": (0.001, 0.01, 0.1, 1.0)}

    mu: NonNegative = 0.01

    def work(self, backend: Backend, task: float, shared: Params, own: Any, client: Any, data: LocalData) -> Work:
        clients = len(data.weight)
        ends = data.space.copies(shared, clients)
        near = proximal(backend.add_gradients, expand(shared, clients), self.mu)
        loss = descend(near, ends, data, self, lr=task)
        change = Sum(None, subtract_(ends, shared))
        return Work(client, Upload({"change": change}, metrics=loss.metrics()))
