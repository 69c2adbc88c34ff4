"""Files are read back as written, real files are read if available, and damaged files are refused."""

import gzip
import io
import pickle
import struct

import numpy as np
import pytest
import torch

from ppfl.core.errors import DataError
from ppfl.data import build, read_cifar10, read_idx, read_mnist, read_npz
from ppfl.data.cifar import read_cifar10_batch
from support import idx_bytes, write_mnist

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
