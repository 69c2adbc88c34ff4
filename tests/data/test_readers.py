"""Files are read back as written, real files are read if available, and damaged files are refused."""

import gzip
import io
import pickle
import struct
import zipfile

import numpy as np
import pytest
import torch

from kit.files import idx_bytes, write_mnist
from ppfl.core.errors import DataError
from ppfl.data import build, read_cifar10, read_idx, read_mnist, read_npz
from ppfl.data.cifar import read_cifar10_batch
from ppfl.data.limits import limited

RNG = np.random.default_rng(0)
IMAGES = RNG.integers(0, 256, (20, 28, 28), dtype=np.uint8)
LABELS = np.arange(20, dtype=np.uint8) % 10


@pytest.mark.parametrize(("code", "dtype"), [(8, "u1"), (9, "i1"), (11, ">i2"), (12, ">i4"), (13, ">f4"), (14, ">f8")])
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_idx_round_trip(tmp_path, code, dtype, suffix):
    array = RNG.integers(0, 100, (3, 4)).astype(dtype)
    path = tmp_path / f"file{suffix}"
    path.write_bytes(gzip.compress(idx_bytes(array, code)) if suffix else idx_bytes(array, code))
    np.testing.assert_array_equal(read_idx(path), array)


@pytest.mark.parametrize("compress", [True, False])
@pytest.mark.parametrize("inner", [".", "MNIST/raw"])
@pytest.mark.parametrize("name", ["{}-idx{}-ubyte", "{}.idx{}-ubyte"])
def test_mnist_round_trip(tmp_path, compress, inner, name):
    write_mnist(tmp_path / inner, IMAGES, LABELS, compress, name)
    x, y = read_mnist(tmp_path)
    assert (x.dtype, x.shape, y.dtype) == (torch.float32, (20, 784), torch.int64)
    torch.testing.assert_close(x, torch.from_numpy(IMAGES).flatten(1) / 255)
    assert y.tolist() == LABELS.tolist()
    assert torch.equal(read_mnist(tmp_path, image=True)[0].flatten(1), x)


def test_real_mnist_is_complete(real_data):
    if not (real_data / "mnist").is_dir():
        pytest.skip("no mnist/ in the data folder")
    x, y = read_mnist(real_data / "mnist")
    assert x.shape == (70_000, 784)
    assert (x.min(), x.max()) == (0, 1)
    assert y.bincount().tolist() == [6903, 7877, 6990, 7141, 6824, 6313, 6876, 7293, 6825, 6958]


def broken_idx(tmp_path, content: bytes, name="file"):
    path = tmp_path / name
    path.write_bytes(content)
    return path


WHOLE = idx_bytes(IMAGES)
BROKEN_IDX = {
    "empty": (b"", "file", "not an idx file"),
    "other format": (b"PNG!" + WHOLE, "file", "not an idx file"),
    "unknown type": (b"\0\0\7\1" + WHOLE[4:], "file", "not an idx file"),
    "header cut": (WHOLE[:9], "file", "within its header"),
    "data cut": (WHOLE[:-1], "file", "expected 15696"),
    "too long": (WHOLE + b"\0", "file", "15697 bytes"),
    "huge": (struct.pack(">BBBB3I", 0, 0, 8, 3, *[2**32 - 1] * 3), "file", "16 bytes"),
    "no gzip": (WHOLE, "file.gz", "damaged"),
    "gzip cut": (gzip.compress(WHOLE)[:-20], "file.gz", "damaged"),
    "gzip flipped": (gzip.compress(WHOLE)[:40] + b"\xff\xff\xff" + gzip.compress(WHOLE)[43:], "file.gz", "damaged"),
}


@pytest.mark.parametrize("case", BROKEN_IDX)
def test_a_broken_idx_file_is_refused(tmp_path, case):
    content, name, pattern = BROKEN_IDX[case]
    with pytest.raises(DataError, match=pattern):
        read_idx(broken_idx(tmp_path, content, name))


def test_errors_about_missing_files_say_what_to_do(tmp_path):
    for read, pattern in (
        (read_idx, "no file .*nowhere.*check the path"),
        (read_npz, "no file .*nowhere"),
        (read_cifar10_batch, "no file .*nowhere"),
        (read_mnist, "train-images-idx3-ubyte.gz in .*nowhere.*torchvision"),
        (read_cifar10, "data_batch_1 in .*nowhere.*cifar-10-python.tar.gz"),
    ):
        with pytest.raises(DataError, match=pattern):
            read(tmp_path / "nowhere")


