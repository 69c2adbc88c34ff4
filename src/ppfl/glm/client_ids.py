"""Ids of clients and situations: checked, sorted, and as integer codes."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Number
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..errors import DataError

Array = np.ndarray[Any, Any]
Codes = np.ndarray[Any, np.dtype[np.int64]]


class ClientCodes(NamedTuple):
    """The client of every row, as a position among the sorted ids."""

    ids: tuple[Any, ...]  # sorted
    codes: Codes  # (n,)

    @classmethod
    def of(cls, clients: Any, rows: int) -> ClientCodes:
        """All rows belong to one client if `clients` is None."""
        if clients is None:
            return cls((0,), np.zeros(rows, dtype=np.int64))
        return cls(*encode_ids("client", clients, rows))

    def positions(self, known: Sequence[Any]) -> Tensor:
        """The position of every row's client among the known ids, or their number for a client that is not known."""
        self.check_kind(known)
        position = {client: i for i, client in enumerate(known)}
        found = np.array([position.get(client, len(position)) for client in self.ids], dtype=np.int64)
        return torch.from_numpy(found[self.codes])

    def check_kind(self, known: Sequence[Any]) -> None:
        """Raise a DataError for '7' where the fit had 7: it would silently count as a client that is not known."""
        if _kind(self.ids[0]) != _kind(known[0]):
            raise DataError(
                f"client ids are of kind {_kind(self.ids[0])}, such as {self.ids[0]!r}, but the fit had ids of kind "
                f"{_kind(known[0])}, such as {known[0]!r}; name clients as the fit did"
            )


def encode_ids(noun: str, ids: Any, rows: int) -> tuple[tuple[Any, ...], Codes]:
    """The sorted distinct ids, and the position of every row's id among them."""
    # np.asarray would turn a list of numbers and names into names, and NaN into the name 'nan'
    values = np.array(ids, dtype=object) if isinstance(ids, list | tuple) else np.asarray(ids)
    if values.shape != (rows,):
        raise DataError(f"{noun}s has shape {values.shape} for {rows} rows; give one {noun} id per row")
    if values.dtype.kind not in "biufUSO":
        raise DataError(f"{noun} ids are of kind {values.dtype}; turn them into strings")
    if missing := count_missing(values):
        raise DataError(f"{missing} of {rows} rows have no {noun} id; drop these rows or give them one")
    kinds = {_kind(item) for item in values.tolist()} if values.dtype.kind == "O" else set()
    if len(kinds) > 1:
        raise DataError(f"{noun} ids are of several kinds ({', '.join(sorted(kinds))}); turn all into strings")
    unique, codes = np.unique(values, return_inverse=True)
    return tuple(unique.tolist()), codes.astype(np.int64)


def count_missing(values: Array) -> int:
    """The number of entries that are None, NaN, NaT or pandas' NA."""
    return sum(map(_is_missing, values.tolist())) if values.dtype.kind in "Of" else 0


def _is_missing(item: Any) -> bool:
    try:
        return item is None or bool(item != item)
    except TypeError:  # pandas' NA has no truth value
        return True


def _kind(item: Any) -> str:
    if isinstance(item, Number | np.bool_):
        return "number"
    return "str" if isinstance(item, str) else type(item).__name__  # also for numpy's own str


def label_rows(memberships: Array, clients: Array) -> Any:
    """A DataFrame indexed by client if pandas is installed, else the array."""
    try:
        import pandas as pd
    except ImportError:
        return memberships
    return pd.DataFrame(memberships, index=pd.Index(clients, name="client"), columns=range(memberships.shape[1]))
