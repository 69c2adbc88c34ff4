"""Optimizers at the server (Reddi et al., Adaptive Federated Optimization, ICLR 2021), for methods whose round ends in
"the models plus a mean change".

The server takes the negative of the mean change d for a gradient, and makes one step of its optimizer:

| optimizer | step of the server |
|---|---|
| momentum (also Hsu et al., 2019) | m <- momentum m + d;  theta <- theta + lr m |
| adagrad, adam, yogi | m <- beta1 m + (1 - beta1) d;  theta <- theta + lr m / (sqrt(v) + tau) |
| where for adagrad | v <- v + d^2 |
| for adam | v <- beta2 v + (1 - beta2) d^2 |
| for yogi | v <- v - (1 - beta2) d^2 sign(v - d^2) |

All of it is per parameter, v starts at tau^2, and m and v are not corrected for their start, as in Algorithm 2 of the
paper. The schedule lowers the step size of the clients, not that of the server. An exchange that does not move the
models, such as PPFL's survey or a round of memberships alone, is no step of the optimizer.
"""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from ..core.registry import ByName, Registry
from ..core.settings import Positive, Settings
from ..core.trees import Params, map_params
from ..errors import SettingError

Decay = Annotated[float, Field(ge=0, lt=1)]


class ServerOptimizer(Settings):
    """An optimizer of what a server sends to all; its state is a tree of tensors."""

    def start(self, shared: Params) -> Any:
        """The state before the first step."""
        raise NotImplementedError

    def step(self, shared: Params, change: Params, state: Any) -> tuple[Params, Any]:
        """The next models and the next state, from a mean change of the models."""
        raise NotImplementedError


def _checked_optimizer(name: str, found: Any) -> type[ServerOptimizer]:
    if not (isinstance(found, type) and issubclass(found, ServerOptimizer)):
        raise SettingError(f"{name!r} is no class of optimizers; name one that derives from ServerOptimizer")
    return found


OPTIMIZERS: Registry[type[ServerOptimizer]] = Registry("server optimizer", _checked_optimizer)
OptimizerByName = Annotated[ServerOptimizer | None, ByName(OPTIMIZERS, optional=True)]


class MomentumState(NamedTuple):
    velocity: Params  # m


@OPTIMIZERS.register("momentum")
class Momentum(ServerOptimizer):
    """SGD with momentum.

    >>> models, change = {"w": torch.tensor([1.0])}, {"w": torch.tensor([0.5])}
    >>> optimizer = Momentum(lr=1.0, momentum=0.9)
    >>> models, state = optimizer.step(models, change, optimizer.start(models))
    >>> optimizer.step(models, change, state)[0]
    {'w': tensor([2.4500])}
    """

    lr: Positive = 1.0
    momentum: Decay = 0.9

    def start(self, shared: Params) -> MomentumState:
        return MomentumState(map_params(torch.zeros_like, shared))

    def step(self, shared: Params, change: Params, state: MomentumState) -> tuple[Params, MomentumState]:
        velocity = map_params(lambda m, d: self.momentum * m + d, state.velocity, change)
        return map_params(lambda x, m: x + self.lr * m, shared, velocity), MomentumState(velocity)


class AdaptiveState(NamedTuple):
    first_moment: Params  # m
    second_moment: Params  # v


class _Adaptive(ServerOptimizer):
    lr: Positive = 0.01
    beta1: Decay = 0.9
    tau: Positive = 1e-3  # the larger, the less steps adapt to the size of changes

    def next_second_moment(self, v: Tensor, squared: Tensor) -> Tensor:
        """v after a change with these squares."""
        raise NotImplementedError

    def start(self, shared: Params) -> AdaptiveState:
        second = map_params(lambda x: torch.full_like(x, self.tau**2), shared)
        return AdaptiveState(map_params(torch.zeros_like, shared), second)

    def step(self, shared: Params, change: Params, state: AdaptiveState) -> tuple[Params, AdaptiveState]:
        first = map_params(lambda m, d: self.beta1 * m + (1 - self.beta1) * d, state.first_moment, change)
        second = map_params(lambda v, d: self.next_second_moment(v, d.square()), state.second_moment, change)

        def moved(x: Tensor, m: Tensor, v: Tensor) -> Tensor:
            return x + self.lr * m / (v.sqrt() + self.tau)

        return map_params(moved, shared, first, second), AdaptiveState(first, second)


@OPTIMIZERS.register("adagrad")
class Adagrad(_Adaptive):
    """Adagrad; as in the paper without momentum, beta1 = 0.

    >>> float(Adagrad().next_second_moment(torch.tensor(1.0), torch.tensor(0.5)))
    1.5
    """

    beta1: Decay = 0.0

    def next_second_moment(self, v: Tensor, squared: Tensor) -> Tensor:
        return v + squared


@OPTIMIZERS.register("adam")
class Adam(_Adaptive):
    """Adam.

    >>> float(Adam(beta2=0.5).next_second_moment(torch.tensor(1.0), torch.tensor(0.5)))
    0.75
    """

    beta2: Decay = 0.99

    def next_second_moment(self, v: Tensor, squared: Tensor) -> Tensor:
        return self.beta2 * v + (1 - self.beta2) * squared


@OPTIMIZERS.register("yogi")
class Yogi(_Adaptive):
    """Yogi: v falls more slowly than that of Adam where changes become small.

    >>> float(Yogi(beta2=0.5).next_second_moment(torch.tensor(1.0), torch.tensor(0.25)))
    0.875
    """

    beta2: Decay = 0.99

    def next_second_moment(self, v: Tensor, squared: Tensor) -> Tensor:
        return v - (1 - self.beta2) * squared * torch.sign(v - squared)
