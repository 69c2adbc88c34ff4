"""The code in docs/extending.md, docs/data.md, docs/python.md and docs/glm.md runs as it stands."""

import re
from pathlib import Path

import pytest

from ppfl.runs import run
from ppfl.runs.load import load_experiment

DOCS = Path(__file__).parents[1] / "docs"
PARTS = re.split(r"^## ", (DOCS / "extending.md").read_text(), flags=re.MULTILINE)[1:]
FILES = [part for part in PARTS if "\nfactory = " in part]
SECTIONS = [part for part in PARTS if part not in FILES]


def run_blocks(text: str, name: str) -> dict[str, object]:
    """Run the blocks of Python one after the other, and return what they define."""
    blocks = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    assert blocks
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, f"docs/{name}", "exec"), names)
    return names


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.splitlines()[0])
def test_the_code_of_a_section_runs(section: str) -> None:
    fitted = run_blocks(section, "extending.md")["fitted"]
    assert len(fitted.history) == 5 and fitted.memberships.shape[0] == len(fitted.ids)


def test_the_code_about_data_runs() -> None:
    names = run_blocks((DOCS / "data.md").read_text(), "data.md")
    assert "in a file" in names["federation"].describe()


def test_the_code_about_keeping_a_fit_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("onnxscript")
    monkeypatch.chdir(tmp_path)
    names = run_blocks((DOCS / "python.md").read_text(), "python.md")
    assert set(names["more"].ids) == set(names["newer"].ids) == set(names["longer"].ids) == set(names["everyone"].ids)
    assert len(names["longer"].history) == 10
    written = {"digits.safetensors", "residual.safetensors", "client.pt", "client.onnx"}
    assert {file.name for file in tmp_path.iterdir()} == written


def test_the_session_of_a_statistician_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("formulaic")
    monkeypatch.chdir(tmp_path)
    (section,) = re.findall(r"## A session.*?(?=^## )", (DOCS / "glm.md").read_text(), flags=re.DOTALL | re.MULTILINE)
    names = run_blocks(section, "glm.md")
    model, new = names["model"], names["new"]
    assert model.k_ == 2  # as the table was drawn
    truth, found = names["slope"], names["effects"]["hours"] + names["fixed"]["hours"]
    assert abs(found.to_numpy() - truth).mean() < 0.3
    assert list(names["same"].predict(new)) == pytest.approx(list(model.predict(new)), abs=1e-6)
    written = {"schools.csv", "residuals.html", "summary.html", "schools.safetensors"}
    assert {file.name for file in tmp_path.iterdir()} == written


def test_the_experiment_file_with_factories_runs(tmp_path: Path) -> None:
    (section,) = FILES
    ((toml,), (module,)) = (
        re.findall(rf"```{kind}\n(.*?)```", section, flags=re.DOTALL) for kind in ("toml", "python")
    )
    lines = [f"shop-{at % 4},{at % 3},{at % 5},{at % 7}" for at in range(60)]
    for name, text in (("mine.toml", toml), ("shops.py", module), ("reviews.txt", "\n".join(lines))):
        (tmp_path / name).write_text(text)
    experiment = load_experiment(tmp_path / "mine.toml", ["rounds=2", "algorithm.lr=0.1"])
    (record,) = run(experiment, tmp_path / "out", base=tmp_path)
    assert record.finished
