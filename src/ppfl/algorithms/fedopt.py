"""FedOpt (Reddi et al., Adaptive Federated Optimization, ICLR 2021): FedAvg with an optimizer at the server.

Clients do what they do in FedAvg, and the server makes one step of its optimizer along their mean change
d = sum_{i in S} p_i (theta_i - theta) / sum_{i in S} p_i, with S the clients of the round. `server_optimizers.py` has
the steps. These are FedAvg with the setting `server_optimizer`, which other methods have too, under the names of the
paper.
What leaves a client: its weighted change, in a sum.
"""

from __future__ import annotations

from typing import Any, ClassVar

from ..core.settings import Positive
from .fedavg import FedAvg
from .local.sgd import LEARNING_RATES
from .server_optimizers import Adagrad, Adam, Decay, Momentum, ServerOptimizer, Yogi


class FedAvgM(FedAvg):
    """FedAvg with momentum at the server. Without momentum and with server_lr = 1 it is FedAvg.

    >>> from torch import nn
    >>> from ppfl import Population, fit
    >>> from ppfl.data import digits_federation
    >>> fit(Population(nn.Linear(64, 10), k=1), digits_federation(), FedAvgM(lr=0.1, server_momentum=0.5), rounds=2)
    <Fitted FedAvgM(lr=0.1, server_momentum=0.5), 2 rounds, 40 clients, accuracy ...%>
    """

    name: ClassVar[str] = "fedavgm"
    title: ClassVar[str] = "FedAvgM"
    search: ClassVar[dict[str, tuple[Any, ...]]] = {"lr": LEARNING_RATES, "server_lr": (0.1, 0.3, 1.0)}

    server_optimizer: None = None
    server_lr: Positive = 1.0
    server_momentum: Decay = 0.9

    @property
    def optimizer(self) -> ServerOptimizer:
        return Momentum(lr=self.server_lr, momentum=self.server_momentum)


class AdaptiveFedAvg(FedAvg):
    """What FedAdagrad, FedAdam and FedYogi have in common."""

    search: ClassVar[dict[str, tuple[Any, ...]]] = {"lr": LEARNING_RATES, "server_lr": (0.001, 0.003, 0.01, 0.03, 0.1)}

    server_optimizer: None = None
    server_lr: Positive = 0.01
    beta1: Decay = 0.9
    tau: Positive = 1e-3  # the larger, the less steps adapt to the size of changes


class FedAdagrad(AdaptiveFedAvg):
    """FedAvg with Adagrad at the server; as in the paper without momentum, beta1 = 0.

    >>> from torch import nn
    >>> from ppfl import Population, fit
    >>> from ppfl.data import digits_federation
    >>> fit(Population(nn.Linear(64, 10), k=1), digits_federation(), FedAdagrad(lr=0.1, server_lr=0.1), rounds=2)
    <Fitted FedAdagrad(lr=0.1, server_lr=0.1), 2 rounds, 40 clients, accuracy ...%>
    """

    name: ClassVar[str] = "fedadagrad"
    title: ClassVar[str] = "FedAdagrad"

    beta1: Decay = 0.0

    @property
    def optimizer(self) -> ServerOptimizer:
        return Adagrad(lr=self.server_lr, beta1=self.beta1, tau=self.tau)


class FedAdam(AdaptiveFedAvg):
    """FedAvg with Adam at the server.

    >>> from torch import nn
    >>> from ppfl import Population, fit
    >>> from ppfl.data import digits_federation
    >>> fit(Population(nn.Linear(64, 10), k=1), digits_federation(), FedAdam(lr=0.1, server_lr=0.03), rounds=2)
    <Fitted FedAdam(lr=0.1, server_lr=0.03), 2 rounds, 40 clients, accuracy ...%>
    """

    name: ClassVar[str] = "fedadam"
    title: ClassVar[str] = "FedAdam"

    beta2: Decay = 0.99

    @property
    def optimizer(self) -> ServerOptimizer:
        return Adam(lr=self.server_lr, beta1=self.beta1, beta2=self.beta2, tau=self.tau)


class FedYogi(FedAdam):
    """FedAvg with Yogi at the server: v falls more slowly than that of Adam where changes become small.

    >>> from torch import nn
    >>> from ppfl import Population, fit
    >>> from ppfl.data import digits_federation
    >>> fit(Population(nn.Linear(64, 10), k=1), digits_federation(), FedYogi(lr=0.1, server_lr=0.03), rounds=2)
    <Fitted FedYogi(lr=0.1, server_lr=0.03), 2 rounds, 40 clients, accuracy ...%>
    """

    name: ClassVar[str] = "fedyogi"
    title: ClassVar[str] = "FedYogi"

    @property
    def optimizer(self) -> ServerOptimizer:
        return Yogi(lr=self.server_lr, beta1=self.beta1, beta2=self.beta2, tau=self.tau)
