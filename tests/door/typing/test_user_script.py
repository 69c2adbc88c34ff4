"""What a user's own mypy --strict says of a script that uses our public names, and that the script runs."""

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import ppfl

SCRIPT = Path(__file__).with_name("user_script.py")
# Our own files are read for their types and not checked, as after installation. What torch needs to compile and to
# export is left out: no type that a user sees depends on it, and it takes most of the time.
LEFT_OUT = (
    "torch._dynamo", "torch._export", "torch._functorch", "torch._higher_order_ops", "torch._inductor",
    "torch._library", "torch._numpy", "torch._prims", "torch._refs", "torch._subclasses", "torch.ao",
    "torch.distributed", "torch.distributions", "torch.export", "torch.fx", "torch.jit", "torch.onnx", "torch.optim",
    "torch.package", "torch.testing", "torch.utils", "IPython", "onnx", "onnxscript", "onnxruntime", "rich",
)  # fmt: skip
SETTINGS = f"""
[mypy]
strict = true
follow_imports = silent

[mypy-{",".join(f"{name}.*" for name in LEFT_OUT)}]
follow_imports = skip
"""
WRONG = "import ppfl\nx: int = ppfl.Population\nppfl.fit(1)\n"  # so that silence means something


@pytest.mark.processes
def test_a_users_script_passes_strict_type_checking(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    (tmp_path / "mypy.ini").write_text(SETTINGS)
    (tmp_path / "wrong.py").write_text(WRONG)
    options = ["--config-file=mypy.ini", "--cache-dir=cache", "--sqlite-cache", "--no-error-summary", "--no-pretty"]
    command = [sys.executable, "-m", "mypy", *options, str(SCRIPT), "wrong.py"]
    where = os.environ | {"MYPYPATH": str(Path(ppfl.__file__).parents[1])}
    done = subprocess.run(command, cwd=tmp_path, env=where, capture_output=True, text=True, check=False)
    lines = (done.stdout + done.stderr).splitlines()
    assert [line for line in lines if not line.startswith("wrong.py:")] == []
    assert any(line.startswith("wrong.py:2: error: Incompatible types") for line in lines)
    assert any(line.startswith("wrong.py:3: error: ") for line in lines)


def test_it_runs(capsys: pytest.CaptureFixture[str]) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert "at least one round" in capsys.readouterr().out
