"""A run stopped at any instant, and resumed, ends with the same bits as a run never stopped."""

import json
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kit.experiments import PLACES, Place, StopError, interrupt_at, small_experiment, stop_after
from kit.refusals import CheckpointError, assert_refused
from ppfl.runs import Experiment, Interrupted, RunRecord, load_run, run, seed_run
from ppfl.runs.storage import read_tensors, write_json
from ppfl.sites import Site

RANDOM = {"name": "ppfl", "lr": 0.3, "batch_size": 4, "order": "random", "participation": 0.5, "membership_batch": 3}
LOCAL = {"name": "local", "participation": 0.5}
LAZY = {"name": "lazy_population", "n_clients": 12, "samples": 6, "dim": 3, "k": 2, "test_points": 4}
NETWORK = {"name": "perceptron", "hidden": 4}
EXPERIMENTS = {
    "random blocks, random output": {"algorithm": RANDOM, "watch": {"every": 2, "output": "random"}},
    "random blocks, best output": {"algorithm": RANDOM, "watch": {"every": 2, "output": "best"}},
    "lost clients": {"dropout": 0.5, "algorithm": {"name": "ppfl", "batch_size": 4}},
    "mixed weights": {"population": {"k": 2, "mix": "weights"}},
    "fedavg": {"algorithm": {"name": "fedavg", "participation": 0.5}, "population": {"k": 1}},
    "local, on disk": {"algorithm": LOCAL, "population": {"k": 1}, "model": NETWORK, "states_on_disk": True},
    "lazy data, on disk": {"algorithm": RANDOM, "watch": {"output": "best"}, "data": LAZY, "states_on_disk": True},
}
BEST = EXPERIMENTS["random blocks, best output"]


def assert_same_tensors(one: Path, other: Path, name: str) -> None:
    a, b = (read_tensors(folder / name)[0] for folder in (one, other))
    assert a.keys() == b.keys()
    assert all(torch.equal(a[key], b[key]) for key in a)


def assert_same(resumed: Path, whole: Path) -> None:
    """The same bits in all tensors and records, seconds apart."""
    for name in ("result.safetensors", "checkpoint.safetensors"):
        assert_same_tensors(resumed, whole, name)
        assert read_tensors(resumed / name)[1] == read_tensors(whole / name)[1]
    a, b = load_run(resumed), load_run(whole)
    assert [{**row, "seconds": 0} for row in a.metrics] == [{**row, "seconds": 0} for row in b.metrics]
    assert a.memberships_by_round.keys() == b.memberships_by_round.keys()
    assert all(torch.equal(c, b.memberships_by_round[at]) for at, c in a.memberships_by_round.items())
    assert a.scores == b.scores


@pytest.mark.parametrize("case", EXPERIMENTS)
def test_a_run_may_be_stopped_many_times(tmp_path, case):
    """Before the first checkpoint, right after one, between two, and when all rounds are done."""
    experiment, out = small_experiment(**EXPERIMENTS[case]), tmp_path / "out"
    (whole,) = run(experiment, tmp_path / "whole")
    for round, every in ((2, 5), (1, 1), (3, 2), (6, 6)):
        with pytest.raises(StopError):
            run(experiment, out, resume=True, checkpoint_every=every, on_round_end=stop_after(round))
        assert not load_run(out / "seed-0").finished
    (record,) = run(experiment, out, resume=True)
    assert_same(record.folder, whole.folder)
    assert len(record.versions["resumed"]) == 4


@pytest.mark.parametrize("case", ["local, on disk", "lazy data, on disk"])
def test_client_states_on_disk_have_the_bits_of_those_in_memory(tmp_path, case):
    for name, on_disk in (("disk", True), ("memory", False)):
        run(small_experiment(**EXPERIMENTS[case] | {"states_on_disk": on_disk}), tmp_path / name)
    assert_same_tensors(tmp_path / "disk" / "seed-0", tmp_path / "memory" / "seed-0", "result.safetensors")


def test_what_a_kill_cut_short_is_forgotten(tmp_path):
    (whole,) = run(small_experiment(), tmp_path / "whole")
    with pytest.raises(StopError):
        run(small_experiment(), tmp_path / "out", checkpoint_every=2, on_round_end=stop_after(3))
    folder = tmp_path / "out" / "seed-0"
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"round": 4, "lo')
    with (folder / "memberships.log").open("ab") as log:
        log.write(b"PPFM half")
    (folder / "checkpoint.safetensors.partial").write_bytes(b"half")
    assert load_run(folder).rounds_done == 3
    run(small_experiment(), tmp_path / "out", resume=True)
    assert_same(folder, whole.folder)


