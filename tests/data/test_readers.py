"""idx, npz, csv and parquet files are read back as written; damaged, hostile and too large files are refused."""

import bz2
import gzip
import io
import lzma
import pickle
import struct
import zipfile
from contextlib import suppress

import numpy as np
import pandas as pd
import pyarrow
import pytest
import torch

from kit.files import idx_bytes, limited, npy_bytes, write_bytes, write_mnist, write_zip
from kit.refusals import DataError, assert_refused
from ppfl.data import DataTable, build, mnist, npz, read_idx, read_table
from ppfl.data.ids import Holdout

RNG = np.random.default_rng(0)
IMAGES = RNG.integers(0, 256, (20, 28, 28), dtype=np.uint8)
LABELS = np.arange(20, dtype=np.uint8) % 10


def test_idx_files_of_every_type_are_read(tmp_path):
    for code, dtype in ((8, "u1"), (9, "i1"), (11, ">i2"), (12, ">i4"), (13, ">f4"), (14, ">f8")):
        array = RNG.integers(0, 100, (3, 4)).astype(dtype)
        np.testing.assert_array_equal(read_idx(write_bytes(tmp_path / "file", idx_bytes(array, code))), array)


@pytest.mark.parametrize("name", ["{}-idx{}-ubyte", "{}.idx{}-ubyte.gz", "MNIST/raw/{}-idx{}-ubyte.gz"])
def test_mnist_is_read_from_the_usual_places(tmp_path, name):
    write_mnist(tmp_path, IMAGES, LABELS, name)
    pool = mnist(tmp_path, standardise=False)
    x, y = pool.x, pool.y
    assert (x.dtype, y.tolist()) == (torch.float32, LABELS.tolist())
    torch.testing.assert_close(x, torch.from_numpy(IMAGES).flatten(1) / 255)
    write_bytes(tmp_path / name.format("t10k-labels", 1), idx_bytes(LABELS[:3]))
    assert_refused(lambda: mnist(tmp_path), DataError, "t10k images of shape (5, 28, 28)", "(3,)")


def save_arrays(path, **changes):
    arrays = {"x": np.ones((12, 2), np.float32), "y": np.arange(12) % 2, "client": np.arange(12) % 3}
    np.savez_compressed(path, **arrays | changes)
    return path


def test_npz_arrays_are_read_with_ids_and_marks_in_every_byte_order(tmp_path):
    x, mark = RNG.normal(size=(12, 4)), np.arange(12) % 5 == 0
    names = np.array(["ä", "b", "c"] * 4)
    for client in (names, np.char.encode(names, "utf-8"), names.astype(">U1")):
        f = npz(save_arrays(tmp_path / "a.npz", x=x.astype(">f8"), client=client, is_test=mark)).federation()
        assert (f.ids, len(f.test)) == (("ä", "b", "c"), 3)
        for at, id in enumerate(f.ids):
            torch.testing.assert_close(f.client(id)["train"].x, torch.from_numpy(x[at::3][~mark[at::3]]).float())


def test_bytes_in_npz_become_images_and_tokens_stay_integers(tmp_path):
    colour = RNG.integers(0, 256, (6, 8, 8, 3), dtype=np.uint8)
    np.savez(tmp_path / "a.npz", x_train=colour[:4], y_train=[0, 1, 0, 1], x_test=colour[4:], y_test=[1, 0])
    pool = npz(tmp_path / "a.npz")
    assert (pool.x.shape, pool.is_test.tolist()) == ((6, 3, 8, 8), [False] * 4 + [True] * 2)
    torch.testing.assert_close(pool.x[5, 2], torch.from_numpy(colour[5, :, :, 2]) / 255)
    np.savez(tmp_path / "b.npz", x=colour[:, 0, :, 0], y=[0, 1] * 3, client=[1, 2, 3] * 2)
    assert npz(tmp_path / "b.npz", tokens=True).federation(test_fraction=0).train.x.dtype == torch.int64
    for x, shape in ((IMAGES, (20, 1, 28, 28)), (np.stack([IMAGES] * 3, -1), (20, 3, 28, 28))):
        np.savez(tmp_path / "c.npz", x=x, y=LABELS, client=LABELS % 2)
        assert build("npz", file=tmp_path / "c.npz", test_fraction=0, image=True).train.x.shape == shape
    assert_refused(lambda: build("npz", file=tmp_path / "b.npz", image=True), DataError, "(8,), which is not an image")


