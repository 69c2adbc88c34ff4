"""Ids of clients and situations: compared as text, shown as they were given, sorted, and as integer codes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from ..data.ids import text_ids
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
        found = np.array(known_positions(self.ids, known), dtype=np.int64)
        return torch.from_numpy(found[self.codes])


def known_positions(ids: Sequence[Any], known: Sequence[Any]) -> list[int]:
    """The positions of ids among the known ones, or the number of these for an id that is not known.

    >>> known_positions([7.0, "8", "nine"], [7, 8])
    [0, 1, 2]
    """
    position = {name: at for at, name in enumerate(text_ids(list(known)).tolist())}
    return [position.get(name, len(position)) for name in text_ids(list(ids)).tolist()]


def encode_ids(noun: str, ids: Any, rows: int) -> tuple[tuple[Any, ...], Codes]:
    """The sorted distinct ids, and the position of every row's id among them.

    >>> encode_ids("client", ["b", "a", "b"], 3)
    (('a', 'b'), array([1, 0, 1]))
    """
    # np.asarray would turn a list of numbers and names into names, and NaN into the name 'nan'
    values = np.array(ids, dtype=object) if isinstance(ids, list | tuple) else np.asarray(ids)
    if values.shape != (rows,):
        raise DataError(f"{noun}s has shape {values.shape} for {rows} rows; give one {noun} id per row")
    if missing := count_missing(values):
        raise DataError(f"{missing} of {rows} rows have no {noun} id; drop these rows or give them one")
    if values.dtype.kind not in "biufUSO":  # such as dates
        values = text_ids(values)
    try:
        unique, codes = np.unique(values, return_inverse=True)
    except TypeError:  # numbers and text have no order
        unique, codes = np.unique(text_ids(values), return_inverse=True)
    text_ids(unique)  # refuses what is no id
    return tuple(unique.tolist()), codes.astype(np.int64)


def count_missing(values: Array) -> int:
    """The number of entries that are None, NaN, NaT or pandas' NA."""
    return int(pd.isna(values).sum())


def label_rows(memberships: Array, clients: Array) -> pd.DataFrame:
    """One row per client, with the client as index."""
    return pd.DataFrame(memberships, index=pd.Index(clients, name="client"), columns=range(memberships.shape[1]))