def test_what_a_run_chose_it_keeps(tmp_path, monkeypatch):
    experiment, folder = small_experiment(**EXPERIMENTS["fedavg"]), tmp_path / "out" / "seed-0"
    (whole,) = run(experiment, tmp_path / "whole")
    assert whole.experiment["algorithm"]["lr"] > 0
    assert json.loads((whole.folder / "experiment.json").read_text())["algorithm"]["lr"] == "auto"
    with pytest.raises(StopError):
        run(experiment, tmp_path / "out", checkpoint_every=1, on_round_end=stop_after(3))
    monkeypatch.setattr(seed_run, "choose_lr", None)  # a second choice would fail
    run(experiment, tmp_path / "out", resume=True)
    assert_same(folder, whole.folder)
    (folder / "result.safetensors").unlink()
    write_json(folder / "chosen.json", {"algorithm": {"name": "fedavg", "lr": -1}})
    assert_refused(lambda: run(experiment, tmp_path / "out", resume=True), CheckpointError, "chosen.json")


# ---------------------------------------------------------------------- Ctrl-C


def run_with_some_seed(settings: dict, folder: Path, wanted: Callable[[RunRecord], bool]) -> RunRecord:
    """The first seed whose run is as the test needs it."""
    found = (run(small_experiment(**settings, seeds=[seed]), folder)[0] for seed in range(30))
    return next(filter(wanted, found))


def interrupt_and_resume(settings: dict, whole: RunRecord, out: Path, place: Place) -> None:
    experiment = small_experiment(**settings, seeds=[whole.seed])
    with pytest.MonkeyPatch.context() as patched:
        interrupt_at(patched, place)
        with pytest.raises(Interrupted):
            run(experiment, out, checkpoint_every=1)
    run(experiment, out, resume=True)
    assert_same(out / whole.folder.name, whole.folder)


ONE_BY_ONE = {"watch": {"output": "random"}, "rounds": 8, "engine": "loop"}


@pytest.fixture(scope="module")
def never_stopped(tmp_path_factory) -> RunRecord:
    """A run that returns a state from the middle."""
    folder = tmp_path_factory.mktemp("whole")
    return run_with_some_seed(ONE_BY_ONE, folder, lambda record: 1 < record.scores["round"] < 8)


@pytest.mark.parametrize("place", PLACES)
def test_ctrl_c_at_any_place_loses_nothing(never_stopped, tmp_path, place):
    interrupt_and_resume(ONE_BY_ONE, never_stopped, tmp_path, PLACES[place])


def test_ctrl_c_while_clients_work_in_threads_loses_nothing(tmp_path):
    settings = {"chunk": 1, "threads": 2}
    (whole,) = run(small_experiment(**settings), tmp_path / "whole")
    interrupt_and_resume(settings, whole, tmp_path / "out", PLACES["in the work of a client"])


def test_ctrl_c_in_the_middle_of_a_round_of_many_exchanges_loses_nothing(tmp_path):
    """A private start takes several exchanges, here in the second round: too few clients come back in the first."""
    private = {"name": "ppfl", "lr": 0.3, "batch_size": 4, "share_memberships": False}
    settings = {"algorithm": private, "population": {"k": 4}, "dropout": 0.4}

    def starts_late(record: RunRecord) -> bool:
        first, second = record.metrics[:2]
        return first["participants"] < 4 <= second["participants"]

    whole = run_with_some_seed(settings, tmp_path / "whole", starts_late)
    interrupt_and_resume(settings, whole, tmp_path / "out", Place(Site, "train", 4))


def test_ctrl_c_after_a_round_keeps_it_and_says_how_to_go_on(tmp_path):
    with pytest.raises(Interrupted, match=r"stopped after round 3 of 6 .*resume=True") as stopped:
        run(small_experiment(), tmp_path, on_round_end=stop_after(3, KeyboardInterrupt))
    assert (stopped.value.round, stopped.value.rounds, stopped.value.out) == (3, 6, tmp_path)
    seen = []
    run(small_experiment(), tmp_path, resume=True, on_round_end=lambda _seed, end: seen.append(end.state.round))
    assert seen == [4, 5, 6]


# ---------------------------------------------------------------------- SIGKILL

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


@pytest.mark.processes
def test_a_killed_run_resumes_to_the_same_bits(tmp_path):
    experiment, seeded = small_experiment(**BEST, rounds=60), random.Random(0)
    (whole,) = run(experiment, tmp_path / "whole")
    kill_somewhere(experiment, tmp_path / "out", after=seeded.randint(1, 20), delay=seeded.uniform(0, 0.02))
    assert not load_run(tmp_path / "out" / "seed-0").finished, "the run was over before it was killed"
    run(experiment, tmp_path / "out", resume=True)
    assert_same(tmp_path / "out" / "seed-0", whole.folder)
