"""Client ids, which rows of a table belong to each of them, and which of these are held out."""

from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Annotated, Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from pydantic import Field
from torch import Tensor

from ppfl.core.settings import Seed, Settings
from ppfl.data.arrays import as_array, as_int64, as_text, quoted, refuse_missing
from ppfl.data.checks import check_ids, check_train
from ppfl.data.files import check_limit
from ppfl.data.samples import Inputs, held_out, offsets_of
from ppfl.errors import DataError


class Holdout(Settings):
    """How much of each client's samples is held out."""

    test_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.2
    validation_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.0
    seed: Seed = 0


class RowGroups(NamedTuple):
    """The rows of a table grouped by client."""

    ids: tuple[str, ...]
    order: Tensor | None  # (n,) row numbers, client by client, in their old order; None if already so
    offsets: Tensor  # (M + 1,) where each client starts in `order`, then n

    @property
    def sizes(self) -> Tensor:
        """Number of rows of each client (M,)."""
        return self.offsets.diff()

    @property
    def numbers(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """The numbers of the rows, client by client (n,)."""
        order = torch.arange(int(self.offsets[-1])) if self.order is None else self.order
        return order.numpy()

    def where(self, keep: Tensor) -> "RowGroups":
        """Keep the rows where a mask (n,) is true; the mask is in the order of the groups."""
        order = keep.nonzero().flatten() if self.order is None else self.order[keep]
        return RowGroups(self.ids, order, offsets_of(keep)[self.offsets])

    def take(self, values: Inputs) -> Inputs:
        """The rows of values (n, ...) in the order of the groups; not copied if they are already in that order."""
        return values.contiguous() if self.order is None else values.index_select(0, self.order.to(values.device))


def group_rows(clients: Any, ids: Sequence[Any] | None = None) -> RowGroups:
    """Group rows by client. Clients are in the order of `ids`, or of first appearance if `ids` is not given.

    >>> group_rows(["b", "a", "b"]).ids
    ('b', 'a')
    >>> group_rows(["b", "a", "b"]).order
    tensor([0, 2, 1])
    >>> group_rows(["b", "b", "a"]).order is None
    True
    """
    codes, found = pd.factorize(_column(clients))
    check_limit("clients", len(found), f"there are {len(found):,} client ids", "check the client column, or ")
    names = tuple(found.astype(np.str_).tolist())
    if ids is not None:
        listed = tuple(text_ids(ids).tolist())
        if unlisted := sorted(set(names) - set(listed)):
            raise DataError(f"clients {quoted(unlisted)} have rows but are not in ids; add them, or drop the rows")
        where = {name: at for at, name in reversed(list(enumerate(listed)))}
        codes, names = np.array([where[name] for name in names], dtype=np.int64)[codes], listed
    of_row = torch.from_numpy(codes.astype(np.int64))
    offsets = offsets_of(torch.bincount(of_row, minlength=len(names)))
    in_order = bool((of_row[1:] >= of_row[:-1]).all())
    return RowGroups(names, None if in_order else of_row.argsort(stable=True), offsets)


def split_rows(
    rows: RowGroups,
    test_fraction: float = 0.0,
    validation_fraction: float = 0.0,
    seed: int = 0,
    is_test: Tensor | None = None,
) -> dict[str, RowGroups]:
    """Divide the rows of every client into "train" and, where rows are held out, "test" and "validation".

    A mask `is_test` (n,), in the order of the table, replaces `test_fraction`. Validation rows are taken from the
    training rows that remain.

    >>> parts = split_rows(group_rows(["a", "b", "a", "b"]), is_test=torch.tensor([False, False, False, True]))
    >>> {name: part.order.tolist() for name, part in parts.items()}
    {'train': [0, 2, 1], 'test': [3]}
    """
    check_ids(rows.ids, {})
    check_train(rows.ids, rows.sizes)
    parts = {"train": rows}
    marked = None
    if is_test is not None:
        marked = rows.take(is_test)
    elif test_fraction:
        marked = held_out(rows.sizes, rows.ids, test_fraction, seed, "test")
    if marked is not None and bool(marked.any()):
        parts = {"train": rows.where(~marked), "test": rows.where(marked)}
    if validation_fraction:
        train = parts["train"]
        held = held_out(train.sizes, rows.ids, validation_fraction, seed, "validation")
        parts |= {"train": train.where(~held), "validation": train.where(held)}
    return parts


def text_ids(clients: Any) -> np.ndarray[Any, np.dtype[np.str_]]:
    """Client ids as text, the one form in which they are compared: 7, 7.0 and "7" are one client, "007" is another.

    >>> text_ids(np.array([7, 7.0, "7", "007"], dtype=object)).tolist()
    ['7', '7', '7', '007']
    """
    return _column(clients).astype(np.str_, copy=False)


def as_weights(weights: Mapping[Any, float], ids: Sequence[str]) -> Tensor:
    """Client weights by id, of any scale, as float32 (M,) that sum to 1.

    >>> as_weights({"a": 3, "b": 1}, ["b", "a"])
    tensor([0.2500, 0.7500])
    """
    by_id = dict(zip(text_ids(list(weights)).tolist(), weights.values(), strict=True))
    odd = sorted(set(by_id) ^ set(ids))
    if odd:
        raise DataError(f"weights and clients differ in {quoted(odd)}; give one weight for each client id")
    values = torch.tensor([float(by_id[i]) for i in ids], dtype=torch.float64)
    return (values / values.sum()).float()


def _column(clients: Any) -> np.ndarray[Any, Any]:
    """Client ids as integers or strings. Integers stay integers, because comparing them is much faster."""
    column = as_array(clients, "clients")
    if column.ndim != 1:
        raise DataError(f"clients has shape {column.shape}; expected one client id per sample, shape (n,)")
    if column.dtype.kind in "iu":
        return column
    if column.dtype.kind == "O" and set(map(type, column)) == {str}:
        return as_text(column, "clients")
    if column.dtype.kind in "Of":
        refuse_missing(column, "clients")
    if column.dtype.kind == "O":
        whole = [_whole(value) if isinstance(value, float | np.floating | Decimal) else value for value in column]
        return as_text(np.array([*whole, None], dtype=object)[:-1], "clients")  # None: no list becomes an axis
    if column.dtype.kind == "f":  # pandas turns integers into floats if some were missing
        for value in column[column != np.floor(column)]:
            _whole(value)
        return as_int64(column, "clients")
    return as_text(column, "clients")


def _whole(value: Any) -> str:
    """The text of a whole number that is stored as a float."""
    if value % 1 != 0:  # also for infinity, whose remainder is NaN
        raise DataError(f"client ids are fractions ({value}); expected strings or whole numbers")
    return str(int(value))
