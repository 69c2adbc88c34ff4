"""The data settings of an experiment file become a federation, or an error message of one line."""

import inspect
import re
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter, ValidationError

from kit.files import write_mnist
from ppfl.core.errors import DataError, SettingError
from ppfl.data import DATASETS, DataSettings, build, partitions, synthetic
from ppfl.data.partition_settings import DirichletSources, LabelGroups

ADAPTER = TypeAdapter(DataSettings)


def parse(text: str):
    return ADAPTER.validate_python(tomllib.loads(text)["data"])


def test_a_short_experiment_file():
    settings = parse("""
        [data]
        name = "digits"
        test_fraction = 0.25
        seed = 3
        [data.partition]
        name = "label_groups"
        groups = [[0, 6], [5, 8], [2, 3, 9], [1, 4, 7]]
        clients = [2, 3, 4, 5]
    """)
    f = settings.build()
    assert (f.name, f.n_clients) == ("digits", 14)
    assert len(f.test) / 1797 == pytest.approx(0.25, abs=0.01)
    assert parse(f"data = {{name = 'digits', seed = {settings.seed}}}").build().n_clients == 40


@pytest.mark.parametrize(
    "partition",
    [
        {"name": "label_groups", "clients": 3},
        {"name": "dirichlet_sources", "clients": 12, "alpha": 0.2},
        {"name": "dirichlet_sources", "clients": 12, "equal": False},
        {"name": "dirichlet_labels", "clients": 12},
        {"name": "iid", "clients": 12},
    ],
)
def test_every_partition_by_name(partition):
    f = build("digits", partition=partition, validation_fraction=0.1)
    assert f.n_clients == 12
    assert sum(len(part) for part in f.splits.values()) == 1797


@pytest.mark.parametrize("name", ["synthetic", "synthetic_groups", "synthetic_linear", "logistic_population"])
def test_every_population_by_name(name):
    small = {"n_clients": 6, "dim": 4, "test_points": 5}
    f, other = build(name, **small), build(name, **small, seed=1)
    assert (f.n_clients, len(f.test)) == (6, 30)
    assert not torch.equal(f.test.x, other.test.x)


@pytest.mark.parametrize(
    ("model", "function"),
    [
        (DATASETS["synthetic"], synthetic.synthetic_classification),
        (DATASETS["synthetic_groups"], synthetic.synthetic_groups),
        (DATASETS["synthetic_linear"], synthetic.synthetic_linear),
        (DATASETS["logistic_population"], synthetic.logistic_population),
        (LabelGroups, partitions.by_label_groups),
        (DirichletSources, partitions.dirichlet_sources),
    ],
)
def test_settings_and_functions_have_the_same_defaults(model, function):
    defaults = {k: p.default for k, p in inspect.signature(function).parameters.items()}
    for key, field in model.model_fields.items():
        assert key == "name" or field.default == defaults[key]


def test_paths_are_relative_to_the_experiment_file(tmp_path):
    pytest.importorskip("pandas")
    (tmp_path / "a.csv").write_text("who,x,y\n" + "a,1,n\nb,2,y\n" * 5)
    f = build("csv", base=tmp_path, file="a.csv", client="who", target="y")
    assert (f.ids, f.classes, f.name) == (("a", "b"), ("n", "y"), "a")
    assert build("csv", file=str(tmp_path / "a.csv"), client="who", target="y").ids == f.ids
    np.savez(tmp_path / "b.npz", x=np.zeros((20, 2)), y=np.arange(20) % 2, client=np.arange(20) % 4)
    assert build("npz", base=tmp_path, file="b.npz").n_clients == 4
    assert build("npz", base=tmp_path, file="b.npz", partition={"name": "iid", "clients": 3}).n_clients == 3
    tokens = build("npz", base=tmp_path / "..", file=f"{tmp_path.name}/b.npz")
    assert tokens.train.x.dtype == torch.float32


