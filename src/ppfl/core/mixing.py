"""The three ways a membership combines K canonical models. They are different functions: equal only where
the canonical part is linear (outputs and weights) or the link is the identity (outputs and predictions)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from .dropout import call_counts, set_call_counts
from .losses import Classification, Loss
from .trees import Params, tree_map, weighted_sum

if TYPE_CHECKING:
    from .backends.autograd import Autograd


MembershipLoss = Callable[[Tensor], tuple[Tensor, Tensor]]  # c (C, K) -> slopes (C, K), losses (C,)


class Mix:
    """How one client's loss and prediction depend on (theta, c). By default it ends in one ordinary output."""

    name: str
    caches_outputs = True  # c enters after the K outputs, so they can be kept while c moves; others write `run` alone
    takes_any_part = False  # ... wherever in the network the canonical part is

    def needs_outputs(self, loss: Loss) -> bool:
        """Whether `membership_loss` keeps outputs; else it keeps a few numbers per sample."""
        return True

    def run(self, backend: Autograd, models: Params, c: Tensor, x: Tensor, key: Tensor | None) -> Tensor:
        """What one client's network gives: the mixed output (B, ...), or all K of them (K, B, ...)."""
        raise NotImplementedError

    def of_outputs(self, outputs: Tensor, c: Tensor) -> Tensor:
        """The same, from the outputs (K, B, ...) of the canonical models."""
        raise NotImplementedError

    def losses(self, loss: Loss, ran: Tensor, c: Tensor, y: Tensor) -> Tensor:
        """(B,), from what `run` gave."""
        return loss.per_sample(ran, y)

    def predictions(self, loss: Loss, ran: Tensor, c: Tensor) -> Tensor:
        """(B, ...), from what `run` gave."""
        return loss.inverse_link(ran)

    def slopes(self, loss: Loss, outputs: Tensor, c: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """d loss / d outputs of many clients' outputs (C, K, ..., B), samples last, and the losses (C, B)."""
        raise NotImplementedError

    def membership_loss(self, loss: Loss, outputs: Tensor, y: Tensor, share: Tensor) -> MembershipLoss:
        """sum_n share_n loss_n of every client as a function of c alone, from kept outputs (C, K, ..., N)."""
        raise NotImplementedError


class Outputs(Mix):
    """Fig. 2a: sum_k c_k I(theta_k) goes to the next layer, or to the loss."""

    name = "outputs"

    def run(self, backend: Autograd, models: Params, c: Tensor, x: Tensor, key: Tensor | None) -> Tensor:
        return backend.run_mixed_outputs(models, c, x, key)

    def of_outputs(self, outputs: Tensor, c: Tensor) -> Tensor:
        return weighted_sum(c, outputs)

    def slopes(self, loss: Loss, outputs: Tensor, c: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        mixed = torch.bmm(c[:, None], outputs.flatten(2)).reshape(len(c), *outputs.shape[2:])
        slope, losses = loss.slopes(mixed, y)
        return c.reshape(*c.shape, *[1] * (outputs.dim() - 2)) * slope[:, None], losses

    def membership_loss(self, loss: Loss, outputs: Tensor, y: Tensor, share: Tensor) -> MembershipLoss:
        flat = outputs.flatten(2)  # (C, K, out N): the mix is linear in it, so two products make a step

        def at(c: Tensor) -> tuple[Tensor, Tensor]:
            mixed = torch.bmm(c[:, None], flat).reshape(len(c), *outputs.shape[2:])
            slope, losses = loss.slopes(mixed, y)
            row = slope.mul_(share.reshape(len(c), *[1] * (slope.dim() - 2), -1)).reshape(len(c), 1, -1)
            return torch.bmm(row, flat.transpose(1, 2)).squeeze(1), (losses * share).sum(dim=1)

        return at


class Predictions(Mix):
    """Eq. (7): sum_k c_k g^-1(output_k), a mixture of what the K models predict."""

    name, takes_any_part = "predictions", True

    def needs_outputs(self, loss: Loss) -> bool:
        return not isinstance(loss, Classification)

    def run(self, backend: Autograd, models: Params, c: Tensor, x: Tensor, key: Tensor | None) -> Tensor:
        return backend.run_models(models, x, key)

    def of_outputs(self, outputs: Tensor, c: Tensor) -> Tensor:
        return outputs

    def losses(self, loss: Loss, ran: Tensor, c: Tensor, y: Tensor) -> Tensor:
        return loss.mixed(ran, c, y)

    def predictions(self, loss: Loss, ran: Tensor, c: Tensor) -> Tensor:
        return weighted_sum(c, loss.inverse_link(ran))

    def slopes(self, loss: Loss, outputs: Tensor, c: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        if isinstance(loss, Classification) and y.dim() == 2:  # one label per sample
            # each model by itself, times its part in the likelihood of the label
            slopes, losses = loss.model_slopes(outputs, y)
            joint = c.log()[:, :, None] - losses
            return slopes.mul_(joint.softmax(1)[:, :, None]), -joint.logsumexp(1)

        def of_client(outputs: Tensor, c: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            losses = loss.mixed(outputs.movedim(-1, 1), c, y)
            return losses.sum(), losses

        slopes, (_, losses) = vmap(grad_and_value(of_client, has_aux=True))(outputs, c, y)
        return slopes, losses

    def membership_loss(self, loss: Loss, outputs: Tensor, y: Tensor, share: Tensor) -> MembershipLoss:
        if isinstance(loss, Classification):  # -log of likelihoods, which mix by themselves
            values, of_sample = loss.log_likelihoods(outputs, y)
            top, each = values.amax(dim=1), share.repeat_interleave(values.shape[2] // share.shape[1], dim=1)
            return self._from_likelihoods((values - top[:, None]).exp(), top, each * of_sample)

        def one(c: Tensor, outputs: Tensor, y: Tensor, share: Tensor) -> Tensor:
            return (loss.mixed(outputs.movedim(-1, 1), c, y) * share).sum()

        return lambda c: vmap(grad_and_value(one))(c, outputs, y, share)

    @staticmethod
    def _from_likelihoods(likelihood: Tensor, log_top: Tensor, share: Tensor) -> MembershipLoss:
        """-log sum_k c_k l_k: the likelihoods (C, K, N) never change while c moves, and the slope is -l_k / sum c l."""

        def at(c: Tensor) -> tuple[Tensor, Tensor]:
            mixed = torch.bmm(c[:, None], likelihood).squeeze(1)  # (C, N)
            slopes = torch.bmm((share / mixed)[:, None], likelihood.transpose(1, 2)).squeeze(1)
            return -slopes, -(share * (mixed.log() + log_top)).sum(dim=1)

        return at


class Weights(Mix):
    """Fig. 2b and Eq. (8): one network with parameters sum_k c_k theta_k."""

    name, caches_outputs = "weights", False

    def run(self, backend: Autograd, models: Params, c: Tensor, x: Tensor, key: Tensor | None) -> Tensor:
        common, canonical = backend.population.split(models)
        return backend.run({**common, **{name: weighted_sum(c, theta) for name, theta in canonical.items()}}, x, key)


class MixedModule(nn.Module):
    """A canonical submodule in the middle of a network: its K outputs are mixed before the next layer.

    Runs only under `functional_call`, with stacked parameters for `inner` and the membership as a buffer.
    """

    membership: Tensor

    def __init__(self, inner: nn.Module, one_by_one: bool = False) -> None:
        super().__init__()
        self.inner, self.one_by_one = inner, one_by_one
        self.trained = [name for name, p in inner.named_parameters() if p.requires_grad]
        self.register_buffer("membership", torch.ones(1))

    def forward(self, *inputs: Any, **named: Any) -> Any:
        values: Params = dict(self.inner.named_parameters())
        stacked = {name: values[name] for name in self.trained}

        def run(theta: Params) -> Any:
            return functional_call(self.inner, theta, inputs, named)

        if self.one_by_one:
            each = [dict(zip(stacked, model, strict=True)) for model in zip(*stacked.values(), strict=True)]
            counts, outputs = call_counts(self.inner), []
            for theta in each:
                set_call_counts(counts)  # all models have the same masks, as with vmap
                outputs.append(run(theta))
            return tree_map(self._mixed, *outputs)
        return tree_map(lambda outputs: weighted_sum(self.membership, outputs), vmap(run)(stacked))

    def _mixed(self, *outputs: Any) -> Any:
        """Numbers are mixed; the rest, such as the lengths in a packed sequence, is the same for all models."""
        if isinstance(outputs[0], Tensor) and outputs[0].is_floating_point():
            return weighted_sum(self.membership, torch.stack(outputs))
        return outputs[0]


MIXES: dict[str, Mix] = {mix.name: mix for mix in (Outputs(), Predictions(), Weights())}
