"""A run stopped at any instant, and resumed, ends with the same bits as a run never stopped."""

import json
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from ppfl.core import CheckpointError
from ppfl.runs import Experiment, Interrupted, load_run, run
from ppfl.runs.storage import read_tensors

RANDOM = {"name": "ppfl", "lr": 0.3, "batch_size": 4, "order": "random", "participation": 0.5, "membership_batch": 3}
CASES = {
    "random blocks, random output": {"algorithm": RANDOM, "watch": {"every": 2, "output": "random"}},
    "random blocks, best output": {"algorithm": RANDOM, "watch": {"every": 2, "output": "best"}},
    "lost clients": {"dropout": 0.5, "algorithm": {"name": "ppfl", "batch_size": 4}},
    "mixed weights": {"population": {"k": 2, "mix": "weights"}},
    "fedavg": {"algorithm": {"name": "fedavg", "participation": 0.5}, "population": {"k": 1}},
    "local": {
        "algorithm": {"name": "local", "participation": 0.5},
        "population": {"k": 1},
        "model": {"name": "perceptron", "hidden": 4},
    },
}


class StopError(Exception):
    pass


def stop_after(round: int, error: type[BaseException] = StopError):
    def stop(_seed, moment) -> None:
        if moment.state.round == round:
            raise error

    return stop


def assert_same(resumed: Path, whole: Path) -> None:
    """The same bits in all tensors and records, seconds apart."""
    for name in ("result.safetensors", "checkpoint.safetensors"):
        (a, meta_a), (b, meta_b) = (read_tensors(folder / name) for folder in (resumed, whole))
        assert meta_a == meta_b
        assert a.keys() == b.keys()
        assert all(torch.equal(a[key], b[key]) for key in a)
    a, b = load_run(resumed), load_run(whole)
    assert [{**row, "seconds": 0} for row in a.metrics] == [{**row, "seconds": 0} for row in b.metrics]
    assert a.memberships_by_round.keys() == b.memberships_by_round.keys()
    assert all(torch.equal(c, b.memberships_by_round[at]) for at, c in a.memberships_by_round.items())
    assert a.scores == b.scores


@pytest.mark.parametrize("case", CASES)
def test_resuming_gives_the_same_bits(make_experiment, tmp_path, case):
    experiment = make_experiment(**CASES[case])
    run(experiment, tmp_path / "whole")
    for round, every in ((1, 1), (3, 2), (5, 4), (2, 5), (6, 6)):
        out = tmp_path / f"stopped-{round}-{every}"
        with pytest.raises(StopError):
            run(experiment, out, checkpoint_every=every, on_moment=stop_after(round))
        assert not load_run(out / "seed-0").finished
        run(experiment, out, resume=True)
        assert_same(out / "seed-0", tmp_path / "whole" / "seed-0")


def test_a_run_may_be_stopped_many_times(make_experiment, tmp_path):
    experiment = make_experiment(**CASES["random blocks, best output"])
    run(experiment, tmp_path / "whole")
    for round in range(1, 6):
        with pytest.raises(StopError):
            run(experiment, tmp_path / "out", resume=True, checkpoint_every=1, on_moment=stop_after(round))
    (record,) = run(experiment, tmp_path / "out", resume=True)
    assert_same(record.folder, tmp_path / "whole" / "seed-0")
    assert len(record.versions["resumed"]) == 5


def test_what_a_kill_cut_short_is_forgotten(make_experiment, tmp_path):
    experiment = make_experiment()
    run(experiment, tmp_path / "whole")
    with pytest.raises(StopError):
        run(experiment, tmp_path / "out", checkpoint_every=2, on_moment=stop_after(3))
    folder = tmp_path / "out" / "seed-0"
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"round": 4, "lo')
    (folder / "memberships" / "4.safetensors").write_bytes(b"half")
    (folder / "checkpoint.safetensors.partial").write_bytes(b"half")
    assert load_run(folder).rounds_done == 3
    run(experiment, tmp_path / "out", resume=True)
    assert_same(folder, tmp_path / "whole" / "seed-0")


def test_ctrl_c_keeps_the_round_it_came_after(make_experiment, tmp_path):
    experiment = make_experiment()
    run(experiment, tmp_path / "whole")
    with pytest.raises(Interrupted, match=r"stopped after round 3 of 6 .*resume=True") as stopped:
        run(experiment, tmp_path / "out", on_moment=stop_after(3, KeyboardInterrupt))
    assert (stopped.value.round, stopped.value.rounds, stopped.value.out) == (3, 6, tmp_path / "out")
    seen = []
    run(experiment, tmp_path / "out", resume=True, on_moment=lambda _seed, moment: seen.append(moment.state.round))
    assert seen == [4, 5, 6]
    assert_same(tmp_path / "out" / "seed-0", tmp_path / "whole" / "seed-0")


