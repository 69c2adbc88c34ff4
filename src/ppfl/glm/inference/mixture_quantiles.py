"""Quantiles of a new observation, whose parameters are uncertain: of a mixture over draws of them."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ..families import Family
from ..families.counts import CountFamily

_HALVINGS, _DOUBLINGS = 50, 60
_LINES = 25  # steps along lines before bisections
_PRECISION = 1e-9  # of the probability below a quantile
_REACH = 4.0  # usual deviations between the means and the first guess of the quantile


def mixture_quantile(family: Family, level: float, parameters: Tensor, nuisance: Tensor) -> Tensor:
    """Quantiles (n,) of equal mixtures of S distributions with mean parameters (n, S, p) and nuisance (r, S).

    Nuisance parameters that differ by row have the shape (r, n, S).
    Quantiles of counts are whole: the smallest with at least this probability below or at it.
    """
    is_count = isinstance(family, CountFamily)

    def cdf(y: Tensor) -> Tensor:
        return family.cdf(y, parameters, nuisance).mean(1)

    def reaches(y: Tensor) -> Tensor:
        return cdf(y) >= level

    mean = family.mean(parameters, nuisance)
    deviation = family.typical_deviation(mean, nuisance).clamp_min(1e-300)
    low, high = (mean - _REACH * deviation).amin(1), (mean + _REACH * deviation).amax(1)
    width = high - low
    if family.positive_only:
        low = torch.full_like(low, -1.0 if is_count else 0.0)
    for _ in range(_DOUBLINGS):
        missing = ~reaches(high)
        too_high = torch.zeros_like(missing) if family.positive_only else reaches(low)
        if not bool(missing.any() | too_high.any()):
            break
        high, low, width = torch.where(missing, high + width, high), torch.where(too_high, low - width, low), 2 * width
    return _whole_quantile(reaches, low, high.ceil()) if is_count else _quantile(cdf, level, low, high)


def _whole_quantile(reaches: Callable[[Tensor], Tensor], low: Tensor, high: Tensor) -> Tensor:
    """By bisection."""
    for _ in range(_HALVINGS):
        middle = ((low + high) / 2).floor()
        reached = reaches(middle)
        low, high = torch.where(reached, low, middle), torch.where(reached, middle, high)
    return high


def _quantile(cdf: Callable[[Tensor], Tensor], level: float, low: Tensor, high: Tensor) -> Tensor:
    """Where a line between two ends reaches the level; an end that stays twice counts half (the Illinois method).

    The last steps are bisections, for distributions for which this is slow.
    """
    below, above = cdf(low) - level, cdf(high) - level
    was_above = torch.full_like(low, math.nan)
    for step in range(_LINES + _HALVINGS):
        share = below / (below - above).clamp(max=-1e-300) if step < _LINES else 0.5
        at = low + (high - low) * share
        found = cdf(at) - level
        if bool((found.abs() <= _PRECISION).all()):
            break
        is_above = found >= 0
        half = torch.where(is_above == was_above, 0.5, 1.0)
        below, above = torch.where(is_above, half * below, found), torch.where(is_above, found, half * above)
        low, high = torch.where(is_above, low, at), torch.where(is_above, at, high)
        was_above = is_above.to(low.dtype)
    return at
