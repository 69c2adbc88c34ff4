"""Penalties that keep parameters finite. They do not change when a canonical model is split into two equal ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from .likelihood import Layout, Parameters


class Regularization(NamedTuple):
    """A ridge on slopes, and weak priors on alpha and on nuisance parameters. All in nats."""

    ridge: float
    slopes: Tensor  # (q,), 1 where the ridge applies, 0 for intercepts
    shared: Tensor  # (f,), the same for shared columns
    samples: float = 0.0  # the number of samples if there is a dispersion, which is kept above 1e-8
    nuisance: Callable[[Tensor], Tensor] | None = None  # a penalty of the family on its nuisance parameters
    fraction: float = 1.0  # of the clients or rows of the whole problem

    def value(self, layout: Layout, at: Parameters) -> Tensor:
        raise NotImplementedError
