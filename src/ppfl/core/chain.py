"""Gradients of many clients at once, by hand, for networks that are chains of linear layers and activations.

torch.func gives the same numbers for any network. For a chain, batched matrix products written out here skip its
bookkeeping and the input gradient of the first layer, which nobody needs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

Params = dict[str, Tensor]


class Activation(NamedTuple):
    """An elementwise function, and the slope that goes back through it, given its own output."""

    apply: Callable[[Tensor], Tensor]
    back: Callable[[Tensor, Tensor], Tensor]  # slope at the output, output -> slope at the input


ACTIVATIONS: dict[type[nn.Module], Activation] = {
    nn.ReLU: Activation(torch.relu_, lambda slope, out: torch.ops.aten.threshold_backward(slope, out, 0)),
    nn.Tanh: Activation(torch.tanh_, lambda slope, out: torch.ops.aten.tanh_backward(slope, out)),
    nn.Sigmoid: Activation(torch.sigmoid_, lambda slope, out: torch.ops.aten.sigmoid_backward(slope, out)),
}


class Layer(NamedTuple):
    weight: str  # names of parameters
    bias: str | None
    activation: Activation | None


def chain_of(net: nn.Module) -> tuple[Layer, ...] | None:
    """The layers of a network that takes vectors through a chain, or None where it is anything else.

    >>> [layer.weight for layer in chain_of(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)))]
    ['0.weight', '2.weight']
    >>> chain_of(nn.Conv2d(1, 1, 3)) is None
    True
    """
    layers: list[Layer] = []
    links = _links(net)
    linear = [id(module) for _, module in links if type(module) is nn.Linear]
    if len(set(linear)) < len(linear):
        return None
    for name, module in links:
        if type(module) is nn.Linear:
            prefix = f"{name}." if name else ""
            layers.append(Layer(f"{prefix}weight", f"{prefix}bias" if module.bias is not None else None, None))
        elif type(module) in ACTIVATIONS and layers and layers[-1].activation is None:
            layers[-1] = layers[-1]._replace(activation=ACTIVATIONS[type(module)])
        elif type(module) is not nn.Flatten or (module.start_dim, module.end_dim) != (1, -1):  # nothing, to a vector
            return None
    return tuple(layers) or None


Slopes = Callable[[Tensor], tuple[Tensor, Tensor]]  # outputs (C, K, B, ...) -> slopes there, losses (C,)


def chain_gradients(layers: tuple[Layer, ...], slopes: Slopes, models: Params, x: Tensor) -> tuple[Params, Tensor]:
    """Gradients (C, K, ...) of each client's loss at its K models, leaves (C, K, ...), on x (C, B, d); losses (C,)."""
    clients, k = models[layers[0].weight].shape[:2]
    inputs, out = [x], x
    for at, layer in enumerate(layers):
        weight, bias = (models[name] if name is not None else None for name in (layer.weight, layer.bias))
        out = _affine(out, _together(weight, at), _together(bias, at))
        out = out if layer.activation is None else layer.activation.apply(out)
        if at == 0:
            out = _model_by_model(out, k)
        inputs.append(out)
    slope, losses = slopes(out.reshape(clients, k, *out.shape[1:]))
    slope = slope.flatten(0, 1)
    gradients: Params = {}
    for at in reversed(range(len(layers))):
        layer = layers[at]
        if layer.activation is not None:
            slope = layer.activation.back(slope, inputs[at + 1])
        if at == 0:
            slope = _side_by_side(slope, k)
        gradients[layer.weight] = torch.bmm(slope.transpose(1, 2), inputs[at]).reshape(models[layer.weight].shape)
        if layer.bias is not None:
            gradients[layer.bias] = slope.sum(dim=1).reshape(models[layer.bias].shape)
        if at > 0:
            slope = torch.bmm(slope, models[layer.weight].flatten(0, 1))
    return {name: gradients[name] for name in models}, losses  # trees match leaf by leaf, in order


def _together(parameter: Tensor | None, at: int) -> Tensor | None:
    """The first layers of a client's K models side by side, as they share their input; later ones one by one."""
    if parameter is None:
        return None
    return parameter.flatten(1, 2) if at == 0 else parameter.flatten(0, 1)


def _model_by_model(out: Tensor, k: int) -> Tensor:
    """(C, B, K h) to (C K, B, h)."""
    clients, batch, _ = out.shape
    return out.reshape(clients, batch, k, -1).transpose(1, 2).flatten(0, 1)


def _side_by_side(slope: Tensor, k: int) -> Tensor:
    """(C K, B, h) to (C, B, K h)."""
    return slope.reshape(-1, k, *slope.shape[1:]).transpose(1, 2).flatten(2, 3)


def _affine(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    assert weight is not None
    transposed = weight.transpose(1, 2)
    return torch.bmm(x, transposed) if bias is None else torch.baddbmm(bias[:, None], x, transposed)


def _links(net: nn.Module, prefix: str = "") -> list[tuple[str, nn.Module]]:
    if type(net) is not nn.Sequential:
        return [(prefix, net)]
    named = net._modules.items()  # named_children would pass over a module that is used twice
    return [
        link
        for name, module in named
        if module is not None
        for link in _links(module, f"{prefix}.{name}" if prefix else name)
    ]
