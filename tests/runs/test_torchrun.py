"""Processes that torchrun starts: any number of them ends in the same state, and one that dies loses nothing."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from kit.experiments import stop_after, tensors_of, write_experiment
from ppfl.runs import Interrupted, load_experiment, run

EXPERIMENT = """
name = "ranks"
rounds = 6
data = { name = "digits" }
model = { name = "perceptron", hidden = 8 }
population = { k = 3, mix = "weights" }
method = { name = "ppfl", lr = 0.1, batch_size = 16 }
affinity = { name = "labels" }
watch = { every = 2 }
"""
# rounds of two clients or fewer, so that a process often has none; the server reads rows
FEW = ["population.mix=predictions", "method.participation=0.05", "method.penalty=0.01", "dropout=0.3"]
PRETRAIN = ["method={ name = 'fedavg', lr = 0.1 }", "population={ k = 1 }", "rounds=2"]
FROM_THERE = ["start.run=pretrain", "rounds=4000"]
pytestmark = pytest.mark.processes


def launch(file: Path, changes: list[str], out: Path, *options: str) -> subprocess.Popen:
    """`ppfl run` in two processes."""
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "ppfl", "run", str(file)]
    options = ("--out", str(out), *options, *(word for change in changes for word in ("--set", change)))
    quiet = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    piped = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, *command, *options], env=os.environ | quiet, **piped)


def rounds_written(out: Path) -> list[dict]:
    file = out / "seed-0" / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def test_a_run_that_goes_on_with_more_processes_ends_in_the_same_state(tmp_path):
    file, out = write_experiment(tmp_path, EXPERIMENT), tmp_path / "many"
    (alone,) = run(load_experiment(file, FEW), tmp_path / "alone")
    with pytest.raises(Interrupted):
        run(load_experiment(file, FEW), out, on_round_end=stop_after(2, KeyboardInterrupt))
    with launch(file, FEW, out, "--resume") as many:
        _, said = many.communicate(timeout=120)
    assert many.returncode == 0, said
    expected, found = (tensors_of(folder / "result.safetensors") for folder in (alone.folder, out / "seed-0"))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    for a, b in zip(rounds_written(out), alone.metrics, strict=True):
        for name in ("round", "bytes_up", "bytes_down", "participants", "lost"):
            assert a.get(name) == b.get(name)
        assert a.get("per_client") == pytest.approx(b.get("per_client"))


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds a process of a rank through /proc")
def test_a_process_that_dies_ends_the_run_with_one_clear_message_and_nothing_lost(tmp_path):
    """Both processes start from the network of another run; later, one process goes on where two were."""
    file, out = write_experiment(tmp_path, EXPERIMENT), tmp_path / "out"
    run(load_experiment(file, PRETRAIN), tmp_path / "pretrain")
    with launch(file, FROM_THERE, out, "--checkpoint-every", "5") as many:
        until = time.monotonic() + 100
        while len(rounds_written(out)) < 20 and time.monotonic() < until:
            time.sleep(0.05)
        children = Path(f"/proc/{many.pid}/task/{many.pid}/children").read_text().split()
        (second,) = (c for c in children if b"RANK=1" in Path(f"/proc/{c}/environ").read_bytes().split(b"\0"))
        os.kill(int(second), signal.SIGKILL)
        _, said = many.communicate(timeout=100)
    assert many.returncode != 0
    (message,) = (line for line in said.splitlines() if line.startswith("error: "))
    assert "is safe in" in message and "--resume" in message
    saved = int(message.split("; round ")[1].split()[0])
    assert saved >= 5
    before = rounds_written(out)[:saved]
    stop = stop_after(saved + 3, KeyboardInterrupt)
    with pytest.raises(Interrupted):
        run(load_experiment(file, FROM_THERE), out, base=tmp_path, resume=True, on_round_end=stop)
    assert rounds_written(out)[:saved] == before and len(rounds_written(out)) == saved + 3
