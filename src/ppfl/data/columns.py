"""Clients from columns by name: dicts of lists, Hugging Face datasets, pandas tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ppfl.data.ragged import is_ragged
from ppfl.data.raw_arrays import quoted
from ppfl.errors import DataError


def column(data: Any, name: str) -> Any:
    """One column; text and rows of different lengths as a list."""
    names = column_names(data)
    if name not in names:
        raise DataError(f"no column {name!r}; the data have {quoted(names, most=12)}")
    values = data[name]
    if type(values).__module__.startswith(("pandas", "datasets")):
        values = values.to_numpy() if hasattr(values, "to_numpy") else values[:]
    if isinstance(values, np.ndarray) and values.dtype == object and len(values) and hasattr(values[0], "__len__"):
        return values.tolist()
    return values


def features_of(data: Any, x: str | Sequence[str]) -> tuple[Any, list[str] | None]:
    """The inputs, from one column that holds them or from several columns of numbers, and the names of these."""
    if isinstance(x, str):
        values = column(data, x)
        one_number = not is_ragged(values) and np.ndim(values[0] if len(values) else 0) == 0
        return (np.asarray(values)[:, None], [x]) if one_number else (values, None)
    names = list(x)
    if not names:
        raise DataError("x names no column; name at least one")
    try:
        return np.stack([np.asarray(column(data, name), dtype=np.float32) for name in names], axis=1), names
    except (TypeError, ValueError) as error:
        raise DataError(f"columns {quoted(names)} cannot be stacked as numbers ({error}); encode them first") from None


def column_names(data: Any) -> list[str]:
    """The names of the columns."""
    for attribute in ("column_names", "columns"):
        if hasattr(data, attribute):
            return [str(name) for name in getattr(data, attribute)]
    if not hasattr(data, "keys"):
        raise DataError(f"the data are a {type(data).__name__}; expected columns by name: a dict, or a table")
    return [str(name) for name in data.keys()]  # noqa: SIM118 (a table of any kind)