def test_broken_npz_files_are_refused_before_memory_is_taken(tmp_path):
    for changes, words in (
        ({"x": np.ones((12, 2), complex)}, "x is complex128"),
        ({"client": np.array([b"\xff"] * 12)}, "not UTF-8"),
        ({"y": np.ones(11)}, "y of shape"),
        ({"y": np.array([0, 1_800_000_000] * 6)}, "1,800,000,001 classes"),
        ({"x": np.array([{}] * 12, dtype=object)}, "not a readable npz file"),  # objects are pickles
    ):
        path = save_arrays(tmp_path / "a.npz", **changes)
        assert_refused(lambda: npz(path).federation(), DataError, words)
    for content in (b"", b"nonsense", save_arrays(path).read_bytes()[:-30], pickle.dumps([1])):
        path.write_bytes(content)
        assert_refused(lambda: npz(path), DataError, "not a readable npz file")

    def archive(content, packing=zipfile.ZIP_DEFLATED):
        return write_zip(path, {f"{name}.npy": content for name in ("x", "y", "client")}, packing)

    for shape, words in (((2**40, 2), "17,592,186,044,416"), ((2**20, 2), "expected 16777216"), ((2, 2), "expected")):
        archive(npy_bytes(shape, bytes(8)))
        assert_refused(lambda: npz(path), DataError, words)
    content = archive(npy_bytes((1, 1), bytes(8))).read_bytes()
    flags = content.index(b"PK\1\2") + 8  # in the directory
    path.write_bytes(content[:flags] + b"\1" + content[flags + 1 :])
    assert_refused(lambda: npz(path), DataError, "is encrypted ('x.npy')")
    np.savez(path, x=np.ones((2, 1)))
    assert_refused(lambda: npz(path), DataError, "contains ['x']")
    archive(npy_bytes((1, 1), bytes(8)), zipfile.ZIP_LZMA)
    assert_refused(lambda: npz(path), DataError, "expected deflate")
    whole = npy_bytes((1000, 10), bytes(80_000))
    content, size = archive(whole).read_bytes(), struct.pack("<I", len(whole))
    assert content.count(size) >= 3
    path.write_bytes(content.replace(size, struct.pack("<I", 200)))  # the directory lies about the size
    assert_refused(lambda: npz(path), DataError, "not a readable npz file")


def test_tables_in_memory_csv_and_parquet_are_the_same(tmp_path):
    numbers = {"price": np.arange(1.0, 7), "sale": [True, False] * 3, "count": range(6)}
    names = {"shop": ["007", "007", "7", "7", "8", "8"], "city": ["x", "y"] * 3, "sold": ["no", "yes"] * 3}
    table = pd.DataFrame({**numbers, **names})
    table.to_csv(tmp_path / "table.csv", index=False)
    table.to_parquet(tmp_path / "table.parquet", index=False)
    files = [read_table(tmp_path / f"table.{kind}", client="shop") for kind in ("csv", "parquet")]
    for source in (table, *files):
        chosen = DataTable.of(source, "shop", "sold", columns=list(numbers))
        f = chosen.federation(Holdout(test_fraction=0))
        assert (f.ids, f.features, f.classes) == (("007", "7", "8"), tuple(numbers), ("no", "yes"))
        torch.testing.assert_close(f.train.x, torch.tensor(table[list(numbers)].to_numpy("float32")))
        assert f.train.y.tolist() == [0, 1] * 3
        counts = DataTable.of(source, "shop", "count", columns=["price"], is_test="sale")
        regression = counts.federation(task="regression")
        assert regression.train.y.dtype == torch.float32 and regression.test.x.flatten().tolist() == [1, 3, 5]


