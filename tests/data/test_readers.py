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

from kit.files import idx_bytes, npy_bytes, write_bytes, write_mnist, write_zip
from kit.refusals import DataError, assert_refused
from ppfl.data import build, from_table, read_csv, read_idx, read_mnist, read_npz, read_parquet
from ppfl.data.limits import limited

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
    x, y = read_mnist(tmp_path)
    assert (x.dtype, x.shape, y.tolist()) == (torch.float32, (20, 784), LABELS.tolist())
    torch.testing.assert_close(x, torch.from_numpy(IMAGES).flatten(1) / 255)
    assert torch.equal(read_mnist(tmp_path, image=True)[0].flatten(1), x)


def test_images_without_their_labels_and_missing_files_are_refused(tmp_path):
    write_mnist(tmp_path, IMAGES, LABELS)
    write_bytes(tmp_path / "t10k-labels-idx1-ubyte.gz", idx_bytes(LABELS[:3]))
    assert_refused(lambda: read_mnist(tmp_path), DataError, "t10k images of shape (5, 28, 28)", "(3,)")
    assert_refused(lambda: read_mnist(tmp_path / "nowhere"), DataError, "train-images-idx3-ubyte.gz in", "torchvision")
    for read in (read_csv, read_parquet):
        assert_refused(lambda: read(tmp_path / "nowhere", "a", "b"), DataError, "no file", "nowhere")
    for name in (tmp_path / "nowhere", "x" * 5000, "a\0b", "\ud800"):
        for read in (read_idx, read_npz):
            assert_refused(lambda: read(name), DataError, "no file")


def save_arrays(path, **changes):
    arrays = {"x": np.ones((12, 2), np.float32), "y": np.arange(12) % 2, "client": np.arange(12) % 3}
    np.savez_compressed(path, **{name: array for name, array in (arrays | changes).items() if array is not None})
    return path


def test_npz_arrays_are_read_with_ids_and_marks_in_every_byte_order(tmp_path):
    x, mark = RNG.normal(size=(12, 4)), np.arange(12) % 5 == 0
    names = np.array(["ä", "b", "c"] * 4)
    for client in (names, np.char.encode(names, "utf-8"), names.astype(">U1")):
        path = save_arrays(tmp_path / "a.npz", x=x, client=client, is_test=mark)
        f = read_npz(path).federation(name="a")
        assert (f.ids, f.name, len(f.test)) == (("ä", "b", "c"), "a", 3)
        for at, id in enumerate(f.ids):
            torch.testing.assert_close(f.client(id)["train"].x, torch.from_numpy(x[at::3][~mark[at::3]]).float())
    for dtype in (">f4", ">i2", ">f8", np.longdouble):
        path = save_arrays(tmp_path / "a.npz", x=np.ones((12, 2), dtype), y=(np.arange(12) % 2).astype(">i4"))
        assert torch.equal(read_npz(path).federation(test_fraction=0).train.x, torch.ones(12, 2))


def test_bytes_in_npz_become_images_and_tokens_stay_integers(tmp_path):
    colour = RNG.integers(0, 256, (6, 8, 8, 3), dtype=np.uint8)
    np.savez(tmp_path / "a.npz", x_train=colour[:4], y_train=[0, 1, 0, 1], x_test=colour[4:], y_test=[1, 0])
    pool = read_npz(tmp_path / "a.npz")
    assert (pool.x.shape, pool.is_test.tolist()) == ((6, 3, 8, 8), [False] * 4 + [True] * 2)
    torch.testing.assert_close(pool.x[5, 2], torch.from_numpy(colour[5, :, :, 2]) / 255)
    assert_refused(pool.federation, DataError, "no array 'client'")
    np.savez(tmp_path / "b.npz", x=colour[:, 0, :, 0], y=[0, 1] * 3, client=[1, 2, 3] * 2)
    assert read_npz(tmp_path / "b.npz", tokens=True).federation(test_fraction=0).train.x.dtype == torch.int64


