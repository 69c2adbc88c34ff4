"""Networks an experiment file can name. Sizes come from the data, initial values from the seed.

Every network of ours ends in a part called `classifier`, so `canonical = "classifier"` fits all of them. A factory
gives any other network.
"""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal

import torch
from pydantic import BeforeValidator, Field
from torch import nn

from ..core.adapters import Lora
from ..core.losses import Loss
from ..core.registry import FactorySettings, with_factory_name
from ..data.federation import Federation
from ..errors import ModelError
from .glm_network import Glm
from .image_networks import Cnn, DigitsCnn, ResNet18
from .network_contract import Network, Shape, Widths, check_size, with_classifier
from .pretrained_networks import EfficientNetLite0
from .sequence_networks import Lstm, Transformer


class Linear(Network):
    """A generalised linear model, in one layer."""

    name: Literal["linear"] = "linear"
    bias: bool = True

    def make_network(self, shape: Shape, outputs: int) -> nn.Module:
        """One layer on the flat sample."""
        return with_classifier(nn.Flatten(), math.prod(shape), outputs, self.bias)


class Perceptron(Network):
    """Hidden layers with ReLU."""

    name: Literal["perceptron"] = "perceptron"
    hidden: Annotated[Widths, Field(min_length=1)] = (32,)

    def make_network(self, shape: Shape, outputs: int) -> nn.Module:
        """Hidden layers on the flat sample."""
        widths = (math.prod(shape), *self.hidden)
        body: list[nn.Module] = [nn.Flatten()]
        for before, after in pairwise(widths):
            body += [nn.Linear(before, after), nn.ReLU()]
        return with_classifier(nn.Sequential(*body), widths[-1], outputs)


class ModelFactory(FactorySettings):
    """A network that a Python function makes.

    Besides the keys of the table it may ask for `federation`, `n_classes` (None for real targets), `sample_shape` and
    `seed`. torch is seeded before it is called, so that initial values are drawn from the seed.
    """

    name: Literal["factory"] = "factory"
    adapters: Lora | None = None

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
        check_size(sum(p.numel() for p in net.parameters()), copies)
        return net


ModelSettings = Annotated[
    Linear | Glm | Perceptron | Cnn | DigitsCnn | ResNet18 | EfficientNetLite0 | Lstm | Transformer | ModelFactory,
    Field(discriminator="name"),
    BeforeValidator(with_factory_name),
]
