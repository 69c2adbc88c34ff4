"""The data settings of an experiment file become a federation or an error of one line; real data are complete."""

import inspect
import re
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter, ValidationError

from kit.files import write_mnist
from kit.refusals import DataError, SettingError, assert_refused
from ppfl.data import DATASETS, DataSettings, build, partitions, synthetic
from ppfl.data.partition_settings import DirichletSources, LabelGroups

ADAPTER = TypeAdapter(DataSettings)


def parse(text: str):
    return ADAPTER.validate_python(tomllib.loads(text)["data"])


def test_a_short_experiment_file():
    partition = (
        "partition = {name = 'label_groups', groups = [[0, 6], [5, 8], [2, 3, 9], [1, 4, 7]], clients = [2, 3, 4, 5]}"
    )
    f = parse(f"[data]\nname = 'digits'\ntest_fraction = 0.25\nseed = 3\n{partition}").build()
    assert (f.name, f.n_clients) == ("digits", 14) and len(f.test) / 1797 == pytest.approx(0.25, abs=0.01)
    assert parse("data = {name = 'digits'}").build().n_clients == 40


def test_every_partition_and_population_by_name():
    twelve = [{"name": "label_groups", "clients": 3}, {"name": "dirichlet_sources", "clients": 12, "alpha": 0.2}]
    for partition in (*twelve, {"name": "dirichlet_labels", "clients": 12}, {"name": "iid", "clients": 12}):
        f = build("digits", partition=partition, validation_fraction=0.1)
        assert (f.n_clients, sum(len(part) for part in f.splits.values())) == (12, 1797)
    small = {"n_clients": 6, "dim": 4, "test_points": 5}
    for name in ("synthetic", "synthetic_groups", "synthetic_linear", "logistic_population"):
        f, other = build(name, **small), build(name, **small, seed=1)
        assert (f.n_clients, len(f.test)) == (6, 30) and not torch.equal(f.test.x, other.test.x)


def test_settings_and_functions_have_the_same_defaults():
    for model, function in (
        (DATASETS["synthetic"], synthetic.synthetic_classification),
        (DATASETS["synthetic_groups"], synthetic.synthetic_groups),
        (DATASETS["synthetic_linear"], synthetic.synthetic_linear),
        (DATASETS["logistic_population"], synthetic.logistic_population),
        (LabelGroups, partitions.by_label_groups),
        (DirichletSources, partitions.dirichlet_sources),
    ):
        defaults = {key: each.default for key, each in inspect.signature(function).parameters.items()}
        for key, field in model.model_fields.items():
            assert key == "name" or field.default == defaults[key]


def test_files_are_found_beside_the_experiment_then_in_the_data_folder(tmp_path, monkeypatch):
    def save(folder, clients: int):
        folder.mkdir(exist_ok=True)
        np.savez(folder / "a.npz", x=np.zeros((12, 2)), y=np.arange(12) % 2, client=np.arange(12) % clients)

    save(tmp_path / "data", 2)
    monkeypatch.setenv("PPFL_DATA", str(tmp_path / "data"))
    experiment = tmp_path / "experiment"
    assert build("npz", base=experiment, file="a.npz").n_clients == 2
    save(experiment, 3)
    assert build("npz", base=experiment, file="a.npz").n_clients == 3
    assert build("npz", base=experiment, file="../data/a.npz").n_clients == 2
    assert build("npz", file="a.npz").n_clients == 2
    assert build("npz", file=str(experiment / "a.npz"), partition={"name": "iid", "clients": 4}).n_clients == 4
    assert_refused(lambda: build("npz", base=experiment, file="b.npz"), DataError, "no file", "b.npz", "PPFL_DATA")
    (tmp_path / "a.csv").write_text("who,x,y\n" + "a,1,n\nb,2,y\n" * 5)
    f = build("csv", base=tmp_path, file="a.csv", client="who", target="y")
    assert (f.ids, f.classes, f.name) == (("a", "b"), ("n", "y"), "a")


