"""The network of the paper's digit domains, Section O5.4: `model = { name = "readers.digits_cnn:digits_cnn" }`."""

from __future__ import annotations

from collections import OrderedDict
from itertools import pairwise

from torch import nn

from ppfl.core.losses import Loss
from ppfl.core.settings import Count
from ppfl.data.sample_spec import SampleSpec
from ppfl.networks.images import halved, image_shape
from ppfl.networks.plain import count_outputs


def digits_cnn(
    spec: SampleSpec,
    loss: Loss,
    channels: tuple[Count, Count, Count] = (64, 64, 128),
    hidden: tuple[Count, Count] = (2048, 512),
    groups: Count = 4,
) -> nn.Module:
    """Three convolutions and three fully connected layers.

    Its sizes are those of FedBN (Li et al., 2021) for the same data: 5 x 5 filters with ReLU, and halving after the
    first two. There, batch norm follows each layer but the last. Here it is group norm: batch norm needs statistics of
    the data, and clients do not exchange those.

    The last two layers are together called `classifier`, so `canonical = "classifier"` is the canonical part of the
    paper. `classifier.output` is the last layer alone.
    """
    shape = image_shape("digits_cnn", spec)
    height, width = halved(shape, 2)
    body: list[nn.Module] = []
    for at, (before, after) in enumerate(pairwise((shape[0], *channels))):
        body += [nn.Conv2d(before, after, 5, padding=2), nn.GroupNorm(groups, after)]
        body += [nn.MaxPool2d(2), nn.ReLU()] if at < 2 else [nn.ReLU()]
    first, second = hidden
    body += [nn.Flatten(), nn.Linear(channels[-1] * height * width, first), nn.GroupNorm(groups, first), nn.ReLU()]
    classifier: OrderedDict[str, nn.Module] = OrderedDict(
        hidden=nn.Linear(first, second),
        norm=nn.GroupNorm(groups, second),
        relu=nn.ReLU(),
        output=nn.Linear(second, count_outputs(spec, loss)),
    )
    return nn.Sequential(OrderedDict(body=nn.Sequential(*body), classifier=nn.Sequential(classifier)))
