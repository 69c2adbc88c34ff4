"""FEMNIST in its three formats: every writer has its own images, with ink as 1, whatever the format."""

import gzip
import json

import numpy as np
import pytest
import torch

from kit.files import write_tff
from ppfl.core.errors import DataError, SettingError
from ppfl.data import FEMNIST_CLASSES, build, read_femnist
from ppfl.data.limits import limited

SIZES = {"ann": 8, "bob": 5, "eve": 3}
RNG = np.random.default_rng(0)
LABELS = {writer: RNG.integers(0, 62, size) for writer, size in SIZES.items()}
PAPER = {  # light, with a little ink
    writer: np.where(RNG.random((size, 28, 28)) < 0.9, 255, RNG.integers(0, 256, (size, 28, 28))).astype(np.uint8)
    for writer, size in SIZES.items()
}


def write_leaf(path, writers=tuple(SIZES), rows=slice(None), **changes):
    data = {w: {"x": (PAPER[w][rows].reshape(-1, 784) / 255).tolist(), "y": LABELS[w][rows].tolist()} for w in writers}
    content = {"users": [*writers], "num_samples": [len(data[w]["y"]) for w in writers], "user_data": data} | changes
    path.parent.mkdir(exist_ok=True)
    text = json.dumps(content).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


def write_npz(path, writers=tuple(SIZES), **changes):
    order = RNG.permutation(sum(SIZES[w] for w in writers))
    arrays = {
        "x": np.concatenate([PAPER[w] for w in writers])[order],
        "y": np.concatenate([LABELS[w] for w in writers])[order],
        "client": np.repeat(np.arange(len(writers)), [SIZES[w] for w in writers])[order],
        "writer_id": np.array(writers),
    }
    np.savez(path, **{key: value for key, value in (arrays | changes).items() if value is not None})
    return path


def write_h5(path, rows=slice(None)):
    pytest.importorskip("h5py")
    fields = {w: {"pixels": (PAPER[w][rows] / 255).astype(np.float32), "label": LABELS[w][rows]} for w in SIZES}
    return write_tff(path, fields)


def leaf_folder(folder):
    write_leaf(folder / "all_data_0.json", ("ann", "bob"))
    write_leaf(folder / "all_data_1.json", ("eve",))
    return folder


def train_and_test_folder(folder):
    write_leaf(folder / "train" / "a_train_9.json", rows=slice(2, None))
    write_leaf(folder / "test" / "a_test_9.json", rows=slice(0, 2))
    return folder


def tff_folder(folder):
    write_h5(folder / "fed_emnist_train.h5", slice(2, None))
    write_h5(folder / "fed_emnist_test.h5", slice(0, 2))
    return folder


SOURCES = {
    "LEAF": leaf_folder,
    "LEAF, one file": lambda folder: write_leaf(folder / "all_data_0.json"),
    "LEAF, compressed": lambda folder: write_leaf(folder / "all_data_0.json.gz"),
    "LEAF, train and test": train_and_test_folder,
    "TFF": tff_folder,
    "TFF, one file": lambda folder: write_h5(folder / "fed_emnist_train.h5"),
    "npz": lambda folder: write_npz(folder / "writers.npz").parent,
}


def rows_of(part) -> list:
    return sorted(zip(part.y.tolist(), map(bytes, part.x.numpy()), strict=True))


@pytest.mark.parametrize("source", SOURCES)
def test_every_writer_has_its_own_images(tmp_path, source):
    f = read_femnist(SOURCES[source](tmp_path), min_samples=1, test_fraction=0.2)
    assert (set(f.ids), f.classes, f.name) == (set(SIZES), FEMNIST_CLASSES, "femnist")
    assert (f.train.x.dtype, tuple(f.train.x.shape[1:])) == (torch.uint8, (1, 28, 28))
    for writer in f.ids:
        found = [row for part in f.client(writer).values() for row in rows_of(part)]
        assert sorted(found) == sorted(zip(LABELS[writer].tolist(), map(bytes, 255 - PAPER[writer]), strict=True))


@pytest.mark.parametrize("source", ["LEAF, train and test", "TFF"])
def test_the_test_part_of_the_source_is_kept(tmp_path, source):
    f = read_femnist(SOURCES[source](tmp_path), min_samples=1, test_fraction=0.5)
    for writer in f.ids:
        tested = zip(LABELS[writer][:2].tolist(), map(bytes, 255 - PAPER[writer][:2]), strict=True)
        assert rows_of(f.client(writer)["test"]) == sorted(tested)


