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
from safetensors.torch import load_file

from ppfl.runs import Interrupted, OnRoundEnd, load_experiment, run
from ppfl.server import RoundEnd

EXPERIMENT = """
name = "ranks"
rounds = {rounds}
dropout = {dropout}
data = {{ name = "digits" }}
model = {{ name = "perceptron", hidden = 8 }}
population = {{ k = 3, mix = "{mix}" }}
algorithm = {{ name = "ppfl", lr = 0.1, batch_size = 16, participation = {participation}, penalty = {penalty} }}
affinity = {{ name = "labels" }}
watch = {{ every = 2 }}
"""
QUIET = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TORCH_CPP_LOG_LEVEL": "ERROR"}


USUAL = {"mix": "weights", "participation": 1.0, "penalty": 0.0, "dropout": 0.0}


def write(folder: Path, rounds: int, **settings: str | float) -> Path:
    file = folder / "experiment.toml"
    file.write_text(EXPERIMENT.format(rounds=rounds, **USUAL | settings))
    return file


def launch(ranks: int, file: Path, out: Path, *options: str) -> subprocess.Popen:
    command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return subprocess.Popen(
        [sys.executable, *command, "-m", "ppfl", "run", str(file), "--out", str(out), *options],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ | QUIET,
    )  # fmt: skip


def stop_after(round: int) -> OnRoundEnd:
    def stop(_seed: int, end: RoundEnd) -> None:
        if end.state.round == round:
            raise KeyboardInterrupt

    return stop


def result(out: Path) -> dict[str, torch.Tensor]:
    return load_file(out / "seed-0" / "result.safetensors")


def test_a_run_that_goes_on_with_more_processes_ends_in_the_same_state(tmp_path: Path) -> None:
    """Rounds of two clients or fewer, so that a process often has none; rows are read by the server."""
    file = write(tmp_path, 6, mix="predictions", participation=0.05, penalty=0.01, dropout=0.3)
    experiment = load_experiment(file)
    run(experiment, tmp_path / "alone")
    with pytest.raises(Interrupted):
        run(experiment, tmp_path / "many", on_round_end=stop_after(2))
    with launch(2, file, tmp_path / "many", "--resume") as many:
        _, said = many.communicate(timeout=120)
    assert many.returncode == 0, said
    alone, found = result(tmp_path / "alone"), result(tmp_path / "many")
    assert alone.keys() == found.keys()
    for name, value in alone.items():
        torch.testing.assert_close(found[name], value, atol=1e-5, rtol=1e-5)
    rounds = [
        [json.loads(line) for line in (tmp_path / out / "seed-0" / "metrics.jsonl").read_text().splitlines()]
        for out in ("alone", "many")
    ]
    for one, other in zip(*rounds, strict=True):
        for name in ("bytes_up", "bytes_down", "participants", "lost"):
            assert one.get(name) == other.get(name)
        assert one.get("per_client") == pytest.approx(other.get("per_client"))


def test_several_processes_start_from_the_same_run(tmp_path: Path) -> None:
    file = write(tmp_path, 3)
    pretrain = load_experiment(file, ["algorithm={ name = 'fedavg', lr = 0.1 }", "population={ k = 1 }"])
    run(pretrain, tmp_path / "pretrain")
    run(load_experiment(file, ["start.run=pretrain"]), tmp_path / "alone", base=tmp_path)
    with launch(2, file, tmp_path / "many", "--set", "start.run=pretrain") as many:
        _, said = many.communicate(timeout=120)
    assert many.returncode == 0, said
    alone, found = result(tmp_path / "alone"), result(tmp_path / "many")
    for name, value in alone.items():
        torch.testing.assert_close(found[name], value, atol=1e-5, rtol=1e-5)
    starts = [load_file(tmp_path / out / "seed-0" / "start.safetensors") for out in ("alone", "many")]
    assert all(torch.equal(starts[0][name], leaf) for name, leaf in starts[1].items())


def process_of_rank(launcher: int, rank: int) -> int:
    for child in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split():
        if f"RANK={rank}".encode() in Path(f"/proc/{child}/environ").read_bytes().split(b"\0"):
            return int(child)
    raise LookupError(f"no process of rank {rank}")


def rounds_written(out: Path) -> int:
    file = out / "seed-0" / "metrics.jsonl"
    return len(file.read_text().splitlines()) if file.exists() else 0


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds a process of a rank through /proc")
def test_a_process_that_dies_ends_the_run_with_one_clear_message_and_nothing_lost(tmp_path: Path) -> None:
    file = write(tmp_path, 4000)
    out = tmp_path / "out"
    with launch(2, file, out, "--checkpoint-every", "5") as many:
        until = time.monotonic() + 100
        while rounds_written(out) < 20 and time.monotonic() < until:
            time.sleep(0.05)
        os.kill(process_of_rank(many.pid, 1), signal.SIGKILL)
        _, said = many.communicate(timeout=100)
    assert many.returncode != 0
    (message,) = (line for line in said.splitlines() if line.startswith("error: "))
    assert "is safe in" in message and "--resume" in message
    saved = int(message.split("; round ")[1].split()[0])
    assert saved >= 5
    lines = (out / "seed-0" / "metrics.jsonl").read_text().splitlines()[:saved]
    # one process goes on where two were
    with pytest.raises(Interrupted):
        run(load_experiment(file), out, resume=True, on_round_end=stop_after(saved + 3))
    resumed = (out / "seed-0" / "metrics.jsonl").read_text().splitlines()
    assert resumed[:saved] == lines
    assert [json.loads(line)["round"] for line in resumed[saved:]] == [saved + 1, saved + 2, saved + 3]
