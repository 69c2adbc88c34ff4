"""Which columns of a table are features, and the encoding of all of them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ...data.arrays import quoted
from ...data.encoded_column import EncodedColumn, is_text
from ...errors import DataError
from ..client_ids import Array
from ..standardize import INTERCEPT

MOST_LEVELS = 20  # a text column with more levels is used only if it is named
_NOT_PLAIN = (bytes, list, tuple, dict, set, np.ndarray)
_ROW_NUMBERS = ("rownames", "index", "unnamed: 0", "")  # as R and pandas write them


class Encoding(NamedTuple):
    """The encoding of all feature columns."""

    columns: tuple[EncodedColumn, ...]

    @classmethod
    def of(cls, frame: Any, names: Sequence[str]) -> Encoding:
        """With the levels in these rows."""
        return cls(tuple(EncodedColumn.of(name, frame[name]) for name in names))

    @property
    def intercept(self) -> bool:
        return True

    @property
    def terms(self) -> list[str]:
        return [term for column in self.columns for term in column.terms]

    def encode(self, frame: Any) -> Array:
        """(n, terms)."""
        parts = [column.encode(frame[column.name]) for column in self.columns]
        return np.concatenate([np.zeros((len(frame), 0)), *parts], 1)

    def shared(self, names: Sequence[str]) -> list[int | str] | str | None:
        """The `shared` setting of an estimator: positions of the encoded columns, `intercept`, or `all`."""
        if not names:
            return None
        if "all" in names and INTERCEPT not in names:
            return "all"
        known = {column.name: column for column in self.columns}
        if absent := [name for name in names if name not in known and name not in (INTERCEPT, "all")]:
            raise DataError(
                f"shared names {quoted(absent)}, which is no feature; use some of {quoted(list(known), 12)}"
            )
        wanted = {term for name in (known if "all" in names else names) if name in known for term in known[name].terms}
        positions: list[int | str] = [i for i, term in enumerate(self.terms) if term in wanted]
        return [*positions, *([INTERCEPT] if INTERCEPT in names else [])]


class ChosenColumns(NamedTuple):
    """The columns that are used as features."""

    names: tuple[str, ...]
    left_out: dict[str, str]  # column -> reason


def choose_features(frame: Any, excluded: Sequence[str], wanted: Sequence[str] | None) -> ChosenColumns:
    """The wanted columns, or if they are None, all useful columns except those in `excluded`."""
    present = list(frame.columns)
    if absent := [name for name in (*excluded, *(wanted or ())) if name not in present]:
        raise DataError(f"no column {quoted(absent)}; the table has {quoted(present, most=12)}")
    if both := [name for name in wanted or () if name in excluded]:
        raise DataError(f"column {both[0]!r} is the client or the target; leave it out of the features")
    if wanted is not None:
        return ChosenColumns(tuple(dict.fromkeys(wanted)), {})
    reasons = {name: _reason_to_leave_out(name, frame[name]) for name in present if name not in excluded}
    names = tuple(name for name, reason in reasons.items() if not reason)
    return ChosenColumns(names, {name: reason for name, reason in reasons.items() if reason})


def is_plain(values: Any) -> bool:
    """Whether a column holds numbers and text, rather than lists or bytes as parquet files may have them."""
    return values.dtype.kind != "O" or not any(isinstance(value, _NOT_PLAIN) for value in values)


def has_decimal_commas(values: Any) -> bool:
    """Whether most cells of a text column are numbers such as 1,5."""
    number = re.compile(r"\s*[-+]?\d+,\d+\s*")
    return 2 * sum(bool(number.fullmatch(str(value))) for value in values) > len(values)


def _reason_to_leave_out(name: str, values: Any) -> str:
    """Why a column is not used unless it is named; empty for a useful column."""
    known = values.dropna()
    if not is_plain(known):
        return "lists or bytes"
    distinct = known.nunique()
    if distinct < 2:
        return "one value"
    if is_text(values):
        if distinct <= MOST_LEVELS:
            return ""
        return "numbers with a decimal comma" if has_decimal_commas(known) else f"{distinct} levels"
    if distinct == len(values) > 2 and bool((known == known.round()).all()):
        span = float(known.max()) - float(known.min())
        if name.strip().lower() in _ROW_NUMBERS or span == len(values) - 1:
            return "row numbers"
    return ""
