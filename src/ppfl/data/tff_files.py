"""HDF5 files as TensorFlow Federated (TFF) has them: examples/<client>/<field>, one row per sample."""

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from ppfl.data.files import check_limit, check_size, existing_file, reading
from ppfl.errors import DataError

_PER_TEXT = 64  # bytes that Python needs for a text besides its letters


@contextmanager
def open_tff(path: str | Path) -> Iterator["TffFile"]:
    """The clients of a TFF file. Whatever fails while it is open is an error about this file."""
    path = existing_file(path, "an HDF5 file of TensorFlow Federated")
    try:
        import h5py
    except ImportError as error:
        raise DataError(f"{path} needs h5py; install it with: pip install 'ppfl[hdf5]'") from error
    with _reading(path), h5py.File(path, "r") as file:
        yield TffFile(path, file)


def _reading(path: Path) -> AbstractContextManager[None]:
    return reading(path, "is not a readable file of TensorFlow Federated", "download it again")


class TffFile:
    """An open TFF file. Only what is asked for is read, and its size is checked before.

    Links and data in other files are refused, so that a file cannot make us read a file of its choice.
    """

    def __init__(self, path: Path, file: Any) -> None:
        self.path, self._read = path, 0
        self._examples = _member(file, "examples", is_group=True)
        check_limit("clients", len(self._examples), f"{path} has {len(self._examples):,} clients")
        self.clients = dict.fromkeys(self._examples)

    def length(self, client: str, field: str) -> int:
        """Number of samples of a client; 0 if the file does not have the client."""
        with _reading(self.path):
            return len(self._field(client, field)) if client in self.clients else 0

    def numbers(self, client: str, field: str) -> np.ndarray[Any, Any]:
        """One field of a client, (n, ...)."""
        with _reading(self.path):
            values = self._field(client, field)
            if values.dtype.kind not in "fiu":
                raise ValueError(f"{field!r} of client {client!r} is {values.dtype}, expected numbers")
            self._count(values.size * values.dtype.itemsize)
            return np.asarray(values[...])

    def texts(self, client: str, field: str) -> list[bytes]:
        """One field of a client that holds texts; an empty list if the file does not have the client."""
        if client not in self.clients:
            return []
        with _reading(self.path):
            values = self._field(client, field)
            if values.dtype.kind == "O":
                raise DataError(
                    f"{self.path} has texts without a fixed length in {field!r} of client {client!r}, on which the "
                    f"HDF5 library can crash; write them as numpy arrays of bytes, type S"
                )
            if values.dtype.kind != "S" or values.ndim != 1:
                raise ValueError(
                    f"{field!r} of client {client!r} is {values.dtype} {values.shape}, expected texts (n,)"
                )
            self._count(len(values) * (_PER_TEXT + values.dtype.itemsize))
            return list(values[...].tolist())

    def _field(self, client: str, field: str) -> Any:
        values = _member(_member(self._examples, client, is_group=True), field, is_group=False)
        if values.external or values.is_virtual or not values.shape:
            raise ValueError(f"{field!r} of client {client!r} has no rows in this file")
        chunk = values.chunks or values.shape
        parts = math.prod(-(-rows // step) for rows, step in zip(values.shape, chunk, strict=False) if step)
        # the library would not come to an end
        if len(chunk) != values.ndim or parts > self.path.stat().st_size:
            raise ValueError(f"{field!r} of client {client!r} has shape {values.shape} in chunks of {chunk}")
        if values.chunks:  # a chunk is read as a whole, however few of its rows exist
            check_size(self.path, math.prod(chunk) * values.dtype.itemsize)
        return values

    def _count(self, size: int) -> None:
        self._read += size
        check_size(self.path, self._read)


def _member(group: Any, name: str, is_group: bool) -> Any:
    import h5py

    link = group.get(name, getlink=True)
    if not isinstance(link, h5py.HardLink):
        raise ValueError(f"{name!r} is missing" if link is None else f"{name!r} is a link")
    found = group[name]
    if not isinstance(found, h5py.Group if is_group else h5py.Dataset):
        raise ValueError(f"{name!r} is a {type(found).__name__}, expected examples/<client>/<field>")
    return found
