"""Convert lists and numpy, pandas and torch arrays to the tensors and client ids of a federation."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ppfl.core.errors import DataError

_Ints = np.ndarray[Any, np.dtype[np.int64]]
LearningTask = Literal["auto", "classification", "regression"]


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

    def take(self, values: Tensor) -> Tensor:
        """The rows of values (n, ...) in the order of the groups; not copied if they are already in that order."""
        return values.contiguous() if self.order is None else values.index_select(0, self.order.to(values.device))


def as_features(x: Any, tokens: bool = False) -> Tensor:
    """Features as float32, or tokens as int64.

    >>> as_features([[1, 2], [3, 4]]).dtype
    torch.float32
    """
    values = x if isinstance(x, Tensor) else _as_tensor(np.asarray(x))
    if values.ndim < 2:
        raise DataError(f"x has shape {tuple(values.shape)}; expected (n, features): use x.reshape(-1, 1)")
    if tokens and values.is_floating_point():
        raise DataError(f"x is {values.dtype} but tokens are integers; pass integers, or tokens=False")
    return values.long() if tokens else values.float()


def as_targets(
    y: Any, task: LearningTask = "auto", classes: Sequence[str] | None = None
) -> tuple[Tensor, tuple[str, ...] | None]:
    """Targets as int64 labels or float32 values, and the names of the classes if they are known.

    "auto" treats integers, booleans and strings as labels and floats as values to predict. A string becomes its
    position in `classes` (by default, the sorted strings that occur).

    >>> as_targets(["no", "yes", "no"])
    (tensor([0, 1, 0]), ('no', 'yes'))
    >>> as_targets([1, 0], task="regression")[0]
    tensor([1., 0.])
    """
    array = y.detach().cpu().numpy() if isinstance(y, Tensor) else np.asarray(y)
    if array.ndim != 1:
        raise DataError(f"y has shape {array.shape}; expected (n,), one target per sample: flatten it first")
    if array.dtype.kind == "O":
        _refuse_missing(array, "y")
        array = np.asarray(array.tolist())  # converts numbers that are stored as objects
    names = tuple(classes) if classes is not None else None
    if array.dtype.kind not in "biuf":
        if task == "regression":
            raise DataError(f"y contains text ({str(array[0])!r}) but regression needs numbers; convert it")
        return _codes(array.astype(str), names)
    if task == "regression" or (task == "auto" and array.dtype.kind == "f"):
        return torch.from_numpy(array.astype(np.float32)), None
    if array.dtype.kind == "f" and not bool(np.all(array == np.floor(array))):
        bad = array[array != np.floor(array)][0]
        raise DataError(f"y contains {bad}, which is not a class label; use integers or strings, or regression")
    return torch.from_numpy(array.astype(np.int64)), names


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
    found_ids = column[run_starts[by_id[id_starts]]].astype(np.str_).tolist()
    if ids is None:
        by_appearance = np.argsort(by_id[id_starts])
        names = tuple(found_ids[i] for i in by_appearance.tolist())
        position = np.empty_like(by_appearance)
        position[by_appearance] = np.arange(len(names))
    else:
        names = tuple(as_ids(ids).tolist())
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


def as_ids(clients: Any) -> np.ndarray[Any, np.dtype[np.str_]]:
    """A column of client ids as strings; 7, 7.0 and "7" are the same client.

    >>> as_ids(np.array([7, 7.0, "7"], dtype=object)).tolist()
    ['7', '7', '7']
    """
    return _column(clients).astype(np.str_, copy=False)


def as_mask(is_test: Any, n: int) -> Tensor:
    """A mask of the test rows, as a boolean (n,).

    >>> as_mask([0, 1], 2)
    tensor([False,  True])
    """
    mask = is_test.detach().cpu().numpy() if isinstance(is_test, Tensor) else np.asarray(is_test)
    if mask.shape != (n,):
        raise DataError(f"is_test has shape {mask.shape}; expected ({n},), one value per sample")
    odd = [str(value) for value in set(mask.tolist()) - {0, 1}]  # in a set, False equals 0 and True equals 1
    if odd:
        raise DataError(f"is_test contains {quoted(odd)}; expected true and false, or 1 and 0: convert it first")
    return torch.from_numpy(mask.astype(bool))


def as_weights(weights: Mapping[Any, float], ids: Sequence[str]) -> Tensor:
    """Client weights by id, of any scale, as float32 (M,) that sum to 1.

    >>> as_weights({"a": 3, "b": 1}, ["b", "a"])
    tensor([0.2500, 0.7500])
    """
    by_id = dict(zip(as_ids(list(weights)).tolist(), weights.values(), strict=True))
    odd = sorted(set(by_id) ^ set(ids))
    if odd:
        raise DataError(f"weights and clients differ in {quoted(odd)}; give one weight for each client id")
    values = torch.tensor([float(by_id[i]) for i in ids], dtype=torch.float64)
    return (values / values.sum()).float()


def quoted(names: Sequence[str], most: int = 5) -> str:
    """A few names for an error message.

    >>> quoted(["a", "b", "c"], most=2)
    "'a', 'b' and 1 more"
    """
    shown = ", ".join(repr(str(n)) for n in names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def _changes(column: np.ndarray[Any, Any]) -> _Ints:
    """Positions where a value differs from the previous one, including position 0."""
    return np.flatnonzero(np.concatenate([np.ones(len(column[:1]), dtype=bool), column[1:] != column[:-1]]))


def _stable_order(values: np.ndarray[Any, Any]) -> _Ints:
    """np.argsort(values, kind="stable"), faster for small integers: value and position are packed into one number."""
    bits = len(values).bit_length()
    if values.dtype.kind in "iu" and len(values) and int(values.max()) - int(values.min()) < 1 << (63 - bits):
        packed: _Ints = (values.astype(np.int64) - values.min().astype(np.int64)) << bits
        packed |= np.arange(len(values))
        packed.sort()
        packed &= (1 << bits) - 1
        return packed
    return np.argsort(values, kind="stable")


def _column(clients: Any) -> np.ndarray[Any, Any]:
    """Client ids as integers or strings. Integers stay integers, because comparing them is much faster."""
    column = clients.detach().cpu().numpy() if isinstance(clients, Tensor) else np.asarray(clients)
    if column.ndim != 1:
        raise DataError(f"clients has shape {column.shape}; expected one client id per sample, shape (n,)")
    if column.dtype.kind in "iuU":
        return column
    if column.dtype.kind == "O" and set(map(type, column)) == {str}:
        return column.astype(np.str_)
    if column.dtype.kind in "Of":
        _refuse_missing(column, "clients")
    if column.dtype.kind == "O":
        return np.asarray([str(int(v)) if isinstance(v, float) and v.is_integer() else str(v) for v in column], np.str_)
    if column.dtype.kind == "f":  # pandas turns integers into floats if some were missing
        if not bool(np.all(column == np.floor(column))):
            raise DataError(f"client ids are fractions ({column[0]}); expected strings or integers")
        return column.astype(np.int64)
    return column.astype(np.str_)


def _codes(
    values: np.ndarray[Any, np.dtype[np.str_]], classes: tuple[str, ...] | None
) -> tuple[Tensor, tuple[str, ...]]:
    found, inverse = np.unique(values, return_inverse=True)
    classes = classes if classes is not None else tuple(str(v) for v in found)
    unknown = sorted(set(found.tolist()) - set(classes))
    if unknown:
        raise DataError(f"y contains {quoted(unknown)}, not among the classes {quoted(classes)}; add them to classes")
    code = {name: i for i, name in enumerate(classes)}
    return torch.tensor([code[str(v)] for v in found], dtype=torch.int64)[torch.from_numpy(inverse)], classes


def _as_tensor(array: np.ndarray[Any, Any]) -> Tensor:
    if array.dtype.kind not in "biuf":  # a table with float and boolean columns becomes an array of objects
        try:
            array = array.astype(np.float32)
        except (TypeError, ValueError) as error:
            raise DataError(f"x is not numeric ({error}); encode text columns as numbers first") from None
    if array.dtype == np.float64:
        array = array.astype(np.float32)
    # pandas may return read-only memory, which torch must not share
    return torch.from_numpy(np.asarray(array, order="C") if array.flags.writeable else array.copy())


def _refuse_missing(array: np.ndarray[Any, Any], what: str) -> None:
    # comparing pandas.NA gives NA, so it can only be recognised by its type
    if array.dtype.kind == "f":
        missing = int(np.isnan(array).sum())
    else:
        missing = sum(v is None or type(v).__name__ in ("NAType", "NaTType") or bool(v != v) for v in array)
    if missing:
        raise DataError(f"{what} has {missing} missing values; drop or fill those rows first")
