"""A run stopped at any instant, and resumed, ends with the same bits as a run never stopped."""

import json
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from kit.experiments import SMALL
from ppfl.algorithms import PPFL
from ppfl.core import CheckpointError
from ppfl.runs import Experiment, Interrupted, RunFolder, load_run, run
from ppfl.runs.storage import read_tensors, write_json
from ppfl.sites import Site

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
    def stop(_seed, end) -> None:
        if end.state.round == round:
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
    for round, every in ((1, 1), (3, 2), (2, 5), (6, 6)):
        out = tmp_path / f"stopped-{round}-{every}"
        with pytest.raises(StopError):
            run(experiment, out, checkpoint_every=every, on_round_end=stop_after(round))
        assert not load_run(out / "seed-0").finished
        run(experiment, out, resume=True)
        assert_same(out / "seed-0", tmp_path / "whole" / "seed-0")


LAZY = {"name": "lazy_population", "n_clients": 12, "samples": 6, "dim": 3, "k": 2, "test_points": 4}


@pytest.mark.parametrize("case", ["random blocks, best output", "local"])
def test_lazy_data_and_states_on_disk_give_the_same_bits_and_are_resumed(make_experiment, tmp_path, monkeypatch, case):
    experiment = make_experiment(**CASES[case] | {"data": LAZY})
    run(experiment, tmp_path / "whole")
    monkeypatch.setattr("ppfl.sites.site.MOST_BYTES", 0)  # so that states are on disk
    run(experiment, tmp_path / "disk")
    assert_same(tmp_path / "disk" / "seed-0", tmp_path / "whole" / "seed-0")
    with pytest.raises(StopError):
        run(experiment, tmp_path / "stopped", checkpoint_every=2, on_round_end=stop_after(3))
    run(experiment, tmp_path / "stopped", resume=True)
    assert_same(tmp_path / "stopped" / "seed-0", tmp_path / "whole" / "seed-0")


def test_no_more_than_the_states_of_clients_is_left_in_the_file_of_a_checkpoint(make_experiment, tmp_path, monkeypatch):
    experiment = make_experiment(**CASES["random blocks, best output"])
    with pytest.raises(StopError):
        run(experiment, tmp_path, checkpoint_every=2, on_round_end=stop_after(3))
    left: list[str] = []

    def read(path: Path, mapped: tuple[str, ...] = ()):
        tensors, about = read_tensors(path, mapped=mapped)
        if path.name == "checkpoint.safetensors":
            left.extend(name for name in tensors if name.startswith(mapped))
            assert left == [name for name in tensors if ".clients." in name]
        return tensors, about

    monkeypatch.setattr(sys.modules["ppfl.runs.folder"], "read_tensors", read)
    run(experiment, tmp_path, resume=True)
    assert left


def test_a_run_may_be_stopped_many_times(make_experiment, tmp_path):
    experiment = make_experiment(**CASES["random blocks, best output"])
    run(experiment, tmp_path / "whole")
    for round in range(1, 6):
        with pytest.raises(StopError):
            run(experiment, tmp_path / "out", resume=True, checkpoint_every=1, on_round_end=stop_after(round))
    (record,) = run(experiment, tmp_path / "out", resume=True)
    assert_same(record.folder, tmp_path / "whole" / "seed-0")
    assert len(record.versions["resumed"]) == 5


def test_what_a_kill_cut_short_is_forgotten(make_experiment, tmp_path):
    experiment = make_experiment()
    run(experiment, tmp_path / "whole")
    with pytest.raises(StopError):
        run(experiment, tmp_path / "out", checkpoint_every=2, on_round_end=stop_after(3))
    folder = tmp_path / "out" / "seed-0"
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"round": 4, "lo')
    with (folder / "memberships.log").open("ab") as log:
        log.write(b"PPFM half")
    (folder / "checkpoint.safetensors.partial").write_bytes(b"half")
    assert load_run(folder).rounds_done == 3
    run(experiment, tmp_path / "out", resume=True)
    assert_same(folder, tmp_path / "whole" / "seed-0")


