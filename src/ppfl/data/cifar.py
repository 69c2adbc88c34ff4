"""CIFAR-10 in its official format, a folder of Python pickles, read without running code from them."""

import io
import pickle
import pickletools
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ppfl.data.files import existing_file, open_bounded, reading
from ppfl.data.readers import images_as_floats
from ppfl.errors import DataError

_BATCHES = (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")


def read_cifar10(folder: str | Path) -> tuple[Tensor, Tensor]:
    """CIFAR-10, train and test pooled: 60,000 images (3, 32, 32) in [0, 1], from `cifar-10-batches-py`.

    >>> x, y = read_cifar10("no such folder")
    Traceback (most recent call last):
        ...
    ppfl.errors.DataError: no data_batch_1 in no such folder; extract cifar-10-python.tar.gz ...
    """
    folder = Path(folder)
    inner = folder / "cifar-10-batches-py"
    place = inner if inner.is_dir() else folder
    if not (place / _BATCHES[0]).is_file():
        raise DataError(
            f"no {_BATCHES[0]} in {place}; extract cifar-10-python.tar.gz (from "
            f"https://www.cs.toronto.edu/~kriz/cifar.html) there, or set PPFL_DATA"
        )
    batches = [read_cifar10_batch(place / name) for name in _BATCHES]
    return torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches])


def read_cifar10_batch(path: str | Path) -> tuple[Tensor, Tensor]:
    """One official batch file: images (n, 3, 32, 32) in [0, 1] and labels (n,)."""
    path = existing_file(path, "a CIFAR-10 batch such as data_batch_1")
    with reading(path, "is damaged or not a CIFAR-10 batch", "extract it again"), open_bounded(path) as file:
        content = file.read()
        _check_memo(content)
        batch = _PlainUnpickler(io.BytesIO(content), encoding="bytes").load()
    data = batch.get(b"data") if isinstance(batch, dict) else None
    labels = batch.get(b"labels") if isinstance(batch, dict) else None
    if not isinstance(data, _ByteArray) or not isinstance(labels, list):
        raise DataError(f"{path} lacks 'data' or 'labels'; expected a CIFAR-10 batch: extract it again")
    pixels = data.values
    if pixels.shape != (len(labels), 3072) or not all(type(v) is int and 0 <= v < 10 for v in labels):
        raise DataError(
            f"{path} has data of shape {pixels.shape} and {len(labels)} labels; expected (n, 3072) and n "
            f"labels from 0 to 9: extract it again"
        )
    return images_as_floats(pixels.reshape(-1, 3, 32, 32)), torch.tensor(labels, dtype=torch.int64)


def _check_memo(content: bytes) -> None:
    """Refuse what makes loading cost more than the file is long.

    The memo of a pickle is an array, so that one high index takes all memory. Tuples that are used twice can be nested
    into a key whose hash takes for ever.
    """
    count, last = 0, ""
    tuples: set[int] = set()
    for opcode, argument, _ in pickletools.genops(content):
        name, at = opcode.name, count if argument is None else argument
        if name == "DUP" or (name.endswith("GET") and int(at) in tuples):
            raise pickle.UnpicklingError("values used twice")
        if name == "MEMOIZE" or name.endswith("PUT"):
            if not 0 <= int(at) <= len(content):
                raise pickle.UnpicklingError(f"memo index {at}")
            (tuples.add if last.startswith("TUPLE") else tuples.discard)(int(at))
            count += 1
        last = name


class _ByteArray:
    """Replaces the numpy array in the pickle; accepts only bytes and a shape."""

    values: np.ndarray[Any, np.dtype[np.uint8]] = np.empty(0, np.uint8)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, dtype, fortran, content = state
        if type(dtype) is not _ByteType or type(content) is not bytes:
            raise pickle.UnpicklingError("an array that is not of bytes")
        self.values = np.frombuffer(content, np.uint8).reshape(shape, order="F" if fortran else "C")


class _ByteType:
    """Replaces the numpy dtype in the pickle; accepts only uint8."""

    def __init__(self, code: Any, *_: Any) -> None:
        if code not in ("u1", b"u1"):
            raise pickle.UnpicklingError(f"an array of type {code!r}, expected u1")

    def __setstate__(self, state: Any) -> None:
        """Ignored: byte order and the like do not apply to single bytes."""


def _byte_array(*_: Any) -> _ByteArray:
    return _ByteArray()


def _latin1(text: str, encoding: str) -> bytes:
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"bytes in the encoding {encoding!r}, expected latin1")
    return text.encode("latin1")


class _PlainUnpickler(pickle.Unpickler):
    """Loads plain containers and byte arrays only.

    Loading a pickle can run any code it names, so ppfl reads no pickles except the official CIFAR-10 files. Here
    the few names that a byte array needs are replaced by the classes above, and any other name is refused. Not even
    the functions of numpy are called.
    """

    _replacements: dict[tuple[str, str], Any] = {
        ("numpy.core.multiarray", "_reconstruct"): _byte_array,
        ("numpy._core.multiarray", "_reconstruct"): _byte_array,
        ("numpy", "ndarray"): _ByteArray,
        ("numpy", "dtype"): _ByteType,
        ("_codecs", "encode"): _latin1,  # how Python 3 writes bytes in protocol 2
    }

    def find_class(self, module: str, name: str, /) -> Any:
        """Refuse every name except those of a byte array."""
        if (module, name) not in self._replacements:
            raise DataError(
                f"the file asks to load {module}.{name}, which no CIFAR-10 batch needs; it may be malicious: "
                f"extract the official archive again"
            )
        return self._replacements[module, name]
