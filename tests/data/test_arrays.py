"""Datasets, columns, ragged rows, images as bytes and mapped files are the arrays that they hold."""

import os
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from kit.problems import make_linear
from kit.refusals import DataError, assert_refused
from ppfl import Federation, Population, fit
from ppfl.algorithms import PPFL, FedAvg
from ppfl.data import DataTable, MappedRows


def tensors(n, seed=0):
    return torch.randn(n, 3, generator=torch.Generator().manual_seed(seed)), torch.arange(n) % 2


def assert_equal(one, other):
    assert one.ids == other.ids and one.splits.keys() == other.splits.keys()
    for name, part in one.splits.items():
        assert torch.equal(part.x, other.splits[name].x) and torch.equal(part.y, other.splits[name].y)


def test_datasets_and_tables_are_the_arrays_they_hold():
    (xa, ya), (xb, yb) = tensors(6), tensors(9, seed=1)
    first = TensorDataset(xa, ya)
    expected = Federation.from_arrays(torch.cat([xa, xb]), torch.cat([ya, yb]), ["a"] * 6 + ["b"] * 9)
    pairs = [(x.numpy(), int(y)) for x, y in zip(xb, yb, strict=True)]
    joined = ConcatDataset([TensorDataset(xb[:4], yb[:4]), Subset(pairs, range(4, 9))])
    both, whole = TensorDataset(torch.cat([xa, xb]), torch.cat([ya, yb])), TensorDataset(xb, yb)
    for b in (whole, pairs, joined, [*whole], Subset(both, range(6, 15))):
        assert_equal(Federation.from_datasets({"a": first, "b": b}), expected)
    assert Federation.from_datasets([first, pairs]).ids == ("0", "1")
    who = list("aabbaa")
    assert_equal(Federation.from_datasets(first, clients=who), Federation.from_arrays(xa, ya, who))
    tested = Federation.from_datasets({"a": pairs, "b": pairs}, test={"b": first})
    assert torch.equal(tested.train.x, torch.cat([xb, xb])) and torch.equal(tested.test.x, xa)
    assert tested.test.sizes.tolist() == [0, 6]
    columns = {"p": xa[:, 0].numpy(), "q": xa[:, 1].tolist(), "y": ya.tolist(), "client": who}
    for data in (columns, pd.DataFrame(columns)):
        found = DataTable.of(data, "client", "y").federation()
        assert_equal(found, Federation.from_arrays(xa[:, :2], ya, who))
        assert found.features == ("p", "q")


def test_rows_of_different_lengths_are_padded_over_all_clients():
    table = pd.DataFrame({"x": [[3, 4, 5], [6]], "y": [[0, 1, 1], [1]], "client": ["a", "b"]})
    f = Federation.from_arrays(table.x, table.y, table.client, test_fraction=0, pad=9)
    assert f.train.x.tolist() == [[3, 4, 5], [6, 9, 9]]
    assert f.train.y.tolist() == [[0, 1, 1], [1, -100, -100]]  # as torch's cross entropy leaves targets out
    fit(Population(nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 2)), k=1), f, FedAvg(lr=0.1), rounds=1)
    b = TensorDataset(torch.tensor([[5, 6], [7, 8]]), torch.tensor([0, 1]))
    f = Federation.from_datasets({"a": [([1, 2, 3], 0), ([4], 1)], "b": b}, test_fraction=0)
    assert f.train.x.tolist() == [[1, 2, 3], [4, 0, 0], [5, 6, 0], [7, 8, 0]]


@pytest.mark.parametrize("kind", ["bytes", "npy", "safetensors"])
def test_bytes_and_mapped_files_train_and_predict_as_the_floats_they_stand_for(tmp_path, kind):
    images = torch.randint(0, 256, (24, 1, 4, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    floats, y, who = images / 255, torch.arange(24) % 3, list("abcd") * 6
    np.save(tmp_path / "x.npy", floats.numpy())
    save_file({"x": floats}, tmp_path / "x.safetensors")
    given, scale, words = {
        "bytes": (images, 255, "bytes scaled to 0..1"),
        "npy": (np.load(tmp_path / "x.npy", mmap_mode="r"), 1, "in a file"),
        "safetensors": (MappedRows(load_file(tmp_path / "x.safetensors")["x"]), 1, "in a file"),
    }[kind]
    one, other = (Federation.from_arrays(x, y, who) for x in (given, floats))
    assert words in one.describe()
    assert torch.equal(one.select(["c", "a"]).train.x[:] / scale, other.select(["c", "a"]).train.x)
    torch.testing.assert_close(one.feature_means(), other.feature_means())
    population = Population(nn.Sequential(nn.Flatten(), make_linear(16)), k=2)
    for engine, batch_size in (("loop", 4), ("loop", None), ("stacked", 4), ("stacked", None)):
        method = PPFL(lr=0.1, batch_size=batch_size)
        first, second = (fit(population, f, method, rounds=2, engine=engine) for f in (one, other))
        torch.testing.assert_close(first.memberships, second.memberships)
        assert first.evaluate(one).loss.pooled == pytest.approx(second.evaluate(other).loss.pooled)
        torch.testing.assert_close(first.predict("a", one.train.x[:2]), second.predict("a", other.train.x[:2]))


def test_a_mapped_file_of_another_type_or_with_nan_is_refused(tmp_path):
    x = np.zeros((6, 2), np.float32)
    x[4, 1] = np.nan
    for array, words in ((x.astype(np.float16), "float16 in a file"), (x, "in 1 samples, 1 of them of client 'a'")):
        np.save(tmp_path / "x.npy", array)
        mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
        assert_refused(lambda: Federation.from_arrays(mapped, [0, 1] * 3, list("ababab")), DataError, words)


LARGE = """
import resource, sys
import numpy as np
from torch import nn
from ppfl import Federation, Population, fit
from ppfl.algorithms import FedAvg

n, width = 50_000, 1000  # 200 MB of float32, as a file of holes
np.memmap(sys.argv[1], np.float32, "w+", shape=(n, width)).flush()
x = np.memmap(sys.argv[1], np.float32, "r", shape=(n, width))
small = Federation.from_arrays(np.zeros((8, width), np.float32), [0, 1] * 4, list("aabbccdd"), test_fraction=0)
population, method = Population(nn.Linear(width, 2), k=1), FedAvg(lr=0.1, batch_size=8, local_steps=2)
fit(population, small, method, rounds=1)
(line,) = [line for line in open("/proc/self/status") if line.startswith("VmData")]
most = int(line.split()[1]) * 1024 + 100 * 2**20  # bytes: no room for a copy of what is trained on
resource.setrlimit(resource.RLIMIT_DATA, (most, most))
who = np.random.default_rng(0).integers(0, 500, n)  # in no order
federation = Federation.from_arrays(x, np.arange(n) % 2, who, validation_fraction=0.1)
federation.fingerprint
fit(population, federation.select(federation.ids[:100]), method, rounds=1)
try:
    Federation.from_arrays(np.array(x), np.arange(n) % 2, who)
except MemoryError:
    print("no room for a copy")
"""


@pytest.mark.processes
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_large_file_is_never_copied(tmp_path):
    command, environment = [sys.executable, "-c", LARGE, str(tmp_path / "x.raw")], os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.stdout == "no room for a copy\n", done.stderr
