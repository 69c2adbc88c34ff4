"""Convert lists and numpy, pandas and torch arrays to the features, targets and masks of a federation."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from ppfl.core.losses import IGNORED
from ppfl.core.settings import quoted as quoted
from ppfl.data.files import check_limit
from ppfl.data.samples import Inputs, mapped_rows
from ppfl.errors import DataError

LearningTask = Literal["auto", "classification", "regression"]
Integers = np.ndarray[Any, np.dtype[np.int64]]
_MOST_AXES = 8
_LONGEST_NAME = 1000  # characters of a client id or a class
_LAST_INTEGER = 2.0**63  # integers below it fit into int64
_ROW = (list, tuple, np.ndarray, Tensor)


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
    if isinstance(x, Mapping):
        raise DataError(
            f"x is a {type(x).__name__}; expected one array (n, ...): put several inputs side by side in its columns, "
            f"or use ppfl.data.DataTable for a table with columns by name"
        )
    if hasattr(x, "toarray"):
        raise DataError(f"x is a sparse {type(x).__name__}; expected an array with all its zeros: use x.toarray()")
    if is_ragged(x):
        x, tokens = pad_rows(x, pad, "x"), True
    if (mapped := mapped_rows(x)) is not None:
        _check_width(mapped.shape)
        return mapped
    values = x if isinstance(x, Tensor) else _as_tensor(as_array(x, "x"))
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
        raise DataError(
            f"x has shape {tuple(shape)}; expected (n, features): use x.reshape(-1, 1), if x and y are not swapped"
        )
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
    array = as_array(pad_rows(y, IGNORED, "y") if is_ragged(y) and not _has_text(y) else y, "y")
    if array.dtype.kind == "O" and array.ndim == 1:
        refuse_missing(array, "y")
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
        codes, names = _codes(as_text(array.reshape(-1), "y"), names)
        if task == "auto" and classes is None and (example := _fraction(names)) is not None:
            raise DataError(
                f"y is text that reads as numbers, such as {example!r}; convert it to numbers, or pass "
                f"task='classification' if they are names of classes"
            )
        return codes.reshape(array.shape), names
    if task == "regression" or (task == "auto" and array.dtype.kind == "f"):
        return torch.from_numpy(as_float32(array)), None
    if array.dtype.kind == "f" and not bool(np.all(array == np.floor(array))):
        bad = array[array != np.floor(array)][0]
        raise DataError(f"y contains {bad}, which is not a class label; use integers or strings, or regression")
    return torch.from_numpy(as_int64(array, "y")), names


def _fraction(names: Sequence[str]) -> str | None:
    """One of these texts that is no whole number, where all of them are numbers."""
    try:
        values = [float(name) for name in names]
    except ValueError:
        return None
    return next((name for name, value in zip(names, values, strict=True) if value % 1), None)


def as_mask(is_test: Any, n: int) -> Tensor:
    """A mask of the test rows, as a boolean (n,).

    >>> as_mask([0, 1], 2)
    tensor([False,  True])
    """
    mask = as_array(is_test, "is_test")
    if mask.shape != (n,):
        raise DataError(f"is_test has shape {mask.shape}; expected ({n},), one value per sample")
    odd = [str(value) for value in mask.tolist() if not isinstance(value, int | float) or value not in (0, 1)]
    if odd:
        raise DataError(f"is_test contains {quoted(odd)}; expected true and false, or 1 and 0: convert it first")
    return torch.from_numpy(mask.astype(bool))


def _numbers_or_objects(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Numbers that are stored as objects, as numbers; anything else as it is."""
    numbers = as_array(array.tolist(), "y")
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
            array = as_int64(array, "x")
        else:  # a table with float and boolean columns becomes an array of objects
            try:
                array = as_float32(array)
            except (TypeError, ValueError, OverflowError) as error:
                raise DataError(f"x is not numeric ({error}); encode text columns as numbers first") from None
    # pandas may return read-only memory, which torch must not share
    return torch.from_numpy(np.asarray(array, order="C") if array.flags.writeable else array.copy())


def _has_text(rows: Any) -> bool:
    return any(isinstance(value, str) for row in rows for value in row)


def is_ragged(values: Any) -> bool:
    """Whether this is a list, or a column of a table, of rows that are lists of different lengths.

    >>> is_ragged([[1, 2], [3]]), is_ragged([[1, 2], [3, 4]])
    (True, False)
    """
    if type(values).__module__.startswith("pandas"):
        values = values.tolist() if hasattr(values, "tolist") else ()
    are_objects = isinstance(values, np.ndarray) and values.dtype == object
    if not are_objects and (not isinstance(values, Sequence) or isinstance(values, str | bytes)):
        return False
    rows = list(values)
    if not rows or not all(isinstance(row, _ROW) for row in rows) or not np.ndim(rows[0]):
        return False
    return are_objects or len({len(row) for row in rows}) > 1


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


def as_array(values: Any, what: str) -> np.ndarray[Any, Any]:
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


def as_text(array: np.ndarray[Any, Any], what: str) -> np.ndarray[Any, np.dtype[np.str_]]:
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


def as_int64(array: np.ndarray[Any, Any], what: str) -> Integers:
    if array.dtype.kind in "fu":
        wide = array.astype(np.float64)
        if (far := (wide >= _LAST_INTEGER) | (wide < -_LAST_INTEGER)).any():
            raise DataError(f"{what} contains {array[far][0]}, too large for an integer of 64 bits; use text instead")
    return array.astype(np.int64)


def as_float32(array: np.ndarray[Any, Any]) -> np.ndarray[Any, np.dtype[np.float32]]:
    with np.errstate(over="ignore"):  # what is too large becomes infinite, and a federation refuses that
        return array.astype(np.float32)


def refuse_missing(array: np.ndarray[Any, Any], what: str) -> None:
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