def test_images_get_a_channel_axis(tmp_path):
    for name, x in (("grey", IMAGES), ("colour", np.stack([IMAGES] * 3, -1)), ("flat", IMAGES.reshape(20, -1))):
        np.savez(tmp_path / f"{name}.npz", x=x, y=LABELS, client=LABELS % 2)

    def read(name: str, **settings) -> torch.Tensor:
        return build("npz", base=tmp_path, file=f"{name}.npz", test_fraction=0, **settings).train.x

    assert read("grey").shape == (20, 28, 28)
    assert torch.equal(read("grey", image=True), read("grey")[:, None])
    assert torch.equal(read("colour", image=True), read("grey")[:, None].expand(-1, 3, -1, -1))
    assert read("grey", image=True, partition={"name": "iid", "clients": 2}).shape == (20, 1, 28, 28)
    assert_refused(lambda: read("flat", image=True), DataError, "(784,), which is not an image")


SPOILED = {
    "complex": ({"x": np.ones((12, 2), complex)}, "x is complex128"),
    "complex targets": ({"y": np.ones(12, complex)}, "y is complex128"),
    "bytes that are no text": ({"client": np.array([b"\xff"] * 12)}, "not UTF-8"),
    "lone surrogate": ({"client": np.array(["\ud800"] * 12)}, "surrogate"),
    "no features": ({"x": np.ones((12, 0))}, "no features"),
    "many axes": ({"x": np.ones((12, *[1] * 30))}, "x has shape"),
    "huge ids": ({"client": np.array([1e300, 1e301] * 6)}, "too large"),
    "several targets and no client": ({"y": np.ones((12, 2)), "client": None}, "y of shape"),
    "fewer targets": ({"y": np.ones(11)}, "y of shape"),
    "a class per integer": ({"y": np.array([0, 1_800_000_000] * 6)}, "1,800,000,001 classes"),
    "no x": ({"x": None}, "['client', 'y']; expected x, y"),
    "objects, which are pickles": ({"x": np.array([{}] * 12, dtype=object)}, "not a readable npz file"),
}


@pytest.mark.parametrize("case", SPOILED)
def test_arrays_that_cannot_be_samples_are_refused(tmp_path, case):
    changes, words = SPOILED[case]
    path = save_arrays(tmp_path / "a.npz", **changes)
    assert_refused(lambda: read_npz(path).federation(), DataError, words)


def test_broken_npz_files_are_refused_before_memory_is_taken(tmp_path):
    path = save_arrays(tmp_path / "a.npz")
    good, single = path.read_bytes(), io.BytesIO()
    np.save(single, np.zeros(3))
    for content in (b"", b"nonsense", good[:-30], single.getvalue(), pickle.dumps([1])):
        path.write_bytes(content)
        assert_refused(lambda: read_npz(path), DataError, "not a readable npz file")
    first, *entries = good.split(b"PK\x01\x02")
    marked = [entry[:4] + bytes([entry[4] | 1]) + entry[5:] for entry in entries]  # the mark of encryption
    path.write_bytes(b"PK\x01\x02".join([first, *marked]))
    assert_refused(lambda: read_npz(path), DataError, "is encrypted")

    def archive(content: bytes, packing: int = zipfile.ZIP_DEFLATED):
        return write_zip(path, {f"{name}.npy": content for name in ("x", "y", "client")}, packing)

    for shape, words in (((2**40, 2), "17,592,186,044,416"), ((2**20, 2), "expected 16777216"), ((2, 2), "expected")):
        archive(npy_bytes(shape, bytes(8)))
        assert_refused(lambda: read_npz(path), DataError, words)
    for packing in (zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA):
        archive(npy_bytes((1, 1), bytes(8)), packing)
        assert_refused(lambda: read_npz(path), DataError, "expected deflate")
    whole = npy_bytes((1000, 10), bytes(80_000))
    content, size = archive(whole).read_bytes(), struct.pack("<I", len(whole))
    assert content.count(size) >= 3
    path.write_bytes(content.replace(size, struct.pack("<I", 200)))  # the directory lies about the size
    assert_refused(lambda: read_npz(path), DataError, "not a readable npz file")


