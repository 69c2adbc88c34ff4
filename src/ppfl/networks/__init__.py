"""Networks that an experiment file can name: sizes come from what a sample is, initial values from the seed.

A network is a function of a `SampleSpec`, the loss, and the keys of `[model]`, its keyword arguments:
`name = "module:function"` is one of your own.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from ..core.adapters import Lora
from ..core.losses import Loss, cross_entropy, loss_by_name, squared
from ..core.registry import Functions, NamedCall
from ..core.settings import Settings
from ..data.files import check_limit
from ..data.sample_spec import SampleSpec
from ..errors import ModelError
from .images import cnn, resnet18
from .plain import glm, linear, perceptron
from .sequences import lstm, transformer


class NetworkSettings(Settings):
    """Keys that all networks have."""

    adapters: Lora | None = None  # low-rank adapters for some of its layers; all else is then frozen


NETWORKS = Functions("network", "model", given=("spec", "loss", "seed"), base=NetworkSettings, error=ModelError)
for _function in (linear, perceptron, glm, cnn, resnet18, lstm, transformer):
    NETWORKS.register(_function.__name__)(_function)


def build_network(
    asked: NamedCall, spec: SampleSpec, seed: int, loss: Loss, copies: int = 1, base: Path | None = None
) -> nn.Module:
    """The network for such samples, its initial values drawn from the seed; `copies` of it must fit into memory.

    The size of a network of ours is checked before memory is taken, that of one's own once it is there.

    >>> spec = SampleSpec(shape=(4,), dtype=torch.float32, target_dtype=torch.int64, classes=("cat", "dog"))
    >>> build_network(NETWORKS.make("linear"), spec, 0, cross_entropy).classifier
    Linear(in_features=4, out_features=2, bias=True)
    """
    if asked.function is not None:
        try:
            with torch.device("meta"):
                parameters = sum(p.numel() for p in asked.call(base, spec=spec, loss=loss, seed=seed).parameters())
        except (RuntimeError, OverflowError) as error:
            raise ModelError(
                f"a layer is too large for samples of shape {spec.shape}; make the layers smaller"
            ) from error
        check_size(parameters, copies)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = asked.call(base, spec=spec, loss=loss, seed=seed)
    if not isinstance(net, nn.Module):
        raise ModelError(
            f"[model]: {asked.name} returned a {type(net).__name__}; it must return a network, an nn.Module"
        )
    check_size(sum(p.numel() for p in net.parameters()), copies)
    return net


def check_size(parameters: int, copies: int) -> None:
    """Refuse a network of which so many copies do not fit into memory."""
    size = parameters * copies * torch.float32.itemsize
    what = f"this network has {parameters:,} parameters; {copies} of it take {size:,} bytes"
    check_limit("bytes", size, what, "make the layers under [model] or population.k smaller, or ", ModelError)


def choose_loss(name: str | None, spec: SampleSpec) -> Loss:
    """The loss of that name, or the usual one: cross entropy for labels, squared for real targets."""
    if name is None:
        return squared if spec.n_classes is None else cross_entropy
    loss = loss_by_name(name)
    refuse_text_as_numbers(loss, spec.classes)
    return loss


def refuse_text_as_numbers(loss: Loss, classes: Sequence[str] | None) -> None:
    """Text targets become numbered classes, and to predict these numbers would mean nothing."""
    named = [name for name in classes or () if not name.lstrip("-").isdigit()]
    if named and loss.name in ("squared", "poisson"):
        raise ModelError(
            f"y has the classes {', '.join(map(repr, (classes or ())[:3]))}, and the loss is {loss.name!r}, which is "
            f"for numbers; use loss='cross_entropy', or numbers in y"
        )


__all__ = ["NETWORKS", "NetworkSettings", "build_network", "choose_loss", "refuse_text_as_numbers"]
