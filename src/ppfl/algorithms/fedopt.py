"""FedOpt (Reddi et al., Adaptive Federated Optimization, ICLR 2021): FedAvg with an optimizer at the server.

Clients do what they do in FedAvg. The server takes the negative of their mean change d for a gradient, and makes one
step of its optimizer: d = sum_{i in S} p_i (theta_i - theta) / sum_{i in S} p_i, with S the clients of the round.

| method | step of the server |
|---|---|
| FedAvgM (also Hsu et al., 2019) | m <- server_momentum m + d;  theta <- theta + server_lr m |
| FedAdagrad, FedAdam, FedYogi | m <- beta1 m + (1 - beta1) d;  theta <- theta + server_lr m / (sqrt(v) + tau) |
| where for FedAdagrad | v <- v + d^2 |
| for FedAdam | v <- beta2 v + (1 - beta2) d^2 |
| for FedYogi | v <- v - (1 - beta2) d^2 sign(v - d^2) |

All of it is per parameter, v starts at tau^2, and m and v are not corrected for their start, as in Algorithm 2 of the
paper. The schedule lowers the step size of the clients, not server_lr.
What leaves a client: its weighted change, in a sum.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Annotated, Any, ClassVar, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from ..core.params import Params, map_params
from ..core.settings import Positive
from .contract import Problem, Rows, Total
from .fedavg import FedAvg, mean
from .local.sgd import LEARNING_RATES

Decay = Annotated[float, Field(ge=0, lt=1)]


class MomentumServer(NamedTuple):
    shared: Params
    velocity: Params  # m


class AdaptiveServer(NamedTuple):
    shared: Params
    first_moment: Params  # m
    second_moment: Params  # v


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

    server_lr: Positive = 1.0
    server_momentum: Decay = 0.9

    def init_server(self, problem: Problem) -> MomentumServer:
        start = problem.population.initial_network()
        return MomentumServer(start, map_params(torch.zeros_like, start))

    def merge(
        self, problem: Problem, server: MomentumServer, task: Any, totals: dict[str, Total], rows: Rows
    ) -> MomentumServer:
        velocity = map_params(lambda m, d: self.server_momentum * m + d, server.velocity, mean(totals["change"]))
        return MomentumServer(map_params(lambda x, m: x + self.server_lr * m, server.shared, velocity), velocity)


class AdaptiveOptimizer(FedAvg):
    """What FedAdagrad, FedAdam and FedYogi have in common: Algorithm 2, but for v."""

    search: ClassVar[dict[str, tuple[Any, ...]]] = {"lr": LEARNING_RATES, "server_lr": (0.001, 0.003, 0.01, 0.03, 0.1)}

    server_lr: Positive = 0.01
    beta1: Decay = 0.9
    tau: Positive = 1e-3  # the larger, the less steps adapt to the size of changes

    @abstractmethod
    def next_second_moment(self, v: Tensor, squared: Tensor) -> Tensor:
        """v after a change with these squares."""

    def init_server(self, problem: Problem) -> AdaptiveServer:
        start = problem.population.initial_network()
        second = map_params(lambda x: torch.full_like(x, self.tau**2), start)
        return AdaptiveServer(start, map_params(torch.zeros_like, start), second)

    def merge(
        self, problem: Problem, server: AdaptiveServer, task: Any, totals: dict[str, Total], rows: Rows
    ) -> AdaptiveServer:
        change = mean(totals["change"])
        first = map_params(lambda m, d: self.beta1 * m + (1 - self.beta1) * d, server.first_moment, change)
        second = map_params(lambda v, d: self.next_second_moment(v, d.square()), server.second_moment, change)

        def step(x: Tensor, m: Tensor, v: Tensor) -> Tensor:
            return x + self.server_lr * m / (v.sqrt() + self.tau)

        return AdaptiveServer(map_params(step, server.shared, first, second), first, second)


class FedAdagrad(AdaptiveOptimizer):
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

    def next_second_moment(self, v: Tensor, squared: Tensor) -> Tensor:
        return v + squared


class FedAdam(AdaptiveOptimizer):
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

    def next_second_moment(self, v: Tensor, squared: Tensor) -> Tensor:
        return self.beta2 * v + (1 - self.beta2) * squared


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

    def next_second_moment(self, v: Tensor, squared: Tensor) -> Tensor:
        return v - (1 - self.beta2) * squared * torch.sign(v - squared)
