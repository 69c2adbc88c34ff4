"""Networks an experiment file can name. Sizes come from the data, initial values from the seed.

Every network of ours ends in a layer called `classifier`, so `canonical = "classifier"` fits all of them. A factory
gives any other network.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import BeforeValidator, Field, model_validator
from torch import nn

from ..core.errors import ModelError
from ..core.losses import Loss, cross_entropy, loss_by_name, squared
from ..core.settings import Count, Settings
from ..data.factories import FactorySettings, with_factory_name
from ..data.federation import Federation
from ..data.limits import check_limit

Shape = tuple[int, ...]


def choose_loss(name: str | None, federation: Federation) -> Loss:
    """The loss of that name, or the usual one: cross entropy for labels, squared for real targets."""
    if name is not None:
        return loss_by_name(name)
    return squared if federation.n_classes is None else cross_entropy


def count_outputs(loss: Loss, federation: Federation) -> int:
    """Width of the last layer: one output per class, or one per number of a target."""
    width = math.prod(federation.train.y.shape[1:])
    if loss is not cross_entropy:
        return width
    if width > 1:
        raise ModelError(
            f"{federation.name} has {width} labels per sample, and the networks of [model] give one; "
            f"use loss = 'multilabel' under [population], or a network of your own from Python"
        )
    if federation.n_classes is None:
        raise ModelError(
            f"{federation.name} has real targets but the loss is 'cross_entropy', which needs labels; "
            f"use loss = 'squared' or 'poisson' under [population]"
        )
    return federation.n_classes


class _Network(Settings):
    def build(
        self, federation: Federation, seed: int, loss: Loss, copies: int = 1, base: Path | None = None
    ) -> nn.Module:
        """The network for these data, its initial values drawn from the seed; `copies` of it must fit into memory."""
        shape, outputs = tuple(federation.train.x.shape[1:]), count_outputs(loss, federation)
        _check_size(self._count_parameters(shape, outputs), copies)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.layers(shape, outputs)

    def _count_parameters(self, shape: Shape, outputs: int) -> int:
        """Without taking memory for them."""
        try:
            with torch.device("meta"):
                return sum(p.numel() for p in self.layers(shape, outputs).parameters())
        except (RuntimeError, OverflowError) as error:
            raise ModelError(
                f"a layer is too large for samples of shape {shape} and {outputs} outputs; make the layers smaller"
            ) from error

    @abstractmethod
    def layers(self, shape: Shape, outputs: int) -> nn.Module:
        """The network for samples of that shape."""


class Linear(_Network):
    """A generalised linear model, in one layer."""

    name: Literal["linear"] = "linear"
    bias: bool = True

    def layers(self, shape: Shape, outputs: int) -> nn.Module:
        """One layer on the flat sample."""
        return _ended(nn.Flatten(), math.prod(shape), outputs, self.bias)


def _listed(value: Any) -> Any:
    return (value,) if isinstance(value, int) else value


Widths = Annotated[tuple[Count, ...], BeforeValidator(_listed), Field(max_length=1000)]


class Perceptron(_Network):
    """Hidden layers with ReLU."""

    name: Literal["perceptron"] = "perceptron"
    hidden: Annotated[Widths, Field(min_length=1)] = (32,)

    def layers(self, shape: Shape, outputs: int) -> nn.Module:
        """Hidden layers on the flat sample."""
        widths = (math.prod(shape), *self.hidden)
        body: list[nn.Module] = [nn.Flatten()]
        for before, after in pairwise(widths):
            body += [nn.Linear(before, after), nn.ReLU()]
        return _ended(nn.Sequential(*body), widths[-1], outputs)


class Cnn(_Network):
    """A small convolutional network: 3 x 3 filters, group norm, ReLU and halving, once for each of `channels`.

    Group norm keeps no running statistics, which clients that differ could not share. Then come fully connected
    layers with ReLU, one for each of `hidden`. They are called `hidden.0`, `hidden.1` and so on: with two of them
    `canonical = ["hidden.1", "classifier"]` mixes the last two layers, `["hidden", "classifier"]` all but the
    convolutions.
    """

    name: Literal["cnn"] = "cnn"
    channels: Annotated[Widths, Field(min_length=1)] = (16, 32)
    hidden: Widths = ()
    groups: Count = 4

    @model_validator(mode="after")
    def _groups_divide_channels(self) -> Cnn:
        if odd := [n for n in self.channels if n % self.groups]:
            raise ValueError(f"{odd[0]} channels do not split into {self.groups} groups; use a multiple")
        return self

    def layers(self, shape: Shape, outputs: int) -> nn.Module:
        """Blocks on images (channels, height, width)."""
        if len(shape) != 3:
            raise ModelError(
                f"cnn takes images (channels, height, width) but samples have shape {shape}; "
                f"use data with images (for mnist and npz: image = true) or the model 'perceptron'"
            )
        smaller = 2 ** len(self.channels)
        height, width = shape[1] // smaller, shape[2] // smaller
        if not height * width:
            raise ModelError(
                f"images of {shape[1]} x {shape[2]} pixels are too small to halve {len(self.channels)} times; "
                f"give fewer channels under [model]"
            )
        body: list[nn.Module] = []
        for before, after in pairwise((shape[0], *self.channels)):
            body += [nn.Conv2d(before, after, 3, padding=1), nn.GroupNorm(self.groups, after)]
            body += [nn.ReLU(), nn.MaxPool2d(2)]
        widths = (self.channels[-1] * height * width, *self.hidden)
        hidden = [nn.Sequential(nn.Linear(before, after), nn.ReLU()) for before, after in pairwise(widths)]
        return _ended(nn.Sequential(*body, nn.Flatten()), widths[-1], outputs, hidden=hidden)


def _ended(body: nn.Module, width: int, outputs: int, bias: bool = True, hidden: Sequence[nn.Module] = ()) -> nn.Module:
    named = OrderedDict(body=body)
    if hidden:
        named["hidden"] = nn.Sequential(*hidden)
    named["classifier"] = nn.Linear(width, outputs, bias=bias)
    return nn.Sequential(named)


class ModelFactory(FactorySettings):
    """A network that a Python function makes.

    Besides the keys of the table it may ask for `federation`, `n_classes` (None for real targets), `sample_shape` and
    `seed`. torch is seeded before it is called, so that initial values are drawn from the seed.
    """

    name: Literal["factory"] = "factory"

    def build(
        self, federation: Federation, seed: int, loss: Loss, copies: int = 1, base: Path | None = None
    ) -> nn.Module:
        """What the function returns; `copies` of it must fit into memory."""
        offered = {
            "federation": federation,
            "n_classes": federation.n_classes,
            "sample_shape": tuple(federation.train.x.shape[1:]),
            "seed": seed,
        }
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            net = self.call("model", base, offered, ModelError)
        if not isinstance(net, nn.Module):
            raise ModelError(
                f"[model]: {self.factory} returned a {type(net).__name__}; it must return a network, an nn.Module"
            )
        _check_size(sum(p.numel() for p in net.parameters()), copies)
        return net


def _check_size(parameters: int, copies: int) -> None:
    size = parameters * copies * torch.float32.itemsize
    what = f"this network has {parameters:,} parameters; {copies} of it take {size:,} bytes"
    check_limit("bytes", size, what, "make the layers under [model] or population.k smaller, or ", ModelError)


ModelSettings = Annotated[
    Linear | Perceptron | Cnn | ModelFactory, Field(discriminator="name"), BeforeValidator(with_factory_name)
]
