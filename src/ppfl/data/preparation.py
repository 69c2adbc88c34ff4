"""A fixed preparation of the columns of a table: the same numbers for the same row, wherever the row is."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ppfl.data.arrays import quoted
from ppfl.data.encoded_column import EncodedColumn, is_text
from ppfl.errors import DataError

MISSING = "missing"  # the level of a missing text where missing values are filled
LARGEST = 1e70  # squares of larger numbers, and sums of them, would overflow


class PreparedColumn(NamedTuple):
    """One column of a table, which becomes one column of numbers, or one for each level but the first."""

    name: str
    levels: tuple[str, ...]  # of text, the reference level first; empty for numbers
    rare: tuple[str, ...]  # levels of few rows, which became `other`
    mean: tuple[float, ...]  # subtracted from each encoded column
    scale: tuple[float, ...]  # by which each is divided; 0: the column has one value, and becomes 0
    fill: float | None  # in the place of missing numbers
    missing: int  # in how many rows the value was missing

    @property
    def encoding(self) -> EncodedColumn:
        """How it becomes numbers, before these are scaled."""
        return EncodedColumn(self.name, self.levels, self.rare)

    def encode(self, values: Any) -> NDArray[np.float64]:
        """(n, terms) of values as `as_text` or `as_numbers` gives them."""
        if self.levels:
            values = values.fillna(MISSING)
        elif self.fill is not None:
            values = values.fillna(self.fill)
        return self.encoding.encode(values)


class Preparation(NamedTuple):
    """What all sites do with their rows.

    >>> import pandas as pd
    >>> age = PreparedColumn("age", (), (), (40.0,), (10.0,), 40.0, missing=1)
    >>> ward = PreparedColumn("ward", ("east", "west"), (), (0.0,), (1.0,), None, missing=0)
    >>> preparation = Preparation((age, ward), rows=7, dropped=0)
    >>> preparation.apply(pd.DataFrame({"ward": ["west", "east"], "age": [60.0, None]})).tolist()
    [[2.0, 1.0], [0.0, 0.0]]
    >>> Preparation.from_json(preparation.to_json()) == preparation
    True
    """

    columns: tuple[PreparedColumn, ...]
    rows: int  # training rows that means and levels are of
    dropped: int  # rows that were left out, as a value was missing
    target: tuple[float, float] = (0.0, 1.0)  # mean and scale of the targets
    log_factorials: float = 0.0  # the sum of log y! over these rows, where targets are counts

    @property
    def terms(self) -> tuple[str, ...]:
        """The names of the prepared columns."""
        return tuple(term for column in self.columns for term in column.encoding.terms)

    def apply(self, frame: Any) -> NDArray[np.float64]:
        """The prepared columns (n, terms) of a pandas table that has all columns by name."""
        return self.scale(self.encode(frame))

    def scale(self, encoded: NDArray[np.float64]) -> NDArray[np.float64]:
        """(encoded - mean) / scale, and 0 for columns that have one value."""
        mean = np.array([value for column in self.columns for value in column.mean])
        scale = np.array([value for column in self.columns for value in column.scale])
        known = np.where(scale > 0, scale, 1.0)
        return np.asarray(np.where(scale > 0, (encoded - mean) / known, 0.0))

    def encode(self, frame: Any) -> NDArray[np.float64]:
        """Numbers in their own units and indicators of levels (n, terms)."""
        if absent := [column.name for column in self.columns if column.name not in frame.columns]:
            raise DataError(f"no column {quoted(absent)}; the table has {quoted(list(frame.columns), most=12)}")
        parts = []
        for column in self.columns:
            values = as_text(frame[column.name]) if column.levels else as_numbers(column.name, frame[column.name])
            found = int(values.isna().sum())
            if found and (column.fill is None if not column.levels else MISSING not in column.levels):
                raise DataError(
                    f"column {column.name!r} has {found} missing values, and the preparation fills none; fill them, or "
                    f"leave out these rows"
                )
            parts.append(column.encode(values))
        return np.concatenate(parts, 1)

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return {
            "columns": [{**column._asdict(), **_lists(column)} for column in self.columns],
            "rows": self.rows, "dropped": self.dropped, "target": list(self.target),
            "log_factorials": self.log_factorials,
        }  # fmt: skip

    @classmethod
    def from_json(cls, found: Any) -> Preparation:
        """What `to_json` gave; DataError if it is anything else, as it may come from a server."""
        try:
            columns = tuple(_column(one) for one in found["columns"])
            shift, scale = (float(value) for value in found["target"])
            made = cls(
                columns, int(found["rows"]), int(found["dropped"]), (shift, scale), float(found["log_factorials"])
            )
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"this is no preparation of a table ({error}); use the same ppfl everywhere") from None
        numbers = [value for column in columns for value in (*column.mean, *column.scale, column.fill or 0.0)]
        if not columns or not all(map(math.isfinite, (*numbers, shift, scale, made.log_factorials))) or not scale > 0:
            raise DataError("a preparation of a table has no columns or numbers that are not finite; agree on it anew")
        return made


def _lists(column: PreparedColumn) -> dict[str, list[Any]]:
    return {name: list(getattr(column, name)) for name in ("levels", "rare", "mean", "scale")}


def _column(found: Any) -> PreparedColumn:
    levels, rare = (tuple(str(level) for level in found[key]) for key in ("levels", "rare"))
    mean, scale = (tuple(float(value) for value in found[key]) for key in ("mean", "scale"))
    fill = None if found["fill"] is None else float(found["fill"])
    column = PreparedColumn(str(found["name"]), levels, rare, mean, scale, fill, int(found["missing"]))
    if not len(mean) == len(scale) == len(column.encoding.terms) or min((0.0, *scale)) < 0:
        raise ValueError(f"column {column.name!r} has {len(mean)} means for {len(column.encoding.terms)} terms")
    return column


def as_text(values: Any) -> Any:
    """A column as text, without a decimal point in whole numbers, as a file with a missing cell would have it.

    >>> import pandas as pd
    >>> as_text(pd.Series([1.0, None, 2.0])).tolist()
    ['1', nan, '2']
    """
    return values.astype(object).where(values.notna(), np.nan).map(_level, na_action="ignore")


def _level(value: Any) -> str:
    whole = isinstance(value, float | np.floating) and math.isfinite(value) and value == int(value)
    return str(int(value)) if whole else str(value)


def as_numbers(name: str, values: Any) -> Any:
    """A column as float64, in which missing values are NaN."""
    if is_text(values) and values.notna().any():
        example = values.dropna().iloc[0]
        raise DataError(f"column {name!r} has text, such as {str(example)!r:.40}, and numbers are expected; convert it")
    found = values.astype("float64")
    largest = float(found.abs().max()) if found.notna().any() else 0.0
    if not largest <= LARGEST:
        raise DataError(
            f"column {name!r} has values up to {largest:.3g}; expected up to {LARGEST:.0e}: change its unit"
        )
    return found
