"""Frozen layers at the beginning of a network: their outputs are constants, which can be computed once per sample."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

from .network_parts import trains
from .randomness import draws_randomly


def frozen_start(net: nn.Module) -> tuple[str, ...]:
    """Names of the submodules that run first, in this order, and have no trained parameter and no randomness.

    They are found in nn.Sequential, also in nested ones: only there is it known what runs first. Layers without any
    parameters are left out at the end, because they cost little and may make the output larger.

    >>> backbone = nn.Sequential(nn.Linear(4, 8), nn.ReLU()).requires_grad_(False)
    >>> frozen_start(nn.Sequential(backbone, nn.Flatten(), nn.Linear(8, 2)))
    ('0',)
    """
    names = _constant_children(net, "")
    while names and not _has_parameters(net.get_submodule(names[-1])):
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


def _has_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


def take_start(net: nn.Module, names: tuple[str, ...]) -> nn.Sequential:
    """The frozen layers as a network of their own."""
    return nn.Sequential(*(net.get_submodule(name) for name in names))


def without_start(net: nn.Module, names: tuple[str, ...]) -> nn.Module:
    """A copy of the network that takes the outputs of these layers, with the very tensors of `net` and their names."""
    kept: dict[int, Any] = {id(tensor): tensor for tensor in (*net.parameters(), *net.buffers())}
    rest = copy.deepcopy(net, kept)
    for path in names:
        parent, _, name = path.rpartition(".")
        setattr(rest.get_submodule(parent), name, nn.Identity())
    return rest
