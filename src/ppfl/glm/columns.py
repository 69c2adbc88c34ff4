"""Columns of a table: their units, which of them vary between clients, which say nothing new; and ids of clients.

Squares of numbers beyond 1e154 overflow, and those of numbers below 1e-162 vanish. Variances of coefficients are
squares of quotients of two columns, so numbers are refused long before that: no unit of measurement needs them.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..data.columns import LARGEST
from ..data.ids import text_ids
from ..errors import DataError, SettingError
from .formula import INTERCEPT

Array = NDArray[Any]
SMALLEST = 1 / LARGEST
LARGEST_LOG_MEAN = 1e13  # beyond it a mean that is the exponential of a predictor is no longer exact
_DIGITS = 1e4  # a column should vary by more than this many steps between neighbouring floating-point numbers
_CONSTANT = 4  # and one that varies by fewer steps than this is constant up to rounding errors
_ALIASED = 1e-9  # what is left of a column that is a sum of others, relative to the column


class PrecisionWarning(UserWarning):
    """A column of numbers so large that few digits are left for their differences."""


class TargetUnits(NamedTuple):
    """The target is `shift + scale * y` for the standardised y, and a linear predictor the same."""

    shift: float = 0.0
    scale: float = 1.0


class ColumnScaling(NamedTuple):
    """The scaling of every column, and which columns vary between canonical models."""

    names: tuple[str, ...]
    mean: Array  # (d,), 0 where centring would change the model
    scale: Array  # (d,), infinite for a constant column, whose coefficient is then 0
    varying: tuple[int, ...]  # positions, d for the intercept
    shared: tuple[int, ...]
    aliased: tuple[int, ...] = ()  # columns that are sums of columns before them, the constant ones among them

    @classmethod
    def fit(cls, x: Array, weight: Array, names: Sequence[str], shared: Any, *, intercept: bool) -> ColumnScaling:
        """Measures the columns of the rows that count.

        Args:
            x: (n, d).
            weight: (n,). Rows of weight 0 do not count.
            names: Of the d columns.
            shared: Names or positions of columns with one coefficient for all clients, "intercept" or "all".
            intercept: Whether there is one.
        """
        mean, scale = _measure(x, weight, names, center=intercept)
        found = cls.of_sums(names, mean, scale, shared, intercept=intercept)
        return found._replace(aliased=found._find_aliased(x[weight > 0]))

    @classmethod
    def of_sums(cls, names: Sequence[str], mean: Array, scale: Array, shared: Any, *, intercept: bool) -> ColumnScaling:
        """From means (d,) and scales (d,), which are infinite for constant columns."""
        d, fixed = len(names), _positions(names, shared, intercept=intercept)
        if not intercept:
            mean = np.zeros(d)
        if d in fixed:  # clients that share an intercept agree where all varying columns are 0, not at their means
            mean = np.where([i in fixed for i in range(d)], mean, 0.0)
        varying = tuple(i for i in (*range(d), *([d] if intercept else [])) if i not in fixed)
        if not varying:
            raise SettingError("all columns are shared, so clients cannot differ; leave one out of `shared`")
        constant = tuple(np.flatnonzero(np.isinf(scale)).tolist())
        return cls(tuple(names), mean, scale, varying, tuple(sorted(fixed)), constant)

    def split(self, x: Array) -> tuple[Tensor, Tensor]:
        """Varying columns (n, q) and shared ones (n, f), standardised."""
        standard = (np.asarray(x, dtype=np.float64) - self.mean) / self.scale
        whole = torch.from_numpy(np.c_[standard, np.ones(len(standard))])
        return whole[:, list(self.varying)].contiguous(), whole[:, list(self.shared)].contiguous()

    def slopes(self) -> tuple[Tensor, Tensor]:
        """For varying columns (q,) and shared ones (f,): 1 for slopes and 0 for the intercept."""
        d = len(self.names)
        varying, shared = (
            torch.tensor([float(i < d) for i in some], dtype=torch.float64) for some in (self.varying, self.shared)
        )
        return varying, shared

    def centres(self) -> tuple[float, ...]:
        """mean / scale of the varying columns, 0 for the intercept: what an effect of a column is at its mean."""
        d = len(self.names)
        return tuple(float(self.mean[i] / self.scale[i]) if i < d else 0.0 for i in self.varying)

    @property
    def intercept_at(self) -> int:
        """The position of the intercept among the varying columns, -1 if it does not vary."""
        d = len(self.names)
        return self.varying.index(d) if d in self.varying else -1

    def to_units(self, canonical: Tensor, shared: Tensor, units: TargetUnits) -> Tensor:
        """Coefficients (K, d + 1, m) in the units of the table, the intercept last.

        Args:
            canonical: (K, q, m), of standardised columns.
            shared: (f, m).
            units: Of the predictor. With a shift of 0 this map is linear, as effects need it.
        """
        k, _, m = canonical.shape
        d, mean, scale = len(self.names), torch.from_numpy(self.mean), torch.from_numpy(self.scale)
        whole = canonical.new_zeros(d + 1, k, m)
        whole = whole.index_copy(0, torch.tensor(self.varying), canonical.transpose(0, 1))
        if self.shared:
            whole = whole.index_copy(0, torch.tensor(self.shared), shared[:, None].expand(-1, k, -1))
        slopes = units.scale * whole[:d] / scale[:, None, None]
        intercepts = units.shift + units.scale * whole[d] - (slopes * mean[:, None, None]).sum(0)
        return torch.cat([slopes, intercepts[None]]).transpose(0, 1)

    def redundant(self, k: int) -> int:
        """How many of the K q + f coefficients of each output the columns leave open, as some are sums of others."""
        return sum(k if i in self.varying else 1 for i in self.aliased)

    def _find_aliased(self, x: Array) -> tuple[int, ...]:
        """The intercept comes first, then the varying columns, then the shared ones, as each may replace the others."""
        d = len(self.names)
        order = sorted((*self.varying, *self.shared), key=lambda i: (i in self.shared, i != d))
        standard = np.c_[(x - self.mean) / self.scale, np.ones(len(x))][:, order]
        size = np.linalg.norm(standard, axis=0)
        rest = np.abs(np.diag(np.linalg.qr(standard / np.maximum(size, 1e-300), mode="r")))
        rest = np.r_[rest, np.zeros(len(order) - len(rest))]  # with fewer rows than columns
        return tuple(sorted(i for i, left in zip(order, rest, strict=True) if left <= _ALIASED))


def _positions(names: Sequence[str], shared: Any, *, intercept: bool) -> set[int]:
    """Columns by name or position; "intercept" is one of them, "all" is all but the intercept."""
    if shared is None:
        return set()
    if isinstance(shared, str) and shared == "all":
        return set(range(len(names)))
    known = [*names, *([INTERCEPT] if intercept else [])]
    found = set()
    for item in [shared] if isinstance(shared, str) or not np.iterable(shared) else shared:
        if isinstance(item, str) and known.count(item) == 1:
            found.add(known.index(item))
        elif isinstance(item, str) and item in known:
            raise SettingError(f"shared names {item!r}, but {known.count(item)} columns have this name; rename one")
        elif isinstance(item, int | np.integer) and not isinstance(item, bool) and 0 <= item < len(names):
            found.add(int(item))
        else:
            raise SettingError(f"shared names {item!r}, which is no column; use some of {', '.join(known)}, or 'all'")
    return found


# ---------------------------------------------------------------------- means and scales


def _measure(x: Array, weight: Array, names: Sequence[str], *, center: bool) -> tuple[Array, Array]:
    """The mean (d,), 0 without centring, and the scale (d,) of every column."""
    counted, share = x[weight > 0], weight[weight > 0] / weight.sum()
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


def measure_target(y: Array, weight: Array, *, center: bool) -> TargetUnits:
    """The mean of y, 0 without centring, and its scale, 1 if it is constant."""
    counted, share, names = y[weight > 0][:, None], weight[weight > 0] / weight.sum(), ["y"]
    _refuse_large(np.abs(counted).max(0), names, noun="target")
    mean = _mean(counted, share) if center else np.zeros(1)
    if center and not np.ptp(counted):
        return TargetUnits(float(counted[0, 0]))
    step = float(np.spacing(np.abs(counted).max()))
    scale = float(_scale(counted - mean, share, names, noun="target")[0])
    return TargetUnits(float(mean[0]), 1.0 if scale <= _CONSTANT * step or scale == 0 else scale)


def check_log_mean(y: Array) -> None:
    """Refuses means that the exponential of a predictor cannot reach."""
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
    for i in np.flatnonzero((peak > 0) & (peak < SMALLEST)).tolist():
        raise DataError(
            f"{noun} {names[i]!r} varies by at most {peak[i]:.2g}, whose square is no longer told from 0; measure it "
            f"in a smaller unit: multiply it by {1 / _power_of_ten(peak[i]):g}"
        )
    return np.asarray(peak * np.sqrt(share @ (deviation / np.where(peak > 0, peak, 1.0)) ** 2))


def _refuse_large(peak: Array, names: Sequence[str], noun: str = "column") -> None:
    for i in np.flatnonzero(peak > LARGEST).tolist():
        raise DataError(
            f"{noun} {names[i]!r} has numbers as large as {peak[i]:.2g}, whose squares and quotients overflow; measure "
            f"it in a larger unit: divide it by {_power_of_ten(peak[i]):g}"
        )


def _power_of_ten(value: float) -> float:
    return float(10.0 ** np.clip(np.floor(np.log10(value)), -300, 300))


# ---------------------------------------------------------------------- ids


def encode_ids(noun: str, ids: Any, rows: int) -> tuple[tuple[Any, ...], NDArray[np.int64]]:
    """The sorted distinct ids, and the position of every row's id among them.

    >>> encode_ids("client", ["b", "a", "b"], 3)
    (('a', 'b'), array([1, 0, 1]))
    """
    # np.asarray would turn a list of numbers and names into names, and NaN into the name 'nan'
    values = np.array(ids, dtype=object) if isinstance(ids, list | tuple) else np.asarray(ids)
    if values.shape != (rows,):
        raise DataError(f"{noun}s has shape {values.shape} for {rows} rows; give one {noun} id per row")
    if missing := int(pd.isna(values).sum()):
        raise DataError(f"{missing} of {rows} rows have no {noun} id; drop these rows or give them one")
    if values.dtype.kind not in "biufUSO":  # such as dates
        values = text_ids(values)
    try:
        unique, codes = np.unique(values, return_inverse=True)
    except TypeError:  # numbers and text have no order
        unique, codes = np.unique(text_ids(values), return_inverse=True)
    text_ids(unique)  # refuses what is no id
    return tuple(unique.tolist()), codes.astype(np.int64)


def find_positions(ids: Sequence[Any], known: dict[str, int]) -> list[int]:
    """Where ids stand among known ones by their text; the number of these for an id that is not known.

    >>> find_positions([7.0, "8", "nine"], {"7": 0, "8": 1})
    [0, 1, 2]
    """
    return [known.get(name, len(known)) for name in text_ids(list(ids)).tolist()]


def label_rows(values: Array, clients: Any) -> pd.DataFrame:
    """One row per client, with the client as index."""
    return pd.DataFrame(values, index=pd.Index(list(clients), name="client"), columns=range(values.shape[1]))
