"""Images: scikit-learn's digits, MNIST, CIFAR-10, and arrays in npz files. Reading them cannot run code."""

import math
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ppfl.core.settings import Count
from ppfl.data.arrays import as_features
from ppfl.data.federation import Federation
from ppfl.data.files import check_members, check_size, data_folder, existing_file, open_bounded, reading
from ppfl.data.load import DATASETS, Pool
from ppfl.data.partitions import MNIST_GROUPS, PARTITIONS, label_groups
from ppfl.data.samples import random_rows
from ppfl.errors import DataError

# Mean and standard deviation of a pixel: a published constant, so no data of clients are needed to compute it
MNIST_PIXELS = 0.1307, 0.3081

_IDX_TYPES = {8: "u1", 9: "i1", 11: ">i2", 12: ">i4", 13: ">f4", 14: ">f8"}
_MOST_AXES = 8
_PIECE = 1 << 20  # bytes read at a time
_HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


def read_idx(path: str | Path) -> np.ndarray[Any, Any]:
    """An array in the idx format, gzipped or not.

    The header is two zero bytes, a type code, the number of axes, and the length of each axis (4 bytes, big-endian).

    >>> from tempfile import NamedTemporaryFile
    >>> with NamedTemporaryFile() as file:
    ...     _ = file.write(bytes([0, 0, 8, 1, 0, 0, 0, 3, 7, 8, 9]))  # one axis of three unsigned bytes
    ...     file.flush()
    ...     read_idx(file.name).tolist()
    [7, 8, 9]
    """
    path = existing_file(path, "idx data such as train-images-idx3-ubyte.gz")
    with reading(path, "is damaged", "download it again"), open_bounded(path) as file:
        content = file.read()
    if len(content) < 4 or content[:2] != b"\0\0" or content[2] not in _IDX_TYPES:
        raise DataError(f"{path} is not an idx file (it starts with {content[:4]!r}); download it again")
    dtype, axes = np.dtype(_IDX_TYPES[content[2]]), content[3]
    if axes > _MOST_AXES:
        raise DataError(f"{path} has {axes} axes; expected at most {_MOST_AXES}: download it again")
    start = 4 + 4 * axes
    if len(content) < start:
        raise DataError(f"{path} ends within its header ({len(content)} bytes); download it again")
    shape = [int.from_bytes(content[i : i + 4], "big") for i in range(4, start, 4)]
    expected = start + dtype.itemsize * int(np.prod(shape, dtype=object))
    if len(content) != expected:
        raise DataError(f"{path} has {len(content)} bytes, expected {expected} for {tuple(shape)}; download it again")
    return np.frombuffer(content, dtype, offset=start).reshape(shape)


@DATASETS.register("digits", partition=PARTITIONS.make("label_groups", clients=10))
def digits() -> Pool:
    """scikit-learn's 1,797 handwritten digits of 8 x 8 pixels, flattened, in [0, 1]; they need no download.

    >>> pool = digits()
    >>> pool.x.shape, float(pool.x.max())
    (torch.Size([1797, 64]), 1.0)
    """
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(pixels / 16, dtype=torch.float32), torch.tensor(labels, dtype=torch.int64)
    return Pool(x, y, name="digits")


def digits_federation(clients_per_group: int = 10, seed: int = 0, test_fraction: float = 0.2) -> Federation:
    """The digits in the paper's four MNIST label groups, with about 45 samples per client.

    >>> digits_federation().describe()
    'digits: 40 clients, 1437 train / 360 test samples (28-44 per client), x (64,), 10 classes, 4 true sources'
    """
    pool = digits()
    clients = label_groups(pool.y, MNIST_GROUPS, clients_per_group, seed)
    return pool.federation(clients, seed=seed, test_fraction=test_fraction)


@DATASETS.register("mnist", partition=PARTITIONS.make("label_groups"))
def mnist(
    folder: Path | None = None,
    image: bool = False,
    standardise: bool = True,
    samples: Count | None = None,
    seed: int = 0,
) -> Pool:
    """MNIST, train and test pooled: 70,000 images, flattened (784) or, with image=True, (1, 28, 28).

    Args:
        folder: The four official files, gzipped or not; MNIST/raw, as torchvision writes it, works too. By default
            the folder mnist/ in PPFL_DATA.
        image: Whether images have axes.
        standardise: Subtract the published mean of a pixel and divide by its deviation; otherwise pixels are in [0, 1].
        samples: Number of random images that are taken; None: all.
        seed: Seeds the choice of images.

    >>> mnist(Path("no such folder"))
    Traceback (most recent call last):
        ...
    ppfl.errors.DataError: no train-images-idx3-ubyte.gz in no such folder; get the four MNIST files, ...
    """
    folder = data_folder("mnist") if folder is None else folder
    images, labels = [], []
    for part in ("train", "t10k"):
        x = read_idx(_mnist_file(folder, f"{part}-images", "idx3-ubyte"))
        y = read_idx(_mnist_file(folder, f"{part}-labels", "idx1-ubyte"))
        if x.ndim != 3 or x.dtype != np.uint8 or y.shape != x.shape[:1]:
            raise DataError(
                f"{folder} has {part} images of shape {x.shape} and labels of shape {y.shape}; "
                f"expected (n, 28, 28) and (n,): download the files again"
            )
        images.append(x)
        labels.append(y)
    pixels = images_as_floats(np.concatenate(images))
    pixels = pixels[:, None] if image else pixels.flatten(1)
    pixels, digit = choose_images(pixels, torch.tensor(np.concatenate(labels)).long(), samples, seed, "mnist")
    return Pool((pixels - MNIST_PIXELS[0]) / MNIST_PIXELS[1] if standardise else pixels, digit, name="mnist")


