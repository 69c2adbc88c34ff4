"""The network, the loss and the method of a fit: how its file describes them, and how they are built again from it.

What is not one of ours, such as a network with code of its own, cannot be kept in a file: the user passes it again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor, nn

from ..algorithms import METHODS
from ..algorithms.contract import Method
from ..core.adapters import Lora, adapted_layers, with_adapters
from ..core.losses import LOSSES, Loss
from ..errors import ModelError, SettingError
from ..io.files import damaged
from ..networks.description import UnknownNetworkError, network_from


def describe_loss(loss: Loss) -> dict[str, Any]:
    """The name of a loss, and its settings if it is one of ours."""
    ours = LOSSES.get(loss.name)
    if ours is None or type(ours) is not type(loss):
        return {"name": loss.name, "settings": None}
    try:
        again = type(loss)(**vars(loss))
        json.dumps(vars(loss))
    except (TypeError, ValueError):
        return {"name": loss.name, "settings": None}
    return {"name": loss.name, "settings": vars(loss) if vars(again) == vars(loss) else None}


def restore_network(path: Path, about: dict[str, Any], net: nn.Module | None, parts: dict[str, Any]) -> nn.Module:
    """The network with the saved values. Layers are frozen, and in evaluation mode, as they were when it was saved."""
    expected = {**parts["network"], **parts["constants"]}
    if net is None:
        if about["network"] is None:
            raise ModelError(
                f"{path} holds a network with code of its own, which a file cannot keep; build the network again and "
                f"pass it: ppfl.load(path, net=net)"
            )
        try:
            # a damaged file may describe a huge network: "meta" checks its shapes without memory for its values
            with torch.device("meta"):
                _refuse_other_tensors(network_from(about["network"]), expected, path)
            with torch.random.fork_rng(devices=[]):
                net = network_from(about["network"])
        except UnknownNetworkError as error:
            raise damaged(path, f"describes a network that cannot be built: {error}") from None
    else:
        if about.get("adapters") and not adapted_layers(net):
            net = with_adapters(net, Lora(**about["adapters"]))
        _refuse_other_tensors(net, expected, path)
    with torch.no_grad():
        for name, tensor in (*net.named_parameters(), *net.named_buffers()):
            tensor.data = expected[name].to(tensor.device)
    for name, parameter in net.named_parameters():
        parameter.requires_grad_(name in parts["network"])
    in_evaluation = set(about["evaluation_mode"])
    for name, module in net.named_modules():
        module.training = name not in in_evaluation
    return net


def describe_adapters(net: nn.Module) -> dict[str, Any] | None:
    """The settings that give a network of the user's own the same adapters."""
    layers = adapted_layers(net)
    sizes = [{"rank": layer.rank, "alpha": layer.alpha} for layer in layers.values()]
    return {**sizes[0], "on": list(layers)} if layers else None


def _refuse_other_tensors(net: nn.Module, expected: Mapping[str, Tensor], path: Path) -> None:
    found = {**dict(net.named_parameters()), **dict(net.named_buffers())}
    if odd := sorted(found.keys() ^ expected.keys()):
        who, other = ("the network", "the file") if odd[0] in found else ("the file", "the network")
        raise ModelError(
            f"the network does not fit {path}: {who} has {odd[0]!r}, {other} has not; build the network as it was"
        )
    for name, tensor in found.items():
        if tensor.shape != expected[name].shape:
            raise ModelError(
                f"the network does not fit {path}: {name!r} has shape {tuple(tensor.shape)}, in the file "
                f"{tuple(expected[name].shape)}; build the network as it was"
            )


def restore_loss(path: Path, about: dict[str, Any], loss: Loss | None) -> Loss:
    """The loss that was described; one that is passed must have the same name."""
    name = about["name"]
    if loss is not None:
        if not isinstance(loss, Loss) or loss.name != name:
            raise ModelError(
                f"{path} was fitted with the loss {name!r}, and loss is {getattr(loss, 'name', loss)!r}; "
                f"pass an object of the loss it was fitted with"
            )
        return loss
    if about["settings"] is None or name not in LOSSES:
        raise ModelError(
            f"{path} was fitted with a loss of your own, {name!r}, which a file cannot keep; "
            f"pass it again: ppfl.load(path, loss=...)"
        )
    return type(LOSSES[name])(**about["settings"]) if about["settings"] else LOSSES[name]


def describe_method(method: Method) -> dict[str, Any]:
    """The name of a method, its settings, and whether it is the user's own."""
    dump = getattr(method, "model_dump", None)
    settings = None if dump is None else dump(mode="json")
    return {"name": method.name, "settings": settings, "own": METHODS.get(method.name) is not type(method)}


def restore_method(path: Path, about: dict[str, Any], method: Method | type[Method] | None) -> Method:
    """The method that was described; one that is passed, or its class, must have the same name."""
    name = about["name"]
    if method is None:
        if about["own"] or name not in METHODS:
            raise SettingError(
                f"{path} was fitted by a method of your own, {name!r}, which a file cannot keep; "
                f"pass its class: ppfl.load(path, method=...)"
            )
        method = METHODS[name]
    elif method.name != name:
        raise SettingError(f"{path} was fitted by {name!r}, and method is {method.name!r}; pass the class it was")
    if not isinstance(method, type):
        return method
    try:
        return method(**about["settings"])
    except (ValidationError, TypeError) as error:
        raise damaged(path, f"has settings that {name!r} does not take ({' '.join(str(error).split())})") from None
