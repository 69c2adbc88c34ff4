"""Parts of a network: which are canonical, frozen or personal, where they stand, and what a loss can be taken of."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ModelError, SettingError
from .adapters import AdaptedLayer, with_adapter_names
from .dropout import draws_randomly
from .losses import Loss
from .mixing import MixedModule

AFFINE = {nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Embedding}
RESHAPING = {nn.Flatten, nn.Unflatten, nn.Identity}


# names of submodules or of single parameters ("classifier.bias"), or "input", "output", "adapters" and "adapters.up"
Part = str | tuple[str, ...]
Names = frozenset[str]  # of parameters


def parameters_of(net: nn.Module, part: Part, setting: str) -> Names:
    """Names of the trained parameters of a part of the network; one that stands in several modules is one parameter.

    >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    >>> sorted(parameters_of(net, "output", "personal_part")), sorted(parameters_of(net, "0.bias", "personal_part"))
    (['2.bias', '2.weight'], ['0.bias'])
    """
    names = with_adapter_names(net, (part,) if isinstance(part, str) else part)
    chosen = {id(p) for name in names for p in _parameters(net, name, setting)}
    return Names(name for name, p in net.named_parameters() if id(p) in chosen and p.requires_grad)


def _parameters(net: nn.Module, name: str, setting: str) -> list[nn.Parameter]:
    trained = {n: [p] for n, p in net.named_parameters(remove_duplicate=False) if p.requires_grad}
    known = {n: [*m.parameters()] for n, m in net.named_modules(remove_duplicate=False) if n and trains(m)}
    layers = [m for m in net.modules() if trains(m) and not any(trains(inner) for inner in m.children())]
    ends = {"input": [*layers[0].parameters()], "output": [*layers[-1].parameters()]}
    for choices in (known, ends, trained):
        if name in choices:
            return choices[name]
    raise SettingError(
        f"{setting} names {name!r}, which is no submodule with trained parameters and no trained parameter; "
        f"use {', '.join(map(repr, [*ends, *known]))}, or several of them"
    )


def canonical_modules(net: nn.Module, canonical: str | Sequence[str]) -> tuple[str, ...]:
    """The named submodules, checked, and those that share a parameter with them; the whole network is named ''.

    A tied parameter is one parameter with several names. Where one of its names is canonical all are, since a tensor
    cannot have K copies in one place and a single one in another, and untying it would train another network than the
    one that was given. So the modules that hold it elsewhere become canonical too.

    >>> net = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))
    >>> net[2].weight = net[0].weight
    >>> canonical_modules(net, "2")
    ('2', '0')
    """
    if canonical == "all":
        return ("",)
    if isinstance(canonical, nn.Module):
        raise ModelError("canonical is a module; give its name in the network, such as canonical='head'")
    names = with_adapter_names(net, (canonical,) if isinstance(canonical, str) else canonical)
    known = {name for name, module in net.named_modules(remove_duplicate=False) if name and trains(module)}
    for name in names:
        if name not in known:
            frozen = bool(name) and name in dict(net.named_modules()) and [*net.get_submodule(name).parameters()] != []
            fault = "is frozen (requires_grad=False)" if frozen else "is no submodule with parameters"
            choices = f" or among {', '.join(map(repr, sorted(known)))}" if known else ", as the network has no parts"
            raise ModelError(f"canonical names {name!r}, which {fault}; it must be 'all'{choices}")
        if any(name != other and name.startswith(other + ".") for other in names):
            raise ModelError(f"canonical names {name!r} twice: it is part of another named submodule; drop one")
    if len(set(names)) < len(names) or not names:
        raise ModelError(f"canonical is {names!r}; name at least one submodule, each once")
    return (*names, *_tied_modules(net, names))


def freeze(net: nn.Module, part: Part) -> None:
    """Make the parameters of a part of the network constants. Something must be left to train.

    >>> net = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 2))
    >>> freeze(net, "0")
    >>> [name for name, p in net.named_parameters() if p.requires_grad]
    ['2.weight', '2.bias']
    """
    for name in parameters_of(net, part, "frozen"):
        net.get_parameter(name).requires_grad_(False)
    if not trains(net):
        raise SettingError(f"frozen names {part!r}, which leaves nothing to train; leave out a part of it")


def _tied_modules(net: nn.Module, names: tuple[str, ...]) -> list[str]:
    """Modules outside of these that hold one of their trained parameters."""
    named = list(net.named_parameters(remove_duplicate=False))
    inside = {id(p): name for name, p in named if p.requires_grad and is_in_module(name, names)}
    found: list[str] = []
    for name, p in named:
        module = name.rpartition(".")[0]
        if id(p) not in inside or is_in_module(name, (*names, *found)):
            continue
        if module == "" or any(other.startswith(module + ".") for other in (*names, *found)):
            raise ModelError(
                f"the canonical parameter {inside[id(p)]!r} is tied to {name!r} of "
                f"{repr(module) if module else 'the network itself'}, which holds the canonical part; expected a "
                f"canonical part that can be told from the rest; use canonical={module or 'all'!r}, or untie the two"
            )
        found.append(module)
    return found


def is_in_module(parameter: str, modules: tuple[str, ...]) -> bool:
    """Whether a parameter belongs to one of these submodules."""
    return any(module == "" or parameter.startswith(module + ".") for module in modules)


def trains(module: nn.Module) -> bool:
    """Whether it has a parameter that is not frozen."""
    return any(p.requires_grad for p in module.parameters())


def are_affine(net: nn.Module, modules: tuple[str, ...]) -> bool:
    """Whether the output of each of these submodules is affine in its parameters: then to mix them is to mix those.

    >>> are_affine(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2)), ("2",))
    True
    """
    return all(_is_affine(net.get_submodule(name)) for name in modules)


def _is_affine(module: nn.Module) -> bool:
    if type(module) is nn.Sequential:
        learned = [child for child in module if [*child.parameters()]]
        others = [child for child in module if child not in learned]
        return len(learned) == 1 and _is_affine(learned[0]) and all(type(m) in RESHAPING for m in others)
    return type(module) in AFFINE and not (isinstance(module, nn.Embedding) and module.max_norm is not None)


def with_tensors_of(net: nn.Module, other: nn.Module) -> nn.Module:
    """A copy of `net` with the very tensors of `other`, whose parameters and buffers have the same names: the two
    always have the same values, and take the memory of one."""
    parameters, buffers = dict(other.named_parameters()), dict(other.named_buffers())
    same: dict[int, Any] = {id(mine): parameters[name] for name, mine in net.named_parameters()}
    same |= {id(mine): buffers[name] for name, mine in net.named_buffers()}
    return copy.deepcopy(net, same)


def with_mixed_modules(net: nn.Module, modules: tuple[str, ...], one_by_one: bool) -> nn.Module:
    """A copy of the network whose canonical submodules mix their outputs where they stand.

    one_by_one: canonical models run one after the other, not by vmap.
    """
    mixed = copy.deepcopy(net)
    for path in modules:
        if path:
            parent, _, name = path.rpartition(".")
            setattr(mixed.get_submodule(parent), name, MixedModule(mixed.get_submodule(path), one_by_one))
    return mixed


def run_and_watch(net: nn.Module, x: Tensor, modules: tuple[str, ...]) -> tuple[Tensor, bool]:
    """Output of the network on x, and whether it is, as an object, what its one canonical module returned.

    An adapter's output is added to that of a frozen layer. Memberships sum to 1, so the sums may be mixed as well.
    """
    seen: list[Any] = []
    handle = _ends_in(net, modules[0]).register_forward_hook(lambda _module, _x, out: seen.append(out))
    try:
        with torch.no_grad():
            output = net(x)
    finally:
        handle.remove()
    return output, len(modules) == 1 and len(seen) == 1 and seen[0] is output


def _ends_in(net: nn.Module, module: str) -> nn.Module:
    """The module itself, or the layer that it is an adapter of."""
    parent, _, name = module.rpartition(".")
    layer = net.get_submodule(parent)
    return layer if isinstance(layer, AdaptedLayer) and name == "up" else net.get_submodule(module)


def advice_on_shape(net: nn.Module, x: Tensor) -> str:
    """What to do where a network cannot run on samples x (N, ...)."""
    first = next((module for module in net.modules() if isinstance(module, nn.Conv2d)), None)
    if first is not None and x.dim() == 3:
        return "images need an axis of channels: use x[:, None]"
    if first is not None and x.dim() == 4 and x.shape[1] != first.in_channels == x.shape[3]:
        return "torch has channels before rows and columns: use x.movedim(-1, 1)"
    return "change the network's input or the data's shape"


def refuse_outputs(loss: Loss, output: Any, y: Tensor, n_classes: int | None) -> None:
    """Refuse outputs (B, ...) that a loss cannot be taken of, given targets y (B, ...)."""
    if not isinstance(output, Tensor):
        raise ModelError(f"the network returns a {type(output).__name__}; it must return one tensor (B, ...)")
    _refuse_number_of_outputs(loss.name, output, n_classes)
    try:
        losses = loss.per_sample(output, y)
        found = f"losses of shape {tuple(losses.shape)}"
    except (RuntimeError, IndexError, ValueError, TypeError) as error:
        losses, found = None, str(error).splitlines()[0]
    if losses is None or losses.shape != y.shape[:1]:
        raise ModelError(
            f"the {loss.name} loss cannot be taken of outputs {tuple(output.shape)} and targets {tuple(y.shape)}: "
            f"{found}; it must give one loss per sample, ({len(y)},)"
        )
    alone = torch.cat([loss.per_sample(output[i : i + 1], y[i : i + 1]) for i in range(len(y))])
    if not torch.allclose(alone, losses, rtol=1e-3, atol=1e-5, equal_nan=True):
        raise ModelError(
            f"the loss {loss.name} of a sample depends on others of its batch ({float(losses[0]):.4g} with another, "
            f"{float(alone[0]):.4g} alone); return losses that each depend on one sample"
        )


def _refuse_number_of_outputs(loss: str, output: Tensor, n_classes: int | None) -> None:
    if loss == "cross_entropy" and n_classes is not None and output.shape[-1] < n_classes:
        raise ModelError(
            f"the network has {output.shape[-1]} outputs but the labels go up to {n_classes - 1}; "
            f"give its last layer {n_classes} outputs"
        )
    if loss == "logistic" and output[0].numel() != 1:
        raise ModelError(
            f"the logistic loss needs one output per sample, the network has {output[0].numel()}; "
            "give its last layer one output or use the cross_entropy loss"
        )


# ---------------------------------------------------------------------- frozen layers at the beginning
#
# Their outputs are constants, which can be computed once per sample.


def first_frozen_layers(net: nn.Module) -> tuple[str, ...]:
    """Names of the submodules that run first, in this order, and have no trained parameter and no randomness.

    They are found in nn.Sequential, also in nested ones: only there is it known what runs first. Layers without any
    parameters are left out at the end, because they cost little and may make the output larger.

    >>> backbone = nn.Sequential(nn.Linear(4, 8), nn.ReLU()).requires_grad_(False)
    >>> first_frozen_layers(nn.Sequential(backbone, nn.Flatten(), nn.Linear(8, 2)))
    ('0',)
    """
    names = _constant_children(net, "")
    while names and not [*net.get_submodule(names[-1]).parameters()]:
        names.pop()
    return tuple(names)


def _constant_children(module: nn.Module, prefix: str) -> list[str]:
    found: list[str] = []
    if type(module) is not nn.Sequential or _is_watched(module):
        return found
    for name, child in module.named_children():
        if not _is_constant(child):
            return found + _constant_children(child, f"{prefix}{name}.")
        found.append(prefix + name)
    return found


def _is_constant(module: nn.Module) -> bool:
    return not trains(module) and not draws_randomly(module) and not any(map(_is_watched, module.modules()))


def _is_watched(module: nn.Module) -> bool:
    """Whether code of the user runs with the module: it may want to see every call."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def layers_as_network(net: nn.Module, names: tuple[str, ...]) -> nn.Sequential:
    """The frozen layers as a network of their own."""
    return nn.Sequential(*(net.get_submodule(name) for name in names))


def without_layers(net: nn.Module, names: tuple[str, ...]) -> nn.Module:
    """A copy of the network that takes the outputs of these layers, with the very tensors of `net` and their names."""
    kept: dict[int, Any] = {id(tensor): tensor for tensor in (*net.parameters(), *net.buffers())}
    rest = copy.deepcopy(net, kept)
    for path in names:
        parent, _, name = path.rpartition(".")
        setattr(rest.get_submodule(parent), name, nn.Identity())
    return rest
