"""Gradients of many clients at once, by hand, for networks that are chains of linear layers and activations.

torch.func gives the same numbers for any network. For a chain, batched matrix products written out here skip its
bookkeeping and the input gradient of the first layer, which nobody needs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from .losses import Loss

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


def chain_gradients(
    layers: tuple[Layer, ...], loss: Loss, parameters: Params, x: Tensor, y: Tensor, weight: Tensor
) -> tuple[Params, Tensor]:
    """Gradients (C, ...) of each client's weighted mean loss at its own parameters, and the losses (C,)."""
    inputs, out = [], x  # x: (C, B, d)
    for layer in layers:
        inputs.append(out)
        transposed = parameters[layer.weight].transpose(1, 2)
        out = torch.bmm(out, transposed) if layer.bias is None else _affine(out, transposed, parameters[layer.bias])
        out = out if layer.activation is None else layer.activation.apply(out)
    slope, losses = _loss_slopes(loss, out, y, weight)
    gradients: Params = {}
    for at in reversed(range(len(layers))):
        layer = layers[at]
        if layer.activation is not None:
            slope = layer.activation.back(slope, out if at == len(layers) - 1 else inputs[at + 1])
        gradients[layer.weight] = torch.bmm(slope.transpose(1, 2), inputs[at])
        if layer.bias is not None:
            gradients[layer.bias] = slope.sum(dim=1)
        if at > 0:
            slope = torch.bmm(slope, parameters[layer.weight])
    return gradients, losses


def _affine(x: Tensor, transposed: Tensor, bias: Tensor) -> Tensor:
    return torch.baddbmm(bias[:, None], x, transposed)


def _loss_slopes(loss: Loss, output: Tensor, y: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Slope of each client's weighted mean loss at its outputs (C, B, ...), and the losses (C,)."""
    share = weight / weight.sum(dim=1, keepdim=True).clamp_min(torch.finfo(weight.dtype).tiny)
    with torch.enable_grad():
        at = output.detach().requires_grad_()
        losses = loss.per_sample(at.flatten(0, 1), y.flatten(0, 1)).reshape(share.shape) * share
        (slope,) = torch.autograd.grad(losses.sum(), at)
    return slope, losses.detach().sum(dim=1)


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
