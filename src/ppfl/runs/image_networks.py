"""Networks for images (channels, height, width), with group norm.

Group norm keeps no running statistics, which clients that differ could not share.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from itertools import pairwise
from typing import Annotated, Literal

from pydantic import Field, model_validator
from torch import Tensor, nn

from ..core.settings import Count
from ..errors import ModelError
from .network_contract import Network, Shape, Widths, fully_connected, with_classifier


class Cnn(Network):
    """A small convolutional network: 3 x 3 filters, group norm, ReLU and halving, once for each of `channels`.

    Then come fully connected layers with ReLU, one for each of `hidden`. They are called `hidden.0`, `hidden.1` and so
    on: with two of them `canonical = ["hidden.1", "classifier"]` mixes the last two layers, `["hidden", "classifier"]`
    all but the convolutions.
    """

    name: Literal["cnn"] = "cnn"
    channels: Annotated[Widths, Field(min_length=1)] = (16, 32)
    hidden: Widths = ()
    groups: Count = 4

    @model_validator(mode="after")
    def _groups_divide_channels(self) -> Cnn:
        refuse_odd_groups(self.groups, self.channels)
        return self

    def make_network(self, shape: Shape, outputs: int) -> nn.Module:
        """Blocks on images (channels, height, width)."""
        refuse_other_shapes(self.name, shape)
        height, width = halved(shape, len(self.channels))
        body: list[nn.Module] = []
        for before, after in pairwise((shape[0], *self.channels)):
            body += [nn.Conv2d(before, after, 3, padding=1), nn.GroupNorm(self.groups, after)]
            body += [nn.MaxPool2d(2), nn.ReLU()]  # the other order gives the same numbers with more work
        widths = (self.channels[-1] * height * width, *self.hidden)
        body.append(nn.Flatten())
        return with_classifier(nn.Sequential(*body), widths[-1], outputs, hidden=fully_connected(widths))


class DigitsCnn(Network):
    """The network of the paper's digit domains, Section O5.4: 3 convolutions and 3 fully connected layers.

    Its sizes are those of FedBN (Li et al., 2021) for the same data: 5 x 5 filters with ReLU, and halving after the
    first two. There, batch norm follows each layer but the last. Here it is group norm: batch norm needs statistics of
    the data, and clients do not exchange those.

    The last two layers are together called `classifier`, so `canonical = "classifier"` is the canonical part of the
    paper. `classifier.output` is the last layer alone.
    """

    name: Literal["digits_cnn"] = "digits_cnn"
    channels: tuple[Count, Count, Count] = (64, 64, 128)
    hidden: tuple[Count, Count] = (2048, 512)
    groups: Count = 4

    @model_validator(mode="after")
    def _groups_divide_channels(self) -> DigitsCnn:
        refuse_odd_groups(self.groups, (*self.channels, *self.hidden))
        return self

    def make_network(self, shape: Shape, outputs: int) -> nn.Module:
        """Three convolutions and one layer in the body, two layers in the classifier."""
        refuse_other_shapes(self.name, shape)
        height, width = halved(shape, 2)
        body: list[nn.Module] = []
        for at, (before, after) in enumerate(pairwise((shape[0], *self.channels))):
            body += [nn.Conv2d(before, after, 5, padding=2), nn.GroupNorm(self.groups, after)]
            body += [nn.MaxPool2d(2), nn.ReLU()] if at < 2 else [nn.ReLU()]
        first, second = self.hidden
        body += [nn.Flatten(), nn.Linear(self.channels[-1] * height * width, first)]
        body += [nn.GroupNorm(self.groups, first), nn.ReLU()]
        classifier: OrderedDict[str, nn.Module] = OrderedDict(
            hidden=nn.Linear(first, second),
            norm=nn.GroupNorm(self.groups, second),
            relu=nn.ReLU(),
            output=nn.Linear(second, outputs),
        )
        return nn.Sequential(OrderedDict(body=nn.Sequential(*body), classifier=nn.Sequential(classifier)))


class ResNet18(Network):
    """ResNet-18 (He et al., 2016) with group norm, for small images such as those of EMNIST and CIFAR-10.

    The first layer has 3 x 3 filters and does not make the image smaller, and there is no max pooling after it: images
    of 28 or 32 pixels are small already. `width` is the number of channels in the first of the four stages; each other
    stage has twice as many as the one before.
    """

    name: Literal["resnet18"] = "resnet18"
    width: Count = 64
    groups: Count = 2

    @model_validator(mode="after")
    def _groups_divide_channels(self) -> ResNet18:
        refuse_odd_groups(self.groups, (self.width,))
        return self

    def make_network(self, shape: Shape, outputs: int) -> nn.Module:
        """A first convolution, four stages of two blocks, and the mean over pixels."""
        refuse_other_shapes(self.name, shape)
        body = [*_convolution(shape[0], self.width, 1, self.groups), nn.ReLU()]
        channels = self.width
        for stage in range(4):
            wider = self.width * 2**stage
            body.append(ResidualBlock(channels, wider, 1 if stage == 0 else 2, self.groups))
            body.append(ResidualBlock(wider, wider, 1, self.groups))
            channels = wider
        return with_classifier(nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten()), channels, outputs)


class ResidualBlock(nn.Module):
    """relu(x + two convolutions of x), with a 1 x 1 convolution of x where the shape changes."""

    def __init__(self, before: int, after: int, stride: int, groups: int) -> None:
        super().__init__()
        first, second = _convolution(before, after, stride, groups), _convolution(after, after, 1, groups)
        self.change = nn.Sequential(*first, nn.ReLU(), *second)
        same = before == after and stride == 1
        self.skip = nn.Identity() if same else nn.Sequential(*_convolution(before, after, stride, groups, size=1))
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.relu(self.skip(x) + self.change(x))
        return result


def _convolution(before: int, after: int, stride: int, groups: int, size: int = 3) -> list[nn.Module]:
    """A convolution and its norm, which has the bias."""
    return [
        nn.Conv2d(before, after, size, stride, padding=size // 2, bias=False),
        nn.GroupNorm(groups, after),
    ]


def refuse_odd_groups(groups: int, channels: Iterable[int]) -> None:
    """Refuse channels that do not split into that many groups of the same size."""
    if odd := [n for n in channels if n % groups]:
        raise ValueError(f"{odd[0]} channels do not split into {groups} groups; use a multiple")


def refuse_other_shapes(name: str, shape: Shape) -> None:
    """Refuse samples that are no images."""
    if len(shape) != 3:
        raise ModelError(
            f"{name} takes images (channels, height, width) but samples have shape {shape}; "
            f"use data with images (for mnist and npz: image = true) or the model 'perceptron'"
        )


def halved(shape: Shape, times: int) -> tuple[int, int]:
    """Height and width of an image after so many halvings."""
    height, width = shape[1] // 2**times, shape[2] // 2**times
    if not height * width:
        raise ModelError(
            f"images of {shape[1]} x {shape[2]} pixels are too small to halve {times} times; "
            f"use larger images, or the model 'cnn' with fewer channels"
        )
    return height, width
