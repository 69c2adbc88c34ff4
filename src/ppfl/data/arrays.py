"""Convert lists and numpy, pandas and torch arrays to the tensors and client ids of a federation."""

import math
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from ppfl.core.errors import DataError
from ppfl.core.losses import IGNORED
from ppfl.data.inputs import Inputs, mapped_rows, scaled
from ppfl.data.limits import check_limit
from ppfl.data.ragged import is_ragged, pad_rows

_Ints = np.ndarray[Any, np.dtype[np.int64]]
LearningTask = Literal["auto", "classification", "regression"]
_MOST_AXES = 8
_LONGEST_NAME = 1000  # characters of a client id or a class
_LAST_INTEGER = 2.0**63  # integers below it fit into int64


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


def as_features(x: Any, tokens: bool = False, pad: int = 0) -> Inputs:
    """Features as float32, tokens as int64, images (n, ..., rows, columns) of bytes as uint8; files stay files.

    Rows of whole numbers of different lengths are tokens, and get `pad` after their end.

    >>> as_features([[1, 2], [3, 4]]).dtype
    torch.float32
    >>> as_features([[5, 2], [3]])
    tensor([[5, 2],
            [3, 0]])
    """
    refuse_datasets(x)
    if is_ragged(x):
        x, tokens = pad_rows(x, pad, "x"), True
    if (mapped := mapped_rows(x)) is not None:
        _check_width(mapped.shape)
        return mapped
    values = x if isinstance(x, Tensor) else _as_tensor(_as_array(x, "x"))
    _check_width(values.shape)
    if values.is_complex() or values.layout is not torch.strided:
        raise DataError(f"x is {values.dtype} ({values.layout}); expected plain real numbers: convert it first")
    if tokens and values.is_floating_point():
        raise DataError(f"x is {values.dtype} but tokens are integers; pass integers, or tokens=False")
    if values.dtype == torch.uint8 and values.dim() > 2 and not tokens:
        return values
    return values.long() if tokens else values.float()


def _check_width(shape: tuple[int, ...]) -> None:
    if not 2 <= len(shape) <= _MOST_AXES:
        raise DataError(f"x has shape {tuple(shape)}; expected (n, features): use x.reshape(-1, 1)")
    width = math.prod(shape[1:])
    if not width:
        raise DataError(
            f"x has shape {tuple(shape)}, so samples have no features; expected at least one: check the columns"
        )
    check_limit("features", width, f"x has {width:,} features")


def refuse_datasets(x: Any) -> None:
    """Refuse a dataset where an array is expected; numpy would read it without end."""
    if isinstance(x, Dataset | DataLoader):
        raise DataError(
            f"this is a {type(x).__name__}, and arrays are expected here; use Federation.from_datasets, "
            f"with one dataset per client, or one dataset and clients=..."
        )


def several_inputs(x: Any, pad: int = 0) -> dict[str, Tensor] | None:
    """The inputs (n, ...) of samples that have several, in a dict or a tuple of arrays; None for anything else.

    >>> several_inputs({"a": [[1.5], [2.5]], "b": [3, 4]})["b"]
    tensor([3, 4])
    """
    arrays = isinstance(x, tuple) and all(isinstance(part, Tensor | np.ndarray) and part.ndim for part in x)
    if not isinstance(x, Mapping) and not (arrays and len({len(part) for part in x}) == 1 and len(x) != len(x[0])):
        return None
    parts = x if isinstance(x, Mapping) else {str(at): part for at, part in enumerate(x)}
    if odd := [name for name in parts if not str(name).isidentifier() and isinstance(x, Mapping)]:
        raise DataError(f"an input is called {odd[0]!r}; use names of the network's arguments, such as 'tokens'")
    if len(parts) < 2:
        raise DataError(
            f"x is a dict or tuple of {len(parts)} inputs; give a single one as x itself, or use "
            f"Federation.from_columns for a table with its columns by name"
        )
    return {str(name): _one_input(part, pad, name) for name, part in parts.items()}


def _one_input(part: Any, pad: int, name: Any) -> Tensor:
    """One of several inputs (n, ...): whole numbers stay whole, as they are tokens or codes."""
    if is_ragged(part):
        part = pad_rows(part, pad, f"input {name!r}")
    values = part if isinstance(part, Tensor) else _as_tensor(_as_array(part, f"input {name!r}"))
    if values.dim() == 0 or values.is_complex():
        raise DataError(f"input {name!r} is {values.dtype} {tuple(values.shape)}; expected real numbers (n, ...)")
    if values.is_floating_point() or (values.dtype == torch.uint8 and values.dim() > 2):
        return scaled(values).float()
    return values.long()


