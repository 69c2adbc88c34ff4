"""Chains of linear layers by hand: the outputs and gradients of many clients' models at once.

The same numbers as `Autograd`'s, which runs any network and does whatever a chain has no faster way for. For a chain,
batched matrix products written out here skip the bookkeeping of torch.func and the input gradient of the first layer,
add gradients straight onto velocities, and allocate nothing. A column is a sample, (width, B): then the K models of a
client, which share their input, are one product, and reductions over a few outputs run along the samples.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..population import Networks, OneNetwork, Population
from ..trees import Params
from .autograd import SAMPLES_AT_ONCE, Autograd, Batch

NUMBERS_AT_ONCE = 2**20  # more samples run together where that is few numbers


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


Slopes = Callable[[Tensor], tuple[Tensor, Tensor]]  # outputs (C K, out, B) -> slopes there, losses (C,)


class Chained(Autograd):
    """A population whose network is a chain of layers that are all trained.

    Parameters are those of one network per client, leaves (C, ...), or of K models per client, leaves (C, K, ...).
    """

    def __init__(self, population: Population, chain: Chain, x: Tensor, y: Tensor, n_classes: int | None) -> None:
        super().__init__(population, x, y, n_classes)
        self.chain = chain
        # K models with a common part share their first layers; torch.func runs these once
        self._models_by_hand = not population.common_names

    # ------------------------------------------------------------------ outputs

    def outputs_of(self, models: OneNetwork | Networks, x: Tensor) -> Tensor:
        if isinstance(models, OneNetwork):
            one = {name: value[None] for name, value in models.values.items()}
            parts = torch.split(x.flatten(0, 1), self._samples_at_once(one))
            together = torch.cat([self._by_hand(one, part)[0] for part in parts], dim=1).T
            return together.reshape(*x.shape[:2], -1)
        with self.space.frame():
            return self._forward(models.values, x.flatten(2))[-1].transpose(1, 2).clone()

    def _samples_at_once(self, models: Params) -> int:
        if not self._models_by_hand:
            return SAMPLES_AT_ONCE
        widest = max(len(theta[0]) for theta in models.values())
        return max(SAMPLES_AT_ONCE, NUMBERS_AT_ONCE // (self.population.k * widest))

    def _outputs_of_shared(self, models: Params, x: Tensor) -> Tensor:
        return self._by_hand(models, x) if self._models_by_hand else super()._outputs_of_shared(models, x)

    def _by_hand(self, models: Params, x: Tensor) -> Tensor:
        """(K, out, B) of models (K, ...)."""
        with self.space.frame():
            return self._forward({name: theta[None] for name, theta in models.items()}, x[None].flatten(2))[-1].clone()

    def _forward(self, params: Params, x: Tensor) -> list[Tensor]:
        """Every layer's output (C K, width, B) after its activation, x (C, B, d)."""
        outs, columns = [], x.transpose(1, 2)
        for layer, (weight, bias) in zip(self.chain.layers, self._products(params), strict=True):
            out = self._product_buffer(weight, columns)
            if bias is None:
                torch.bmm(weight, columns, out=out)
            else:
                torch.baddbmm(bias.unsqueeze(2), weight, columns, out=out)
            if layer.activation is not None:
                layer.activation.apply(out)
            width = params[layer.weight].shape[-2]
            columns = out if out.shape[1] == width else out.view(-1, width, out.shape[2])
            outs.append(columns)
        return outs

    def _products(self, params: Params) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Every layer's weight and bias for batched products: those of networks as they are, of K models one product
        for each client in the first layer, (C, K out, ...), and one for each model in later ones, (C K, out, ...)."""
        for at, layer in enumerate(self.chain.layers):
            weight, bias = params[layer.weight], None if layer.bias is None else params[layer.bias]
            if weight.dim() == 4:
                ends = (1, 2) if at == 0 else (0, 1)
                weight, bias = weight.flatten(*ends), None if bias is None else bias.flatten(*ends)
            yield weight, bias

    def _product_buffer(self, a: Tensor, b: Tensor) -> Tensor:
        """A buffer for the batched product a @ b."""
        return self.space.empty((a.shape[0], a.shape[1], b.shape[2]), a)

    # ------------------------------------------------------------------ gradients

    def add_gradients(
        self, networks: Params, velocity: Params, momentum: float, batch: Batch, only: Container[str] | None = None
    ) -> Tensor:
        def slopes(outputs: Tensor) -> tuple[Tensor, Tensor]:
            slope, losses = self.loss.slopes(outputs, batch.y)
            return slope.mul_(batch.share[:, None]), (losses * batch.share).sum(1)

        return self._add(networks, velocity, momentum, batch.x, slopes)

    def add_model_gradients(self, models: Params, velocity: Params, momentum: float, c: Tensor, batch: Batch) -> Tensor:
        if not (self._models_by_hand and self.caches_outputs):
            return super().add_model_gradients(models, velocity, momentum, c, batch)

        def slopes(outputs: Tensor) -> tuple[Tensor, Tensor]:
            slope, losses = self.mix.slopes(self.loss, outputs.view(*c.shape, *outputs.shape[1:]), c, batch.y)
            return slope.mul_(batch.share[:, None, None]).flatten(0, 1), (losses * batch.share).sum(1)

        return self._add(models, velocity, momentum, batch.x, slopes)

    def add_weighted_gradients(
        self, models: Params, velocity: Params, momentum: float, weights: Tensor, batch: Batch
    ) -> Tensor:
        if not self._models_by_hand:
            return super().add_weighted_gradients(models, velocity, momentum, weights, batch)

        def slopes(outputs: Tensor) -> tuple[Tensor, Tensor]:
            slope, losses = self.loss.model_slopes(outputs.view(*weights.shape[:2], *outputs.shape[1:]), batch.y)
            return slope.mul_(weights[:, :, None]).flatten(0, 1), (losses * weights).sum((1, 2))

        return self._add(models, velocity, momentum, batch.x, slopes)

    def _add(self, params: Params, velocity: Params, momentum: float, x: Tensor, slopes: Slopes) -> Tensor:
        """velocity <- momentum velocity + gradient, in place; returns the losses (C,). With momentum 0 velocity may
        hold anything."""
        with self.space.frame():
            x = x.flatten(2)
            outs = self._forward(params, x)
            slope, losses = slopes(outs[-1])
            layers = list(zip(self.chain.layers, self._products(params), self._products(velocity), strict=True))
            for at, (layer, (weight, _), (onto, bias_onto)) in reversed(list(enumerate(layers))):
                if layer.activation is not None:
                    slope = layer.activation.back(slope, outs[at])
                inputs = x if at == 0 else outs[at - 1].transpose(1, 2)
                if slope.shape[:2] != onto.shape[:2]:  # in the first layer K models are side by side
                    slope = slope.reshape(len(onto), -1, slope.shape[2])
                torch.baddbmm(onto, slope, inputs, beta=momentum, out=onto)
                if bias_onto is not None:
                    total = slope.sum(dim=2)
                    torch.add(total, bias_onto, alpha=momentum, out=bias_onto) if momentum else bias_onto.copy_(total)
                if at > 0:
                    back = weight.transpose(1, 2)
                    slope = torch.bmm(back, slope, out=self._product_buffer(back, slope))
            return losses
