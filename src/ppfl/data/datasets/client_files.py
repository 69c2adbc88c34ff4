"""Files by client: which of a folder are read, which of their clients are taken, and HDF5 files as TFF has them."""

import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from ppfl.data.files import check_limit, check_size, data_folder, existing_file, reading
from ppfl.data.samples import random_rows
from ppfl.errors import DataError, SettingError

_PER_TEXT = 64  # bytes that Python needs for a text besides its letters
Files = list[tuple[Path, bool | None]]  # each with whether it is for testing; None if no file is


def find_files(
    name: str, file: Path | None, folder: Path | None, patterns: Sequence[tuple[str, str]], wanted: str
) -> Files:
    """The file itself, or in a folder the files of the first (training, test) patterns that fit; "" fits no file.

    The folder is by default that of the data set's name in PPFL_DATA.

    >>> find_files("femnist", None, Path("no such folder"), [("train.h5", "test.h5")], "train.h5")
    Traceback (most recent call last):
        ...
    ppfl.errors.DataError: no train.h5 in no such folder; check the path, or set PPFL_DATA to your data folder
    """
    if file is not None and folder is not None:
        raise SettingError(f"data set {name} has both folder and file; set one of them under [data]")
    path = Path(file or folder or data_folder(name))
    # os.path, because the methods of Path raise for names that no file can have
    if os.path.isfile(path):  # noqa: PTH113
        return [(path, None)]
    for train, test in patterns if os.path.isdir(path) else ():  # noqa: PTH112
        if found := sorted(path.glob(train)):
            tests = sorted(path.glob(test)) if test else []
            return [(each, False if tests else None) for each in found] + [(each, True) for each in tests]
    raise DataError(f"no {wanted} in {path}; check the path, or set PPFL_DATA to your data folder")


def choose_clients(
    names: Sequence[str], size_of: Callable[[str], int], at_least: int, clients: int | None, seed: int, unit: str
) -> list[str]:
    """The clients of at least that size: all of them, or `clients` of them at random, in the order of `names`.

    Sizes are asked for one by one, and no longer than needed. A smaller choice is a part of a larger one.

    >>> choose_clients(["a", "b", "c"], {"a": 9, "b": 2, "c": 7}.get, 5, None, seed=0, unit="samples")
    ['a', 'c']
    """
    order = list(range(len(names)))
    if clients is not None and names:
        order = random_rows(len(names), len(names), seed, "clients").tolist()
    found: list[int] = []
    for at in order:
        if size_of(names[at]) >= at_least:
            found.append(at)
        if len(found) == clients:
            break
    if len(found) < (clients or 1):
        raise DataError(
            f"{len(found)} of {len(names)} clients have at least {at_least} {unit}; expected {clients or 1} or more: "
            f"set a lower minimum, or fewer clients"
        )
    return [names[at] for at in sorted(found)]


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

    def read(self, client: str, field: str, kinds: str = "fiu") -> np.ndarray[Any, Any]:
        """One field of a client (n, ...): numbers, or texts as bytes where kinds is "S"."""
        with _reading(self.path):
            values = self._field(client, field)
            if values.dtype.kind == "O":
                raise DataError(
                    f"{self.path} has texts without a fixed length in {field!r} of client {client!r}, on which the "
                    f"HDF5 library can crash; write them as numpy arrays of bytes, type S"
                )
            if values.dtype.kind not in kinds or (kinds == "S" and values.ndim != 1):
                expected = "texts (n,)" if kinds == "S" else "numbers"
                raise ValueError(
                    f"{field!r} of client {client!r} is {values.dtype} {values.shape}, expected {expected}"
                )
            self._read += values.size * (values.dtype.itemsize + (_PER_TEXT if kinds == "S" else 0))
            check_size(self.path, self._read)
            return np.asarray(values[...])

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


def _member(group: Any, name: str, is_group: bool) -> Any:
    import h5py

    link = group.get(name, getlink=True)
    if not isinstance(link, h5py.HardLink):
        raise ValueError(f"{name!r} is missing" if link is None else f"{name!r} is a link")
    found = group[name]
    if not isinstance(found, h5py.Group if is_group else h5py.Dataset):
        raise ValueError(f"{name!r} is a {type(found).__name__}, expected examples/<client>/<field>")
    return found