def as_targets(
    y: Any, task: LearningTask = "auto", classes: Sequence[str] | None = None
) -> tuple[Tensor, tuple[str, ...] | None]:
    """Targets as int64 labels or float32 values, and the names of the classes if they are known.

    "auto" treats integers, booleans and strings as labels and floats as values to predict. A string becomes its
    position in `classes` (by default, the sorted strings that occur). A sample may have several targets, (n, ...).
    Rows of labels of different lengths are padded with IGNORED.

    >>> as_targets(["no", "yes", "no"])
    (tensor([0, 1, 0]), ('no', 'yes'))
    >>> as_targets([1, 0], task="regression")[0]
    tensor([1., 0.])
    """
    refuse_datasets(y)
    array = _as_array(pad_rows(y, IGNORED, "y") if is_ragged(y) and not _has_text(y) else y, "y")
    if array.dtype.kind == "O" and array.ndim == 1:
        _refuse_missing(array, "y")
        array = _numbers_or_objects(array)
    if array.ndim == 2 and array.shape[1] == 1:  # a column of a table
        array = array[:, 0]
    width = math.prod(array.shape[1:])
    if not 1 <= array.ndim <= _MOST_AXES or not width:
        raise DataError(f"y has shape {array.shape}; expected (n,), or (n, ...) for several values per sample")
    check_limit("features", width, f"y has {width:,} values per sample")
    names = tuple(classes) if classes is not None else None
    if array.dtype.kind not in "biuf":
        if task == "regression" and len(array):
            raise DataError(f"y contains text ({str(array.flat[0])!r}) but regression needs numbers; convert it")
        codes, names = _codes(_as_text(array.reshape(-1), "y"), names)
        return codes.reshape(array.shape), names
    if task == "regression" or (task == "auto" and array.dtype.kind == "f"):
        return torch.from_numpy(_as_float32(array)), None
    if array.dtype.kind == "f" and not bool(np.all(array == np.floor(array))):
        bad = array[array != np.floor(array)][0]
        raise DataError(f"y contains {bad}, which is not a class label; use integers or strings, or regression")
    return torch.from_numpy(_as_int64(array, "y")), names


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
    mask = _as_array(is_test, "is_test")
    if mask.shape != (n,):
        raise DataError(f"is_test has shape {mask.shape}; expected ({n},), one value per sample")
    odd = [str(value) for value in mask.tolist() if not isinstance(value, int | float) or value not in (0, 1)]
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
    column = _as_array(clients, "clients")
    if column.ndim != 1:
        raise DataError(f"clients has shape {column.shape}; expected one client id per sample, shape (n,)")
    if column.dtype.kind in "iu":
        return column
    if column.dtype.kind == "O" and set(map(type, column)) == {str}:
        return _as_text(column, "clients")
    if column.dtype.kind in "Of":
        _refuse_missing(column, "clients")
    if column.dtype.kind == "O":
        whole = [str(int(v)) if isinstance(v, float) and v.is_integer() else v for v in column]
        return _as_text(np.array([*whole, None], dtype=object)[:-1], "clients")  # None: no list becomes an axis
    if column.dtype.kind == "f":  # pandas turns integers into floats if some were missing
        if not bool(np.all(column == np.floor(column))):
            raise DataError(f"client ids are fractions ({column[0]}); expected strings or integers")
        return _as_int64(column, "clients")
    return _as_text(column, "clients")