TABLE = pd.DataFrame(
    {
        "shop": ["007", "007", "7", "7", "8", "8"],
        "price": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
        "sale": [True, False] * 3,
        "city": ["x", "y"] * 3,
        "sold": ["no", "yes"] * 3,
        "count": [0, 2, 4, 6, 8, 10],
    }
)


def test_tables_in_memory_csv_and_parquet_are_the_same(tmp_path):
    TABLE.to_csv(tmp_path / "table.csv", index=False)
    TABLE.to_parquet(tmp_path / "table.parquet", index=False)
    sources = {read_csv: tmp_path / "table.csv", read_parquet: tmp_path / "table.parquet", from_table: TABLE}
    for read, source in sources.items():
        f = read(source, "shop", "sold", drop=["city"], test_fraction=0)
        assert (f.ids, f.features) == (("007", "7", "8"), ("price", "sale", "count"))
        assert (f.classes, f.name) == (("no", "yes"), "table")
        torch.testing.assert_close(f.train.x, torch.tensor(TABLE[list(f.features)].to_numpy("float32")))
        assert f.train.y.tolist() == [0, 1] * 3


def test_targets_marks_and_names_of_a_table():
    def made(target="count", table=TABLE, **settings):
        return from_table(table, "shop", target, columns=["price"], **{"test_fraction": 0, **settings})

    assert made().n_classes == 11
    numbers = made(task="regression")
    assert (numbers.n_classes, numbers.train.y.dtype) == (None, torch.float32)
    one_sided = made("sold", TABLE[TABLE.sold == "yes"], classes=("no", "yes"))
    assert one_sided.train.y.tolist() == [1, 1, 1]
    marked = from_table(TABLE, "shop", "sold", columns=["price"], is_test="sale")
    assert marked.test.x.flatten().tolist() == [1, 3, 5]
    named = TABLE[["shop", "price", "count"]].rename(columns={"price": 7}).assign(shop=[b"a", b"b"] * 3)
    f = from_table(named, "shop", "count")
    assert (f.features, f.ids) == (("7",), ("a", "b"))


ROWS = b"who,x,y\n" + b"".join(b"%d,%d,%d\n" % (i % 3, i, i % 2) for i in range(60))


def zipped(*files: bytes) -> bytes:
    buffer = io.BytesIO()
    return write_zip(buffer, {f"{at}.csv": content for at, content in enumerate(files)}).getvalue()


PACK = {"": bytes, ".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zip": zipped}
PACK[".zst"] = lambda content: pyarrow.compress(content, "zstd", asbytes=True)


