"""Rows of different lengths, such as sentences, padded to a rectangle."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from ppfl.data.limits import check_limit
from ppfl.errors import DataError

_ROW = (list, tuple, np.ndarray, Tensor)


def is_ragged(values: Any) -> bool:
    """Whether this is a list, or a column of a table, of rows that are lists of different lengths.

    >>> is_ragged([[1, 2], [3]]), is_ragged([[1, 2], [3, 4]])
    (True, False)
    """
    if isinstance(values, Tensor) or not isinstance(values, Sequence | np.ndarray) or isinstance(values, str | bytes):
        values = values.tolist() if type(values).__module__.startswith("pandas") and hasattr(values, "tolist") else ()
    if isinstance(values, np.ndarray) and values.dtype != object:
        return False
    rows = list(values)
    if not rows or not all(isinstance(row, _ROW) and np.ndim(row) for row in rows[:1]):
        return False
    if not all(isinstance(row, _ROW) for row in rows):
        return False
    return len({len(row) for row in rows}) > 1 or isinstance(values, np.ndarray)


def pad_rows(values: Any, pad: int, what: str) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Rows of whole numbers (n, longest), with `pad` after the end of the shorter ones.

    >>> pad_rows([[5, 6, 7], [8]], 0, "x").tolist()
    [[5, 6, 7], [8, 0, 0]]
    """
    rows = [np.asarray(row) for row in values]
    longest = max(map(len, rows))
    size = len(rows) * longest * 8
    check_limit(
        "bytes", size, f"{what} padded to {longest:,} values per row takes {size:,} bytes", "cut long rows, or "
    )
    padded = np.full((len(rows), longest), pad, np.int64)
    for at, row in enumerate(rows):
        if row.ndim != 1 or (len(row) and row.dtype.kind not in "biu"):
            raise DataError(
                f"{what} has rows of different lengths, and row {at} is {row.dtype} {row.shape}; only lists of whole "
                f"numbers are padded: give every row the same shape"
            )
        padded[at, : len(row)] = row
    return padded