def _as_array(values: Any, what: str) -> np.ndarray[Any, Any]:
    """A numpy array in the byte order of this machine."""
    try:
        if isinstance(values, Tensor):
            return values.detach().cpu().numpy()
        array = np.asarray(values)
        if array.dtype.kind in "US" and not isinstance(values, np.ndarray):
            array = np.asarray(values, dtype=object)  # arrays of text would drop NULs at the end
    except (TypeError, ValueError, RuntimeError, OverflowError, RecursionError) as error:
        raise DataError(f"{what} is not an array ({error}); give every row the same shape") from None
    if array.dtype.kind in "cVmM" and what != "clients":
        raise DataError(f"{what} is {array.dtype}; expected real numbers or text: convert it first")
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def _as_text(array: np.ndarray[Any, Any], what: str) -> np.ndarray[Any, np.dtype[np.str_]]:
    """Values as text that can be written to a file, and that stays as different as it was."""
    texts: Any = array
    if array.dtype.kind in "OS":
        texts = [_decoded(value, what) for value in array.tolist()]
        longest = max(map(len, texts), default=0)
        if odd := next((text for text in texts if "\0" in text), None):
            raise DataError(f"{what} has {odd!r}, with a NUL character in it; remove it, or number the values")
    else:
        longest = array.dtype.itemsize // 4 if array.dtype.kind == "U" else 0
    if longest > _LONGEST_NAME:
        raise DataError(f"{what} has a text of {longest} characters; expected at most {_LONGEST_NAME}: use short names")
    size = 4 * longest * len(array)
    check_limit("bytes", size, f"{what} would need {size:,} bytes as text", "use shorter names, or ")
    text = np.ascontiguousarray(np.asarray(texts, dtype=np.str_))
    codes = text.view(np.uint32) if text.itemsize else np.zeros(0, np.uint32)
    if bool((((codes >= 0xD800) & (codes < 0xE000)) | (codes > 0x10FFFF)).any()):
        raise DataError(f"{what} has text with half a character (a lone surrogate), which no file can hold; replace it")
    return text


def _decoded(value: Any, what: str) -> str:
    if not isinstance(value, bytes):
        return str(value)
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise DataError(f"{what} has the bytes {value[:20]!r}, which are not UTF-8; decode them first") from None


def _as_int64(array: np.ndarray[Any, Any], what: str) -> _Ints:
    if array.dtype.kind in "fu":
        wide = array.astype(np.float64)
        if (far := (wide >= _LAST_INTEGER) | (wide < -_LAST_INTEGER)).any():
            raise DataError(f"{what} contains {array[far][0]}, too large for an integer of 64 bits; use text instead")
    return array.astype(np.int64)


def _as_float32(array: np.ndarray[Any, Any]) -> np.ndarray[Any, np.dtype[np.float32]]:
    with np.errstate(over="ignore"):  # what is too large becomes infinite, and a federation refuses that
        return array.astype(np.float32)


def _numbers_or_objects(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Numbers that are stored as objects, as numbers; anything else as it is."""
    numbers = _as_array(array.tolist(), "y")
    return numbers if numbers.dtype.kind in "biuf" else array


def _codes(
    values: np.ndarray[Any, np.dtype[np.str_]], classes: tuple[str, ...] | None
) -> tuple[Tensor, tuple[str, ...]]:
    found, inverse = np.unique(values, return_inverse=True)
    check_limit("classes", len(found), f"y has {len(found):,} different texts", "check the target, or ")
    classes = classes if classes is not None else tuple(str(v) for v in found)
    unknown = sorted(set(found.tolist()) - set(classes))
    if unknown:
        raise DataError(f"y contains {quoted(unknown)}, not among the classes {quoted(classes)}; add them to classes")
    code = {name: i for i, name in enumerate(classes)}
    return torch.tensor([code[str(v)] for v in found], dtype=torch.int64)[torch.from_numpy(inverse)], classes


def _as_tensor(array: np.ndarray[Any, Any]) -> Tensor:
    if array.dtype.kind not in "biuf" or array.dtype.itemsize > 4:
        if array.dtype.kind in "iu":
            array = _as_int64(array, "x")
        else:  # a table with float and boolean columns becomes an array of objects
            try:
                array = _as_float32(array)
            except (TypeError, ValueError, OverflowError) as error:
                raise DataError(f"x is not numeric ({error}); encode text columns as numbers first") from None
    # pandas may return read-only memory, which torch must not share
    return torch.from_numpy(np.asarray(array, order="C") if array.flags.writeable else array.copy())


def _refuse_missing(array: np.ndarray[Any, Any], what: str) -> None:
    # comparing pandas.NA gives NA, so it can only be recognised by its type
    if array.dtype.kind == "f":
        missing = int(np.isnan(array).sum())
    else:
        missing = sum(
            v is None or type(v).__name__ in ("NAType", "NaTType") or (isinstance(v, float | np.floating) and v != v)
            for v in array
        )
    if missing:
        raise DataError(f"{what} has {missing} missing values; drop or fill those rows first")


def _has_text(rows: Any) -> bool:
    return any(isinstance(value, str) for row in rows for value in row)


def _is_nan(value: Any) -> bool:
    return isinstance(value, float | np.floating | Decimal) and value != value