@pytest.mark.parametrize("suffix", PACK)
def test_every_compression_gives_the_same_table_and_damage_is_refused(tmp_path, suffix):
    path, packed = tmp_path / f"a.csv{suffix}", PACK[suffix](ROWS)
    path.write_bytes(packed)
    f = read_csv(path, "who", "y", test_fraction=0)
    assert (f.ids, sorted(f.train.x.flatten().tolist())) == (("0", "1", "2"), list(map(float, range(60))))
    with limited(bytes=len(ROWS) - 1):
        assert_refused(lambda: read_csv(path, "who", "y"), DataError, "PPFL_LIMITS=bytes=")
    for damaged in (packed[: len(packed) // 2], b"nonsense", b"") if suffix else ():
        path.write_bytes(damaged)
        assert_refused(lambda: read_csv(path, "who", "y"), DataError, "cannot be read as csv")


WHOLE, ZIPPED = idx_bytes(IMAGES), gzip.compress(idx_bytes(IMAGES))
BROKEN = {
    "empty idx": ("a.idx", b"", "not an idx file"),
    "other format": ("a.idx", b"PNG!" + WHOLE, "not an idx file"),
    "unknown type": ("a.idx", b"\0\0\7\1" + WHOLE[4:], "not an idx file"),
    "header cut": ("a.idx", WHOLE[:9], "within its header"),
    "data cut": ("a.idx", WHOLE[:-1], "expected 15696"),
    "too long": ("a.idx", WHOLE + b"\0", "15697 bytes"),
    "header that lies": ("a.idx", struct.pack(">BBBB3I", 0, 0, 8, 3, *[2**32 - 1] * 3), "16 bytes"),
    "many axes": ("a.idx", struct.pack(">BBBB100I", 0, 0, 8, 100, *[1] * 100) + b"\0", "100 axes"),
    "no gzip": ("a.idx.gz", WHOLE, "damaged"),
    "gzip cut": ("a.idx.gz", ZIPPED[:-20], "damaged"),
    "gzip flipped": ("a.idx.gz", ZIPPED[:40] + b"\xff\xff\xff" + ZIPPED[43:], "damaged"),
    "empty csv": ("a.csv", b"", "cannot be read as"),
    "ragged": ("a.csv", b"a,b\n1,2\n1,2,3,4\n", "cannot be read as"),
    "not text": ("a.csv", b"a,b\n\xff\xfe\x80,1\n", "cannot be read as"),
    "tar": ("a.tar", ROWS, "is an archive"),
    "tar and gzip": ("a.csv.tar.gz", ROWS, "is an archive"),
    "two files": ("a.csv.zip", zipped(ROWS, ROWS), "2 files"),
    "no files": ("a.csv.zip", zipped(), "0 files"),
    "NUL": ("a.csv", ROWS + b"a\0,1,1\na,1,1\n", "NUL"),
    "UTF-16": ("a.csv", ROWS.decode().encode("utf-16"), "a.csv"),
    "no parquet": ("a.parquet", b"a,b\n1,2\n", "cannot be read as"),
}


def read_any(path):
    if ".idx" in path.suffixes:
        return read_idx(path)
    return read_parquet(path, "who", "y") if path.suffix == ".parquet" else read_csv(path, "who", "y")


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_file_is_refused(tmp_path, case):
    name, content, words = BROKEN[case]
    (tmp_path / name).write_bytes(content)
    assert_refused(lambda: read_any(tmp_path / name), DataError, words)


def test_damaged_parquet_files_are_refused_at_every_byte(tmp_path):
    path = tmp_path / "a.parquet"
    pd.DataFrame({"who": ["a", "b"] * 20, "x": range(40), "y": [0.5] * 40}).to_parquet(path)
    whole = path.read_bytes()
    for at in range(0, len(whole), 11):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 255]) + whole[at + 1 :])
        with suppress(DataError):  # some bytes do not matter
            read_any(path)


def test_files_that_expand_beyond_the_limit_are_refused(tmp_path):
    """A small npz, gzip or parquet file that would take all memory."""
    n = 100_000
    save_arrays(tmp_path / "a.npz", x=np.zeros((12, n), np.float32))
    write_bytes(tmp_path / "a.gz", idx_bytes(np.zeros(10 * n, np.uint8)))
    frame = pd.DataFrame({"who": ["a" * 500] * 10_000, "x": np.zeros(10_000), "y": np.zeros(10_000)})
    frame.to_parquet(tmp_path / "a.parquet")
    for name, read in (("npz", read_npz), ("gz", read_idx), ("parquet", lambda path: read_parquet(path, "who", "y"))):
        path = tmp_path / f"a.{name}"
        assert path.stat().st_size < 100_000
        assert read(path) is not None
        with limited(bytes=900_000):
            assert_refused(lambda: read(path), DataError, "PPFL_LIMITS=bytes=")
