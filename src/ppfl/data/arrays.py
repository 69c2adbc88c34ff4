"""Convert lists and numpy, pandas and torch arrays to the features and targets of a federation."""

import math
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from ppfl.core.losses import IGNORED
from ppfl.data.inputs import Inputs, mapped_rows
from ppfl.data.limits import check_limit
from ppfl.data.ragged import is_ragged, pad_rows
from ppfl.data.raw_arrays import as_array, as_float32, as_int64, as_text, quoted, refuse_missing
from ppfl.errors import DataError

LearningTask = Literal["auto", "classification", "regression"]
_MOST_AXES = 8


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
            f"or use Federation.from_columns for columns by name"
        )
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
        return codes.reshape(array.shape), names
    if task == "regression" or (task == "auto" and array.dtype.kind == "f"):
        return torch.from_numpy(as_float32(array)), None
    if array.dtype.kind == "f" and not bool(np.all(array == np.floor(array))):
        bad = array[array != np.floor(array)][0]
        raise DataError(f"y contains {bad}, which is not a class label; use integers or strings, or regression")
    return torch.from_numpy(as_int64(array, "y")), names


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


def _is_nan(value: Any) -> bool:
    return isinstance(value, float | np.floating | Decimal) and value != value
