"""Low-rank adapters (LoRA; Hu et al., ICLR 2022): a pretrained layer stays as it is, and a small change is trained.

    output = base(x) + alpha / rank * up(down(x))

`down` (A in the paper) and `up` (B) have few parameters. `up` is 0 at first: a network begins with the outputs that
it had before. The output is linear in `up`. So with `down` common and `up` canonical a mixture of adapters
is the adapter of the mixed `up`, exactly, and a client trains and sends one adapter whatever K is. That is not so with
both factors canonical: the mean of products is not the product of means.
"""

from __future__ import annotations

import copy
from collections.abc import Container, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ModelError
from .settings import Count, Positive, Settings

ADAPTERS, ADAPTERS_UP = "adapters", "adapters.up"  # names of parts: whole adapters, and the factor B of each
KINDS: dict[str, tuple[type[nn.Module], ...]] = {
    "linear": (nn.Linear,),
    "convolution": (nn.Conv1d, nn.Conv2d, nn.Conv3d),
    "embedding": (nn.Embedding,),
}
SMALL = 0.01  # of a usual initial value: K drawn adapters differ, and hardly change what a network gives


class Lora(Settings):
    """Which layers get adapters, and how large. `ppfl.lora(...)` makes one.

    on: the name of a layer, or of a module whose layers are meant; a part of such names, such as "attention"; the kind
    "linear", "convolution" or "embedding"; or several of these.
    alpha: adapters count alpha / rank; None: they count 1.
    train: names of modules that are trained as a whole, such as ("classifier",). They are common unless
    `canonical` names them too, and get no adapters.
    train_down: False keeps the factor A as it was drawn. Then also the mean over clients is exact.

    >>> from ppfl import Population, lora
    >>> net = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    >>> population = Population(net, canonical=lora(rank=4, on="linear"), k=4)
    >>> {name: tuple(leaf.shape) for name, leaf in population.initial_models(seed=0).items()}
    {'0.down.weight': (4, 64), '0.up.weight': (4, 32, 4), '2.down.weight': (4, 32), '2.up.weight': (4, 10, 4)}
    """

    rank: Count = 8
    on: str | tuple[str, ...] = "linear"
    alpha: Positive | None = None
    train: tuple[str, ...] = ()
    train_down: bool = True


lora = Lora


class AdaptedLayer(nn.Module):
    """A frozen layer and its adapter."""

    def __init__(self, base: Any, rank: int, alpha: float) -> None:
        super().__init__()
        self.base, self.rank, self.alpha = base, rank, alpha
        self.down, self.up = _factors(base, rank)
        self.to(base.weight)  # its type and device
        base.requires_grad_(False)
        # With orthonormal directions a step of SGD on `up` is one on the weight itself, along `rank` of its directions:
        # a step size that suits the layer suits its adapter, for alpha = rank.
        nn.init.orthogonal_(self.down.weight)
        if (padding := getattr(base, "padding_idx", None)) is not None:
            nn.init.zeros_(self.down.weight[padding])
        nn.init.zeros_(self.up.weight)

    @property
    def scale(self) -> float:
        """How much of the adapter's output is added."""
        return self.alpha / self.rank

    def extra_repr(self) -> str:
        return f"rank={self.rank}, alpha={self.alpha:g}"

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.base(x) + self.scale * self.up(self.down(x))
        return output

    def change(self) -> Tensor:
        """What the adapter adds to the weight of its layer."""
        up, down = self.up.weight.flatten(1), self.down.weight.flatten(1)
        product: Tensor = down @ up.T if isinstance(self.base, nn.Embedding) else up @ down
        return self.scale * product.reshape(self.base.weight.shape)


def _factors(base: Any, rank: int) -> tuple[Any, Any]:
    """The layers `down` and `up` for a layer."""
    if isinstance(base, nn.Linear):
        return nn.Linear(base.in_features, rank, bias=False), nn.Linear(rank, base.out_features, bias=False)
    if isinstance(base, nn.Embedding):
        down = nn.Embedding(base.num_embeddings, rank, base.padding_idx)
        return down, nn.Linear(rank, base.embedding_dim, bias=False)
    place = base.kernel_size, base.stride, base.padding, base.dilation
    down = type(base)(base.in_channels, rank, *place, bias=False, padding_mode=base.padding_mode)
    return down, type(base)(rank, base.out_channels, 1, bias=False)