def test_an_npz_file_may_mark_its_test_rows_and_name_its_clients(tmp_path):
    names, marks = np.repeat([*SIZES], [*SIZES.values()]), np.arange(16) % 3 == 0
    x, y = (np.concatenate([part[w] for w in SIZES]) for part in (PAPER, LABELS))
    path = write_npz(tmp_path / "a.npz", x=x, y=y, client=names, writer_id=None, is_test=marks)
    f = read_femnist(path, min_samples=1)
    assert f.ids == tuple(SIZES)
    assert torch.equal(f.test.x[:, 0], torch.from_numpy(255 - x[marks]))


@pytest.mark.parametrize("source", SOURCES)
def test_writers_with_few_samples_are_left_out(tmp_path, source):
    path = SOURCES[source](tmp_path)
    assert set(read_femnist(path, min_samples=4).ids) == {"ann", "bob"}
    assert set(read_femnist(path, min_samples=8).ids) == {"ann"}
    with pytest.raises(DataError, match="0 of 3 clients have at least 30 samples"):
        read_femnist(path)


def test_some_writers_at_random(tmp_path):
    path = leaf_folder(tmp_path)

    def some(clients, seed=0) -> set[str]:
        return set(read_femnist(path, 1, clients, seed=seed).ids)

    assert some(1) < some(2) < some(3) == set(SIZES)
    assert len({tuple(some(1, seed)) for seed in range(20)}) == 3
    with pytest.raises(DataError, match="2 of 3 clients have at least 4 samples; expected 3 or more"):
        read_femnist(path, min_samples=4, clients=3)


