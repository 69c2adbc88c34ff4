"""Datasets, columns, ragged rows, images as bytes, and files that are larger than what may be copied."""

import os
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from kit.problems import make_linear
from kit.refusals import DataError, assert_refused
from ppfl import Federation, Population, fit
from ppfl.algorithms import PPFL, FedAvg
from ppfl.data import MappedRows


def as_dataset(pairs: list) -> Dataset:
    return Subset([None, *pairs], range(1, len(pairs) + 1))


def tensors(n, seed=0, classes=2):
    return torch.randn(n, 3, generator=torch.Generator().manual_seed(seed)), torch.arange(n) % classes


def assert_equal(one: Federation, other: Federation) -> None:
    assert one.ids == other.ids and one.splits.keys() == other.splits.keys()
    for name, part in one.splits.items():
        assert torch.equal(part.x, other.splits[name].x) and torch.equal(part.y, other.splits[name].y)


def test_datasets_are_the_arrays_they_hold():
    (xa, ya), (xb, yb) = tensors(6), tensors(9, seed=1)
    expected = Federation.from_arrays(torch.cat([xa, xb]), torch.cat([ya, yb]), ["a"] * 6 + ["b"] * 9)
    pairs = [(x.numpy(), int(y)) for x, y in zip(xb, yb, strict=True)]
    joined = ConcatDataset([TensorDataset(xb[:4], yb[:4]), as_dataset(list(zip(xb[4:], yb[4:], strict=True)))])
    for b in (TensorDataset(xb, yb), as_dataset(pairs), pairs, joined):
        assert_equal(Federation.from_datasets({"a": TensorDataset(xa, ya), "b": b}), expected)
    assert Federation.from_datasets([TensorDataset(xa, ya), TensorDataset(xb, yb)]).ids == ("0", "1")
    who = list("aabbaa")
    assert_equal(
        Federation.from_datasets(TensorDataset(xa, ya), clients=who, test_fraction=0),
        Federation.from_arrays(xa, ya, who, test_fraction=0),
    )
    tested = Federation.from_datasets({"a": pairs, "b": pairs}, test={"b": TensorDataset(xa, ya)})
    assert torch.equal(tested.train.x, torch.cat([xb, xb])) and torch.equal(tested.test.x, xa)
    assert tested.test.sizes.tolist() == [0, 6]


def test_columns_of_a_dict_and_of_a_table_are_arrays():
    x, y = tensors(6)
    who = list("ababab")
    columns = {"p": x[:, 0].numpy(), "q": x[:, 1].tolist(), "y": y.tolist(), "client": who}
    for data in (columns, pd.DataFrame(columns)):
        found = Federation.from_columns(data, x=["p", "q"])
        assert_equal(found, Federation.from_arrays(x[:, :2], y, who))
        assert found.features == ("p", "q")
        assert Federation.from_columns(data, x="p").train.x.shape[1:] == (1,)


def test_rows_of_different_lengths_are_padded_over_all_clients():
    table = pd.DataFrame({"x": [[3, 4, 5], [6]], "y": [[0, 1, 1], [1]], "client": ["a", "b"]})
    f = Federation.from_columns(table, test_fraction=0, pad=9)
    assert f.train.x.tolist() == [[3, 4, 5], [6, 9, 9]]
    assert f.train.y.tolist() == [[0, 1, 1], [1, -100, -100]]  # as torch's cross entropy leaves targets out
    fit(Population(nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 2)), k=1), f, FedAvg(lr=0.1), rounds=1)
    a = as_dataset([([1, 2, 3], 0), ([4], 1)])
    b = TensorDataset(torch.tensor([[5, 6], [7, 8]]), torch.tensor([0, 1]))
    f = Federation.from_datasets({"a": a, "b": b}, test_fraction=0)
    assert f.train.x.tolist() == [[1, 2, 3], [4, 0, 0], [5, 6, 0], [7, 8, 0]]


def assert_trains_alike(one: Federation, other: Federation, net: nn.Module) -> None:
    """Within rounding, for both engines, by batches and at once."""
    torch.testing.assert_close(one.feature_means(), other.feature_means())
    for engine, batch_size in (("loop", 4), ("loop", None), ("stacked", 4), ("stacked", None)):
        method = PPFL(lr=0.1, batch_size=batch_size)
        first, second = (fit(Population(net, k=2), f, method, rounds=2, engine=engine) for f in (one, other))
        torch.testing.assert_close(first.memberships, second.memberships)
        assert first.evaluate(one).pooled_loss == pytest.approx(second.evaluate(other).pooled_loss)
        x, id = one.train.x[:2], one.ids[0]
        torch.testing.assert_close(first.predict(id, x), second.predict(id, other.train.x[:2]))