def with_adapters(net: nn.Module, settings: Lora, seed: int = 0) -> nn.Module:
    """A copy of `net` whose chosen layers have adapters; everything else but `settings.train` is frozen.

    For one adapter that all clients share (FedAvg), for one per client (Local, or personal_part="adapters"), and for
    canonical ones (canonical="adapters.up", which is what `Population(net, canonical=lora(...))` does).

    >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    >>> adapted, x = with_adapters(net, Lora(rank=2, on="0")), torch.rand(5, 4)
    >>> torch.equal(adapted(x), net(x)), [name for name, p in adapted.named_parameters() if p.requires_grad]
    (True, ['0.down.weight', '0.up.weight'])
    """
    if adapted_layers(net):
        raise ModelError("the network has adapters already; name all layers in one lora(on=(...))")
    adapted = copy.deepcopy(net).requires_grad_(False)
    chosen = _chosen_layers(adapted, settings)
    alpha = float(settings.rank if settings.alpha is None else settings.alpha)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers = {id(layer): layer for layer in chosen.values()}  # one that stands in two places has one adapter
        new = {key: AdaptedLayer(layer, settings.rank, alpha) for key, layer in layers.items()}
    _replace(adapted, new)
    for layer in new.values():
        layer.down.requires_grad_(settings.train_down)
    for module in adapted.modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0  # its fast path in evaluation mode takes weights past the adapters
    for name in settings.train:
        adapted.get_submodule(name).requires_grad_(True)
    return adapted


def merge_adapters_(net: nn.Module) -> nn.Module:
    """Replace adapted layers by plain ones with the same output, in place: the change is added to their weight."""
    merged: dict[int, nn.Module] = {}
    for layer in adapted_layers(net).values():
        watched = layer.base._forward_hooks or layer.base._forward_pre_hooks  # they may use the weight as it is
        if type(layer.up) in (nn.Linear, *KINDS["convolution"]) and not watched:
            base: Any = layer.base
            with torch.no_grad():  # a new parameter, as the old one may be tied to another layer's
                base.weight = nn.Parameter(base.weight + layer.change(), requires_grad=False)
            merged[id(layer)] = base
    _replace(net, merged)
    return net


def shrink_adapters_(net: nn.Module) -> None:
    """Make drawn adapters small, in place."""
    with torch.no_grad():
        for layer in adapted_layers(net).values():
            layer.up.weight.mul_(SMALL)


def adapted_layers(net: nn.Module) -> dict[str, AdaptedLayer]:
    """Layers with adapters, by name."""
    return {name: module for name, module in net.named_modules() if isinstance(module, AdaptedLayer)}