def test_ctrl_c_keeps_the_round_it_came_after(make_experiment, tmp_path):
    experiment = make_experiment()
    run(experiment, tmp_path / "whole")
    with pytest.raises(Interrupted, match=r"stopped after round 3 of 6 .*resume=True") as stopped:
        run(experiment, tmp_path / "out", on_round_end=stop_after(3, KeyboardInterrupt))
    assert (stopped.value.round, stopped.value.rounds, stopped.value.out) == (3, 6, tmp_path / "out")
    seen = []
    run(experiment, tmp_path / "out", resume=True, on_round_end=lambda _seed, end: seen.append(end.state.round))
    assert seen == [4, 5, 6]
    assert_same(tmp_path / "out" / "seed-0", tmp_path / "whole" / "seed-0")


def interrupt(monkeypatch, owner, name: str, call: int, *, after: bool = False) -> None:
    """Ctrl-C at the nth call of a function, before what it does or after it."""
    original, calls = getattr(owner, name), iter(range(10**6))

    def stopped(*arguments, **settings):
        stop = next(calls) == call
        if stop and not after:
            raise KeyboardInterrupt
        result = original(*arguments, **settings)
        if stop:
            raise KeyboardInterrupt
        return result

    monkeypatch.setattr(owner, name, stopped)


PLACES = {
    "in the work of a client": (PPFL, "work", 4, False),
    "after all clients have worked": (Site, "train", 4, True),
    "before their work is merged": (PPFL, "merge", 3, False),
    "after it is merged": (PPFL, "merge", 3, True),
    "in an evaluation": (Site, "evaluate", 2, False),
    "before a state is kept": (Site, "keep", 1, False),
    "after a state is kept": (Site, "keep", 1, True),
    "while a checkpoint is written": (RunFolder, "save_checkpoint", 3, False),
    "after a checkpoint is written": (RunFolder, "save_checkpoint", 3, True),
}


ONE_BY_ONE, IN_THREADS = {"engine": "loop"}, {"chunk": 1, "threads": 2}


@pytest.fixture(scope="module")
def never_stopped(request, tmp_path_factory):
    """An experiment that returns a state from the middle, and the folder of its whole run."""
    settings = SMALL | {"watch": {"output": "random"}, "rounds": 8, "seeds": [5]} | request.param
    experiment, folder = Experiment.model_validate(settings), tmp_path_factory.mktemp("whole")
    (record,) = run(experiment, folder)
    assert 1 < record.scores["round"] < 8, "choose another seed"
    return experiment, record.folder


EVERYWHERE = [(ONE_BY_ONE, place) for place in PLACES] + [(IN_THREADS, "in the work of a client")]


@pytest.mark.parametrize(("never_stopped", "place"), EVERYWHERE, indirect=["never_stopped"])
def test_ctrl_c_at_any_place_loses_nothing(never_stopped, tmp_path, monkeypatch, place):
    experiment, whole = never_stopped
    owner, name, call, after = PLACES[place]
    with monkeypatch.context() as patched:
        interrupt(patched, owner, name, call, after=after)
        with pytest.raises(Interrupted):
            run(experiment, tmp_path / "out", checkpoint_every=1)
    run(experiment, tmp_path / "out", resume=True)
    assert_same(tmp_path / "out" / whole.name, whole)


def test_ctrl_c_in_the_middle_of_a_round_of_many_exchanges_loses_nothing(make_experiment, tmp_path, monkeypatch):
    """A private start takes ten exchanges, here in the second round: too few clients come back in the first."""
    private = {"name": "ppfl", "lr": 0.3, "batch_size": 4, "share_memberships": False}
    experiment = make_experiment(algorithm=private, population={"k": 4}, dropout=0.4, seeds=[8])
    (record,) = run(experiment, tmp_path / "whole")
    assert [row["participants"] < 4 for row in record.metrics[:2]] == [True, False], "choose another seed"
    with monkeypatch.context() as patched:
        interrupt(patched, Site, "train", 4)
        with pytest.raises(Interrupted):
            run(experiment, tmp_path / "out")
    run(experiment, tmp_path / "out", resume=True)
    assert_same(tmp_path / "out" / "seed-8", tmp_path / "whole" / "seed-8")


