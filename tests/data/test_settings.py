"""The data settings of an experiment file become a federation or an error of one line; real data are complete."""

import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter

from kit.documents import blocks
from kit.files import write_mnist
from kit.refusals import DataError, SettingError, assert_refused
from ppfl.data import DataByName, build

ADAPTER = TypeAdapter(DataByName)
IID = {"name": "iid", "clients": 12}


def test_every_partition_and_population_by_name():
    groups = {"name": "label_groups", "groups": [[0, 6], [5, 8], [2, 3, 9], [1, 4, 7]], "clients": [1, 2, 4, 5]}
    sources = {"name": "dirichlet_sources", "clients": 12, "alpha": 0.2}
    for partition in (groups, sources, {"name": "dirichlet_labels", "clients": 12}, IID):
        f = build("digits", partition=partition, test_fraction=0.25, validation_fraction=0.1)
        assert (f.n_clients, sum(len(part) for part in f.splits.values())) == (12, 1797)
    small = {"n_clients": 6, "dim": 4, "test_points": 5}
    for name in ("synthetic", "synthetic_groups", "synthetic_linear"):
        f, other = build(name, **small), build(name, **small, seed=1)
        assert (f.n_clients, len(f.test)) == (6, 30) and not torch.equal(f.test.x, other.test.x)


def test_files_are_found_beside_the_experiment_then_in_the_data_folder(tmp_path, monkeypatch):
    def save(folder, clients):
        folder.mkdir()
        np.savez(folder / "a.npz", x=np.zeros((12, 2)), y=np.arange(12) % 2, client=np.arange(12) % clients)

    save(tmp_path / "data", 2)
    monkeypatch.setenv("PPFL_DATA", str(tmp_path / "data"))
    experiment = tmp_path / "experiment"
    assert build("npz", base=experiment, file="a.npz").n_clients == 2
    save(experiment, 3)
    assert build("npz", base=experiment, file="a.npz").n_clients == 3
    assert build("npz", file="a.npz").n_clients == 2
    assert_refused(lambda: build("npz", base=experiment, file="b.npz"), DataError, "no file", "b.npz", "PPFL_DATA")


def test_a_subset_of_images_depends_on_the_seed(tmp_path, monkeypatch):
    shades = np.arange(60, dtype=np.uint8)
    write_mnist(tmp_path, np.broadcast_to(shades[:, None, None], (60, 28, 28)), shades % 10)

    def some(samples, seed=0):
        f = build("mnist", folder=tmp_path, standardise=False, partition=IID, samples=samples, seed=seed)
        assert torch.equal((255 * f.train.x[:, 0]).round().long() % 10, f.train.y)
        return {round(255 * float(x[0])) for part in f.splits.values() for x in part.x}

    assert len(some(30)) == 30 and some(30) != some(30, seed=1)
    assert some(30) < some(40) < some(60) == set(range(60))
    assert_refused(lambda: some(61), DataError, "61 samples asked of mnist, which has 60")
    monkeypatch.delenv("PPFL_DATA", raising=False)
    assert_refused(lambda: build("mnist"), DataError, "no folder for mnist", "PPFL_DATA")


def test_a_wrong_setting_is_refused_in_one_line():
    for settings, *words in (
        ({"name": "mnits"}, "no data set 'mnits'", "did you mean 'mnist'?", "'digits'"),
        ({"name": "digits", "folder": "x"}, "no key 'folder'", "its keys are"),
        ({"name": "digits", "partition": {"name": "iid", "alpha": 1}}, "partition.alpha"),
        ({"name": "csv", "client": "a", "target": "b"}, "file is missing"),
    ):
        assert_refused(lambda: build(**settings), SettingError, *words)


def test_the_docs_show_settings_that_are_valid_and_survive_json():
    text = (Path(__file__).parents[2] / "docs" / "data.md").read_text()
    shown = [ADAPTER.validate_python(tomllib.loads(block)["data"]) for block in blocks(text, "toml")]
    assert all(ADAPTER.validate_json(settings.model_dump_json()) == settings for settings in shown)


REAL = [
    ("mnist", 100, 70_000, 10),
    ("femnist", 289, 46_035, 62),
    ("readers.shakespeare:read", 715, 43_323, 90),
    ("readers.stackexchange:read", 428, 65_369, 10_004),
    pytest.param("readers.digit_domains:read", 5, 37_190, 10, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("name", "clients", "samples", "classes"), REAL)
def test_real_data_are_complete(name, clients, samples, classes, real_data, monkeypatch):
    folders = ("digits5", "mnist") if "domains" in name else (name.removeprefix("readers.").removesuffix(":read"),)
    if not all((real_data / folder).is_dir() for folder in folders):
        pytest.skip(f"no {' or '.join(folders)} in the data folder")
    monkeypatch.setenv("PPFL_DATA", str(real_data))
    f = build(name)
    assert (f.n_clients, sum(len(part) for part in f.splits.values()), f.n_classes) == (clients, samples, classes)


def test_a_partition_keeps_marks_of_test_samples_and_is_refused_where_data_have_clients(tmp_path):
    x, y, mark = np.arange(40.0)[:, None], np.arange(40) % 2, np.arange(40) % 4 == 0
    np.savez(tmp_path / "marked.npz", x=x, y=y, is_test=mark)
    f = build("npz", tmp_path, file="marked.npz", partition={"name": "iid", "clients": 3})
    assert sorted(f.test.x.flatten().tolist()) == x[mark].flatten().tolist()
    np.savez(tmp_path / "owned.npz", x=x, y=y, client=y)
    owned = {"base": tmp_path, "file": "owned.npz", "partition": {"name": "iid", "clients": 3}}
    assert_refused(lambda: build("npz", **owned), DataError, "has clients of its own", "leave it out")
    assert build("npz", tmp_path, file="owned.npz").n_clients == 2
    np.savez(tmp_path / "pooled.npz", x=x, y=y)
    assert_refused(lambda: build("npz", tmp_path, file="pooled.npz"), DataError, "choose a partition")
