"""The examples run without data files, on a few simulated clients, and write their figures."""

import os
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
PICTURES = {
    "choices": {"willingness", "memberships"},
    "multilabel_images": {"f1"},
    "onboarding": {"samples"},
    "schools": {"shrinkage", "lines"},
    "sleep_study": {"everyone", "canonical", "memberships"},
    "text_lstm": set(),
}


def run(name: str, folder: Path) -> str:
    """Run an example without data files in this folder, and return its output."""
    few = {"PPFL_DATA": str(folder / "no data"), "PPFL_EXAMPLE_CLIENTS": "16", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "error", str(EXAMPLES / f"{name}.py")]
    done = subprocess.run(command, cwd=folder, env=os.environ | few, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", sorted(PICTURES))
def test_an_example_runs_without_data(name: str, tmp_path: Path) -> None:
    pytest.importorskip("pandas")
    printed = run(name, tmp_path)
    assert "(simulated)" in printed
    assert "nan" not in printed
    drawn = {file.stem: file for file in (tmp_path / "runs" / "examples" / name).glob("*.svg")}
    assert set(drawn) == PICTURES[name]
    for file in drawn.values():
        assert ElementTree.parse(file).getroot().tag.endswith("svg")
        assert "nan" not in file.read_text()


def test_a_mixture_of_heads_on_a_frozen_backbone_is_best_and_can_be_taken_out(tmp_path: Path) -> None:
    printed = run("frozen_backbone", tmp_path)
    accuracy = {name: float(found) for name, found in re.findall(r"^(\w+).* ([\d.]+)% +[\d.]+$", printed, re.MULTILINE)}
    assert list(accuracy) == ["pretrained", "FedAvg", "Local", "PPFL"]
    assert max(accuracy.values()) == accuracy["PPFL"]
    assert "its own network predicts the same" in printed
    pytest.importorskip("onnxscript")
    pytest.importorskip("onnxruntime")
    assert float(re.search(r"predictions within (\S+) in onnxruntime", printed)[1]) <= 1e-6


def test_four_mixed_adapters_beat_one_and_those_of_each_client_and_cost_as_much_as_one(tmp_path: Path) -> None:
    printed = run("adapters", tmp_path)
    found = re.findall(r"^(\w+), .* ([\d.]+)% +([\d.]+)$", printed, re.MULTILINE)
    accuracy, sent = ({name: float(row[at]) for name, *row in found} for at in (0, 1))
    assert list(accuracy) == ["FedAvg", "Local", "PPFL"]
    assert max(accuracy.values()) == accuracy["PPFL"]
    assert sent["FedAvg"] < sent["PPFL"] <= 1.05 * sent["FedAvg"]
    assert {file.name for file in (tmp_path / "runs" / "examples" / "adapters").rglob("*.*")} >= {
        "adapter_config.json",
        "adapter_model.safetensors",
    }


def test_every_example_is_tested() -> None:
    scripts = {file.stem for file in EXAMPLES.glob("*.py") if "# %%" in file.read_text()}
    assert scripts == {*PICTURES, "frozen_backbone", "adapters"}


def test_examples_are_short() -> None:
    for name in (*PICTURES, "frozen_backbone"):
        assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) < 120
