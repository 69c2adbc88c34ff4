"""Networks of fully connected layers: linear models, perceptrons, and the network of a population GLM.

Every network ends in a part called `classifier`, so that `canonical = "classifier"` fits all of them; the one of a GLM
has its canonical part in `varying`.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated, Any

import torch
from pydantic import BeforeValidator, Field
from torch import Tensor, nn

from ..core.losses import Loss, cross_entropy
from ..core.settings import Count
from ..data.sample_spec import SampleSpec
from ..errors import ModelError, SettingError


def _listed(value: Any) -> Any:
    return (value,) if isinstance(value, int) else value


Widths = Annotated[tuple[Count, ...], BeforeValidator(_listed), Field(max_length=1000)]


def linear(spec: SampleSpec, loss: Loss, bias: bool = True) -> nn.Module:
    """A generalised linear model: one layer on the flat sample."""
    return with_classifier(nn.Flatten(), math.prod(spec.shape), count_outputs(spec, loss), bias)


def perceptron(spec: SampleSpec, loss: Loss, hidden: Annotated[Widths, Field(min_length=1)] = (32,)) -> nn.Module:
    """Hidden layers with ReLU on the flat sample."""
    widths = (math.prod(spec.shape), *hidden)
    body: list[nn.Module] = [nn.Flatten()]
    for before, after in pairwise(widths):
        body += [nn.Linear(before, after), nn.ReLU()]
    return with_classifier(nn.Sequential(*body), widths[-1], count_outputs(spec, loss))


def glm(spec: SampleSpec, loss: Loss, shared: tuple[str, ...] = ()) -> nn.Module:
    """The network of `[estimator]`: one coefficient per column, and an intercept.

    shared: columns with one coefficient for all clients; the others and the intercept are the part `varying`.
    """
    (columns,) = spec.shape
    names = spec.features or tuple(f"x{at}" for at in range(1, columns + 1))
    varying, same = split_columns(names, shared)
    return PartlySharedLinear(len(varying), len(same), count_outputs(spec, loss), (*varying, *same))


class PartlySharedLinear(nn.Module):
    """A linear model of the columns in which canonical models differ, and of those that all of them share.

    columns: where these are in (x, 1), the varying ones first; without it x has them in this order.
    """

    def __init__(self, varying: int, shared: int, outputs: int, columns: Sequence[int] | None = None) -> None:
        super().__init__()
        self.n_varying, self.columns = varying, None if columns is None else list(columns)
        self.varying = nn.Linear(varying, outputs, bias=False)
        self.shared = nn.Linear(shared, outputs, bias=False) if shared else None

    def forward(self, x: Tensor) -> Tensor:
        """The predictor (B, outputs)."""
        if self.columns is not None:
            x = torch.cat([x, torch.ones_like(x[:, :1])], 1)[:, self.columns]
        predictor: Tensor = self.varying(x[..., : self.n_varying])
        return predictor if self.shared is None else predictor + self.shared(x[..., self.n_varying :])


def split_columns(names: Sequence[str], shared: Sequence[str]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Positions of the varying columns, the intercept last, and of the shared ones. "all": all but the intercept.

    >>> split_columns(["age", "ward = west"], ["age"])
    ((1, 2), (0,))
    """
    named = set(names) if "all" in shared else {*shared}
    if absent := sorted(named - set(names)):
        raise SettingError(
            f"shared names {absent[0]!r}, which is no prepared column; use some of {', '.join(names[:12])}, or 'all'"
        )
    fixed = tuple(at for at, name in enumerate(names) if name in named)
    return (*(at for at in range(len(names)) if at not in fixed), len(names)), fixed


# ---------------------------------------------------------------------- what all networks use


def count_outputs(spec: SampleSpec, loss: Loss) -> int:
    """Width of the last layer: one output per class, or one per number of a target."""
    width = math.prod(spec.target_shape)
    if loss is not cross_entropy:
        return width
    if width > 1:
        raise ModelError(
            f"the data have {width} labels per sample, and this network of [model] gives one; use loss = 'multilabel' "
            f"under [population], the model 'lstm' or 'transformer' for sequences of tokens, or a network of your own"
        )
    return count_classes(spec)


def count_classes(spec: SampleSpec) -> int:
    """Number of classes; refuses real targets."""
    if spec.n_classes is None:
        raise ModelError(
            "the data have real targets but the loss is 'cross_entropy', which needs labels; use loss = 'squared' or "
            "'poisson' under [population]"
        )
    return spec.n_classes


def refuse_odd_parts(sizes: Sequence[int], parts: int, what: str, into: str) -> None:
    """Refuse sizes that do not split into that many equal parts."""
    if odd := [size for size in sizes if size % parts]:
        raise ModelError(f"{odd[0]} {what} do not split into {parts} {into}; use a multiple under [model]")


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