def test_bytes_train_and_predict_as_the_floats_they_stand_for():
    images = torch.randint(0, 256, (24, 1, 4, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    y, who = torch.arange(24) % 3, ["a", "b", "c"] * 8
    as_bytes, as_floats = Federation.from_arrays(images, y, who), Federation.from_arrays(images / 255, y, who)
    assert as_bytes.train.x.dtype == torch.uint8 and "bytes scaled to 0..1" in as_bytes.describe()
    assert_trains_alike(as_bytes, as_floats, nn.Sequential(nn.Flatten(), make_linear(16)))


@pytest.mark.parametrize("kind", ["npy", "memmap", "safetensors"])
def test_a_mapped_file_trains_as_the_array_it_holds(tmp_path, kind):
    x, y = tensors(30, classes=3)
    who = [f"c{i % 4}" for i in range(30)]
    np.save(tmp_path / "x.npy", x.numpy())
    save_file({"x": x}, tmp_path / "x.safetensors")
    np.memmap(tmp_path / "x.raw", np.float32, "w+", shape=(30, 3))[:] = x.numpy()
    mapped = {
        "npy": lambda: np.load(tmp_path / "x.npy", mmap_mode="r"),
        "memmap": lambda: np.memmap(tmp_path / "x.raw", np.float32, "r", shape=(30, 3)),
        "safetensors": lambda: MappedRows(load_file(tmp_path / "x.safetensors")["x"]),
    }[kind]()
    one, other = (Federation.from_arrays(each, y, who) for each in (mapped, x))
    assert "in a file" in one.describe()
    assert torch.equal(one.select(["c2", "c0"]).train.x[:], other.select(["c2", "c0"]).train.x)
    assert torch.equal(one.client("c1")["test"].x, other.client("c1")["test"].x)
    assert_trains_alike(one, other, make_linear(3))


def test_a_mapped_file_of_another_type_or_with_nan_is_refused(tmp_path):
    x = np.zeros((6, 2), np.float32)
    x[4, 1] = np.nan
    half, other = (x.astype(np.float16), "float16 in a file", "float32"), (x.astype(">f4"), "byte order")
    for array, *words in (half, other, (x, "row 4 of client 'a'")):
        np.save(tmp_path / "x.npy", array)
        mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
        make = lambda: Federation.from_arrays(mapped, [0, 1] * 3, list("ababab"), test_fraction=0)  # noqa: E731
        assert_refused(make, DataError, *words)


LARGE = """
import resource, sys
import numpy as np, torch
from torch import nn
from ppfl import Federation, Population, fit
from ppfl.algorithms import FedAvg

n, width = 50_000, 1000  # 200 MB of float32, as a file of holes
x = np.memmap(sys.argv[1], np.float32, "w+", shape=(n, width))
x.flush()
x = np.memmap(sys.argv[1], np.float32, "r", shape=(n, width))
small = Federation.from_arrays(np.zeros((8, width), np.float32), [0, 1] * 4, list("aabbccdd"), test_fraction=0)
net = nn.Linear(width, 2)
method = FedAvg(lr=0.1, batch_size=8, local_steps=2)
fit(Population(net, k=1), small, method, rounds=1)
(line,) = [line for line in open("/proc/self/status") if line.startswith("VmData")]
most = int(line.split()[1]) * 1024 + 100 * 2**20  # bytes: no room for a copy of what is trained on
resource.setrlimit(resource.RLIMIT_DATA, (most, most))
who = np.random.default_rng(0).integers(0, 500, n)  # in no order
federation = Federation.from_arrays(x, np.arange(n) % 2, who, validation_fraction=0.1)
federation.fingerprint
fit(Population(net, k=1), federation.select(federation.ids[:100]), method, rounds=1)
try:
    Federation.from_arrays(np.array(x), np.arange(n) % 2, who)
except MemoryError:
    print("no room for a copy")
"""


@pytest.mark.processes
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_large_file_is_never_copied(tmp_path):
    command = [sys.executable, "-c", LARGE, str(tmp_path / "x.raw")]
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=one_thread)
    assert done.stdout == "no room for a copy\n", done.stderr