def test_the_same_seed_gives_the_same_split(tmp_path):
    path = leaf_folder(tmp_path)
    first, again, other = (read_femnist(path, 3, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first.train.x, again.train.x) and torch.equal(first.test.x, again.test.x)
    assert not torch.equal(first.test.x, other.test.x)


def test_images_as_numbers_have_the_same_pixels(tmp_path):
    path = leaf_folder(tmp_path)
    images, numbers = (read_femnist(path, 1, image=image) for image in (True, False))
    assert (numbers.train.x.dtype, numbers.train.x.shape[1:]) == (torch.float32, (784,))
    torch.testing.assert_close(numbers.train.x, images.train.first_inputs(99).flatten(1))


def test_settings_of_an_experiment_file(tmp_path, monkeypatch):
    write_leaf(tmp_path / "femnist" / "all_data_0.json")
    assert build("femnist", folder="femnist", base=tmp_path, min_samples=4).ids == ("ann", "bob")
    file = build("femnist", file="femnist/all_data_0.json", base=tmp_path, min_samples=1, clients=2, image=False)
    assert (file.n_clients, file.train.x.ndim) == (2, 2)
    monkeypatch.setenv("PPFL_DATA", str(tmp_path))
    assert build("femnist", min_samples=8).ids == ("ann",)
    with pytest.raises(SettingError, match="both folder and file"):
        build("femnist", folder="femnist", file="a.npz")
    monkeypatch.delenv("PPFL_DATA")
    with pytest.raises(DataError, match=r"no folder for femnist.*PPFL_DATA"):
        build("femnist")
    with pytest.raises(DataError, match=r"no fed_emnist_train.h5, all_data_\*.json or npz"):
        build("femnist", folder=tmp_path)


ONE = {"x": [[1.0] * 784] * 2, "y": [0, 1]}
BROKEN_LEAF = {
    "no json": (b"{", "is not FEMNIST"),
    "a list": ([1], "expected users"),
    "no users": ({"user_data": {}}, "expected users"),
    "deep": (b"[" * 100_000, "is not FEMNIST"),
    "other names": ({"users": ["bob"]}, "others"),
    "names of another type": ({"users": [1, None]}, "is not FEMNIST"),
    "names that are a number": ({"users": 1}, "is not FEMNIST"),
    "other sizes": ({"num_samples": [3]}, "num_samples differs"),
    "a writer without images": ({"user_data": {"ann": {"y": [0]}}}, "no x and y"),
    "one label too few": ({"user_data": {"ann": ONE | {"y": [0]}}}, "labels are"),
    "labels of text": ({"user_data": {"ann": ONE | {"y": ["0", "1"]}}}, "labels are"),
    "a label of 62": ({"user_data": {"ann": ONE | {"y": [0, 62]}}}, "label 62 of client 'ann'.*outside 0..61"),
    "small images": ({"user_data": {"ann": ONE | {"x": [[1.0] * 10] * 2}}}, "expected \\(28, 28\\) or \\(784,\\)"),
    "images of different sizes": ({"user_data": {"ann": ONE | {"x": [[1.0] * 784, [1.0]]}}}, "is not FEMNIST"),
    "pixels of text": ({"user_data": {"ann": ONE | {"x": [["1"] * 784] * 2}}}, "numbers from 0 to 1"),
    "pixels that are bytes": ({"user_data": {"ann": ONE | {"x": [[255] * 784] * 2}}}, "numbers from 0 to 1"),
    "not a number": ({"user_data": {"ann": ONE | {"x": [[float("nan")] * 784] * 2}}}, "numbers from 0 to 1"),
    "light ink": ({"user_data": {"ann": ONE | {"x": [[0.0] * 784] * 2}}}, "light ink on a dark background"),
    "a NUL in a name": ({"users": ["a\0"], "user_data": {"a\0": ONE}}, "NUL"),
}


@pytest.mark.parametrize("case", BROKEN_LEAF)
def test_a_broken_leaf_file_is_refused(tmp_path, case):
    content, pattern = BROKEN_LEAF[case]
    path = tmp_path / "all_data_0.json"
    if isinstance(content, dict) and case != "no users":
        content = {"users": ["ann"], "num_samples": [2], "user_data": {"ann": ONE}} | content
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    with pytest.raises(DataError, match=pattern) as caught:
        read_femnist(path, min_samples=1, test_fraction=0)
    assert "\n" not in str(caught.value)


def test_a_name_that_occurs_twice_in_json_is_refused(tmp_path):
    path = tmp_path / "all_data_0.json"
    path.write_text('{"users": ["a"], "users": ["b"]}')
    with pytest.raises(DataError, match="a name occurs twice"):
        read_femnist(path)


@pytest.mark.parametrize(
    ("changes", "pattern"),
    [
        ({"client": None}, "expected x, y and client"),
        ({"client": np.full(16, 3)}, "positions in writer_id"),
        ({"client": np.full(16, -1)}, "positions in writer_id"),
        ({"client": np.full(16, 0.5)}, "positions in writer_id"),
        ({"client": np.zeros(3, int)}, "'client': 3"),
        ({"y": np.zeros(3, int)}, "'y': 3"),
        ({"y": np.full(16, 0.5)}, "labels are float64"),
        ({"is_test": np.zeros(3)}, "'is_test': 3"),
        ({"x": np.zeros((16, 10), np.uint8)}, "expected \\(28, 28\\)"),
        ({"x": np.zeros((16, 28, 28))}, "light ink"),
        ({"x": np.full((16, 784), np.inf)}, "numbers from 0 to 1"),
    ],
)
def test_a_broken_npz_file_is_refused(tmp_path, changes, pattern):
    with pytest.raises(DataError, match=pattern) as caught:
        read_femnist(write_npz(tmp_path / "a.npz", **changes), min_samples=1)
    assert "\n" not in str(caught.value)


def test_one_of_two_npz_files_must_be_named(tmp_path):
    for name in ("a.npz", "b.npz"):
        write_npz(tmp_path / name)
    with pytest.raises(DataError, match="2 npz files; expected one"):
        read_femnist(tmp_path)
    assert read_femnist(tmp_path / "a.npz", min_samples=1).n_clients == 3


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"pixels": np.ones((3, 28, 28)), "label": np.arange(2)}, "labels are int64 \\(2,\\)"),
        ({"pixels": np.ones((2, 8, 8)), "label": np.arange(2)}, "other things than images of client 'ann'"),
        ({"pixels": np.full((2, 28, 28), np.nan), "label": np.arange(2)}, "numbers from 0 to 1"),
        ({"pixels": np.ones((2, 28, 28)), "label": np.array([b"a", b"b"])}, "expected numbers"),
        ({"label": np.arange(2)}, "'pixels' is missing"),
        ({}, "'label' is missing"),
    ],
)
def test_a_broken_tff_file_is_refused(tmp_path, fields, pattern):
    pytest.importorskip("h5py")
    path = write_tff(tmp_path / "fed_emnist_train.h5", {"ann": fields})
    with pytest.raises(DataError, match=pattern) as caught:
        read_femnist(path, min_samples=1)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("source", SOURCES)
def test_more_than_the_limit_is_refused(tmp_path, source):
    path = SOURCES[source](tmp_path)
    with limited(bytes=5_000), pytest.raises(DataError, match="more than the limit of 5,000"):
        read_femnist(path, min_samples=1)


def test_real_writers(real_data, monkeypatch):
    if not (real_data / "femnist").is_dir():
        pytest.skip("no femnist/ in the data folder")
    monkeypatch.setenv("PPFL_DATA", str(real_data))
    f = build("femnist")
    assert int((f.train.sizes + f.test.sizes).min()) >= 30
    assert (f.n_classes, int(f.train.x.min()), int(f.train.x.max())) == (62, 0, 255)
    corners = f.train.x[:, 0, ::27, ::27].float()
    assert corners.mean() < 10  # no ink at the corners
    some = build("femnist", clients=20, min_samples=100)
    assert some.n_clients == 20 and set(some.ids) <= set(f.ids)
    for writer in some.ids:
        assert torch.equal(some.client(writer)["test"].x, f.client(writer)["test"].x)
