"""Quantiles of a new observation, whose parameters are uncertain: of a mixture over draws of them."""

from __future__ import annotations

import torch
from torch import Tensor

from ..families import Family
from ..families.counts import CountFamily

_HALVINGS, _DOUBLINGS = 50, 60
_REACH = 4.0  # usual deviations between the means and the first guess of the quantile


def mixture_quantile(family: Family, level: float, parameters: Tensor, nuisance: Tensor) -> Tensor:
    """Quantiles (n,) of equal mixtures of S distributions with mean parameters (n, S, p) and nuisance (r, S).

    Nuisance parameters that differ by row have the shape (r, n, S).
    By bisection. Quantiles of counts are whole: the smallest with at least this probability below or at it.
    """

    def reaches(y: Tensor) -> Tensor:
        return family.cdf(y, parameters, nuisance).mean(1) >= level

    mean = family.mean(parameters, nuisance)
    deviation = family.typical_deviation(mean, nuisance).clamp_min(1e-300)
    low, high = (mean - _REACH * deviation).amin(1), (mean + _REACH * deviation).amax(1)
    width = high - low
    if family.positive_only:
        low = torch.full_like(low, -1.0 if isinstance(family, CountFamily) else 0.0)
    for _ in range(_DOUBLINGS):
        missing = ~reaches(high)
        too_high = torch.zeros_like(missing) if family.positive_only else reaches(low)
        if not bool(missing.any() | too_high.any()):
            break
        high, low, width = torch.where(missing, high + width, high), torch.where(too_high, low - width, low), 2 * width
    if isinstance(family, CountFamily):
        high = high.ceil()
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        middle = middle.floor() if isinstance(family, CountFamily) else middle
        reached = reaches(middle)
        low, high = torch.where(reached, low, middle), torch.where(reached, middle, high)
    return high
