"""A population: any network split into a common part and K canonical parts, mixed by a membership.

All functions here are pure: parameters come in as `Shared`, nothing is stored in the network. Those named
`*_one` speak of one client; the others of a chunk of clients, whose tensors have a leading dimension C.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.utils import _pytree as pytree

from .anatomy import canonical_modules, refuse_hidden_state, run_and_watch, with_mixed_modules
from .chain import chain_gradients, chain_of
from .errors import ModelError
from .losses import Loss, loss_by_name
from .mixing import MIXES, MembershipLoss, Mix, weighted_sum
from .simplex import harden

Params = dict[str, Tensor]


class Shared(NamedTuple):
    """theta: what all clients share. A chunk of clients in the middle of local work has (C, ...) leaves."""

    common: Params
    canonical: Params  # leaves (K, ...)


class Population:
    """K canonical copies of the named submodules of `net`, the rest common to all.

    canonical: "all" (whole networks are mixed), the name of a submodule, or several names.
    mix: "outputs" (Fig. 2a), "predictions" (Eq. 7, after the inverse link) or "weights" (Fig. 2b).

    >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    >>> population = Population(net, canonical="2", k=5, mix="weights")
    >>> {name: tuple(leaf.shape) for name, leaf in population.initial(seed=0).canonical.items()}
    {'2.weight': (5, 3, 8), '2.bias': (5, 3)}
    """

    def __init__(
        self,
        net: nn.Module,
        *,
        k: int,
        canonical: str | Sequence[str] = "all",
        mix: str = "outputs",
        loss: str | Loss = "cross_entropy",
    ) -> None:
        if k < 1:
            raise ModelError(f"k is {k}; a population has at least one canonical model: set k >= 1")
        if mix not in MIXES:
            raise ModelError(f"mix is {mix!r}; it must be one of {', '.join(map(repr, MIXES))}")
        refuse_hidden_state(net)
        self.k = k
        self.net = copy.deepcopy(net)
        self.loss = loss_by_name(loss) if isinstance(loss, str) else loss
        self.canonical_modules = canonical_modules(net, canonical)
        self.mix: Mix = MIXES[mix]
        self._mixed_net = with_mixed_modules(net, self.canonical_modules)
        self._canonical_ends_net = self.canonical_modules == ("",)
        self._chain = chain_of(net)

    # ------------------------------------------------------------------ parameters

    def initial(self, seed: int, *, distinct: bool = False) -> Shared:
        """Start values: K copies of the network's own, or (`distinct`) K draws of its initialiser."""
        values = {name: p.detach().clone() for name, p in self.net.named_parameters()}
        canonical_names = [name for name in values if self._is_canonical(name)]
        draws = [values] + [self._redrawn(seed, k) if distinct else values for k in range(1, self.k)]
        return Shared(
            common={name: value for name, value in values.items() if name not in canonical_names},
            canonical={name: torch.stack([draw[name] for draw in draws]) for name in canonical_names},
        )

    def _is_canonical(self, parameter: str) -> bool:
        return any(module == "" or parameter.startswith(module + ".") for module in self.canonical_modules)

    def _redrawn(self, seed: int, k: int) -> Params:
        net = copy.deepcopy(self.net)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed * 1_000_003 + k)
            for module in net.modules():
                reset = getattr(module, "reset_parameters", None)
                if callable(reset):
                    reset()
        return {name: p.detach().clone() for name, p in net.named_parameters()}

    def to(self, device: torch.device | str) -> Population:
        """The same population with its buffers on `device`; parameters follow the data anyway."""
        self.net.to(device)
        self._mixed_net.to(device)
        return self

    # ------------------------------------------------------------------ one client

    def outputs_one(self, shared: Shared, x: Tensor) -> Tensor:
        """Outputs of all K models, (K, B, ...); layers before the canonical part run once."""
        outputs: Tensor = vmap(lambda theta: self.run_plain(shared.common, theta, x))(shared.canonical)
        return outputs

    def losses_one(self, shared: Shared, c: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """Per-sample losses (B,) of the client with membership c (K,)."""
        return self.mix.losses(self, shared, c, x, y)

    def mean_loss_one(self, shared: Shared, c: Tensor, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        """f_i: the weighted mean over a batch; a batch of padding only has loss 0."""
        return _weighted_mean(self.losses_one(shared, c, x, y), weight)

    def predict_one(self, shared: Shared, c: Tensor, x: Tensor) -> Tensor:
        """Mean predictions, after the inverse link."""
        return self.mix.predictions(self, shared, c, x)

    def run_plain(self, common: Params, theta: Params, x: Tensor) -> Tensor:
        """Output of the network with one set of canonical parameters (no K)."""
        output: Tensor = functional_call(self.net, {**common, **theta}, (x,))
        return output

    def run_mixed_outputs(self, shared: Shared, c: Tensor, x: Tensor) -> Tensor:
        """Fig. 2a: the weighted sum of the canonical outputs is passed to the next layer."""
        if self._canonical_ends_net:
            return weighted_sum(c, self.outputs_one(shared, x))
        values = dict(shared.common)
        for name, value in shared.canonical.items():
            module = next(m for m in self.canonical_modules if name.startswith(m + "."))
            values[f"{module}.inner{name[len(module) :]}"] = value
        values |= {f"{module}.membership": c for module in self.canonical_modules}
        output: Tensor = functional_call(self._mixed_net, values, (x,))
        return output

    # ------------------------------------------------------------------ a chunk of clients

    def predict(self, shared: Shared, c: Tensor, x: Tensor, *, own: bool = False, hard: bool = False) -> Tensor:
        """Mean predictions (C, B, ...) of clients with memberships c (C, K) on x (C, B, ...).

        own: every client has parameters of its own, leaves (C, ...). hard: the max rule, Section O3.1.
        """
        predictions: Tensor = self._over_clients(self.predict_one, own, shared, harden(c) if hard else c, x)
        return predictions

    def mean_losses(
        self, shared: Shared, c: Tensor, x: Tensor, y: Tensor, weight: Tensor, *, own: bool = False
    ) -> Tensor:
        """f_i of every client on its batch, (C,)."""
        losses: Tensor = self._over_clients(self.mean_loss_one, own, shared, c, x, y, weight)
        return losses

    def theta_gradients(
        self, shared: Shared, c: Tensor, x: Tensor, y: Tensor, weight: Tensor, *, own: bool = True
    ) -> tuple[Shared, Tensor]:
        """Gradients of f_i for theta, leaves (C, ...), and the losses (C,); none for c (short cut 4)."""
        whole_chain = self._chain is not None and not shared.common and self.caches_outputs
        if whole_chain and own and len(x) > 1 and x.dim() == 3:

            def slopes(outputs: Tensor) -> tuple[Tensor, Tensor]:
                found, losses = vmap(grad_and_value(self._loss_of_outputs))(outputs, c, y, weight)
                return found, losses

            assert self._chain is not None
            gradients, losses = chain_gradients(self._chain, slopes, shared.canonical, x)
            return Shared({}, gradients), losses
        result = self._over_clients(grad_and_value(self.mean_loss_one), own, shared, c, x, y, weight)
        return result[0], result[1]

    def network_gradients(self, networks: Shared, x: Tensor, y: Tensor, weight: Tensor) -> tuple[Shared, Tensor]:
        """Gradients at one plain network a client, canonical leaves (C, ...) without K, and the losses (C,)."""

        def loss_of_output(output: Tensor, y: Tensor, weight: Tensor) -> Tensor:
            return _weighted_mean(self.loss.per_sample(output, y), weight)

        if self._chain is not None and len(x) > 1 and x.dim() == 3:
            models = {name: value[:, None] for part in networks for name, value in part.items()}

            def slopes(outputs: Tensor) -> tuple[Tensor, Tensor]:
                found, losses = vmap(grad_and_value(loss_of_output))(outputs[:, 0], y, weight)
                return found[:, None], losses

            gradients, losses = chain_gradients(self._chain, slopes, models, x)
            return Shared(*({name: gradients[name][:, 0] for name in part} for part in networks)), losses

        def mean_loss(network: Shared, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
            return loss_of_output(self.run_plain(*network, x), y, weight)

        result = self._over_clients(grad_and_value(mean_loss), True, networks, x, y, weight)
        return result[0], result[1]

    def membership_gradients(
        self, shared: Shared, c: Tensor, x: Tensor, y: Tensor, weight: Tensor
    ) -> tuple[Tensor, Tensor]:
        """df_i/dc_i, (C, K), and the losses (C,); none for theta (short cut 4)."""
        slope_and_loss = grad_and_value(self.mean_loss_one, argnums=1)
        result = self._over_clients(slope_and_loss, False, shared, c, x, y, weight)
        return result[0], result[1]

    # ------------------------------------------------------------------ membership steps on cached outputs

    @property
    def caches_outputs(self) -> bool:
        """Whether f_i depends on theta through the K outputs alone, so that they can be kept (short cut 2)."""
        return self.mix.caches_outputs and (self._canonical_ends_net or self.mix.takes_any_part)

    def outputs(self, shared: Shared, x: Tensor) -> Tensor:
        """Outputs (C, K, B, ...) of the shared models on every client's x (C, B, ...)."""
        result: Tensor = self._over_clients(self.outputs_one, False, shared, x)
        return result

    def membership_loss(self, outputs: Tensor, y: Tensor, weight: Tensor) -> MembershipLoss:
        """f_i as a function of c_i alone, from kept outputs (C, K, B, ...): the network is not touched again."""
        return self.mix.membership_loss(self.loss, outputs, y, _shares(weight))

    def _loss_of_outputs(self, outputs: Tensor, c: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        """f_i of one client from the outputs (K, B, ...) of the canonical models."""
        return _weighted_mean(self.mix.losses_of_outputs(self, c, outputs, y), weight)

    def _over_clients(self, f: Callable[..., Any], own: bool, parameters: Any, *rows: Tensor) -> Any:
        if len(rows[0]) == 1:  # vmap costs more than it gives for one client, and convolutions lose their fast path
            first = pytree.tree_map(lambda leaf: leaf[0], parameters) if own else parameters
            return pytree.tree_map(lambda leaf: leaf[None], f(first, *(row[0] for row in rows)))
        return vmap(f, in_dims=(0 if own else None, *(0 for _ in rows)))(parameters, *rows)

    # ------------------------------------------------------------------ first contact with data

    def fit_to(self, x: Tensor, y: Tensor, n_classes: int | None) -> Population:
        """Run once on a few samples: refuse a network that does not fit the data, and learn whether the
        canonical part is where the network ends (then outputs can be cached)."""
        self.loss.check_target(y)
        try:
            output, ends = run_and_watch(self.net, x, self.canonical_modules)
        except (RuntimeError, TypeError, IndexError) as error:
            raise ModelError(
                f"the network cannot run on the data (samples of shape {tuple(x.shape[1:])}, {x.dtype}): "
                f"{str(error).splitlines()[0]}; change the network's input or the data's shape"
            ) from None
        if self.loss.name == "cross_entropy" and n_classes is not None and output.shape[-1] < n_classes:
            raise ModelError(
                f"the network has {output.shape[-1]} outputs but the labels go up to {n_classes - 1}; "
                f"give its last layer {n_classes} outputs"
            )
        if self.loss.name == "logistic" and output[0].numel() != 1:
            raise ModelError(
                f"the logistic loss needs one output a sample, the network has {output[0].numel()}; "
                "give its last layer one output or use the cross_entropy loss"
            )
        self._canonical_ends_net = self.canonical_modules == ("",) or ends
        return self


def _weighted_mean(losses: Tensor, weight: Tensor) -> Tensor:
    return (losses * _shares(weight)).sum()


def _shares(weight: Tensor) -> Tensor:
    """Weights that sum to 1; padding alone stays 0."""
    return weight / weight.sum(dim=-1, keepdim=True).clamp_min(torch.finfo(weight.dtype).tiny)
