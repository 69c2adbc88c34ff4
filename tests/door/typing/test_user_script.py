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
# No type that a user sees depends on these parts of torch and others, and to read them takes most of the time.
LEFT_OUT = (
    "torch._dynamo", "torch._export", "torch._functorch", "torch._higher_order_ops", "torch._inductor",
    "torch._library", "torch._numpy", "torch._prims", "torch._refs", "torch._subclasses", "torch.ao",
    "torch.distributed", "torch.distributions", "torch.export", "torch.fx", "torch.jit", "torch.onnx", "torch.optim",
    "torch.package", "torch.testing", "torch.utils", "IPython", "onnx", "onnxscript", "onnxruntime", "rich",
)  # fmt: skip
SKIPPED = f"[mypy-{','.join(f'{name}.*' for name in LEFT_OUT)}]\nfollow_imports = skip\n"
WRONG = "import ppfl\nx: int = ppfl.Population\nppfl.fit(1)\n"  # so that silence means something


@pytest.mark.processes
def test_a_users_script_passes_strict_type_checking(tmp_path):
    pytest.importorskip("mypy")
    (tmp_path / "mypy.ini").write_text(f"[mypy]\nstrict = true\nfollow_imports = silent\n{SKIPPED}")
    (tmp_path / "wrong.py").write_text(WRONG)
    options = ["--config-file=mypy.ini", "--cache-dir=cache", "--sqlite-cache", "--no-error-summary", "--no-pretty"]
    command = [sys.executable, "-m", "mypy", *options, str(SCRIPT), "wrong.py"]
    where = os.environ | {"MYPYPATH": str(Path(ppfl.__file__).parents[1])}
    done = subprocess.run(command, cwd=tmp_path, env=where, capture_output=True, text=True, check=False)
    lines = (done.stdout + done.stderr).splitlines()
    assert [line for line in lines if not line.startswith("wrong.py:")] == []
    assert {line.split(":")[1] for line in lines} == {"2", "3"}


def test_it_runs(capsys):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert "at least one round" in capsys.readouterr().out
