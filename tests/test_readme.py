"""What the README shows works as shown."""

import re
import tomllib
from pathlib import Path

import numpy as np
import pytest

from ppfl.algorithms import METHODS
from ppfl.runs import load_experiment
from ppfl.runs.comparison import load_comparison

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_the_python_example_runs(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    example, _ = blocks("python")
    exec(compile(example, "README.md", "exec"), {})
    accuracy, membership, labels = capsys.readouterr().out.strip().split("\n", 2)
    assert 0 < float(accuracy) <= 1
    assert membership.startswith("tensor([")
    assert labels.startswith("tensor([")


def test_the_table_example_runs() -> None:
    _, example = blocks("python")
    random = np.random.default_rng(0)
    names = {"X": random.normal(size=(60, 2)), "y": random.normal(size=60), "ids": np.arange(60) % 6}
    exec(compile(example, "README.md", "exec"), names)
    assert names["model"].memberships_.shape == (6, 2)


def test_the_experiment_file_is_one(tmp_path: Path) -> None:
    (example,) = blocks("toml")
    (tmp_path / "digits.toml").write_text(example)
    assert load_experiment(tmp_path / "digits.toml", ["population.k=3"]).population.k == 3


@pytest.mark.parametrize("file", sorted((ROOT / "experiments").glob("*.toml")), ids=lambda path: path.stem)
def test_shipped_experiments_are_valid(file: Path) -> None:
    if "methods" in tomllib.loads(file.read_text()):
        assert {experiment.name for experiment in load_comparison(file).values()} == {file.stem}
    else:
        assert load_experiment(file).name == file.stem


def test_local_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / target).exists(), target


def test_the_comparison_in_the_docs_is_one(tmp_path: Path) -> None:
    (example,) = re.findall(r"```toml\n(.*?)```", (ROOT / "docs" / "methods.md").read_text(), re.DOTALL)
    (tmp_path / "methods.toml").write_text(example)
    assert list(load_comparison(tmp_path / "methods.toml")) == ["FedAvg", "PPFL2"]


def test_every_method_is_in_the_docs() -> None:
    page = (ROOT / "docs" / "methods.md").read_text()
    assert all(f"`{name}`" in page for name in METHODS)
