"""The three ways a membership combines K canonical models. They are different functions: equal only where
the canonical part is linear (outputs and weights) or the link is the identity (outputs and predictions)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from .losses import Classification, Loss

if TYPE_CHECKING:
    from .population import Params, Population, Shared


MembershipLoss = Callable[[Tensor], tuple[Tensor, Tensor]]  # c (C, K) -> slopes (C, K), losses (C,)


class Mix(Protocol):
    """How one client's loss and prediction depend on (theta, c)."""

    name: str
    caches_outputs: bool  # c enters after the K outputs, so they can be kept while c moves
    takes_any_part: bool  # ... wherever in the network the canonical part is

    def losses(self, population: Population, shared: Shared, c: Tensor, x: Tensor, y: Tensor) -> Tensor: ...
    def predictions(self, population: Population, shared: Shared, c: Tensor, x: Tensor) -> Tensor: ...
    def losses_of_outputs(self, population: Population, c: Tensor, outputs: Tensor, y: Tensor) -> Tensor: ...
    def membership_loss(self, loss: Loss, outputs: Tensor, y: Tensor, share: Tensor) -> MembershipLoss:
        """sum_n share_n loss_n of every client as a function of c alone, from kept outputs (C, K, N, ...)."""


class Outputs:
    """Fig. 2a: sum_k c_k I(theta_k) goes to the next layer, or to the loss."""

    name, caches_outputs, takes_any_part = "outputs", True, False

    def losses(self, population: Population, shared: Shared, c: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return population.loss.per_sample(population.run_mixed_outputs(shared, c, x), y)

    def predictions(self, population: Population, shared: Shared, c: Tensor, x: Tensor) -> Tensor:
        return population.loss.inverse_link(population.run_mixed_outputs(shared, c, x))

    def losses_of_outputs(self, population: Population, c: Tensor, outputs: Tensor, y: Tensor) -> Tensor:
        return population.loss.per_sample(weighted_sum(c, outputs), y)

    def membership_loss(self, loss: Loss, outputs: Tensor, y: Tensor, share: Tensor) -> MembershipLoss:
        flat = outputs.flatten(2)  # (C, K, N out): the mix is linear in it, so two products make a step

        def at(c: Tensor) -> tuple[Tensor, Tensor]:
            mixed = torch.bmm(c[:, None], flat).reshape(len(c) * y.shape[1], *outputs.shape[3:])
            with torch.enable_grad():
                mixed.requires_grad_()
                losses = loss.per_sample(mixed, y.flatten()).reshape(share.shape) * share
                (slope,) = torch.autograd.grad(losses.sum(), mixed)
            return torch.bmm(flat, slope.reshape(len(c), -1, 1)).squeeze(2), losses.detach().sum(dim=1)

        return at


class Predictions:
    """Eq. (7): sum_k c_k g^-1(output_k), a mixture of what the K models predict."""

    name, caches_outputs, takes_any_part = "predictions", True, True

    def losses(self, population: Population, shared: Shared, c: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return population.loss.mixed(population.outputs_one(shared, x), c, y)

    def predictions(self, population: Population, shared: Shared, c: Tensor, x: Tensor) -> Tensor:
        predictions = population.loss.inverse_link(population.outputs_one(shared, x))
        return weighted_sum(c, predictions)

    def losses_of_outputs(self, population: Population, c: Tensor, outputs: Tensor, y: Tensor) -> Tensor:
        return population.loss.mixed(outputs, c, y)

    def membership_loss(self, loss: Loss, outputs: Tensor, y: Tensor, share: Tensor) -> MembershipLoss:
        if isinstance(loss, Classification):
            return self._from_likelihoods(*loss.likelihoods(outputs, y), share)

        def one(c: Tensor, outputs: Tensor, y: Tensor, share: Tensor) -> Tensor:
            return (loss.mixed(outputs, c, y) * share).sum()

        return lambda c: vmap(grad_and_value(one))(c, outputs, y, share)

    @staticmethod
    def _from_likelihoods(likelihood: Tensor, log_top: Tensor, share: Tensor) -> MembershipLoss:
        """-log sum_k c_k l_k: the likelihoods (C, K, N) never change while c moves, and the slope is -l_k / sum c l."""

        def at(c: Tensor) -> tuple[Tensor, Tensor]:
            mixed = torch.bmm(c[:, None], likelihood).squeeze(1)  # (C, N)
            slopes = -torch.bmm(likelihood, (share / mixed)[:, :, None]).squeeze(2)
            return slopes, -(share * (mixed.log() + log_top)).sum(dim=1)

        return at


class Weights:
    """Fig. 2b and Eq. (8): one network with parameters sum_k c_k theta_k."""

    name, caches_outputs, takes_any_part = "weights", False, False

    def losses(self, population: Population, shared: Shared, c: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return population.loss.per_sample(self._run(population, shared, c, x), y)

    def predictions(self, population: Population, shared: Shared, c: Tensor, x: Tensor) -> Tensor:
        return population.loss.inverse_link(self._run(population, shared, c, x))

    def losses_of_outputs(self, population: Population, c: Tensor, outputs: Tensor, y: Tensor) -> Tensor:
        raise TypeError("mixed weights have no outputs to keep: c enters before the network runs")

    def membership_loss(self, loss: Loss, outputs: Tensor, y: Tensor, share: Tensor) -> MembershipLoss:
        raise TypeError("mixed weights have no outputs to keep: c enters before the network runs")

    def _run(self, population: Population, shared: Shared, c: Tensor, x: Tensor) -> Tensor:
        return population.run_plain(shared.common, mixed_weights(shared.canonical, c), x)


def mixed_weights(canonical: Params, c: Tensor) -> Params:
    """W = sum_k c_k theta_k for c (K,), or W_i for each row of c (C, K)."""
    return {name: weighted_sum(c, theta) for name, theta in canonical.items()}


def weighted_sum(c: Tensor, values: Tensor) -> Tensor:
    """sum_k c_k value_k over the first dimension of `values`, for c (K,) or for each row of c (C, K)."""
    mixed: Tensor = torch.tensordot(c, values, dims=1)
    return mixed


class MixedModule(nn.Module):
    """A canonical submodule in the middle of a network: its K outputs are mixed before the next layer.

    Runs only under `functional_call`, with stacked parameters for `inner` and the membership as a buffer.
    """

    membership: Tensor

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.register_buffer("membership", torch.ones(1))

    def forward(self, *inputs: Any) -> Tensor:
        stacked = dict(self.inner.named_parameters())
        outputs: Tensor = vmap(lambda theta: functional_call(self.inner, theta, inputs))(stacked)
        return weighted_sum(self.membership, outputs)


MIXES: dict[str, Mix] = {mix.name: mix for mix in (Outputs(), Predictions(), Weights())}
