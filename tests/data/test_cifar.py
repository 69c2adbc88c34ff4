"""The pickles of CIFAR-10 are read, and other pickles are refused."""

import os
import pickle

import numpy as np
import pytest
import torch

from ppfl.core.errors import DataError
from ppfl.data import build, read_cifar10
from ppfl.data.cifar import read_cifar10_batch

PIXELS = np.random.default_rng(0).integers(0, 256, (20, 3072), dtype=np.uint8)


def batch(rows=slice(None), **changes) -> dict:
    n = len(PIXELS[rows])
    content = {
        b"batch_label": b"training batch 1 of 5",
        b"labels": [i % 10 for i in range(n)],
        b"data": PIXELS[rows],
        b"filenames": [b"a.png"] * n,
    }
    return content | {k.encode(): v for k, v in changes.items()}


def python2_batch(pixels: bytes, n: int) -> bytes:
    """A batch as in the official files, written by Python 2: str as bytes, numpy.core, labels as a list."""

    def text(s: bytes) -> bytes:
        return b"T" + len(s).to_bytes(4, "little") + s

    array = (
        (b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\x00t" + text(b"b") + b"tR")
        + (b"(K\x01(M" + n.to_bytes(2, "little") + b"M\x00\x0ct")
        + (b"cnumpy\ndtype\n(" + text(b"u1") + b"K\x00K\x01tR")
        + (b"(K\x03" + text(b"|") + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb")
        + b"I00\n"
        + text(pixels)
        + b"tb"
    )
    labels = b"(" + b"".join(b"K" + bytes([i % 10]) for i in range(n)) + b"l"
    return b"\x80\x02}(" + text(b"data") + array + text(b"labels") + labels + b"u."


def write(path, content, protocol=2):
    path.write_bytes(content if isinstance(content, bytes) else pickle.dumps(content, protocol))
    return path


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("protocol", [2, 3, 4])
def test_a_batch_round_trip(tmp_path, protocol, order):
    x, y = read_cifar10_batch(write(tmp_path / "b", batch(data=np.asarray(PIXELS, order=order)), protocol))
    assert (x.shape, x.dtype) == ((20, 3, 32, 32), torch.float32)
    torch.testing.assert_close(x.flatten(1), torch.from_numpy(PIXELS) / 255)
    assert y.tolist() == [i % 10 for i in range(20)]


def test_a_batch_as_python_2_wrote_it(tmp_path):
    content = python2_batch(PIXELS.tobytes(), 20)
    np.testing.assert_array_equal(pickle.loads(_renamed(content), encoding="bytes")[b"data"], PIXELS)
    x, _ = read_cifar10_batch(write(tmp_path / "b", content))
    torch.testing.assert_close(x.flatten(1), torch.from_numpy(PIXELS) / 255)


def _renamed(content: bytes) -> bytes:
    """Use the new name of the numpy module, because numpy warns about the old one."""
    return content.replace(b"numpy.core.", b"numpy._core.")


def test_the_data_set_is_all_six_batches(tmp_path):
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    for name in [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]:
        write(folder / name, batch())
    x, y = read_cifar10(tmp_path)
    assert (len(x), len(y)) == (120, 120)
    assert torch.equal(read_cifar10(folder)[0], x)
    groups = {"name": "label_groups", "groups": [[1, 9], [0, 8], [2, 3, 4, 5, 6, 7]], "clients": 2}
    f = build("cifar10", folder="cifar-10-batches-py", base=tmp_path, partition=groups)
    assert (f.n_clients, f.classes[1], f.train.x.shape[1:]) == (6, "automobile", (3, 32, 32))
    (folder / "test_batch").unlink()
    with pytest.raises(DataError, match=r"no file .*test_batch"):
        read_cifar10(tmp_path)


class Malicious:
    """An object whose pickle calls a function."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize(
    ("function", "arguments"),
    [(os.system, ("touch {}",)), (eval, ("open({!r}, 'w')",)), (np.save, ("{}", 1)), (getattr, ({}, "get"))],
)
@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_a_malicious_pickle_is_refused_and_does_nothing(tmp_path, function, arguments, protocol):
    target = str(tmp_path / "touched")
    filled = [a.format(target) if isinstance(a, str) else a for a in arguments]
    path = write(tmp_path / "b", batch(data=Malicious(function, *filled)), protocol)
    with pytest.raises(DataError, match="asks to load"):
        read_cifar10_batch(path)
    assert [p.name for p in tmp_path.iterdir()] == ["b"]


def test_other_encodings_of_bytes_are_refused(tmp_path):
    import codecs

    path = write(tmp_path / "b", batch(extra=Malicious(codecs.encode, "x", "rot13")))
    with pytest.raises(DataError, match="damaged"):
        read_cifar10_batch(path)


GOOD = pickle.dumps(batch(), 2)
BROKEN = {
    "empty": b"",
    "text": b"hello",
    "cut": GOOD[:-50],
    "half": GOOD[: len(GOOD) // 2],
    "list": [1, 2],
    "no data": {b"labels": [1]},
    "no labels": {b"data": PIXELS},
    "other type": batch(data=PIXELS.astype(np.int16)),
    "objects": batch(data=np.array([{}], dtype=object)),
    "other shape": batch(data=PIXELS[:, :100].copy()),
    "too few labels": batch(labels=[1, 2]),
    "label of 10": batch(labels=[10] * 20),
    "label of text": batch(labels=["1"] * 20),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_batch_is_refused(tmp_path, case):
    with pytest.raises(DataError, match="extract it again") as caught:
        read_cifar10_batch(write(tmp_path / "b", BROKEN[case]))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("attack", [b"r\xff\xff\xff\x7f", b"p99999999999\n", b")" + b"2\x86" * 60 + b"0"])
def test_a_pickle_that_costs_more_than_it_is_long_is_refused(tmp_path, attack):
    content = pickle.dumps(batch(), protocol=2)
    path = tmp_path / "data_batch_1"
    path.write_bytes(content)
    assert len(read_cifar10_batch(path)[1]) == 20
    path.write_bytes(content[:-1] + attack + b".")
    with pytest.raises(DataError, match="damaged"):
        read_cifar10_batch(path)
