"""What every network of an experiment file is: settings that build it from the shapes of the data.

Its size is checked before memory is taken, and its initial values are drawn from the seed.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import BeforeValidator, Field
from torch import nn

from ..core.adapters import Lora
from ..core.losses import Loss, cross_entropy, loss_by_name, squared
from ..core.settings import Count, Settings
from ..data.federation import Federation
from ..data.files import check_limit
from ..errors import ModelError

Shape = tuple[int, ...]


def _listed(value: Any) -> Any:
    return (value,) if isinstance(value, int) else value


Widths = Annotated[tuple[Count, ...], BeforeValidator(_listed), Field(max_length=1000)]


def choose_loss(name: str | None, federation: Federation) -> Loss:
    """The loss of that name, or the usual one: cross entropy for labels, squared for real targets."""
    if name is not None:
        return loss_by_name(name)
    return squared if federation.n_classes is None else cross_entropy


class Network(Settings):
    """A network that an experiment file names. It ends in a part called `classifier`."""

    adapters: Lora | None = None  # low-rank adapters for some of its layers; all else is then frozen

    def build(
        self, federation: Federation, seed: int, loss: Loss, copies: int = 1, base: Path | None = None
    ) -> nn.Module:
        """The network for these data, its initial values drawn from the seed; `copies` of it must fit into memory."""
        shape, outputs = tuple(federation.train.x.shape[1:]), self.count_outputs(loss, federation)
        check_size(self._count_parameters(shape, outputs), copies)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.make_network(shape, outputs)

    def count_outputs(self, loss: Loss, federation: Federation) -> int:
        """Width of the last layer: one output per class, or one per number of a target."""
        width = math.prod(federation.train.y.shape[1:])
        if loss is not cross_entropy:
            return width
        if width > 1:
            raise ModelError(
                f"{federation.name} has {width} labels per sample, and this network of [model] gives one; "
                f"use loss = 'multilabel' under [population], the model 'lstm' or 'transformer' for sequences of "
                f"tokens, or a network of your own"
            )
        return count_classes(federation)

    def _count_parameters(self, shape: Shape, outputs: int) -> int:
        """Without taking memory for them."""
        try:
            with torch.device("meta"):
                return sum(p.numel() for p in self.make_network(shape, outputs).parameters())
        except (RuntimeError, OverflowError) as error:
            raise ModelError(
                f"a layer is too large for samples of shape {shape} and {outputs} outputs; make the layers smaller"
            ) from error

    @abstractmethod
    def make_network(self, shape: Shape, outputs: int) -> nn.Module:
        """The network for samples of that shape."""


def count_classes(federation: Federation) -> int:
    """Number of classes; refuses real targets."""
    if federation.n_classes is None:
        raise ModelError(
            f"{federation.name} has real targets but the loss is 'cross_entropy', which needs labels; "
            f"use loss = 'squared' or 'poisson' under [population]"
        )
    return federation.n_classes


def with_classifier(
    body: nn.Module, width: int, outputs: int, bias: bool = True, hidden: Sequence[nn.Module] = ()
) -> nn.Module:
    """A network of a body, hidden layers where there are any, and a linear layer called `classifier`."""
    named = OrderedDict(body=body)
    if hidden:
        named["hidden"] = nn.Sequential(*hidden)
    named["classifier"] = nn.Linear(width, outputs, bias=bias)
    return nn.Sequential(named)


def fully_connected(widths: Sequence[int]) -> list[nn.Module]:
    """Fully connected layers with ReLU, from each width to the next."""
    return [nn.Sequential(nn.Linear(before, after), nn.ReLU()) for before, after in pairwise(widths)]


def check_size(parameters: int, copies: int) -> None:
    """Refuse a network of which so many copies do not fit into memory."""
    size = parameters * copies * torch.float32.itemsize
    what = f"this network has {parameters:,} parameters; {copies} of it take {size:,} bytes"
    check_limit("bytes", size, what, "make the layers under [model] or population.k smaller, or ", ModelError)