def test_a_subset_of_images_depends_on_the_seed(tmp_path, monkeypatch):
    shades = np.arange(60, dtype=np.uint8)
    write_mnist(tmp_path, np.broadcast_to(shades[:, None, None], (60, 28, 28)), shades % 10)

    def some(**more) -> set[int]:
        halves = {"partition": {"name": "iid", "clients": 2}, "test_fraction": 0}
        f = build("mnist", folder=tmp_path, standardise=False, **halves, **more)
        found = (255 * f.train.x[:, 0]).round().long()
        assert torch.equal(found % 10, f.train.y)
        return set(found.tolist())

    assert len(some(samples=20)) == 20 and some(samples=20) != some(samples=20, seed=1)
    assert some(samples=20) < some(samples=40) < some() == some(samples=60) == set(range(60))
    assert_refused(lambda: some(samples=61), DataError, "61 samples asked of mnist, which has 60")
    monkeypatch.delenv("PPFL_DATA", raising=False)
    assert_refused(lambda: build("mnist"), DataError, "no folder for mnist", "PPFL_DATA")


WRONG = {
    "unknown data": ({"name": "mnits"}, "mnits", "data sets are digits"),
    "unknown key": ({"name": "digits", "folder": "x"}, "digits.folder"),
    "unknown partition": ({"name": "digits", "partition": {"name": "sorted"}}, "partition"),
    "unknown key of a partition": ({"name": "digits", "partition": {"name": "iid", "alpha": 1}}, "partition.iid.alpha"),
    "wrong fraction": ({"name": "digits", "test_fraction": 1.5}, "digits.test_fraction", "less than 1"),
    "no file": ({"name": "csv", "client": "a", "target": "b"}, "csv.file", "required"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_setting_is_refused_in_one_line(case):
    settings, *words = WRONG[case]
    assert_refused(lambda: build(**settings), SettingError, *words)


def test_settings_are_immutable_survive_json_and_the_docs_show_valid_ones():
    for name in ("digits", "digit_domains", "mnist", "cifar10", "femnist", "shakespeare", "stackexchange", "synthetic"):
        settings = ADAPTER.validate_python({"name": name})
        assert ADAPTER.validate_json(settings.model_dump_json()) == settings
        with pytest.raises(ValidationError):
            settings.seed = 4
    text = (Path(__file__).parents[2] / "docs" / "data.md").read_text()
    found = [parse(block) for block in re.findall(r"```toml\n(.*?)```", text, re.DOTALL)]
    assert [each.name for each in found] == ["femnist", "shakespeare", "stackexchange", "digit_domains"]


REAL = {  # folders that are needed, settings, and the numbers of clients, samples and classes
    "mnist": (["mnist"], {}, (100, 70_000, 10)),
    "femnist": (["femnist"], {}, (289, 46_035, 62)),
    "shakespeare": (["shakespeare"], {}, (715, 43_323, 90)),
    "stackexchange": (["stackexchange"], {}, (428, 65_369, 10_004)),
    "digit_domains": (["digits5", "mnist"], {}, (5, 37_190, 10)),
    "csv": (["tabular"], {"file": "tabular/mlmRev_Contraception.csv.gz", "client": "district", "target": "use",
                          "columns": ["age"]}, (60, 1934, 2)),
}  # fmt: skip
SLOW = {"digit_domains": pytest.mark.slow}


@pytest.mark.parametrize("name", [pytest.param(name, marks=SLOW.get(name, ())) for name in REAL])
def test_real_data_are_complete(name, real_data, monkeypatch):
    folders, settings, numbers = REAL[name]
    if not all((real_data / folder).is_dir() for folder in folders):
        pytest.skip(f"no {' or '.join(folders)} in the data folder")
    monkeypatch.setenv("PPFL_DATA", str(real_data))
    f = build(name, **settings)
    assert (f.n_clients, sum(len(part) for part in f.splits.values()), f.n_classes) == numbers
    if name == "mnist":
        counts = (f.label_counts() + f.label_counts("test")).sum(0).tolist()
        assert counts == [6903, 7877, 6990, 7141, 6824, 6313, 6876, 7293, 6825, 6958]
    if name == "femnist":
        assert f.train.x[:, 0, ::27, ::27].float().mean() < 10  # no ink at the corners
        some = build("femnist", clients=2)
        assert all(torch.equal(some.client(id)["test"].x, f.client(id)["test"].x) for id in some.ids)
    if name == "shakespeare":
        targets = f.client("ALL_S_WELL_THAT_ENDS_WELL_ADAM")["train"].y.flatten().tolist()
        text = "".join(f.classes[token] for token in targets if token >= 0)
        assert "Yonder comes my master, your brother.<eos>" in text
