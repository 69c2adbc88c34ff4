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
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from ppfl import Federation, Population, fit
from ppfl.algorithms import PPFL, FedAvg
from ppfl.core.errors import DataError
from ppfl.core.losses import IGNORED
from ppfl.data import MappedRows
from ppfl.data.limits import limited


class Endless(Dataset):
    """No length and no end, as numpy would find out."""

    def __getitem__(self, at):
        return torch.zeros(2), 0


class Pairs(Dataset):
    def __init__(self, pairs):
        self.pairs = pairs

    def __len__(self):
        return len(self.pairs)

    def __getitem__(self, at):
        return self.pairs[at]


class Stream(IterableDataset):
    def __iter__(self):
        yield torch.zeros(2), 0


def tensors(n, seed=0, classes=2):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, 3, generator=generator), torch.arange(n) % classes


def same(one, other):
    assert one.ids == other.ids
    assert one.splits.keys() == other.splits.keys()
    for name, part in one.splits.items():
        assert torch.equal(part.x, other.splits[name].x)
        assert torch.equal(part.y, other.splits[name].y)


# ── datasets ──────────────────────────────────────────────────────────────────────────────────────


def test_datasets_are_the_arrays_they_hold():
    (xa, ya), (xb, yb) = tensors(6), tensors(9, seed=1)
    expected = Federation.from_arrays(torch.cat([xa, xb]), torch.cat([ya, yb]), ["a"] * 6 + ["b"] * 9)
    pairs = [(x.numpy(), int(y)) for x, y in zip(xb, yb, strict=True)]
    joined = ConcatDataset([TensorDataset(xb[:4], yb[:4]), Pairs(list(zip(xb[4:], yb[4:], strict=True)))])
    for b in (TensorDataset(xb, yb), Pairs(pairs), Subset(Pairs([None, *pairs]), range(1, 10)), pairs, joined):
        same(Federation.from_datasets({"a": TensorDataset(xa, ya), "b": b}), expected)
    assert Federation.from_datasets([TensorDataset(xa, ya), TensorDataset(xb, yb)]).ids == ("0", "1")


def test_datasets_for_testing_and_one_dataset_for_all():
    x, y = tensors(12)
    train = {"a": TensorDataset(x[:4], y[:4]), "b": TensorDataset(x[4:8], y[4:8])}
    f = Federation.from_datasets(train, test={"b": TensorDataset(x[8:], y[8:])})
    assert torch.equal(f.train.x, x[:8]) and torch.equal(f.test.x, x[8:])
    assert f.test.sizes.tolist() == [0, 4]
    ids = list("aabbccaabbcc")
    same(Federation.from_datasets(TensorDataset(x, y), clients=ids), Federation.from_arrays(x, y, ids))


def test_sentences_of_datasets_are_padded_over_all_clients():
    a = Pairs([([1, 2, 3], 0), ([4], 1)])
    b = TensorDataset(torch.tensor([[5, 6], [7, 8]]), torch.tensor([0, 1]))
    f = Federation.from_datasets({"a": a, "b": b}, test_fraction=0)
    assert f.train.x.tolist() == [[1, 2, 3], [4, 0, 0], [5, 6, 0], [7, 8, 0]]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: Federation.from_arrays(Endless(), [0, 1], ["a", "b"]), "Endless.*from_datasets"),
        (lambda: Federation.from_arrays(TensorDataset(*tensors(4)), [0, 1] * 2, list("abab")), "from_datasets"),
        (lambda: Federation.from_arrays(tensors(4)[0], DataLoader(Pairs([1])), list("abab")), "from_datasets"),
        (lambda: Federation.from_arrays({"p": [1.0]}, [0], ["a"]), "of 1 inputs.*from_columns"),
        (lambda: Federation.from_datasets({"a": Endless()}), "Dataset with a length"),
        (lambda: Federation.from_datasets({"a": Stream()}), "IterableDataset.*islice"),
        (lambda: Federation.from_datasets({"a": DataLoader(Pairs([1]))}), "give its dataset"),
        (lambda: Federation.from_datasets({"a": Pairs([{"x": 1}])}), r"item 0 of .*'a' is a dict.*pair \(x, y\)"),
        (lambda: Federation.from_datasets({"a": Pairs([])}), "is empty"),
        (lambda: Federation.from_datasets({}), "no dataset"),
        (lambda: Federation.from_datasets(Pairs([1])), "one dataset per client"),
        (lambda: Federation.from_datasets({"a": Pairs([(np.zeros(2), 0), (np.zeros(3), 1)])}), "x"),
        (lambda: Federation.from_datasets({"a": TensorDataset(torch.zeros(2, 2))}), "1 tensors"),
        (lambda: Federation.from_datasets({"a": Pairs([(1, 0)])}, test={"b": Pairs([(1, 0)])}), "'b' have a dataset"),
        (lambda: Federation.from_columns({"x": [1.0]}), "no column 'y'; the data have 'x'"),
        (lambda: Federation.from_columns({"x": ["a"], "y": [0], "client": ["c"]}, x=["x"]), "encode"),
        (lambda: Federation.from_arrays([[1, 2], [3.5]], [0, 1], ["a", "a"]), "row 1 is float64"),
    ],
)
def test_what_cannot_be_read_is_refused_at_once_in_one_line(call, words):
    with pytest.raises(DataError, match=words) as error:
        call()
    assert "\n" not in str(error.value)


# ── columns and ragged rows ───────────────────────────────────────────────────────────────────────


