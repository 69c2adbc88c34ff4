"""A network as JSON, so that it can be built again without its code: chains of layers of torch.nn, with adapters.

A layer is described by its class and the arguments of its constructor, which torch.nn keeps as attributes. Whether
that is enough is tried: the layer is built again, and its attributes must be equal to those of the original. Networks
of classes of one's own have no description. Nothing but layers of torch.nn and adapters is ever built from a file.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn

from ..core.adapters import AdaptedLayer

Description = dict[str, Any]

_ATTRIBUTES_OF_ALL = frozenset(vars(nn.Module()))
_HOOKS = tuple(name for name in _ATTRIBUTES_OF_ALL if name.endswith("_hooks"))
_DEEPEST = 32  # chains within chains


class UnknownNetworkError(ValueError):
    """A network that cannot be described, or a description of no network."""


def describe_network(net: nn.Module) -> Description | None:
    """What `network_from` takes; None where only the network's own code can build it.

    >>> describe_network(nn.Sequential(nn.Linear(4, 3, bias=False), nn.ReLU()))["layers"][0]
    {'name': '0', 'type': 'Linear', 'arguments': {'in_features': 4, 'out_features': 3, 'bias': False}}
    """
    parts: list[list[tuple[str, Any]]] = [
        [*net.named_modules(remove_duplicate=False)],
        [*net.named_parameters(remove_duplicate=False), *net.named_buffers(remove_duplicate=False)],
    ]
    if any(len({id(part) for _, part in found}) < len(found) for found in parts):
        return None  # a layer or a tensor that stands in several places
    try:
        with torch.device("meta"):
            description = _describe(net, "")
    except (UnknownNetworkError, TypeError, ValueError, RuntimeError):
        return None
    return description


def network_from(description: Any, depth: int = 0) -> nn.Module:
    """The network, with initial values of its own."""
    if depth > _DEEPEST:
        raise UnknownNetworkError(f"it is nested deeper than {_DEEPEST} layers")
    if description["type"] == AdaptedLayer.__name__:
        return AdaptedLayer(network_from(description["base"], depth + 1), description["rank"], description["alpha"])
    kind = getattr(nn, str(description["type"]), None)
    if not (inspect.isclass(kind) and issubclass(kind, nn.Module)):
        raise UnknownNetworkError(f"torch.nn has no layer {description['type']!r}")
    if "layers" in description:
        if kind is not nn.Sequential:
            raise UnknownNetworkError(f"{description['type']!r} has layers inside")
        layers = OrderedDict((str(part["name"]), network_from(part, depth + 1)) for part in description["layers"])
        return nn.Sequential(layers)
    return _build_layer(kind, description["arguments"])


def _describe(module: nn.Module, name: str) -> Description:
    kind = type(module)
    if isinstance(module, AdaptedLayer):
        base = _describe(module.base, "base")
        return {"name": name, "type": kind.__name__, "base": base, "rank": module.rank, "alpha": module.alpha}
    children = dict(module.named_children())
    if kind is nn.Sequential and not _attributes(module) and not _has_hooks(module):
        layers = [_describe(part, name) for name, part in children.items()]
        return {"name": name, "type": kind.__name__, "layers": layers}
    if getattr(nn, kind.__name__, None) is not kind or children or _has_hooks(module):
        raise UnknownNetworkError(f"{kind.__name__} has code of its own, or layers inside")
    arguments = _arguments(module)
    if not _alike(module, _build_layer(kind, arguments)):
        raise UnknownNetworkError(f"{kind.__name__} cannot be built from its attributes")
    return {"name": name, "type": kind.__name__, "arguments": arguments}


def _has_hooks(module: nn.Module) -> bool:
    return any(vars(module)[hooks] for hooks in _HOOKS)


def _arguments(module: nn.Module) -> dict[str, Any]:
    """Of the constructor, as far as the attributes tell; others have their defaults."""
    found: dict[str, Any] = {}
    for name in inspect.signature(type(module)).parameters:
        if name.startswith("_") or name in ("device", "dtype") or not hasattr(module, name):
            continue
        value = getattr(module, name)
        if name == "bias":
            value = value is not None if value is None or isinstance(value, Tensor) else value
        found[name] = _plain(value)
    return found


def _plain(value: Any) -> Any:
    """As JSON has it; tuples become lists."""
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise UnknownNetworkError(f"an argument is a {type(value).__name__}")


def _build_layer(kind: type[nn.Module], arguments: dict[str, Any]) -> nn.Module:
    return kind(**{name: _as_tuples(value) for name, value in arguments.items()})


def _as_tuples(value: Any) -> Any:
    return tuple(_as_tuples(item) for item in value) if isinstance(value, list) else value


def _attributes(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if name not in _ATTRIBUTES_OF_ALL}


def _alike(one: nn.Module, other: nn.Module) -> bool:
    if _attributes(one) != _attributes(other):
        return False
    shapes = [
        {name: tensor.shape for name, tensor in (*module.named_parameters(), *module.named_buffers())}
        for module in (one, other)
    ]
    return shapes[0] == shapes[1]
