"""CIFAR-10 in its official format, a folder of Python pickles, which are read without being loaded."""

import pickletools
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
_ORDERS = ("NEWTRUE", "NEWFALSE", "INT")  # operations that say whether an array is stored column by column
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
    """One official batch file: images (n, 3, 32, 32) in [0, 1] and labels (n,).

    To load a pickle is to run what it names. So it is not loaded: of the operations that it lists, the longest text is
    the pixels, and the numbers after the text "labels" are the labels.
    """
    path = existing_file(path, "a CIFAR-10 batch such as data_batch_1")
    pixels: bytes | str = b""
    last: bytes | str = b""
    labels: list[int] = []
    by_column = rows_are_columns = has_bytes = False
    with reading(path, "is damaged or not a CIFAR-10 batch", "extract it again"), open_bounded(path) as file:
        value: Any
        for operation, value, _ in pickletools.genops(file.read()):
            if isinstance(value, bytes | str):
                if len(value) > len(pixels):
                    pixels, by_column = value, rows_are_columns
                has_bytes |= value == "u1"
                last = last if value == "latin1" else value
            elif operation.name in _ORDERS:
                rows_are_columns = operation.name == "NEWTRUE" or value is True
            elif operation.name == "BININT1" and last in ("labels", b"labels"):
                labels.append(value)
        content = np.frombuffer(pixels.encode("latin1") if isinstance(pixels, str) else pixels, np.uint8)
    if not has_bytes or not labels or len(content) != 3072 * len(labels) or max(labels) > 9:
        raise DataError(
            f"{path} has {len(content)} bytes of pixels and {len(labels)} labels; expected a CIFAR-10 batch, 3072 "
            "bytes for each label from 0 to 9: extract it again"
        )
    images = content.reshape(len(labels), 3072, order="F" if by_column else "C")
    return images_as_floats(images.reshape(-1, 3, 32, 32)), torch.tensor(labels)
