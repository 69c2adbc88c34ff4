"""CIFAR-10 in its official format, a folder of Python pickles, read without running code from them."""

import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ppfl.core.settings import Count
from ppfl.data.datasets.images import choose_images, images_as_floats
from ppfl.data.files import data_folder, existing_file, open_bounded, reading
from ppfl.data.load import DATASETS, Pool
from ppfl.data.partitions import PARTITIONS
from ppfl.errors import DataError

CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
CIFAR10_GROUPS = ((1, 9), (0, 8), (2, 3, 4, 5, 6, 7))  # road, sky and water, animals
# Mean and standard deviation of a pixel: published constants, so no data of clients are needed to compute them
CIFAR10_PIXELS = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
_BATCHES = (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")


@DATASETS.register("cifar10", partition=PARTITIONS.make("label_groups", groups=CIFAR10_GROUPS, clients=(27, 27, 26)))
def cifar10(folder: Path | None = None, standardise: bool = True, samples: Count | None = None, seed: int = 0) -> Pool:
    """CIFAR-10, train and test pooled: 60,000 images (3, 32, 32).

    Args:
        folder: `cifar-10-batches-py`, or the folder that it is in. By default the folder cifar10/ in PPFL_DATA.
        standardise: Subtract the published mean of a pixel and divide by its deviation; otherwise pixels are in [0, 1].
        samples: Number of random images that are taken; None: all.
        seed: Seeds the choice of images.

    >>> cifar10(Path("no such folder"))
    Traceback (most recent call last):
        ...
    ppfl.errors.DataError: no data_batch_1 in no such folder; extract cifar-10-python.tar.gz ...
    """
    folder = data_folder("cifar10") if folder is None else folder
    inner = folder / "cifar-10-batches-py"
    place = inner if inner.is_dir() else folder
    if not (place / _BATCHES[0]).is_file():
        raise DataError(
            f"no {_BATCHES[0]} in {place}; extract cifar-10-python.tar.gz (from "
            f"https://www.cs.toronto.edu/~kriz/cifar.html) there, or set PPFL_DATA"
        )
    batches = [read_cifar10_batch(place / name) for name in _BATCHES]
    x, y = torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches])
    x, y = choose_images(x, y, samples, seed, "cifar10")
    if standardise:
        mean, deviation = torch.tensor(CIFAR10_PIXELS)[:, :, None, None]
        x = (x - mean) / deviation
    return Pool(x, y, name="cifar10", classes=CIFAR10_CLASSES)


def read_cifar10_batch(path: str | Path) -> tuple[Tensor, Tensor]:
    """One official batch file: images (n, 3, 32, 32) in [0, 1] and labels (n,)."""
    path = existing_file(path, "a CIFAR-10 batch such as data_batch_1")
    with reading(path, "is damaged or not a CIFAR-10 batch", "extract it again"), open_bounded(path) as file:
        batch = _PlainUnpickler(file.read()).load()
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


class _ByteArray:
    """Stands for the numpy array in the pickle: bytes and their shape."""

    values: np.ndarray[Any, Any] = np.empty(0, np.uint8)

    def __init__(self, *_: Any) -> None: ...

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, dtype, fortran, content = state
        if type(dtype) is not _ByteType or type(content) is not bytes:
            raise pickle.UnpicklingError("an array that is not of bytes")
        self.values = np.frombuffer(content, np.uint8).reshape(shape, order="F" if fortran else "C")


class _ByteType:
    """Stands for the numpy dtype in the pickle: bytes."""

    def __init__(self, code: Any, *_: Any) -> None:
        if code not in ("u1", b"u1"):
            raise pickle.UnpicklingError(f"an array of type {code!r:.20}, expected u1")

    def __setstate__(self, state: Any) -> None:
        """Byte order and the like do not apply to single bytes."""


_Unpickler: Any = pickle._Unpickler  # in Python, whose memo takes no memory in advance
# Opcodes that make sets, copies and empty arrays of any size: no batch has them
_REFUSED = (pickle.DUP, pickle.EMPTY_SET, pickle.ADDITEMS, pickle.FROZENSET, pickle.BYTEARRAY8)
_KEYS = {pickle.SETITEM: slice(-2, -1), pickle.SETITEMS: slice(None, None, 2), pickle.DICT: slice(None, None, 2)}


def _with_plain_keys(load: Any, keys: slice) -> Any:
    """Keys are texts: the hash of a nested tuple can take for ever."""

    def checked(unpickler: Any) -> None:
        if any(type(key) not in (bytes, str) for key in unpickler.stack[keys]):
            raise pickle.UnpicklingError("a key that is no text")
        load(unpickler)

    return checked


class _PlainUnpickler(_Unpickler):  # type: ignore[misc]
    """Loads plain containers and arrays of bytes only.

    Loading a pickle can run any code that it names. Here four names, those that an array of bytes needs, stand for
    what is above, and any other name is refused. Not even the functions of numpy are called.
    """

    dispatch = {code: load for code, load in _Unpickler.dispatch.items() if code not in [op[0] for op in _REFUSED]} | {
        op[0]: _with_plain_keys(_Unpickler.dispatch[op[0]], keys) for op, keys in _KEYS.items()
    }

    def __init__(self, content: bytes) -> None:
        super().__init__(io.BytesIO(content), encoding="bytes")
        self._bytes_left = len(content)

    def find_class(self, module: str, name: str) -> Any:
        allowed = {
            "multiarray._reconstruct": lambda *_: _ByteArray(), "numpy.ndarray": _ByteArray,
            "numpy.dtype": _ByteType, "_codecs.encode": self._encode,
        }  # fmt: skip
        found = f"{module}.{name}".removeprefix("numpy.core.").removeprefix("numpy._core.")
        if found not in allowed:
            raise DataError(
                f"the file asks to load {module}.{name}, which no CIFAR-10 batch needs; it may be malicious: "
                f"extract the official archive again"
            )
        return allowed[found]

    def _encode(self, text: str, encoding: str) -> bytes:
        """How Python 3 writes bytes in protocol 2. All of them together are no longer than the file."""
        self._bytes_left -= len(text)
        if encoding != "latin1" or self._bytes_left < 0:
            raise pickle.UnpicklingError(f"bytes in the encoding {encoding!r:.20}, expected latin1, each once")
        return text.encode("latin1")
