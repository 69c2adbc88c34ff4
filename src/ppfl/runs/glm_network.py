"""The network of a population GLM: a linear model in which some columns vary between canonical models."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from ..core.losses import Loss
from ..data.federation import Federation
from ..errors import SettingError
from .network_contract import Network, Shape


class VaryingAndShared(nn.Module):
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
        predictor: Tensor = self.varying(x[:, : self.n_varying])
        return predictor if self.shared is None else predictor + self.shared(x[:, self.n_varying :])


class Glm(Network):
    """The model of `[estimator]`; its varying part is called `varying`."""

    name: Literal["glm"] = "glm"
    shared: tuple[str, ...] = ()  # columns with one coefficient for all

    def build(
        self, federation: Federation, seed: int, loss: Loss, copies: int = 1, base: Path | None = None
    ) -> nn.Module:
        """With one coefficient per prepared column, and an intercept."""
        outputs = self.count_outputs(loss, federation)
        varying, shared = split_columns(federation.features or (), self.shared)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return VaryingAndShared(len(varying), len(shared), outputs, (*varying, *shared))

    def make_network(self, shape: Shape, outputs: int) -> nn.Module:
        """All columns vary, as their names are not known."""
        (columns,) = shape
        return VaryingAndShared(columns + 1, 0, outputs, range(columns + 1))


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