def test_different_numbers_of_images_and_labels_are_refused(tmp_path):
    write_mnist(tmp_path, IMAGES, LABELS)
    (tmp_path / "t10k-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx_bytes(LABELS[:3])))
    with pytest.raises(DataError, match=r"t10k images of shape \(5, 28, 28\) and labels of shape \(3,\)"):
        read_mnist(tmp_path)


def test_npz_round_trip(tmp_path):
    x, y, client = RNG.normal(size=(30, 4)), RNG.integers(0, 3, 30), np.repeat(["u", "v", "w"], 10)
    mark = np.arange(30) % 5 == 0
    np.savez_compressed(tmp_path / "a.npz", x=x, y=y, client=client, is_test=mark)
    f = read_npz(tmp_path / "a.npz").federation(name="a")
    assert (f.ids, f.name, len(f.test)) == (("u", "v", "w"), "a", 6)
    torch.testing.assert_close(f.train.x, torch.from_numpy(x[~mark]).float())
    assert f.train.y.tolist() == y[~mark].tolist()


def test_bytes_in_npz_become_images_and_tokens_stay_integers(tmp_path):
    colour = RNG.integers(0, 256, (6, 8, 8, 3), dtype=np.uint8)
    np.savez(tmp_path / "a.npz", x_train=colour[:4], y_train=[0, 1, 0, 1], x_test=colour[4:], y_test=[1, 0])
    pool = read_npz(tmp_path / "a.npz")
    assert pool.x.shape == (6, 3, 8, 8)
    torch.testing.assert_close(pool.x[5, 2], torch.from_numpy(colour[5, :, :, 2]) / 255)
    assert pool.is_test.tolist() == [False] * 4 + [True] * 2
    with pytest.raises(DataError, match="no array 'client'"):
        pool.federation()
    np.savez(tmp_path / "b.npz", x=colour[:, 0, :, 0], y=[0, 1] * 3, client=[1, 2, 3] * 2)
    f = read_npz(tmp_path / "b.npz", tokens=True).federation(test_fraction=0)
    assert f.train.x.dtype == torch.int64


def test_images_get_a_channel_axis(tmp_path):
    grey, colour = IMAGES, np.stack([IMAGES] * 3, -1)
    np.savez(tmp_path / "grey.npz", x=grey, y=LABELS, client=LABELS % 2)
    np.savez(tmp_path / "colour.npz", x=colour, y=LABELS, client=LABELS % 2)
    np.savez(tmp_path / "flat.npz", x=grey.reshape(20, -1), y=LABELS, client=LABELS % 2)

    def read(name: str, **settings) -> torch.Tensor:
        return build("npz", base=tmp_path, file=f"{name}.npz", test_fraction=0, **settings).train.x

    assert read("grey").shape == (20, 28, 28)
    assert torch.equal(read("grey", image=True), read("grey")[:, None])
    assert torch.equal(read("colour", image=True), read("grey")[:, None].expand(-1, 3, -1, -1))
    halves = {"name": "iid", "clients": 2}
    assert read("grey", image=True, partition=halves).shape == (20, 1, 28, 28)
    with pytest.raises(DataError, match=r"shape \(784,\), which is not an image"):
        read("flat", image=True)


def test_a_broken_npz_file_is_refused(tmp_path):
    good, path = io.BytesIO(), tmp_path / "file.npz"
    np.savez(good, x=np.zeros((3, 2)), y=np.zeros(3))
    objects = io.BytesIO()
    np.savez(objects, x=np.array([{}, None], dtype=object), y=np.zeros(2))
    single = io.BytesIO()
    np.save(single, np.zeros(3))
    for content in (b"", b"nonsense", good.getvalue()[:-30], objects.getvalue(), single.getvalue(), pickle.dumps([1])):
        path.write_bytes(content)
        with pytest.raises(DataError, match="not a readable npz file"):
            read_npz(path)
    np.savez(path, images=np.zeros(3), y=np.zeros(3))
    with pytest.raises(DataError, match=r"\['images', 'y'\]; expected x, y"):
        read_npz(path)


def test_real_femnist_writers_are_clients(real_data):
    path = real_data / "femnist" / "femnist_writers.npz"
    if not path.is_file():
        pytest.skip("no femnist/ in the data folder")
    f = read_npz(path).federation(name="femnist")
    assert (f.n_clients, f.n_classes) == (300, 62)
    assert len(f.train) + len(f.test) == 46_187


def save_arrays(path, **changes):
    arrays = {"x": np.ones((12, 2), np.float32), "y": np.arange(12) % 2, "client": np.arange(12) % 3}
    np.savez_compressed(path, **{name: array for name, array in (arrays | changes).items() if array is not None})
    return path


@pytest.mark.parametrize(
    "x", [np.ones((12, 2), ">f4"), np.ones((12, 2), ">i2"), np.ones((12, 2), np.longdouble), np.ones((12, 2), ">f8")]
)
def test_every_byte_order_and_width_of_real_numbers_is_read(tmp_path, x):
    f = read_npz(save_arrays(tmp_path / "a.npz", x=x, y=(np.arange(12) % 2).astype(">i4"))).federation(test_fraction=0)
    assert torch.equal(f.train.x, torch.ones(12, 2))


def test_client_ids_may_be_bytes_of_utf8_in_any_byte_order(tmp_path):
    names = np.array(["ä", "b", "c"] * 4)
    for client in (np.char.encode(names, "utf-8"), names.astype(">U1")):
        f = read_npz(save_arrays(tmp_path / "a.npz", client=client)).federation(test_fraction=0)
        assert f.ids == ("ä", "b", "c")


SPOILED = {
    "complex": ({"x": np.ones((12, 2), complex)}, "x is complex128"),
    "complex targets": ({"y": np.ones(12, complex)}, "y is complex128"),
    "bytes that are no text": ({"client": np.array([b"\xff"] * 12)}, "not UTF-8"),
    "lone surrogate": ({"client": np.array(["\ud800"] * 12)}, "surrogate"),
    "no features": ({"x": np.ones((12, 0))}, "no features"),
    "many axes": ({"x": np.ones((12, *[1] * 30))}, "x has shape"),
    "huge ids": ({"client": np.array([1e300, 1e301] * 6)}, "1e.300, too large"),
    "several targets and no client": ({"y": np.ones((12, 2)), "client": None}, "y of shape"),
    "fewer targets": ({"y": np.ones(11)}, "y of shape"),
    "a class per integer": ({"y": np.array([0, 1_800_000_000] * 6)}, '1,800,000,001 classes.*task = "regression"'),
}


@pytest.mark.parametrize("case", SPOILED)
def test_arrays_that_cannot_be_samples_are_refused(tmp_path, case):
    changes, pattern = SPOILED[case]
    with pytest.raises(DataError, match=pattern):
        read_npz(save_arrays(tmp_path / "a.npz", **changes)).federation()


def test_an_archive_that_expands_beyond_the_limit_is_refused(tmp_path):
    path = save_arrays(tmp_path / "a.npz", x=np.zeros((12, 100_000), np.float32))
    assert path.stat().st_size < 100_000
    assert read_npz(path).x.numel() == 1_200_000
    with limited(bytes=1_000_000), pytest.raises(DataError, match="a.npz has at least .* set PPFL_LIMITS=bytes="):
        read_npz(path)


def with_header(shape, data=b""):
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f8", "fortran_order": False, "shape": shape})
    return header.getvalue() + data


def archive(path, content, packing=zipfile.ZIP_DEFLATED):
    with zipfile.ZipFile(path, "w", packing) as file:
        for name in ("x", "y", "client"):
            file.writestr(f"{name}.npy", content)
    return path


def test_a_header_that_lies_about_the_size_is_refused_before_memory_is_taken(tmp_path):
    for shape, pattern in (((2**40, 2), "17,592,186,044,416"), ((2**20, 2), "expected 16777216"), ((2, 2), "expected")):
        with pytest.raises(DataError, match=pattern):
            read_npz(archive(tmp_path / "a.npz", with_header(shape, bytes(8))))


def test_a_directory_that_lies_about_the_size_is_refused(tmp_path):
    path = archive(tmp_path / "a.npz", with_header((1000, 10), bytes(80_000)))
    content = bytearray(path.read_bytes())
    size = struct.pack("<I", len(with_header((1000, 10), bytes(80_000))))
    assert content.count(size) >= 3
    path.write_bytes(bytes(content).replace(size, struct.pack("<I", 200)))
    with pytest.raises(DataError, match="not a readable npz file"):
        read_npz(path)


@pytest.mark.parametrize("packing", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_only_the_compression_that_numpy_writes_is_read(tmp_path, packing):
    with pytest.raises(DataError, match="expected deflate"):
        read_npz(archive(tmp_path / "a.npz", with_header((1, 1), bytes(8)), packing))


def test_an_encrypted_archive_is_refused(tmp_path):
    path = save_arrays(tmp_path / "a.npz")
    content = bytearray(path.read_bytes())
    at = content.index(b"PK\x01\x02")
    while at >= 0:
        content[at + 8] |= 1  # the mark of encryption in the directory
        at = content.find(b"PK\x01\x02", at + 1)
    path.write_bytes(content)
    with pytest.raises(DataError, match="is encrypted"):
        read_npz(path)


def test_an_idx_file_with_many_axes_is_refused(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(struct.pack(">BBBB100I", 0, 0, 8, 100, *[1] * 100) + b"\0")
    with pytest.raises(DataError, match="100 axes"):
        read_idx(path)


def test_an_idx_file_that_expands_beyond_the_limit_is_refused(tmp_path):
    path = tmp_path / "file.gz"
    path.write_bytes(gzip.compress(struct.pack(">BBBBI", 0, 0, 8, 1, 10**6) + bytes(10**6)))
    assert read_idx(path).shape == (10**6,)
    with limited(bytes=10**5), pytest.raises(DataError, match="PPFL_LIMITS=bytes="):
        read_idx(path)


def test_a_name_that_no_file_can_have_is_refused():
    for name in ("x" * 5000, "a\0b", "\ud800"):
        with pytest.raises(DataError, match="no file"):
            read_npz(name)
