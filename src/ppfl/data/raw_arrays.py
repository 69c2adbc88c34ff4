"""Anything that looks like an array as a numpy array of this machine: numbers, or text that a file can hold."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from ppfl.data.limits import check_limit
from ppfl.errors import DataError

Integers = np.ndarray[Any, np.dtype[np.int64]]
_LONGEST_NAME = 1000  # characters of a client id or a class
_LAST_INTEGER = 2.0**63  # integers below it fit into int64


def quoted(names: Sequence[str], most: int = 5) -> str:
    """A few names for an error message.

    >>> quoted(["a", "b", "c"], most=2)
    "'a', 'b' and 1 more"
    """
    shown = ", ".join(repr(str(n)) for n in names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


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
