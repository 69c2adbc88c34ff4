"""A population: any network split into a common part and K canonical parts, mixed by a membership; and the personal
models of its clients, as a method gives them for prediction, evaluation and export.

This is the description alone. How its models run and are differentiated is a backend's business (`core/backends`).
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..errors import ModelError
from . import links
from .adapters import (
    ADAPTERS_UP,
    Lora,
    mixes_both_factors,
    parameters_without_adapters,
    shrink_adapters_,
    with_adapters,
)
from .criteria import LossFunction, as_loss
from .dropout import refuse_running_statistics, with_keyed_dropout
from .losses import Loss
from .mixing import MIXES, Mix
from .parts import are_affine, canonical_modules, is_in_module, with_tensors_of, without_layers
from .registry import did_you_mean
from .simplex import harden
from .trees import Params, first_clients

NAMED = 4  # canonical submodules that the repr names
APART = 0.1  # how far distinct copies of a trained network are from it, as a part of the difference of two draws


class Population:
    """A network of which clients share k versions of some parts, and one of the rest.

    The versions are called canonical models; a client mixes them by its membership. The network that is passed is
    copied. Parameters with `requires_grad=False` and buffers are constants: they are not trained, not copied for each
    client and not sent. Dropout masks depend on seed, round, client and step alone. A tied parameter is
    one parameter: it has k copies in every place if one of the modules that hold it is canonical.

    Args:
        net: Takes a batch (B, ...) and returns one tensor (B, ...), such as logits. Training begins with its values.
        k: Number of canonical models.
        canonical: Which parts have k versions: "all", the name of a submodule, several names, or `lora(...)` for
            low-rank adapters of a network that stays as it is otherwise.
        mix: What a client mixes: "outputs" (Fig. 2a), "predictions" (Eq. 7, after the inverse link) or "weights"
            (Fig. 2b).
        loss: "cross_entropy", "logistic", "multilabel", "squared", "poisson", a criterion such as nn.HuberLoss(), a
            function (output, target) -> losses (B,), or a `Loss`.

    Raises:
        ModelError: If the network, a part, the loss or the kind of mixing cannot be used.

    Example:
        >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> population = Population(net, canonical="2", k=5, mix="weights")
        >>> {name: tuple(leaf.shape) for name, leaf in population.initial_models(seed=0).items()}
        {'0.weight': (8, 4), '0.bias': (8,), '2.weight': (5, 3, 8), '2.bias': (5, 3)}
    """

    def __init__(
        self,
        net: nn.Module,
        *,
        k: int,
        canonical: str | Sequence[str] | Lora = "all",
        mix: str = "outputs",
        loss: str | Loss | nn.Module | LossFunction = "cross_entropy",
    ) -> None:
        if not isinstance(net, nn.Module):
            given = f"the class {net.__name__}" if isinstance(net, type) else f"a {type(net).__name__}"
            raise ModelError(f"net is {given}; give a network, an object of a subclass of torch.nn.Module")
        if not isinstance(k, int) or isinstance(k, bool):
            raise ModelError(
                f"k is {k!r}; give a whole number of canonical models, such as k=4: compare fits with several by their "
                f"scores on validation data (only population GLMs search for k themselves)"
            )
        if k < 1:
            raise ModelError(f"k is {k}; a population has at least one canonical model: set k >= 1")
        if mix not in MIXES:
            known = ", ".join(map(repr, MIXES))
            raise ModelError(f"mix is {mix!r}; {did_you_mean(str(mix), MIXES)}it must be one of {known}")
        if isinstance(canonical, Lora):
            net, canonical = with_adapters(net, canonical), ADAPTERS_UP
        refuse_running_statistics(net)
        self.k = k
        self.pretrained = False  # whether the start values are those of a trained network
        keyed, self.mask_keys = with_keyed_dropout(net)
        self.net: nn.Module = keyed.cpu()  # start values are drawn there, whatever device the data are on
        self.architecture = with_tensors_of(net, self.net)  # the network as it was given, for models that leave here
        self.loss = as_loss(loss)
        _refuse_probabilities(net, self.loss)
        self.mix: Mix = MIXES[mix]
        if mix == "predictions":
            self.loss.check_mixing()
        trained = [name for name, p in self.net.named_parameters() if p.requires_grad]
        if not trained:
            raise ModelError("the network has no parameters to train; give it at least one with requires_grad=True")
        self.canonical_modules = canonical_modules(net, canonical)
        self.canonical_names = frozenset(name for name in trained if is_in_module(name, self.canonical_modules))
        self.common_names = frozenset(trained) - self.canonical_names
        if k > 1 and mix == "weights" and mixes_both_factors(net, self.canonical_names):
            raise ModelError(
                "mix is 'weights' and both factors of the adapters are canonical, but the mean of products is not the "
                "product of means; use canonical='adapters.up', which keeps the factor A common, or mix='outputs'"
            )
        # short cut 1 holds where the mixed output is that of the mixed weights, wherever the canonical part stands
        self.collapses = mix == "weights" or (mix == "outputs" and are_affine(net, self.canonical_modules))

    def __repr__(self) -> str:
        modules, sizes = self.canonical_modules, {"common": 0, "canonical": 0, "frozen": 0}
        canonical = "the whole network" if modules == ("",) else ", ".join(map(repr, modules[:NAMED]))
        if len(modules) > NAMED:
            canonical += f" and {len(modules) - NAMED} more"
        for name, p in (*self.net.named_parameters(), *self.net.named_buffers()):
            part = "canonical" if name in self.canonical_names else "common" if name in self.common_names else "frozen"
            sizes[part] += p.numel()
        counts = ", ".join(f"{size:,} {part}" for part, size in sizes.items())
        return (
            f"<Population {type(self.net).__name__}, k={self.k}, canonical {canonical}, mix={self.mix.name!r}, "
            f"loss={self.loss.name!r}, parameters: {counts}>"
        )

    @property
    def dtype(self) -> torch.dtype:
        """Of the trained parameters."""
        return next(p.dtype for p in self.net.parameters() if p.requires_grad)

    def load(self, values: Params) -> None:
        """Take other start values of the trained parameters."""
        with torch.no_grad():
            for name, p in self.net.named_parameters():
                if p.requires_grad:
                    p.copy_(values[name])

    def start_from(self, values: Params) -> None:
        """Start from a trained network: all canonical models are copies of it. Its frozen parts are taken too, and
        adapters are adapters of it. Another network is refused."""
        parameters = parameters_without_adapters(self.net)
        trained = [name for name, p in parameters.items() if p.requires_grad]
        for name in dict.fromkeys((*trained, *values)):
            there, here = _describe_shape(values.get(name)), _describe_shape(parameters.get(name))
            if there != here:
                raise ModelError(
                    f"the network to start from does not fit: {name!r} is {there} there and {here} here; use the same "
                    f"network for both"
                )
        with torch.no_grad():
            for name, value in values.items():
                parameters[name].copy_(value)
        self.pretrained = True

    def initial_network(self) -> Params:
        """The network's own values of its trained parameters."""
        return {name: p.detach().clone() for name, p in self.net.named_parameters() if p.requires_grad}

    def initial_models(self, seed: int, *, distinct: bool = False) -> Params:
        """Start values, canonical leaves (K, ...): K copies of the network's own, or K draws of its initialiser.

        Draws would throw away a trained network: its copies are told apart by a part of the difference of two draws,
        which is zero on average and where the initialiser is a constant.
        """
        first = self.initial_network()
        draws = [first] + [self._another(first, seed, k) if distinct else first for k in range(1, self.k)]
        return {
            name: torch.stack([draw[name] for draw in draws]) if name in self.canonical_names else value
            for name, value in first.items()
        }

    def without_layers(self, names: tuple[str, ...]) -> Population:
        """The population without these frozen layers at the beginning of its network: it takes their outputs."""
        rest = copy.copy(self)
        rest.net = without_layers(self.net, names)
        return rest

    def split(self, models: Params) -> tuple[Params, Params]:
        """The common and the canonical leaves."""
        common: Params = {}
        canonical: Params = {}
        for name, leaf in models.items():
            (canonical if name in self.canonical_names else common)[name] = leaf
        return common, canonical

    @cached_property
    def bytes_of_local_run(self) -> int:
        """Parameters that a client moves in a local run, in bytes: one model's where K collapse to it."""
        copies = 1 if self.collapses else self.k
        return sum(
            p.numel() * p.element_size() * (copies if name in self.canonical_names else 1)
            for name, p in self.net.named_parameters()
            if p.requires_grad
        )

    def _another(self, first: Params, seed: int, k: int) -> Params:
        drawn = self._redrawn(seed, k)
        if not self.pretrained:
            return drawn
        other = self._redrawn(seed, 0)
        return {name: value + APART * (drawn[name] - other[name]) for name, value in first.items()}

    def _redrawn(self, seed: int, k: int) -> Params:
        net = copy.deepcopy(self.net)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed * 1_000_003 + k)
            for module in net.modules():
                reset = getattr(module, "reset_parameters", None)
                if callable(reset):
                    reset()
        shrink_adapters_(net)
        return {name: p.detach().clone() for name, p in net.named_parameters() if p.requires_grad}


