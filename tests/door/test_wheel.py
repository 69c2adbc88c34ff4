"""The wheel in an empty environment, with the base dependencies alone."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PIP = ("-m", "pip", "--disable-pip-version-check", "--quiet")
FIT = """
import numpy as np, torch, ppfl
from ppfl.data import digits_federation
from ppfl.glm import PopulationRegressor
federation = digits_federation()
fitted = ppfl.fit(ppfl.Population(torch.nn.Linear(64, 10), k=2), federation, rounds=2)
assert fitted.evaluate(federation).pooled > 0
x, clients = np.random.default_rng(0).normal(size=(60, 2)), np.arange(60) % 6
model = PopulationRegressor(k=2, random_state=0).fit(x, x[:, 0], clients=clients)
assert model.memberships_.shape == (6, 2)
"""


@pytest.mark.slow
@pytest.mark.processes
def test_the_wheel_works_without_extras(tmp_path: Path) -> None:
    def call(*command: str | Path) -> str:
        done = subprocess.run([*map(str, command)], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    call(sys.executable, *PIP, "wheel", "--no-deps", "--wheel-dir", tmp_path, ROOT)
    (wheel,) = tmp_path.glob("ppfl-*.whl")
    inside = zipfile.ZipFile(wheel).namelist()
    sources = (file for file in (ROOT / "src").rglob("*") if file.is_file() and "__pycache__" not in file.parts)
    assert {str(file.relative_to(ROOT / "src")) for file in sources} <= set(inside)
    call(sys.executable, "-m", "venv", tmp_path / "env")
    python = tmp_path / "env" / "bin" / "python"
    call(python, *PIP, "install", "-r", ROOT / "requirements.txt")
    call(python, *PIP, "install", "--no-deps", wheel)
    installed = call(python, *PIP, "list").lower()
    assert not [extra for extra in ("flwr", "pyarrow", "onnx", "h5py", "pytest") if extra in installed]
    call(python, "-c", FIT)
    short = ("--set", "rounds=2", "--set", "seeds=[0]")
    call(python, "-m", "ppfl", "run", ROOT / "experiments" / "synthetic.toml", *short, "--out", "run")
    assert "300 clients" in call(python, "-m", "ppfl", "show", "run")