@pytest.mark.parametrize("share", [0.0, 0.5, 0.99])
def test_half_a_checkpoint_is_refused_and_nothing_is_touched(make_experiment, tmp_path, snapshot, share):
    with pytest.raises(StopError):
        run(make_experiment(), tmp_path, checkpoint_every=1, on_round_end=stop_after(3))
    file = tmp_path / "seed-0" / "checkpoint.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[: int(share * len(content))])
    before = snapshot(tmp_path)
    with pytest.raises(CheckpointError, match=r"checkpoint.safetensors cannot be read .* start again in another"):
        run(make_experiment(), tmp_path, resume=True)
    assert snapshot(tmp_path) == before


def test_lost_rounds_are_noticed(make_experiment, tmp_path):
    with pytest.raises(StopError):
        run(make_experiment(), tmp_path, checkpoint_every=1, on_round_end=stop_after(3))
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
        run(make_experiment(data=data), tmp_path / "out", checkpoint_every=1, on_round_end=stop_after(3))
    write(12)
    before = snapshot(tmp_path)
    with pytest.raises(CheckpointError, match=r"clients.json differs from the data.*samples.*bring the old data back"):
        run(make_experiment(data=data), tmp_path / "out", resume=True)
    assert snapshot(tmp_path) == before


def test_what_a_run_chose_it_keeps(make_experiment, tmp_path, monkeypatch):
    experiment = make_experiment(algorithm={"name": "fedavg"}, population={"k": 1})
    (whole,) = run(experiment, tmp_path / "whole")
    assert whole.experiment["algorithm"]["lr"] > 0
    assert json.loads((whole.folder / "experiment.json").read_text())["algorithm"]["lr"] == "auto"
    with pytest.raises(StopError):
        run(experiment, tmp_path / "out", checkpoint_every=1, on_round_end=stop_after(3))
    monkeypatch.setattr(sys.modules["ppfl.runs.seed_run"], "choose_lr", None)  # a second choice would fail
    run(experiment, tmp_path / "out", resume=True)
    assert_same(tmp_path / "out" / "seed-0", whole.folder)
    chosen = tmp_path / "out" / "seed-0" / "chosen.json"
    (tmp_path / "out" / "seed-0" / "result.safetensors").unlink()
    write_json(chosen, {"algorithm": {"name": "fedavg", "lr": -1}})
    with pytest.raises(CheckpointError, match="chosen.json does not hold"):
        run(experiment, tmp_path / "out", resume=True)


KILLED = """
import json, sys, torch
from ppfl.runs import Experiment, run
torch.set_num_threads(1)
experiment = Experiment.model_validate(json.loads(sys.argv[1]))
tell = lambda seed, end: print(end.state.round, flush=True)
run(experiment, sys.argv[2], resume=True, checkpoint_every=1, on_round_end=tell)
"""


def kill_somewhere(experiment: Experiment, out: Path, after: int, delay: float) -> None:
    """SIGKILL a run in a process of its own, shortly after a round."""
    command = [sys.executable, "-c", KILLED, json.dumps(experiment.model_dump(mode="json")), str(out)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        for _, line in zip(range(after), process.stdout, strict=False):
            assert line.strip().isdigit()
        time.sleep(delay)
        process.kill()


def test_a_killed_run_resumes_to_the_same_bits(make_experiment, tmp_path):
    experiment = make_experiment(**CASES["random blocks, best output"], rounds=60)
    run(experiment, tmp_path / "whole")
    when = random.randint(1, 20), random.uniform(0, 0.02)
    kill_somewhere(experiment, tmp_path / "out", *when)
    assert not load_run(tmp_path / "out" / "seed-0").finished, f"the run was over before it was killed at {when}"
    run(experiment, tmp_path / "out", resume=True)
    assert_same(tmp_path / "out" / "seed-0", tmp_path / "whole" / "seed-0")