def _refuse_probabilities(net: nn.Module, loss: Loss) -> None:
    """A loss that makes probabilities of outputs would do so twice."""
    last = net
    while isinstance(last, nn.Sequential) and len(last):
        last = last[-1]
    if isinstance(last, nn.Softmax | nn.Sigmoid) and loss.link in (links.softmax, links.logit):
        raise ModelError(
            f"the network ends in {type(last).__name__}, and the loss {loss.name!r} takes outputs before it; leave it "
            f"out: fitted.predict gives probabilities"
        )


def _describe_shape(leaf: Tensor | None) -> str:
    return "missing" if leaf is None else f"of shape {tuple(leaf.shape)}"


class OneNetwork(NamedTuple):
    """The same network for all clients."""

    values: Params

    def first(self, clients: int) -> OneNetwork:
        """The models of the first so many clients."""
        return self

    def hardened(self) -> OneNetwork:
        """By the max rule, which changes nothing here."""
        return self


class Networks(NamedTuple):
    """One network per client."""

    values: Params  # leaves (C, ...)

    def first(self, clients: int) -> Networks:
        """The models of the first so many clients."""
        return Networks(first_clients(self.values, clients))

    def hardened(self) -> Networks:
        """By the max rule, which changes nothing here."""
        return self


class Mixture(NamedTuple):
    """K models that all clients share, mixed by each client's membership."""

    models: Params  # canonical leaves (K, ...)
    memberships: Tensor  # (C, K)

    def first(self, clients: int) -> Mixture:
        """The models of the first so many clients."""
        return self._replace(memberships=self.memberships[:clients])

    def hardened(self) -> Mixture:
        """By the max rule, Section O3.1: every client wholly in its largest membership."""
        return self._replace(memberships=harden(self.memberships))


Models = OneNetwork | Networks | Mixture