@pytest.mark.parametrize("share", [0.0, 0.5, 0.99])
def test_half_a_checkpoint_is_refused_and_nothing_is_touched(make_experiment, tmp_path, snapshot, share):
    with pytest.raises(StopError):
        run(make_experiment(), tmp_path, checkpoint_every=1, on_moment=stop_after(3))
    file = tmp_path / "seed-0" / "checkpoint.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[: int(share * len(content))])
    before = snapshot(tmp_path)
    with pytest.raises(CheckpointError, match=r"checkpoint.safetensors cannot be read .* start again in another"):
        run(make_experiment(), tmp_path, resume=True)
    assert snapshot(tmp_path) == before


def test_lost_rounds_are_noticed(make_experiment, tmp_path):
    with pytest.raises(StopError):
        run(make_experiment(), tmp_path, checkpoint_every=1, on_moment=stop_after(3))
    metrics = tmp_path / "seed-0" / "metrics.jsonl"
    metrics.write_text(metrics.read_text().splitlines(keepends=True)[0])
    with pytest.raises(CheckpointError, match="1 rounds, fewer than the checkpoint's 3"):
        run(make_experiment(), tmp_path, resume=True)


def test_changed_data_are_noticed(make_experiment, tmp_path, snapshot):
    table = tmp_path / "table.csv"

    def write(rows: int) -> None:
        lines = [f"{client},{i % 5},{i % 2}" for client in "abc" for i in range(rows)]
        table.write_text("\n".join(["who,x,y", *lines]))

    data = {"name": "csv", "file": str(table), "client": "who", "target": "y"}
    write(10)
    with pytest.raises(StopError):
        run(make_experiment(data=data), tmp_path / "out", checkpoint_every=1, on_moment=stop_after(3))
    write(12)
    before = snapshot(tmp_path)
    with pytest.raises(CheckpointError, match=r"clients.json differs .* bring them back"):
        run(make_experiment(data=data), tmp_path / "out", resume=True)
    assert snapshot(tmp_path) == before


def test_what_a_run_chose_it_keeps(make_experiment, tmp_path, monkeypatch):
    experiment = make_experiment(algorithm={"name": "fedavg"}, population={"k": 1})
    (whole,) = run(experiment, tmp_path / "whole")
    assert whole.experiment["algorithm"]["lr"] > 0
    assert json.loads((whole.folder / "experiment.json").read_text())["algorithm"]["lr"] == "auto"
    with pytest.raises(StopError):
        run(experiment, tmp_path / "out", checkpoint_every=1, on_moment=stop_after(3))
    monkeypatch.setattr(sys.modules["ppfl.runs.run"], "with_chosen_lr", None)  # a second choice would fail
    run(experiment, tmp_path / "out", resume=True)
    assert_same(tmp_path / "out" / "seed-0", whole.folder)
    chosen = tmp_path / "out" / "seed-0" / "chosen.json"
    (tmp_path / "out" / "seed-0" / "result.safetensors").unlink()
    chosen.write_text('{"algorithm": {"name": "fedavg", "lr": -1}}')
    with pytest.raises(CheckpointError, match="chosen.json does not hold"):
        run(experiment, tmp_path / "out", resume=True)


KILLED = """
import json, sys, torch
from ppfl.runs import Experiment, run
torch.set_num_threads(1)
experiment = Experiment.model_validate(json.loads(sys.argv[1]))
tell = lambda seed, moment: print(moment.state.round, flush=True)
run(experiment, sys.argv[2], resume=True, checkpoint_every=1, on_moment=tell)
"""


def kill_somewhere(experiment: Experiment, out: Path, after: int, delay: float) -> None:
    """SIGKILL a run of its own process a moment after a round."""
    command = [sys.executable, "-c", KILLED, json.dumps(experiment.model_dump(mode="json")), str(out)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        for _, line in zip(range(after), process.stdout, strict=False):
            assert line.strip().isdigit()
        time.sleep(delay)
        process.kill()


def test_a_killed_run_resumes_to_the_same_bits(make_experiment, tmp_path):
    experiment = make_experiment(**CASES["random blocks, best output"], rounds=150)
    run(experiment, tmp_path / "whole")
    moment = random.randint(1, 50), random.uniform(0, 0.02)
    kill_somewhere(experiment, tmp_path / "out", *moment)
    assert not load_run(tmp_path / "out" / "seed-0").finished, f"the run was over before it was killed at {moment}"
    run(experiment, tmp_path / "out", resume=True)
    assert_same(tmp_path / "out" / "seed-0", tmp_path / "whole" / "seed-0")
