"""Data files that were valid once: made in every format we read, then changed."""

import bz2
import contextlib
import gzip
import io
import lzma
import math
import struct
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import hostile_client_files
import numpy as np

Input = tuple[str, Callable[[], object], bytes]  # its name, how to use it, and its content to be saved if that fails


def files(random: Random, folder: Path) -> Input:
    """One file of some kind, valid in the beginning, and changed up to a few times."""
    name, suffix, make = random.choice(FORMATS)
    content = make(random)
    for _ in range(random.choice([0, 0, 1, 1, 1, 2, 4])):
        content = changed(content, random)
    path = folder / f"input{suffix}"
    path.write_bytes(content)
    return name, lambda: read(path, Random(repr(random.getstate()[1][:3]))), content


def read(path: Path, random: Random) -> object:
    """Read a file as its name says, up to the federation or the prepared table."""
    from ppfl.data import DataTable, npz, read_idx, read_table
    from ppfl.data.datasets.cifar import read_cifar10_batch
    from ppfl.glm.table import TableSettings, prepare_table

    if not {*hostile_client_files.SUFFIXES}.isdisjoint(path.suffixes):
        return hostile_client_files.read(path, random)
    if ".npz" in path.suffixes:
        pool = npz(path, tokens=random.random() < 0.2)
        return pool.federation(seed=random.randrange(9))
    if ".idx" in path.suffixes:
        return read_idx(path)
    if ".batch" in path.suffixes:
        return read_cifar10_batch(path)
    frame = read_table(path, client="who")
    if random.random() < 0.3:
        return prepare_table(frame, TableSettings("who", "y", ks=(1,))).encoding.terms
    task = random.choice(["auto", "auto", "classification", "regression"])
    return DataTable.of(frame, "who", "y").federation(task=task)


def changed(content: bytes, random: Random) -> bytes:
    """The same content with some bytes flipped, cut, repeated, or replaced by an extreme number."""
    if not content:
        return random.randbytes(8)
    data, at = bytearray(content), random.randrange(len(content))
    if random.random() < 0.4:  # headers are at the ends
        at = (
            min(len(data) - 1, random.randrange(64))
            if random.random() < 0.5
            else max(0, len(data) - 1 - random.randrange(96))
        )
    match random.randrange(7):
        case 0:
            data[at] ^= 1 << random.randrange(8)
        case 1:
            del data[at:]
        case 2:
            del data[at : at + random.randrange(1, 40)]
        case 3:
            data[at:at] = data[random.randrange(len(data)) :][: random.randrange(1, 200)]
        case 4:
            size = random.choice([1, 2, 4, 8])
            number = random.choice([0, 1, 2**31 - 1, 2**32 - 1, 2**63 - 1, 2**64 - 1, random.randrange(2**64)])
            data[at : at + size] = (number % 256**size).to_bytes(size, random.choice(["big", "little"]))
        case 5:
            data[at : at + 1] = random.choice([b"\0", b"\xff", b"\n", b",", b'"', b"\xed\xa0\x80", b"9" * 400, b"\x1a"])
        case 6:
            digits = [i for i, byte in enumerate(data) if 48 <= byte < 58]
            if digits:
                at = random.choice(digits)
                data[at : at + 1] = random.choice([b"9999999999", b"-1", b"0", b"1e400", b"nan", b"None", b"1" * 5000])
    return bytes(data)


TYPES = [
    "f4",
    "f8",
    ">f8",
    ">f4",
    "f2",
    "g",
    "i8",
    ">i4",
    "u1",
    "u8",
    "i2",
    "?",
    "c8",
    "c16",
    "S3",
    "U3",
    ">U3",
    "M8[s]",
    "m8",
    "V4",
    "O",
]


