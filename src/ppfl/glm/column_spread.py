"""Means and standard deviations that survive any scale, or an error that names the column.

Squares of numbers beyond 1e154 overflow, and those of numbers below 1e-162 vanish. Variances of coefficients are
squares of quotients of two columns, so numbers are refused long before that: no unit of measurement needs them.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import scipy.sparse as sp

from ..errors import DataError
from .client_ids import Array

LARGEST, SMALLEST = 1e70, 1e-70
LARGEST_LOG_MEAN = 1e13  # beyond it a mean that is the exponential of a predictor is no longer exact
_DIGITS = 1e4  # a column should vary by more than this many steps between neighbouring floating-point numbers
_CONSTANT = 4  # and one that varies by fewer steps than this is constant up to rounding errors
_NEARLY_CONSTANT = 1e-6  # variation of a sparse column, which is not centred, relative to its values


class PrecisionWarning(UserWarning):
    """A column of numbers so large that few digits are left for their differences."""


def measure_columns(x: Any, weight: Array, names: Sequence[str], *, center: bool) -> tuple[Array, Array]:
    """The mean (d,) and the scale (d,) of every column: infinite for a constant one, whose coefficient is then 0.

    Without centring, and for sparse tables, which it would make dense, the mean is 0.
    """
    is_counted = weight > 0
    counted = x if is_counted.all() else x[is_counted]
    share = weight[is_counted] / weight.sum()
    if sp.issparse(x):
        return _measure_sparse(counted.tocsc(), share, names, center=center)
    _refuse_large(np.abs(counted).max(0), names)
    mean = _mean(counted, share) if center else np.zeros(x.shape[1])
    constant = (counted == counted[0]).all(0) if center else (counted == 0).all(0)
    scale = _scale(np.where(constant, 0.0, counted - mean), share, names)
    scale[constant] = np.inf
    if center:
        step = np.spacing(np.abs(counted).max(0))
        for i in np.flatnonzero(scale < _DIGITS * step).tolist():
            lost = scale[i] <= _CONSTANT * step[i]
            effect = "so its coefficient is set to 0" if lost else "so few of its digits are left"
            warnings.warn(
                f"column {names[i]!r} varies by {scale[i]:.2g} around {mean[i]:.2g}, where floating-point numbers are "
                f"{step[i]:.1g} apart, {effect}; subtract a constant before numbers of this size are made",
                PrecisionWarning,
                stacklevel=2,
            )
        scale[scale <= _CONSTANT * step] = np.inf
    return mean, scale


def _measure_sparse(x: Any, share: Array, names: Sequence[str], *, center: bool) -> tuple[Array, Array]:
    d = x.shape[1]
    peak = np.asarray(abs(x).max(0).toarray()).ravel()
    _refuse_large(peak, names)
    _refuse_small(peak, names)
    scaled = x @ sp.diags_array(1 / np.where(peak > 0, peak, 1.0))
    scale = peak * np.sqrt(np.asarray(share @ scaled.multiply(scaled)).ravel())
    scale[scale == 0] = np.inf
    if center:  # a constant column would be a second intercept
        spread = np.asarray((x.max(0) - x.min(0)).toarray()).ravel()
        scale[spread == 0] = np.inf
        for i in np.flatnonzero((spread > 0) & (spread < _NEARLY_CONSTANT * peak)).tolist():
            raise DataError(
                f"column {names[i]!r} of a sparse table varies by only {spread[i]:.2g} around {peak[i]:.2g}; sparse "
                f"columns are not centred: subtract its mean, or give a dense table"
            )
    return np.zeros(d), scale


def measure_target(y: Array, weight: Array, *, center: bool) -> tuple[float, float]:
    """The mean of y, 0 without centring, and its scale, 1 if it is constant."""
    counted = y[weight > 0][:, None]
    share = weight[weight > 0] / weight.sum()
    names = ["y"]
    _refuse_large(np.abs(counted).max(0), names, noun="target")
    mean = _mean(counted, share) if center else np.zeros(1)
    if center and not np.ptp(counted):
        return float(counted[0, 0]), 1.0
    step = float(np.spacing(np.abs(counted).max()))
    scale = float(_scale(counted - mean, share, names, noun="target")[0])
    return float(mean[0]), 1.0 if scale <= _CONSTANT * step or scale == 0 else scale


def check_positive_target(y: Array) -> None:
    """Raise a DataError for means that the exponential of a predictor cannot reach."""
    largest = float(np.abs(y).max())
    if largest > LARGEST_LOG_MEAN:
        raise DataError(
            f"y is as large as {largest:.2g}, and a mean that is the exponential of a predictor must stay below "
            f"{LARGEST_LOG_MEAN:g}; measure y in a larger unit: divide it by {_power_of_ten(largest):g}"
        )


def _mean(x: Array, share: Array) -> Array:
    """Centred twice: the first mean of large numbers has a rounding error, which the second removes."""
    first = share @ x
    return np.asarray(first + share @ (x - first))


def _scale(deviation: Array, share: Array, names: Sequence[str], noun: str = "column") -> Array:
    """The root of the mean square, in units of the largest deviation, so that no square overflows or vanishes."""
    peak = np.abs(deviation).max(0)
    _refuse_small(peak, names, noun)
    return np.asarray(peak * np.sqrt(share @ (deviation / np.where(peak > 0, peak, 1.0)) ** 2))


def _refuse_large(peak: Array, names: Sequence[str], noun: str = "column") -> None:
    for i in np.flatnonzero(peak > LARGEST).tolist():
        raise DataError(
            f"{noun} {names[i]!r} has numbers as large as {peak[i]:.2g}, whose squares and quotients overflow; measure "
            f"it in a larger unit: divide it by {_power_of_ten(peak[i]):g}"
        )


def _refuse_small(peak: Array, names: Sequence[str], noun: str = "column") -> None:
    for i in np.flatnonzero((peak > 0) & (peak < SMALLEST)).tolist():
        raise DataError(
            f"{noun} {names[i]!r} varies by at most {peak[i]:.2g}, whose square is no longer told from 0; measure it "
            f"in a smaller unit: multiply it by {1 / _power_of_ten(peak[i]):g}"
        )


def _power_of_ten(value: float) -> float:
    return float(10.0 ** np.clip(np.floor(np.log10(value)), -300, 300))
