"""Many clients' networks at once, by hand, where networks are chains of linear layers and activations.

torch.func gives the same numbers for any network. For a chain, batched matrix products written out here skip its
bookkeeping and the input gradient of the first layer, add gradients straight onto velocities, and allocate nothing.
A column is a sample, (width, B): then the K models of a client, which share their input, are one product, and
reductions over a few outputs run along the samples.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..trees import Params
from ..workspace import Workspace


class Activation(NamedTuple):
    """An elementwise function, in place, and how a slope goes back through it, in place, given its output."""

    apply: Callable[[Tensor], Tensor]
    back: Callable[[Tensor, Tensor], Tensor]  # slope at the output, output -> slope at the input


_back = torch.ops.aten
ACTIVATIONS: dict[type[nn.Module], Activation] = {
    nn.ReLU: Activation(torch.relu_, lambda g, out: _back.threshold_backward.grad_input(g, out, 0, grad_input=g)),
    nn.Tanh: Activation(torch.tanh_, lambda g, out: _back.tanh_backward.grad_input(g, out, grad_input=g)),
    nn.Sigmoid: Activation(torch.sigmoid_, lambda g, out: _back.sigmoid_backward.grad_input(g, out, grad_input=g)),
}


class Layer(NamedTuple):
    weight: str  # names of parameters
    bias: str | None
    activation: Activation | None


class Chain(NamedTuple):
    layers: tuple[Layer, ...]
    flattens: bool  # takes samples of any shape, as vectors

    def takes(self, x: Tensor) -> bool:
        """Whether samples x (N, ...) go through it."""
        return x.dim() == 2 or (self.flattens and x.dim() > 2)

    def trains_all(self, net: nn.Module) -> bool:
        """Whether no layer is frozen."""
        return all(p.requires_grad for p in net.parameters())


def chain_of(net: nn.Module) -> Chain | None:
    """The layers of a network that takes vectors through a chain, or None where it is anything else.

    >>> chain = chain_of(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)))
    >>> [layer.weight for layer in chain.layers]
    ['0.weight', '2.weight']
    >>> chain_of(nn.Conv2d(1, 1, 3)) is None
    True
    """
    layers: list[Layer] = []
    flattens = False
    links = _links(net)
    parameters = [id(p) for _, module in links for p in module.parameters()]
    if len(set(parameters)) < len(parameters):  # a layer in two places, or a weight in two layers
        return None
    for name, module in links:
        if type(module) is nn.Linear:
            prefix = f"{name}." if name else ""
            layers.append(Layer(f"{prefix}weight", f"{prefix}bias" if module.bias is not None else None, None))
        elif type(module) in ACTIVATIONS and layers and layers[-1].activation is None:
            layers[-1] = layers[-1]._replace(activation=ACTIVATIONS[type(module)])
        elif type(module) is nn.Flatten and (module.start_dim, module.end_dim) == (1, -1):
            flattens = flattens or not layers  # later it does nothing to a vector
        elif type(module) is not nn.Identity:  # as it stands for frozen layers, whose outputs are the samples
            return None
    return Chain(tuple(layers), flattens) if layers else None


Slopes = Callable[[Tensor], tuple[Tensor, Tensor]]  # outputs (C, K, out, B) -> slopes there, losses (C,)


def chain_outputs(chain: Chain, models: Params, x: Tensor, space: Workspace) -> Tensor:
    """Outputs (C, K, out, B) of each client's K models, leaves (C, K, ...), on its x (C, B, ...)."""
    last = _forward(chain, models, x.flatten(2), space)[-1]
    return last.reshape(len(x), -1, *last.shape[1:])


def add_chain_gradients(
    chain: Chain,
    models: Params,
    velocity: Params,
    momentum: float,
    x: Tensor,
    slopes: Slopes,
    space: Workspace,
    scales: Params | None = None,
) -> Tensor:
    """velocity <- momentum velocity + gradient, in place, leaves (C, K, ...); returns the losses (C,).

    With momentum 0 velocity may hold anything. `scales` (C, 1, 1), for K = 1, multiply the gradients of the layers
    whose weight they are named after.
    """
    x = x.flatten(2)
    outs = _forward(chain, models, x, space)
    slope, losses = slopes(outs[-1].view(len(x), -1, *outs[-1].shape[1:]))
    slope = slope.flatten(0, 1)
    scales = scales or {}
    if scales and all(layer.weight in scales for layer in chain.layers):  # all alike: once, at the narrow end
        slope, scales = slope * next(iter(scales.values())), {}
    for at in reversed(range(len(chain.layers))):
        layer = chain.layers[at]
        if layer.activation is not None:
            slope = layer.activation.back(slope, outs[at])
        scaled = slope * scales[layer.weight] if layer.weight in scales else slope
        if at == 0:
            scaled = scaled.reshape(len(x), -1, scaled.shape[2])  # K models side by side
        inputs = x if at == 0 else outs[at - 1].transpose(1, 2)
        onto = _as_products(velocity[layer.weight], at)
        torch.baddbmm(onto, scaled, inputs, beta=momentum, out=onto)
        if layer.bias is not None:
            onto = _as_products(velocity[layer.bias], at)
            torch.add(scaled.sum(dim=2), onto, alpha=momentum, out=onto) if momentum else onto.copy_(scaled.sum(dim=2))
        if at > 0:
            weight = _as_products(models[layer.weight], at).transpose(1, 2)
            slope = torch.bmm(weight, slope, out=_product_buffer(space, weight, slope))
    return losses


def _forward(chain: Chain, models: Params, x: Tensor, space: Workspace) -> list[Tensor]:
    """Every layer's output (C K, width, B) after its activation, x (C, B, d)."""
    outs, columns = [], x.transpose(1, 2)
    for at, layer in enumerate(chain.layers):
        weight = _as_products(models[layer.weight], at)
        out = _product_buffer(space, weight, columns)
        if layer.bias is None:
            torch.bmm(weight, columns, out=out)
        else:
            torch.baddbmm(_as_products(models[layer.bias], at)[:, :, None], weight, columns, out=out)
        if layer.activation is not None:
            layer.activation.apply(out)
        columns = out.view(-1, models[layer.weight].shape[2], out.shape[2])
        outs.append(columns)
    return outs


def _as_products(parameter: Tensor, at: int) -> Tensor:
    """(C, K, out, ...) for one product a client in the first layer, (C, K out, ...), for one a model in later ones."""
    return parameter.flatten(1, 2) if at == 0 else parameter.flatten(0, 1)


def _product_buffer(space: Workspace, a: Tensor, b: Tensor) -> Tensor:
    """A buffer for the batched product a @ b."""
    return space.empty((a.shape[0], a.shape[1], b.shape[2]), a)


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