def array(random: Random, shape: tuple[int, ...]) -> Any:
    """An array of any type, often with extreme values."""
    kind = random.choice(TYPES)
    values = np.random.default_rng(random.randrange(2**32)).integers(0, 3, shape)
    with np.errstate(all="ignore"):
        found = values.astype(np.dtype(kind) if kind != "V4" else np.int32)
    if kind == "V4":
        return found.view("V4") if found.ndim and found.size else found
    if found.size and random.random() < 0.3:
        extremes = [math.inf, math.nan, 1e300, -1, 2**31, 2**63 - 1, 2**40, "\ud800", b"\xff\xfe", "a\0", 1e-320, None]
        with contextlib.suppress(Exception), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found[(0,) * found.ndim] = random.choice(extremes)
    return found


def npz_bytes(random: Random) -> bytes:
    n = random.choice([0, 1, 2, *[12] * 8, 40])
    shape = random.choice([*[(n, 3)] * 12, (n,), (n, 0), (n, 2, 2), (n, 4, 4, 3), (), (n + 1, 2), (n, *[1] * 30)])
    parts: dict[str, Any] = {"x": array(random, shape) if random.random() < 0.3 else np.ones(shape, "f4")}
    parts["y"] = array(random, (n,)) if random.random() < 0.3 else np.arange(n) % 2
    parts["client"] = array(random, (n,)) if random.random() < 0.3 else np.arange(n) % 3
    if random.random() < 0.3:
        parts["is_test"] = array(random, (n,))
    if random.random() < 0.2:
        parts |= {f"{key}_{part}": parts[key] for key in ("x", "y") for part in ("train", "test")}
    file = io.BytesIO()
    (np.savez_compressed if random.random() < 0.5 else np.savez)(file, **parts)
    return bomb(random) if random.random() < 0.03 else lying(file.getvalue(), random)