ROWS = b"who,x,y\n" + b"".join(b"%d,%d,%d\n" % (i % 3, i, i % 2) for i in range(60))


def zipped(*files):
    return write_zip(io.BytesIO(), {f"{at}.csv": content for at, content in enumerate(files)}).getvalue()


PACK = {"": bytes, ".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zip": zipped}
PACK[".zst"] = lambda content: pyarrow.compress(content, "zstd", asbytes=True)


@pytest.mark.parametrize("suffix", PACK)
def test_every_compression_gives_the_same_table_and_damage_is_refused(tmp_path, suffix):
    path, packed = tmp_path / f"a.csv{suffix}", PACK[suffix](ROWS)
    path.write_bytes(packed)
    frame = read_table(path, client="who")
    assert (frame["who"].unique().tolist(), frame["x"].tolist()) == (["0", "1", "2"], list(range(60)))
    with limited(bytes=len(ROWS) - 1):
        assert_refused(lambda: read_table(path, client="who"), DataError, "PPFL_LIMITS=bytes=")
    for damaged in (packed[: len(packed) // 2], b"nonsense", b"") if suffix else ():
        path.write_bytes(damaged)
        assert_refused(lambda: read_table(path, client="who"), DataError, "cannot be read as csv")


def read_any(path):
    if ".idx" in path.suffixes:
        return read_idx(path)
    return read_table(path, client="who")


def test_missing_and_broken_files_are_refused_and_parquet_damaged_at_any_byte_is_read_or_refused(tmp_path):
    assert_refused(lambda: mnist(tmp_path), DataError, "train-images-idx3-ubyte.gz in", "torchvision")
    for name in ("nowhere", "x" * 5000, "a\0b", "\ud800"):
        assert_refused(lambda: npz(name), DataError, "no file")
    whole, packed = idx_bytes(IMAGES), gzip.compress(idx_bytes(IMAGES))
    for name, content, words in (
        ("a.idx", b"PNG!" + whole, "not an idx file"),
        ("a.idx", whole[:9], "within its header"),
        ("a.idx", struct.pack(">BBBB3I", 0, 0, 8, 3, *[2**32 - 1] * 3), "16 bytes"),
        ("a.idx", struct.pack(">BBBB100I", 0, 0, 8, 100, *[1] * 100) + b"\0", "100 axes"),
        ("a.idx.gz", packed[:40] + b"\xff\xff\xff" + packed[43:], "damaged"),
        ("a.csv", b"a,b\n1,2\n1,2,3,4\n", "cannot be read as"),
        ("a.csv.tar.gz", ROWS, "is an archive"),
        ("a.csv.zip", zipped(ROWS, ROWS), "2 files"),
        ("a.csv", ROWS + b"a\0,1,1\na,1,1\n", "NUL"),
        ("a.parquet", b"a,b\n1,2\n", "cannot be read as"),
    ):
        path = tmp_path / name
        path.write_bytes(content)
        assert_refused(lambda: read_any(path), DataError, words)
    pd.DataFrame({"who": ["a", "b"] * 20, "x": range(40), "y": [0.5] * 40}).to_parquet(path)
    whole = path.read_bytes()
    for at in range(0, len(whole), 11):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 255]) + whole[at + 1 :])
        with suppress(DataError):  # some bytes do not matter
            read_any(path)


def test_small_files_that_expand_beyond_the_limit_are_refused(tmp_path):
    save_arrays(tmp_path / "a.npz", x=np.zeros((12, 100_000), np.float32))
    write_bytes(tmp_path / "a.gz", idx_bytes(np.zeros(1_000_000, np.uint8)))
    pd.DataFrame({"who": ["a" * 500] * 10_000, "x": 0.0, "y": 0.0}).to_parquet(tmp_path / "a.parquet")
    for name, read in (("a.npz", npz), ("a.gz", read_idx), ("a.parquet", read_any)):
        path = tmp_path / name
        assert path.stat().st_size < 100_000 and read(path) is not None
        with limited(bytes=900_000):
            assert_refused(lambda: read(path), DataError, "PPFL_LIMITS=bytes=")
