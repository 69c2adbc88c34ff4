"""Single columns of a table: numbers, text, cells that cannot be read, and columns that say nothing."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import narwhals as nw
import numpy as np
import pandas as pd
from pandas.api.types import is_numeric_dtype
from torch import Tensor

from ppfl.errors import DataError

MOST_LEVELS = 20  # a text column with more levels is used only if it is named
NO_VALUE, ONE_VALUE, ROW_NUMBERS = "no value", "one value", "row numbers"  # why columns are left out
LISTS = "lists or bytes"  # also a reason
FEW = 10  # a text column of which at most one cell in so many is no number is one of numbers
LARGEST = 1e70  # squares of larger numbers, and sums of them, would overflow
_NOT_PLAIN = (bytes, list, tuple, dict, set, np.ndarray)
_ROW_NUMBERS = ("rownames", "index", "unnamed: 0", "")  # as R and pandas write them
_CONSTANT = 4  # steps between neighbouring floating-point numbers, by which a column of one value may vary


class BadCells(NamedTuple):
    """The cells of a column of numbers that are no numbers, such as `n/a?`."""

    column: str
    cells: int
    example: str
    row: int  # of the example, from 1

    def describe(self) -> str:
        """In one sentence."""
        what = "1 cell" if self.cells == 1 else f"{self.cells} cells"
        such_as = "" if self.cells == 1 else "such as "
        return (
            f"{self.column} has {what} without a number, {such_as}{self.example!r} in row {self.row}: taken as missing"
        )


def as_pandas(data: Any) -> pd.DataFrame:
    """A pandas table with its column names as text, none of them twice.

    >>> list(as_pandas({0: [1.0], "a": [2.0]}).columns)
    ['0', 'a']
    """
    if isinstance(data, Mapping):
        try:
            data = pd.DataFrame({name: np.asarray(column) if isinstance(column, Tensor) else column
                                 for name, column in data.items()})  # fmt: skip
        except ValueError as error:
            raise DataError(f"the columns are no table ({error}); give one value per row in each of them") from None
    elif not isinstance(data, pd.DataFrame):
        try:
            data = nw.from_native(data, eager_only=True).to_pandas()
        except TypeError:
            raise DataError(
                f"the data are a {type(data).__name__}; expected a table: pandas, polars, pyarrow, or a dict of columns"
            ) from None
    names = [str(name) for name in data.columns]
    refuse_repeated(names)
    return data.set_axis(names, axis=1)


def refuse_repeated(names: Sequence[str]) -> None:
    if repeated := sorted(name for name, times in Counter(names).items() if times > 1):
        raise DataError(f"the table has two columns {repeated[0]!r}; rename one of them")


def is_plain(values: Any) -> bool:
    """Whether a column holds numbers and text, rather than lists or bytes as parquet files may have them."""
    return values.dtype.kind != "O" or not any(isinstance(value, _NOT_PLAIN) for value in values)


def read_numbers(values: pd.Series) -> tuple[pd.Series, BadCells | None]:
    """A text column in which nearly all cells are numbers as numbers, and the cells that are none; others as they are.

    A text column in which all cells are numbers stays text: somebody made it text, as names of things often are.
    """
    known = values.dropna()
    if known.empty or not is_text(values) or isinstance(values.dtype, pd.CategoricalDtype) or not is_plain(known):
        return values, None
    numbers = pd.to_numeric(values.astype(str).where(values.notna()), errors="coerce")
    bad = (numbers.isna() & values.notna()).to_numpy()
    if not bad.any() or bad.sum() > len(known) // FEW:
        return values, None
    first = int(bad.argmax())
    return numbers.astype(float), BadCells(str(values.name), int(bad.sum()), str(values.iloc[first]), first + 1)


def check_column(name: str, values: pd.Series) -> pd.Series:
    """A column as text (object) or float64, NaN where a value is missing; an error where it is neither."""
    if not is_plain(values.dropna()):
        raise DataError(f"column {name!r} has lists or bytes; expected numbers or text: convert it first")
    return as_text(values) if is_text(values) and values.notna().any() else as_numbers(name, values)


def reason_to_leave_out(name: str, values: pd.Series) -> str:
    """Why a column of text or float64 is not used unless it is named; empty for a useful column."""
    known = values.dropna()
    if known.empty:
        return NO_VALUE
    distinct = known.nunique()
    if values.dtype == object:
        if distinct <= MOST_LEVELS:
            return ONE_VALUE if distinct == 1 else ""
        return "numbers with a decimal comma" if _has_decimal_commas(known) else f"{distinct} levels"
    least, most = float(known.min()), float(known.max())
    if most - least <= _CONSTANT * np.spacing(max(abs(least), abs(most))):
        return ONE_VALUE
    numbered = name.strip().lower() in _ROW_NUMBERS or most - least == len(values) - 1
    different = distinct == len(values) > 2 and bool((known == known.round()).all())
    return ROW_NUMBERS if numbered and different else ""


def _has_decimal_commas(values: Any) -> bool:
    """Whether most cells of a text column are numbers such as 1,5."""
    number = re.compile(r"\s*[-+]?\d+,\d+\s*")
    return 2 * sum(bool(number.fullmatch(str(value))) for value in values) > len(values)


def is_text(values: Any) -> bool:
    """Whether a column holds text rather than numbers; booleans are numbers."""
    return not is_numeric_dtype(values.dtype)


def as_text(values: Any) -> Any:
    """A column as text, in which an empty text is missing. Whole numbers are written without a decimal point.

    >>> import pandas as pd
    >>> as_text(pd.Series([1.0, None, 2.0])).tolist()
    ['1', nan, '2']
    """
    texts = values.astype(object).where(values.notna(), np.nan).map(_level, na_action="ignore").astype(object)
    return texts.where(texts != "", np.nan)


def _level(value: Any) -> str:
    whole = isinstance(value, float | np.floating) and math.isfinite(value) and value == int(value)
    return str(int(value)) if whole else str(value)


def as_numbers(name: str, values: Any) -> Any:
    """A column as float64, in which missing values are NaN."""
    if is_text(values) and values.notna().any():
        example = values.dropna().iloc[0]
        raise DataError(f"column {name!r} has text, such as {str(example)!r:.40}, and numbers are expected; convert it")
    if values.dtype.kind == "c":
        raise DataError(f"column {name!r} has complex numbers; use their real and imaginary parts as two columns")
    found = values.astype("float64")
    largest = float(found.abs().max()) if found.notna().any() else 0.0
    if math.isinf(largest):
        raise DataError(f"column {name!r} has infinite values; correct them, or drop the rows")
    if largest > LARGEST:
        raise DataError(
            f"column {name!r} has values up to {largest:.3g}; expected up to {LARGEST:.0e}: change its unit"
        )
    return found