def bomb(random: Random) -> bytes:
    """A small archive of zeros that are many."""
    file = io.BytesIO()
    rows = random.choice([10**8, 2**31])
    with zipfile.ZipFile(
        file, "w", random.choice([zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
    ) as archive:
        for name in ("x", "y", "client"):
            header = io.BytesIO()
            np.lib.format.write_array_header_1_0(header, {"descr": "<f8", "fortran_order": False, "shape": (rows, 1)})
            archive.writestr(f"{name}.npy", header.getvalue() + bytes(random.choice([0, 10**6, 3 * 10**7])))
    return file.getvalue()


def lying(content: bytes, random: Random) -> bytes:
    """Sometimes an npy header with another shape or type, in an archive that is otherwise right."""
    if random.random() < 0.7:
        return content
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            new.writestr(name, changed(old.read(name), random) if random.random() < 0.5 else old.read(name))
    return file.getvalue()


def idx_bytes(random: Random) -> bytes:
    axes = random.choice([0, 1, 2, 3, 3, 3, 9, 100, 255])
    lengths = [random.choice([0, 1, 2, 3]) if axes < 5 else 1 for _ in range(axes)]
    kind = random.choice([8, 8, 9, 11, 12, 13, 14, 0, 255])
    size = {8: 1, 9: 1, 11: 2, 12: 4, 13: 4, 14: 8}.get(kind, 1) * math.prod(lengths)
    return struct.pack(f">BBBB{axes}I", 0, 0, kind, axes, *lengths) + random.randbytes(size)


CELLS = [
    "0",
    "1",
    "2.5",
    "-1",
    "",
    "nan",
    "inf",
    "1e400",
    "9" * 5000,
    "a",
    "b ",
    '"a,b"',
    "True",
    "\ud7ff",
    "7.0",
    "1800000000",
    "1+2j",
    "0x10",
]


def csv_bytes(random: Random) -> bytes:
    names = random.choice([["who", "y", "x", "z"]] * 6 + [["who", "y"], ["who", "y", "x", "x"], ["a"], []])
    odd = random.choice([0, 0, 0, 0.05, 0.5])
    rows = [
        [random.choice(CELLS) if random.random() < odd else str((i + 2 * at) % (2 + at)) for at in range(len(names))]
        for i in range(random.choice([0, 1, *[20] * 6, 200]))
    ]
    return "\n".join(",".join(row) for row in [names, *rows]).encode()


def zip_bytes(random: Random) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", random.choice([0, 8, 8, 12, 14])) as archive:
        for i in range(random.choice([1, 1, 1, 0, 2])):
            archive.writestr(f"{i}.csv", csv_bytes(random))
    return file.getvalue()


def zst_bytes(random: Random) -> bytes:
    import pyarrow

    return bytes(pyarrow.compress(csv_bytes(random), "zstd", asbytes=True))


def long_zeros(random: Random) -> bytes:
    """Text that becomes many times longer when it is decompressed."""
    return (b"who,y,x\n" if random.random() < 0.5 else b"") + random.choice([b"1,0,1\n", b",", b"1", b"\n"]) * 10**6


def parquet_bytes(random: Random) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    n = random.choice([0, 1, *[20] * 6, 200])
    columns = {name: column(random, n) for name in random.choice([["who", "y", "x", "z"]] * 5 + [["who", "y"], ["x"]])}
    names = list(columns) if random.random() < 0.9 else ["x"] * len(columns)
    file = io.BytesIO()
    pq.write_table(
        pa.table(list(columns.values()), names=names),
        file,
        compression=random.choice(["snappy", "none", "gzip", "zstd"]),
    )
    return file.getvalue()


def column(random: Random, n: int) -> Any:
    import pyarrow as pa

    whole = [i % 3 for i in range(n)]
    match random.randrange(24):
        case 0:
            return pa.array([f"c{i}" for i in whole])
        case 1:
            return pa.array([b"\xff%d" % i for i in whole], pa.binary())
        case 2:
            return pa.array([[i] for i in whole])
        case 3:
            return pa.array([None if i == 0 else i for i in whole])
        case 4:
            return pa.array(["a\0" if i else "a" for i in whole]).dictionary_encode()
        case 5:
            return pa.array(whole).cast(pa.decimal128(30, 2)) if n else pa.array([], pa.date32())
        case _:
            return pa.array(
                whole, random.choice([pa.int8(), *[pa.int64(), pa.float32(), pa.float64()] * 3, pa.timestamp("s")])
            )


def batch_bytes(random: Random) -> bytes:
    """A CIFAR-10 batch of a few images."""
    import pickle

    n = random.choice([0, 1, 2])
    batch = {b"data": np.zeros((n, 3072), np.uint8), b"labels": [1] * n, b"names": ["a", ("b", None)]}
    content = pickle.dumps(batch, protocol=random.choice([0, 1, 2, 3, 4, 5]))
    return (
        content.replace(b".", random.choice([b"r\xff\xff\xff\x7f.", b"p999999999999\n.", b"2\x86.", b"."]))
        if random.random() < 0.2
        else content
    )


def packed(compress: Callable[[bytes], bytes], make: Callable[[Random], bytes]) -> Callable[[Random], bytes]:
    return lambda random: compress((make if random.random() < 0.98 else long_zeros)(random))


FORMATS: list[tuple[str, str, Callable[[Random], bytes]]] = [
    ("npz", ".npz", npz_bytes),
    ("npz", ".npz", npz_bytes),
    ("idx", ".idx", idx_bytes),
    ("idx.gz", ".idx.gz", packed(gzip.compress, idx_bytes)),
    ("csv", ".csv", csv_bytes),
    ("csv.gz", ".csv.gz", packed(gzip.compress, csv_bytes)),
    ("csv.bz2", ".csv.bz2", packed(bz2.compress, csv_bytes)),
    ("csv.xz", ".csv.xz", packed(lzma.compress, csv_bytes)),
    ("csv.zst", ".csv.zst", zst_bytes),
    ("csv.zip", ".csv.zip", zip_bytes),
    ("csv.tar", ".csv.tar", csv_bytes),
    ("parquet", ".parquet", parquet_bytes),
    ("parquet", ".parquet", parquet_bytes),
    ("cifar", ".batch", batch_bytes),
    *hostile_client_files.CLIENT_FORMATS,
]
