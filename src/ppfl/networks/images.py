"""Networks for images (channels, height, width), with group norm.

Group norm keeps no running statistics, which clients that differ could not share.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated

from pydantic import Field
from torch import Tensor, nn

from ..core.losses import Loss
from ..core.settings import Count
from ..data.sample_spec import SampleSpec
from ..errors import ModelError
from .plain import Widths, count_outputs, fully_connected, refuse_odd_parts, with_classifier


def cnn(
    spec: SampleSpec,
    loss: Loss,
    channels: Annotated[Widths, Field(min_length=1)] = (16, 32),
    hidden: Widths = (),
    groups: Count = 4,
) -> nn.Module:
    """A small convolutional network: 3 x 3 filters, group norm, ReLU and halving, once for each of `channels`.

    Then come fully connected layers with ReLU, one for each of `hidden`. They are called `hidden.0`, `hidden.1` and so
    on: with two of them `canonical = ["hidden.1", "classifier"]` mixes the last two layers, `["hidden", "classifier"]`
    all but the convolutions.
    """
    refuse_odd_parts(channels, groups, "channels", "groups")
    shape = image_shape("cnn", spec)
    height, width = halved(shape, len(channels))
    body: list[nn.Module] = []
    for before, after in pairwise((shape[0], *channels)):
        body += [nn.Conv2d(before, after, 3, padding=1), nn.GroupNorm(groups, after)]
        body += [nn.MaxPool2d(2), nn.ReLU()]  # the other order gives the same numbers with more work
    widths = (channels[-1] * height * width, *hidden)
    body.append(nn.Flatten())
    outputs = count_outputs(spec, loss)
    return with_classifier(nn.Sequential(*body), widths[-1], outputs, hidden=fully_connected(widths))


def resnet18(spec: SampleSpec, loss: Loss, width: Count = 64, groups: Count = 2) -> nn.Module:
    """ResNet-18 (He et al., 2016) with group norm, for small images such as those of EMNIST and CIFAR-10.

    The first layer has 3 x 3 filters and does not make the image smaller, and there is no max pooling after it: images
    of 28 or 32 pixels are small already. `width` is the number of channels in the first of the four stages; each other
    stage has twice as many as the one before.
    """
    refuse_odd_parts((width,), groups, "channels", "groups")
    shape = image_shape("resnet18", spec)
    body = [*_convolution(shape[0], width, 1, groups), nn.ReLU()]
    channels = width
    for stage in range(4):
        wider = width * 2**stage
        body.append(ResidualBlock(channels, wider, 1 if stage == 0 else 2, groups))
        body.append(ResidualBlock(wider, wider, 1, groups))
        channels = wider
    outputs = count_outputs(spec, loss)
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


def image_shape(name: str, spec: SampleSpec) -> tuple[int, int, int]:
    """Channels, height and width of the samples; refuses samples that are no images."""
    if len(spec.shape) == 3:
        return spec.shape[0], spec.shape[1], spec.shape[2]
    if len(spec.shape) == 2:
        advice = "add an axis for the channels: x[:, None]"
    else:
        advice = "use data with images (for mnist and npz: image = true) or the model 'perceptron'"
    raise ModelError(f"{name} takes images (channels, height, width) but samples have shape {spec.shape}; {advice}")


def halved(shape: tuple[int, int, int], times: int) -> tuple[int, int]:
    """Height and width of an image after so many halvings."""
    height, width = shape[1] // 2**times, shape[2] // 2**times
    if not height * width:
        raise ModelError(
            f"images of {shape[1]} x {shape[2]} pixels are too small to halve {times} times; "
            f"use larger images, or the model 'cnn' with fewer channels"
        )
    return height, width