def parameters_without_adapters(net: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that the network has without its adapters, by their names there."""
    layers = adapted_layers(net)
    factors = {id(p) for layer in layers.values() for part in (layer.down, layer.up) for p in part.parameters()}
    found: dict[str, nn.Parameter] = {}
    for name, p in net.named_parameters():
        if id(p) not in factors:
            module, _, last = name.rpartition(".")
            plain = module.removesuffix(".base") if module.removesuffix(".base") in layers else module
            found[f"{plain}.{last}" if plain else last] = p
    return found


def mixes_both_factors(net: nn.Module, canonical: Container[str]) -> bool:
    """Whether both factors of an adapter are among these parameters."""
    return any(f"{name}.up.weight" in canonical and f"{name}.down.weight" in canonical for name in adapted_layers(net))


def with_adapter_names(net: nn.Module, names: Iterable[str]) -> tuple[str, ...]:
    """Names of submodules, with "adapters" and "adapters.up" replaced by the names of these."""
    layers = adapted_layers(net)
    parts = {ADAPTERS: [*layers], ADAPTERS_UP: [f"{name}.up" for name in layers]} if layers else {}
    known = dict(net.named_modules())
    return tuple(found for name in names for found in ([name] if name in known else parts.get(name, [name])))


# ---------------------------------------------------------------------- which layers


def _chosen_layers(net: nn.Module, settings: Lora) -> dict[str, nn.Module]:
    if _can_be_adapted(net):
        raise ModelError("the network is itself one layer, which has no name; put it into nn.Sequential(layer)")
    named = dict(net.named_modules(remove_duplicate=False))
    for name in settings.train:
        if not name or name not in named or next(named[name].parameters(), None) is None:
            modules = ", ".join(repr(n) for n, m in named.items() if n and next(m.parameters(), None) is not None)
            raise ModelError(f"lora(train=...) names {name!r}, which is no module with parameters; use {modules}")
    possible = {name: layer for name, layer in named.items() if name and _can_be_adapted(layer)}
    free = {name: layer for name, layer in possible.items() if not _is_within(name, settings.train)}
    chosen: dict[str, nn.Module] = {}
    for wanted in (settings.on,) if isinstance(settings.on, str) else settings.on:
        found = _matching(named, wanted)
        for name, module in found.items():
            if wanted not in KINDS and (fault := _fault(module)):
                raise ModelError(f"lora(on={wanted!r}) matches {name!r}, {fault}; name other layers: {_list(free)}")
        layers = {name: module for name, module in found.items() if name in free}
        if not layers:
            raise ModelError(f"lora(on={wanted!r}) matches no layer that can have an adapter; use {_list(free)}")
        chosen |= layers
    for name, layer in chosen.items():
        weight = next(layer.parameters())  # it comes before a bias
        largest = min(weight.shape[0], weight[0].numel())
        if settings.rank > largest:
            raise ModelError(
                f"lora has rank {settings.rank}, but the weight of {name!r} ({type(layer).__name__}) has rank "
                f"{largest} at most; use rank={largest} or less, or name other layers"
            )
    return chosen


def _matching(named: dict[str, nn.Module], wanted: str) -> dict[str, nn.Module]:
    """Modules within the one of that name; or else those of that kind, or with that in their name."""
    if wanted and wanted in named:
        return {name: module for name, module in named.items() if _is_within(name, (wanted,))}
    if wanted in KINDS:
        return {name: module for name, module in named.items() if type(module) in KINDS[wanted]}
    return {name: module for name, module in named.items() if wanted and wanted in name}


def _can_be_adapted(module: nn.Module) -> bool:
    return any(type(module) in kinds for kinds in KINDS.values()) and _fault(module) is None


def _fault(module: nn.Module) -> str | None:
    """Why a layer with parameters that one may want to adapt cannot have an adapter."""
    if isinstance(module, nn.RNNBase | nn.MultiheadAttention):
        return f"which is a {type(module).__name__}: torch runs it on bare weights, and would not see an adapter"
    if type(module) in KINDS["convolution"] and module.groups != 1:
        return f"a convolution with {module.groups} groups, whose weight has no low-rank form"
    if type(module) is nn.Embedding and module.max_norm is not None:
        return "an embedding with max_norm, which changes its weight when it runs"
    return None


def _is_within(name: str, modules: Sequence[str]) -> bool:
    return any(name == module or name.startswith(f"{module}.") for module in modules)


def _list(layers: dict[str, nn.Module]) -> str:
    kinds = [kind for kind, types in KINDS.items() if any(type(layer) in types for layer in layers.values())]
    names = [*kinds, *layers][:20]
    more = len(kinds) + len(layers) - len(names)
    return (", ".join(map(repr, names)) or "a network with linear layers") + (f" and {more} more" if more else "")


def _replace(net: nn.Module, new: dict[int, Any]) -> None:
    """Put other modules in the place of these, wherever they stand."""
    for parent in list(net.modules()):
        for name, child in list(parent._modules.items()):  # named_children would pass over a module that is used twice
            if id(child) in new:
                setattr(parent, name, new[id(child)])
