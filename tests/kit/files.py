"""Data files as the public gets them, files that lie about their size, and small tables with a column of clients."""

import gzip
import io
import json
import os
import struct
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd


@contextmanager
def limited(**sizes: int) -> Iterator[None]:
    """Other limits for a while, as PPFL_LIMITS sets them."""
    before = os.environ.get("PPFL_LIMITS", "")
    os.environ["PPFL_LIMITS"] = ",".join(filter(None, [before, *(f"{name}={most}" for name, most in sizes.items())]))
    try:
        yield
    finally:
        os.environ["PPFL_LIMITS"] = before


def write_bytes(path: Path, content: bytes) -> Path:
    """Compressed if the name ends in gz."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def idx_bytes(array: np.ndarray, code: int = 8) -> bytes:
    """An array as MNIST's files hold it."""
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, code, array.ndim, *array.shape) + array.tobytes()


def write_mnist(folder: Path, images: np.ndarray, labels: np.ndarray, name: str = "{}-idx{}-ubyte.gz") -> Path:
    """MNIST's four files, three quarters of the images in the first two."""
    cut = 3 * len(labels) // 4
    for part, rows in (("train", slice(0, cut)), ("t10k", slice(cut, None))):
        for kind, axes, array in (("images", 3, images), ("labels", 1, labels)):
            write_bytes(folder / name.format(f"{part}-{kind}", axes), idx_bytes(array[rows]))
    return folder


def cifar_batch(pixels: np.ndarray, **changes: Any) -> dict[bytes, Any]:
    """What a batch of CIFAR-10 unpickles to; labels count from 0 to 9 again and again."""
    content = {b"labels": [at % 10 for at in range(len(pixels))], b"data": pixels, b"batch_label": b"batch 1 of 5"}
    return content | {key.encode(): value for key, value in changes.items()}


def python2_cifar_batch(pixels: np.ndarray) -> bytes:
    """A batch as in the official files, pickled by Python 2: str as bytes, numpy.core, labels as a list."""

    def text(s: bytes) -> bytes:
        return b"T" + len(s).to_bytes(4, "little") + s

    n = len(pixels)
    array = (
        (b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\x00t" + text(b"b") + b"tR")
        + (b"(K\x01(M" + n.to_bytes(2, "little") + b"M\x00\x0ct")
        + (b"cnumpy\ndtype\n(" + text(b"u1") + b"K\x00K\x01tR")
        + (b"(K\x03" + text(b"|") + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb")
        + (b"I00\n" + text(pixels.tobytes()) + b"tb")
    )
    labels = b"(" + b"".join(b"K" + bytes([at % 10]) for at in range(n)) + b"l"
    return b"\x80\x02}(" + text(b"data") + array + text(b"labels") + labels + b"u."


def write_leaf(path: Path, clients: dict[str, tuple[np.ndarray, np.ndarray]]) -> Path:
    """A JSON file of LEAF, with x and y of every client."""
    data = {name: {"x": x.tolist(), "y": y.tolist()} for name, (x, y) in clients.items()}
    content = {"users": [*data], "num_samples": [len(one["y"]) for one in data.values()], "user_data": data}
    return write_bytes(path, json.dumps(content).encode())


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


def npy_bytes(shape: tuple[int, ...], data: bytes) -> bytes:
    """A file of numpy whose header says this shape, whatever the data are."""
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f8", "fortran_order": False, "shape": shape})
    return header.getvalue() + data


def write_zip(path: Any, files: dict[str, bytes], packing: int = zipfile.ZIP_DEFLATED) -> Any:
    with zipfile.ZipFile(path, "w", packing) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path


def make_table(rows: int = 120) -> pd.DataFrame:
    """Clients of three sites, columns of very different sizes, and text that only one site has."""
    random = np.random.default_rng(0)
    site = np.repeat(["north", "south", "east"], rows // 3)
    frame = pd.DataFrame(
        {
            "client": [f"{name}-{i % 4}" for i, name in enumerate(site)],
            "age": random.normal(50, 12, rows),
            "year": 2000 + random.integers(0, 20, rows),
            "tiny": 1e-9 * random.normal(3, 1, rows),
            "same": 0.1,
            "ward": random.choice(["a", "b"], rows),
            "code": random.choice([10, 20, 30], rows),
            "y": random.normal(size=rows),
        }
    )
    frame.loc[site == "east", "ward"] = "only-east"
    return frame


def with_gaps(frame: pd.DataFrame) -> pd.DataFrame:
    random, frame = np.random.default_rng(1), frame.copy()
    for name in ("age", "ward"):
        frame.loc[random.random(len(frame)) < 0.2, name] = None
    frame.loc[frame.client.str.startswith("south"), "age"] = None  # a column that one site does not have at all
    return frame
