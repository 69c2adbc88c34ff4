"""Client ids, which rows of a table belong to each of them, and which of these are held out."""

from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from ppfl.core.settings import Seed, Settings
from ppfl.data.arrays import Integers, as_array, as_int64, as_text, quoted, refuse_missing
from ppfl.data.files import check_limit
from ppfl.data.samples import Inputs, held_out
from ppfl.errors import DataError


class Holdout(Settings):
    """How much of each client's samples is held out."""

    test_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.2
    validation_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.0
    seed: Seed = 0

    def fractions(self) -> dict[str, Any]:
        """These settings as keywords of `Federation.from_arrays`."""
        return {key: getattr(self, key) for key in Holdout.model_fields}


class RowGroups(NamedTuple):
    """The rows of a table grouped by client."""

    ids: tuple[str, ...]
    order: Tensor | None  # (n,) row numbers, client by client, in their old order; None if already so
    offsets: Tensor  # (M + 1,) where each client starts in `order`, then n

    @property
    def sizes(self) -> Tensor:
        """Number of rows of each client (M,)."""
        return self.offsets.diff()

    def where(self, keep: Tensor) -> "RowGroups":
        """Keep the rows where a mask (n,) is true; the mask is in the order of the groups."""
        order = keep.nonzero().flatten() if self.order is None else self.order[keep]
        return RowGroups(self.ids, order, torch.cat([keep.new_zeros(1), keep]).cumsum(0)[self.offsets])

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
    column = _column(clients)
    run_starts = _changes(column)
    lengths = np.diff(run_starts, append=len(column))
    by_id = _stable_order(column[run_starts])
    id_starts = _changes(column[run_starts[by_id]])
    check_limit("clients", len(id_starts), f"there are {len(id_starts):,} client ids", "check the client column, or ")
    found_ids = column[run_starts[by_id[id_starts]]].astype(np.str_).tolist()
    if ids is None:
        by_appearance = np.argsort(by_id[id_starts])
        names = tuple(found_ids[i] for i in by_appearance.tolist())
        position = np.empty_like(by_appearance)
        position[by_appearance] = np.arange(len(names))
    else:
        names = tuple(text_ids(ids).tolist())
        where = {name: i for i, name in reversed(list(enumerate(names)))}
        unlisted = sorted(set(found_ids) - set(names))
        if unlisted:
            raise DataError(f"clients {quoted(unlisted)} have rows but are not in ids; add them, or drop the rows")
        position = np.array([where[name] for name in found_ids], dtype=np.int64)
    client_of_run = np.empty_like(by_id)
    client_of_run[by_id] = np.repeat(position, np.diff(id_starts, append=len(by_id)))
    sizes = np.bincount(client_of_run, weights=lengths, minlength=len(names)).astype(np.int64)
    offsets = torch.from_numpy(np.concatenate([[0], np.cumsum(sizes)]))
    if bool(np.all(client_of_run[1:] >= client_of_run[:-1])):
        return RowGroups(names, None, offsets)
    return RowGroups(names, torch.from_numpy(_stable_order(np.repeat(client_of_run, lengths))), offsets)


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


def _changes(column: np.ndarray[Any, Any]) -> Integers:
    """Positions where a value differs from the previous one, including position 0."""
    return np.flatnonzero(np.concatenate([np.ones(len(column[:1]), dtype=bool), column[1:] != column[:-1]]))


def _stable_order(values: np.ndarray[Any, Any]) -> Integers:
    """np.argsort(values, kind="stable"), faster for small integers: value and position are packed into one number."""
    bits = len(values).bit_length()
    if values.dtype.kind in "iu" and len(values) and int(values.max()) - int(values.min()) < 1 << (63 - bits):
        packed: Integers = (values.astype(np.int64) - values.min().astype(np.int64)) << bits
        packed |= np.arange(len(values))
        packed.sort()
        packed &= (1 << bits) - 1
        return packed
    return np.argsort(values, kind="stable")


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