def test_files_that_are_not_beside_the_experiment_are_found_in_the_data_folder(tmp_path, monkeypatch):
    def save(folder, clients: int):
        folder.mkdir(exist_ok=True)
        np.savez(folder / "a.npz", x=np.zeros((12, 2)), y=np.arange(12) % 2, client=np.arange(12) % clients)

    save(tmp_path / "data", 2)
    monkeypatch.setenv("PPFL_DATA", str(tmp_path / "data"))
    experiment = tmp_path / "experiment"
    assert build("npz", base=experiment, file="a.npz").n_clients == 2
    save(experiment, 3)
    assert build("npz", base=experiment, file="a.npz").n_clients == 3
    assert build("npz", file="a.npz").n_clients == 2
    with pytest.raises(DataError, match=r"no file .*experiment.b.npz.*PPFL_DATA"):
        build("npz", base=experiment, file="b.npz")


def test_a_subset_of_images_depends_on_the_seed(tmp_path):
    shades = np.arange(60, dtype=np.uint8)
    write_mnist(tmp_path, np.broadcast_to(shades[:, None, None], (60, 28, 28)), shades % 10)

    def some(**more) -> set[int]:
        halves = {"partition": {"name": "iid", "clients": 2}, "test_fraction": 0}
        f = build("mnist", folder=tmp_path, standardise=False, **halves, **more)
        found = (255 * f.train.x[:, 0]).round().long()
        assert torch.equal(found % 10, f.train.y)
        return set(found.tolist())

    assert len(some(samples=20)) == 20
    assert some(samples=20) < some(samples=40) < some() == some(samples=60) == set(range(60))
    assert some(samples=20) != some(samples=20, seed=1)
    with pytest.raises(DataError, match="61 samples asked of mnist, which has 60; ask for 1 to 60"):
        some(samples=61)


def test_mnist_is_found_by_folder_or_environment(monkeypatch, tmp_path, real_data):
    if not (real_data / "mnist").is_dir():
        pytest.skip("no mnist/ in the data folder")
    monkeypatch.setenv("PPFL_DATA", str(real_data))
    f = build("mnist")
    assert (f.n_clients, len(f.train) + len(f.test)) == (100, 70_000)
    assert f.truth.memberships.sum(0).tolist() == [25] * 4
    monkeypatch.delenv("PPFL_DATA")
    with pytest.raises(DataError, match=r"no folder for mnist.*PPFL_DATA"):
        build("mnist")
    with pytest.raises(DataError, match="no train-images"):
        build("mnist", folder=tmp_path)


WRONG = {
    "unknown data": ({"name": "mnits"}, "mnits.*data sets are digits"),
    "unknown key": ({"name": "digits", "folder": "x"}, "digits.folder"),
    "unknown partition": ({"name": "digits", "partition": {"name": "sorted"}}, "partition"),
    "unknown partition key": (
        {"name": "digits", "partition": {"name": "iid", "alpha": 1}},
        "digits.partition.iid.alpha",
    ),
    "wrong fraction": ({"name": "digits", "test_fraction": 1.5}, "digits.test_fraction.*less than 1"),
    "no file": ({"name": "csv", "client": "a", "target": "b"}, "csv.file.*required"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_setting_gives_an_error_of_one_line(case):
    settings, pattern = WRONG[case]
    with pytest.raises(ValidationError):
        ADAPTER.validate_python(settings)
    with pytest.raises(SettingError, match=pattern) as caught:
        build(**settings)
    assert "\n" not in str(caught.value)


def test_the_examples_of_the_docs_are_valid_settings():
    text = (Path(__file__).parents[2] / "docs" / "data.md").read_text()
    found = [parse(block) for block in re.findall(r"```toml\n(.*?)```", text, re.DOTALL)]
    assert [each.name for each in found] == ["femnist", "shakespeare", "stackexchange", "digit_domains"]


def test_settings_are_immutable():
    settings = ADAPTER.validate_python({"name": "digits"})
    with pytest.raises(ValidationError):
        settings.seed = 4


def test_settings_survive_a_round_trip_through_json():
    for name in ("digits", "digit_domains", "mnist", "cifar10", "femnist", "shakespeare", "stackexchange", "synthetic"):
        settings = ADAPTER.validate_python({"name": name})
        assert ADAPTER.validate_json(settings.model_dump_json()) == settings
