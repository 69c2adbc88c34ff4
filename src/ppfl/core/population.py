"""A population: any network split into a common part and K canonical parts, mixed by a membership.

All functions here are pure: parameters come in as `Shared`, nothing is stored in the network. Those named
`*_one` speak of one client; the others of a chunk of clients, whose tensors have a leading dimension C. Given a
workspace, networks that are chains of layers are run and differentiated by hand; without one, torch.func does it,
and that is the reference.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.func import grad_and_value, vmap

from .anatomy import (
    are_affine,
    canonical_modules,
    refuse_hidden_state,
    refuse_outputs,
    run_and_watch,
    with_mixed_modules,
)
from .by_hand import ByHand
from .chain import chain_of
from .errors import ModelError
from .losses import Loss, loss_by_name
from .mixing import MIXES, MembershipLoss, Mix
from .network import Clients, Network
from .shared import Params, Shared, mixed_weights, weighted_sum
from .simplex import harden
from .workspace import Workspace

AT_ONCE = 2048  # samples, or more of them where that is few numbers, that run through shared models in one product
NUMBERS_AT_ONCE = 2**20


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
        # short cut 1 holds where the mixed output is that of the mixed weights, wherever the canonical part stands
        self.collapses = mix == "weights" or (mix == "outputs" and are_affine(net, self.canonical_modules))
        self.clients = Clients(net)
        self._plain, self._mixed = Network(self.net), Network(with_mixed_modules(net, self.canonical_modules))
        chain = chain_of(net)
        self._hand = None if chain is None else ByHand(chain, self.loss, self.mix)
        self._canonical_ends_net = self.canonical_modules == ("",)

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

    def bytes_of_local_run(self) -> int:
        """Parameters a client moves in a local run, in bytes: one model's where K collapse to it."""
        copies = 1 if self.collapses else self.k
        return sum(
            p.numel() * p.element_size() * (copies if self._is_canonical(name) else 1)
            for name, p in self.net.named_parameters()
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
        self._plain.to(device)
        self._mixed.to(device)
        return self

    # ------------------------------------------------------------------ one client

    def outputs_one(self, shared: Shared, x: Tensor) -> Tensor:
        """Outputs of all K models, (K, B, ...); layers before the canonical part run once."""
        if self.clients.one_by_one(x):
            models = zip(*shared.canonical.values(), strict=True)  # a client's own may be fewer than K
            named = (dict(zip(shared.canonical, model, strict=True)) for model in models)
            return torch.stack([self.run_plain(shared.common, theta, x) for theta in named])
        outputs: Tensor = vmap(lambda theta: self.run_plain(shared.common, theta, x))(shared.canonical)
        return outputs

    def losses_one(self, shared: Shared, c: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """Per-sample losses (B,) of the client with membership c (K,)."""
        return self.mix.losses(self.loss, self.mix.run(self, shared, c, x), c, y)

    def mean_loss_one(self, shared: Shared, c: Tensor, x: Tensor, y: Tensor, share: Tensor) -> Tensor:
        """f_i on a batch: sum_n share_n loss_n, where shares (B,) sum to 1 and padding has none."""
        return (self.losses_one(shared, c, x, y) * share).sum()

    def predict_one(self, shared: Shared, c: Tensor, x: Tensor) -> Tensor:
        """Mean predictions, after the inverse link."""
        return self.mix.predictions(self.loss, self.mix.run(self, shared, c, x), c)

    def run_plain(self, common: Params, theta: Params, x: Tensor) -> Tensor:
        """Output of the network with one set of canonical parameters (no K)."""
        return self._plain({**common, **theta}, x)

    def run_mixed_outputs(self, shared: Shared, c: Tensor, x: Tensor) -> Tensor:
        """Fig. 2a: the weighted sum of the canonical outputs is passed to the next layer."""
        if self._canonical_ends_net:
            return weighted_sum(c, self.outputs_one(shared, x))
        values = dict(shared.common)
        for name, value in shared.canonical.items():
            module = next(m for m in self.canonical_modules if name.startswith(m + "."))
            values[f"{module}.inner{name[len(module) :]}"] = value
        return self._mixed(values | {f"{module}.membership": c for module in self.canonical_modules}, x)

    # ------------------------------------------------------------------ a chunk of clients: predictions and losses

    def predict(self, shared: Shared, c: Tensor, x: Tensor, *, own: bool = False, hard: bool = False) -> Tensor:
        """Mean predictions (C, B, ...) of clients with memberships c (C, K) on x (C, B, ...).

        own: every client has parameters of its own, leaves (C, ...). hard: the max rule, Section O3.1.
        """
        predictions: Tensor = self.clients.each(self.predict_one, own, shared, harden(c) if hard else c, x)
        return predictions

    def judge(
        self, shared: Shared, c: Tensor, x: Tensor, y: Tensor, *, own: bool = False, space: Workspace | None = None
    ) -> tuple[Tensor, Tensor]:
        """Mean predictions (C, B, ...) and losses (C, B) of every client on its batch, from one run of its network."""

        def of_run(ran: Tensor, c: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            return self.mix.predictions(self.loss, ran, c), self.mix.losses(self.loss, ran, c, y)

        def of_client(shared: Shared, c: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            return of_run(self.mix.run(self, shared, c, x), c, y)

        if self.caches_outputs and not own:
            outputs = self.outputs(shared, x, space).transpose(2, 3)
            return vmap(lambda outputs, c, y: of_run(self.mix.of_outputs(outputs, c), c, y))(outputs, c, y)
        if space is not None and (hand := self._by_hand(x)) and (own or self.collapses):
            outputs = hand.outputs_of_networks(self._networks(shared, c, own, space), x, space)
            return vmap(lambda out, y: (self.loss.inverse_link(out), self.loss.per_sample(out, y)))(outputs, y)
        predictions, losses = self.clients.each(of_client, own, shared, c, x, y)
        return predictions, losses

    def outputs(self, shared: Shared, x: Tensor, space: Workspace | None = None) -> Tensor:
        """Outputs (C, K, out, B), a column a sample, of the shared models on every client's x (C, B, ...)."""
        clients, batch = x.shape[:2]
        widest = max((len(theta[0]) for theta in shared.canonical.values()), default=1)
        at_once = max(AT_ONCE, NUMBERS_AT_ONCE // (self.k * widest)) if self._by_hand(x) else AT_ONCE
        found = [self._outputs_of_shared(shared, some, space) for some in torch.split(x.flatten(0, 1), at_once)]
        together = found[0] if len(found) == 1 else torch.cat(found, dim=2)  # (K, out, C B)
        return together.reshape(*together.shape[:2], clients, batch).permute(2, 0, 1, 3).contiguous()

    def _outputs_of_shared(self, shared: Shared, x: Tensor, space: Workspace | None) -> Tensor:
        """(K, out, B) for samples x (B, ...), whosever they are."""
        if space is not None and (hand := self._by_hand(x[None])) and not shared.common:
            return hand.outputs_of_shared(shared, x, space)
        outputs = self.outputs_one(shared, self.clients.laid_out(x))
        return outputs.reshape(*outputs.shape[:2], -1).transpose(1, 2)

    def _networks(self, shared: Shared, c: Tensor, own: bool, space: Workspace) -> Shared:
        """One plain network a client, leaves (C, ...): its own, or the mixed weights."""
        if own:
            return shared._replace(canonical={name: theta[:, 0] for name, theta in shared.canonical.items()})
        return Shared(shared.spread(len(c)).common, mixed_weights(shared.canonical, c, space))

    def _by_hand(self, x: Tensor) -> ByHand | None:
        """For batches x (C, B, ...) that go through a chain of layers."""
        return self._hand if self._hand is not None and self._hand.chain.takes(x[0]) else None

    # ------------------------------------------------------------------ a chunk of clients: gradients

    def theta_gradients(
        self, shared: Shared, c: Tensor, x: Tensor, y: Tensor, share: Tensor, *, own: bool = True
    ) -> tuple[Shared, Tensor]:
        """Gradients of f_i for theta, leaves (C, ...), and the losses (C,); none for c (short cut 4)."""
        return self.clients.gradients(self.mean_loss_one, own, shared, c, x, y, share)

    def network_gradients(self, networks: Shared, x: Tensor, y: Tensor, share: Tensor) -> tuple[Shared, Tensor]:
        """Gradients at one plain network a client, canonical leaves (C, ...) without K, and the losses (C,)."""

        def mean_loss(network: Shared, x: Tensor, y: Tensor, share: Tensor) -> Tensor:
            return (self.loss.per_sample(self.run_plain(*network, x), y) * share).sum()

        return self.clients.gradients(mean_loss, True, networks, x, y, share)

    def push_networks(
        self,
        networks: Shared,
        velocity: Shared,
        momentum: float,
        x: Tensor,
        y: Tensor,
        share: Tensor,
        space: Workspace | None,
        scale: Tensor | None = None,
    ) -> Tensor:
        """velocity <- momentum velocity + gradient at one plain network a client, in place; returns the losses (C,).

        scale (C,) multiplies the gradients of the canonical part.
        """
        if space is not None and (hand := self._by_hand(x)):
            return hand.push_networks(networks, velocity, momentum, x, y, share, space, scale)
        gradient, losses = self.network_gradients(networks, x, y, share)
        velocity.push(momentum, gradient.scale_canonical(scale))
        return losses

    def push_models(
        self,
        shared: Shared,
        velocity: Shared,
        momentum: float,
        c: Tensor,
        x: Tensor,
        y: Tensor,
        share: Tensor,
        space: Workspace | None,
        scale: Tensor | None = None,
    ) -> Tensor:
        """The same for all K models of each client, mixed by c: leaves (C, ...), canonical ones (C, K, ...)."""
        if space is not None and (hand := self._by_hand(x)) and self.caches_outputs and not shared.common:
            return hand.push_models(shared, velocity, momentum, c, x, y, share, space, scale)
        gradient, losses = self.theta_gradients(shared, c, x, y, share)
        velocity.push(momentum, gradient.scale_canonical(scale))
        return losses

    def push_weighted_models(
        self,
        shared: Shared,
        velocity: Shared,
        momentum: float,
        x: Tensor,
        y: Tensor,
        weights: Tensor,
        space: Workspace | None,
    ) -> Tensor:
        """The same for K models that are not mixed: sum_k sum_n weights_kn loss_kn, with weights (C, K, B)."""
        if space is not None and (hand := self._by_hand(x)) and not shared.common:
            return hand.push_weighted_models(shared, velocity, momentum, x, y, weights, space)
        gradient, losses = self.clients.gradients(self._weighted_loss_one, True, shared, x, y, weights)
        velocity.push(momentum, gradient)
        return losses

    def _weighted_loss_one(self, shared: Shared, x: Tensor, y: Tensor, weights: Tensor) -> Tensor:
        losses = [self.loss.per_sample(output, y) for output in self.outputs_one(shared, x)]
        return (torch.stack(losses) * weights).sum()

    # ------------------------------------------------------------------ memberships

    def membership_gradients(
        self, shared: Shared, c: Tensor, x: Tensor, y: Tensor, share: Tensor, space: Workspace | None = None
    ) -> tuple[Tensor, Tensor]:
        """df_i/dc_i, (C, K), and the losses (C,); none for theta (short cut 4)."""
        if space is not None and self.collapses and self._by_hand(x):  # df/dc_k = <G, theta_k>
            networks = self._networks(shared, c, False, space)
            G = networks.room(space, "gradient")
            losses = self.push_networks(networks, G, 0.0, x, y, share, space)
            products = [G.canonical[name].flatten(1) @ theta.flatten(1).T for name, theta in shared.canonical.items()]
            return torch.stack(products).sum(0), losses
        slope_and_loss = grad_and_value(self.mean_loss_one, argnums=1)
        slopes, losses = self.clients.each(slope_and_loss, False, shared, c, x, y, share)
        return slopes, losses

    @property
    def caches_outputs(self) -> bool:
        """Whether f_i depends on theta through the K outputs alone, so that they can be kept (short cut 2)."""
        return self.mix.caches_outputs and (self._canonical_ends_net or self.mix.takes_any_part)

    def membership_loss(self, outputs: Tensor, y: Tensor, share: Tensor) -> MembershipLoss:
        """f_i as a function of c_i alone, from kept outputs (C, K, out, B): the network is not touched again."""
        return self.mix.membership_loss(self.loss, outputs, y, share)

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
        refuse_outputs(self.loss.name, output, n_classes)
        self._canonical_ends_net = self.canonical_modules == ("",) or ends
        self.clients.look_at(self.net, x)
        return self