@DATASETS.register("npz")
def npz(file: Path, tokens: bool = False, image: bool = False) -> Pool:
    """A numpy archive of `x, y`, optionally `client` and `is_test`; or of `x_train, y_train, x_test, y_test`.

    uint8 arrays are read as images: scaled to [0, 1], with a last axis of 3 colours moved before rows and columns.

    Args:
        file: The archive. Without `client` it needs a partition.
        tokens: Whether whole numbers are tokens.
        image: Whether images get the axis of channels that networks for images expect.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     np.savez(f"{folder}/data.npz", x=np.zeros((4, 2), np.float32), y=[0, 1, 0, 1], client=["a", "a", "b", "b"])
    ...     npz(Path(folder, "data.npz")).federation(test_fraction=0).ids
    ('a', 'b')
    """
    path = existing_file(file, "a numpy archive with arrays x and y")
    with reading(path, "is not a readable npz file", "save it with numpy.savez, without objects"):
        arrays = read_arrays(path)
        if {"x_train", "y_train", "x_test", "y_test"} <= arrays.keys():
            sizes = [len(arrays["y_train"]), len(arrays["y_test"])]
            arrays["x"] = np.concatenate([arrays.pop("x_train"), arrays.pop("x_test")])
            arrays["y"] = np.concatenate([arrays["y_train"], arrays["y_test"]])
            arrays["is_test"] = np.repeat([False, True], sizes)
        if not {"x", "y"} <= arrays.keys():
            raise DataError(f"{path} contains {sorted(arrays)}; expected x, y and optionally client, is_test")
        x, y = arrays["x"], arrays["y"]
        if x.shape[:1] != y.shape[:1] or (y.ndim != 1 and "client" not in arrays):
            raise DataError(
                f"{path} has x of shape {x.shape} and y of shape {y.shape}; expected (n, features) and (n,)"
            )
        check_size(path, x.size * torch.float32.itemsize)
        features = images_as_floats(x) if x.dtype == np.uint8 and not tokens else as_features(x, tokens)
    features = with_channels(features) if image else features
    return Pool(features, y, arrays.get("client"), arrays.get("is_test"), path.stem)


def read_arrays(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    """The arrays of a numpy archive; what its directory and headers say is checked before memory is taken."""
    with zipfile.ZipFile(path) as archive:
        check_members(archive, path)
        names = archive.namelist()
        if repeated := sorted({name for name in names if names.count(name) > 1}):
            raise DataError(f"{path} has two arrays {repeated[0]!r}; save it again with numpy.savez")
        return {name.removesuffix(".npy"): _read_array(archive, name, path) for name in names}


def _read_array(archive: zipfile.ZipFile, name: str, path: Path) -> np.ndarray[Any, Any]:
    with archive.open(name) as stream:
        version = np.lib.format.read_magic(stream)
        if version not in _HEADERS:
            raise DataError(f"{path} has {name!r} in npy version {version}; save plain arrays with numpy.savez")
        shape, by_column, dtype = _HEADERS[version](stream)
        if dtype.hasobject or dtype.kind == "V" or min(shape, default=0) < 0:
            raise ValueError(f"{name} has shape {shape} and type {dtype}, expected plain numbers or text")
        size = dtype.itemsize * math.prod(shape)
        check_size(path, size)
        content = bytearray(min(size, archive.getinfo(name).file_size))
        view, filled = memoryview(content), 0
        while piece := stream.read(min(_PIECE, len(content) - filled)):
            view[filled : filled + len(piece)] = piece
            filled += len(piece)
        if filled < size or stream.read(1):  # reading past the end also compares the checksum
            raise ValueError(f"{name} has {filled} bytes, expected {size} for shape {shape}")
    return np.frombuffer(content, dtype).reshape(shape, order="F" if by_column else "C")


def images_as_floats(pixels: np.ndarray[Any, Any]) -> Tensor:
    """Bytes as float32 in [0, 1], with the colour axis before rows and columns, as PyTorch expects.

    >>> images_as_floats(np.full((2, 4, 4, 3), 255, np.uint8)).shape
    torch.Size([2, 3, 4, 4])
    """
    x = torch.tensor(pixels).float().div_(255)
    return x.movedim(-1, 1).contiguous() if x.ndim == 4 and x.shape[-1] == 3 else x


def with_channels(x: Tensor) -> Tensor:
    """Images with a channel axis, as convolutions expect; a channel axis of length 1 is added if there is none.

    >>> with_channels(torch.zeros(2, 4, 4)).shape
    torch.Size([2, 1, 4, 4])
    """
    if x.ndim not in (3, 4):
        raise DataError(
            f"samples have shape {tuple(x.shape[1:])}, which is not an image; expected (rows, columns): reshape x"
        )
    return x[:, None] if x.ndim == 3 else x


def choose_images(x: Tensor, y: Tensor, samples: int | None, seed: int, name: str) -> tuple[Tensor, Tensor]:
    """Some of the images at random, or all."""
    if samples is None:
        return x, y
    rows = random_rows(len(y), samples, seed, name)
    return x[rows], y[rows]


def _mnist_file(folder: Path, stem: str, kind: str) -> Path:
    for place in (folder, folder / "raw", folder / "MNIST" / "raw"):
        for name in (f"{stem}-{kind}.gz", f"{stem}-{kind}", f"{stem}.{kind}", f"{stem}.{kind}.gz"):
            if (place / name).is_file():
                return place / name
    raise DataError(
        f"no {stem}-{kind}.gz in {folder}; get the four MNIST files, for instance with "
        f"torchvision.datasets.MNIST({str(folder)!r}, download=True), or set PPFL_DATA"
    )
