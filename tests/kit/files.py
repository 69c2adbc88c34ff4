"""Data files as the public gets them."""

import gzip
import struct
from pathlib import Path

import numpy as np


def idx_bytes(array: np.ndarray, code: int = 8) -> bytes:
    """An array as MNIST's files hold it."""
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, code, array.ndim, *array.shape) + array.tobytes()


def write_mnist(
    folder: Path, images: np.ndarray, labels: np.ndarray, compress: bool = True, name: str = "{}-idx{}-ubyte"
) -> None:
    """MNIST's four files, three quarters of the images in the first two."""
    folder.mkdir(parents=True, exist_ok=True)
    cut = 3 * len(labels) // 4
    for part, rows in (("train", slice(0, cut)), ("t10k", slice(cut, None))):
        for kind, axes, array in (("images", 3, images), ("labels", 1, labels)):
            content, file = idx_bytes(array[rows]), name.format(f"{part}-{kind}", axes)
            (folder / (file + ".gz" * compress)).write_bytes(gzip.compress(content) if compress else content)


def write_tff(path: Path, clients: dict[str, dict[str, np.ndarray | list[str]]]) -> Path:
    """An HDF5 file of TensorFlow Federated: examples/<client>/<field>, with texts as bytes of a fixed length."""
    import h5py

    with h5py.File(path, "w") as file:
        examples = file.create_group("examples")
        for client, fields in clients.items():
            group = examples.create_group(client)
            for field, values in fields.items():
                as_bytes = np.array([text.encode() for text in values], "S") if isinstance(values, list) else values
                group.create_dataset(field, data=as_bytes, compression="gzip")
    return path