def test_columns_of_a_dict_and_of_a_table_are_arrays():
    x, y = tensors(6)
    who = list("ababab")
    expected = Federation.from_arrays(x[:, :2], y, who)
    columns = {"p": x[:, 0].numpy(), "q": x[:, 1].tolist(), "y": y.tolist(), "client": who}
    for data in (columns, pd.DataFrame(columns)):
        found = Federation.from_columns(data, x=["p", "q"])
        same(found, expected)
        assert found.features == ("p", "q")
        assert Federation.from_columns(data, x="p").train.x.shape[1:] == (1,)


def test_a_table_of_token_lists_and_tags_is_padded():
    table = pd.DataFrame({"x": [[3, 4, 5], [6]], "y": [[0, 1, 1], [1]], "client": ["a", "b"]})
    f = Federation.from_columns(table, test_fraction=0, pad=9)
    assert f.train.x.tolist() == [[3, 4, 5], [6, 9, 9]]
    assert f.train.y.tolist() == [[0, 1, 1], [1, IGNORED, IGNORED]]
    net = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 2))
    fit(Population(net, k=1), f, FedAvg(lr=0.1), rounds=1)


def test_padding_is_limited():
    with limited(bytes=1000), pytest.raises(DataError, match="padded to 100 values"):
        Federation.from_arrays([[1] * 100, [1]], [0, 1], ["a", "a"])


# ── images as bytes ───────────────────────────────────────────────────────────────────────────────


def test_bytes_train_and_predict_as_the_floats_they_stand_for():
    images = torch.randint(0, 256, (24, 1, 4, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    y, who = torch.arange(24) % 3, ["a", "b", "c"] * 8
    as_bytes = Federation.from_arrays(images, y, who)
    as_floats = Federation.from_arrays(images.float() / 255, y, who)
    assert as_bytes.train.x.dtype == torch.uint8
    assert "x (1, 4, 4) bytes scaled to 0..1" in as_bytes.describe()
    torch.testing.assert_close(as_bytes.feature_means(), as_floats.feature_means())
    net = nn.Sequential(nn.Flatten(), nn.Linear(16, 3))
    for engine in ("loop", "stacked"):
        for batch_size in (4, None):
            one, other = (
                fit(Population(net, k=2), f, PPFL(lr=0.1, batch_size=batch_size), rounds=2, engine=engine)
                for f in (as_bytes, as_floats)
            )
            torch.testing.assert_close(one.memberships, other.memberships)
            torch.testing.assert_close(one.predict("a", images[:2]), other.predict("a", images[:2] / 255))
            assert one.evaluate(as_bytes).pooled_loss == pytest.approx(other.evaluate(as_floats).pooled_loss)


# ── files ─────────────────────────────────────────────────────────────────────────────────────────


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
    torch.testing.assert_close(one.feature_means(), other.feature_means())
    some = ["c2", "c0"]
    assert torch.equal(one.select(some).train.x[:], other.select(some).train.x)
    assert torch.equal(one.client("c1")["test"].x, other.client("c1")["test"].x)
    net = nn.Linear(3, 3)
    for engine in ("loop", "stacked"):
        for batch_size in (4, None):
            method = PPFL(lr=0.1, batch_size=batch_size)
            fits = [fit(Population(net, k=2), f, method, engine=engine, rounds=2) for f in (one, other)]
            torch.testing.assert_close(fits[0].memberships, fits[1].memberships)
            assert fits[0].evaluate(one).pooled_loss == pytest.approx(fits[1].evaluate(other).pooled_loss)


def test_a_mapped_file_of_another_type_is_refused(tmp_path):
    np.save(tmp_path / "x.npy", np.zeros((4, 2), np.float16))
    with pytest.raises(DataError, match="float16 in a file.*must be float32"):
        Federation.from_arrays(np.load(tmp_path / "x.npy", mmap_mode="r"), [0, 1] * 2, list("abab"))


def test_a_mapped_file_with_nan_names_the_row_and_the_client(tmp_path):
    x = np.zeros((6, 2), np.float32)
    x[4, 1] = np.nan
    np.save(tmp_path / "x.npy", x)
    with pytest.raises(DataError, match="row 4 of client 'a'"):
        Federation.from_arrays(np.load(tmp_path / "x.npy", mmap_mode="r"), [0, 1] * 3, list("ababab"), test_fraction=0)


LARGE = """
import resource, sys
import numpy as np, torch
from torch import nn
from ppfl import Federation, Population, fit
from ppfl.algorithms import FedAvg

n, width = 75_000, 1000  # 300 MB of float32, as a file of holes
x = np.memmap(sys.argv[1], np.float32, "w+", shape=(n, width))
x.flush()
x = np.memmap(sys.argv[1], np.float32, "r", shape=(n, width))
small = Federation.from_arrays(np.zeros((8, width), np.float32), [0, 1] * 4, list("aabbccdd"), test_fraction=0)
net = nn.Linear(width, 2)
method = FedAvg(lr=0.1, batch_size=8, local_steps=2)
fit(Population(net, k=1), small, method, rounds=1)
(line,) = [line for line in open("/proc/self/status") if line.startswith("VmData")]
most = int(line.split()[1]) * 1024 + 150 * 2**20  # bytes: no room for a copy of what is trained on
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


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_large_file_is_never_copied(tmp_path):
    command = [sys.executable, "-c", LARGE, str(tmp_path / "x.raw")]
    run = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert run.stdout == "no room for a copy\n", run.stderr
