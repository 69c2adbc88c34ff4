"""A run stopped at any instant, and resumed, ends with the same bits as a run never stopped."""

import json
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from kit.experiments import PLACES, Place, StopError, content_of, interrupt_at, small_experiment, stop_after, tensors_of
from ppfl.runs import Interrupted, load_run, run
from ppfl.server import Training
from ppfl.sites import Site

RANDOM = {"name": "ppfl", "lr": 0.3, "batch_size": 4, "order": "random", "participation": 0.5, "membership_batch": 3}
LOCAL = {"method": {"name": "local", "participation": 0.5}, "population": {"k": 1}}
NETWORK = {"name": "perceptron", "hidden": 4}
LAZY = {"name": "lazy_population:lazy_population", "n_clients": 12, "samples": 6, "dim": 3, "k": 2, "test_points": 4}
EXPERIMENTS = {
    "random output": {"method": RANDOM, "watch": {"every": 2, "output": "random"}},
    "best output": {"method": RANDOM, "watch": {"every": 2, "output": "best"}},
    "lost clients": {"dropout": 0.5, "population": {"k": 2, "mix": "weights"}},
    "fedavg": {"method": {"name": "fedavg", "participation": 0.5}, "population": {"k": 1}},
    "local, on disk": {**LOCAL, "model": NETWORK, "states_on_disk": True},
    "lazy data, on disk": {"method": RANDOM, "watch": {"output": "best"}, "data": LAZY, "states_on_disk": True},
}


def assert_same(resumed: Path, whole: Path) -> None:
    """The same bits in all tensors and records, seconds apart."""
    for name in ("result.safetensors", "checkpoint.safetensors"):
        torch.testing.assert_close(tensors_of(resumed / name), tensors_of(whole / name), atol=0, rtol=0)
        a, b = (content_of(folder / name) for folder in (resumed, whole))
        assert a.keys() == b.keys()
        assert all(value == b[key] for key, value in a.items() if not isinstance(value, torch.Tensor))
    a, b = load_run(resumed), load_run(whole)
    assert [{**row, "seconds": 0} for row in a.metrics] == [{**row, "seconds": 0} for row in b.metrics]
    torch.testing.assert_close(a.memberships_by_round, b.memberships_by_round, atol=0, rtol=0)
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
    if experiment.states_on_disk:
        (in_memory,) = run(experiment.model_copy(update={"states_on_disk": False}), tmp_path / "memory")
        a, b = (tensors_of(record.folder / "result.safetensors") for record in (in_memory, whole))
        torch.testing.assert_close(a, b, atol=0, rtol=0)


def test_what_a_kill_cut_short_is_forgotten_and_what_a_run_chose_is_kept(tmp_path, monkeypatch):
    experiment, folder = small_experiment(method={"name": "ppfl"}), tmp_path / "out" / "seed-0"
    (whole,) = run(experiment, tmp_path / "whole")
    assert whole.experiment["method"]["lr"] > 0
    assert json.loads((whole.folder / "run.json").read_text())["experiment"]["method"]["lr"] == "auto"
    with pytest.raises(StopError):
        run(experiment, tmp_path / "out", checkpoint_every=2, on_round_end=stop_after(3))
    for name, half in (("metrics.jsonl", b'{"round": 4, "lo'), ("memberships.log", b"half a record")):
        (folder / name).write_bytes((folder / name).read_bytes() + half)
    (folder / "checkpoint.safetensors.partial").write_bytes(b"half")
    assert load_run(folder).rounds_done == 3
    monkeypatch.setattr(Training, "begin", None)  # to begin again, with another choice, would fail
    run(experiment, tmp_path / "out", resume=True)
    assert_same(folder, whole.folder)


PRIVATE = {"name": "ppfl", "lr": 0.3, "batch_size": 4, "share_memberships": False}
LATE = {"method": PRIVATE, "population": {"k": 4}, "dropout": 0.4}  # a private start takes several exchanges
ONE_BY_ONE = {"watch": {"output": "random"}, "rounds": 8, "engine": "loop"}
STOPS = {  # settings, what the run has to be like, and places
    "one by one": (ONE_BY_ONE, lambda whole: 1 < whole.scores["round"] < 8, PLACES.values()),
    "threads": ({"chunk": 1, "threads": 2}, bool, [PLACES["in the work of a client"]]),
    "within the second round": (
        LATE,
        lambda whole: whole.metrics[0]["participants"] < 4 <= whole.metrics[1]["participants"],
        [Place(Site, "train", 4)],
    ),
}


@pytest.mark.parametrize("case", STOPS)
def test_ctrl_c_at_any_place_loses_nothing(tmp_path, case):
    settings, wanted, places = STOPS[case]
    found = (run(small_experiment(**settings, seeds=[seed]), tmp_path / "whole")[0] for seed in range(30))
    whole = next(filter(wanted, found))
    experiment = small_experiment(**settings, seeds=[whole.seed])
    for number, place in enumerate(places):
        out = tmp_path / f"{number} {place.function}"
        with pytest.MonkeyPatch.context() as patched:
            interrupt_at(patched, place)
            with pytest.raises(Interrupted):
                run(experiment, out, checkpoint_every=1)
        run(experiment, out, resume=True)
        assert_same(out / whole.folder.name, whole.folder)


KILLED = """
import json, sys, torch
from ppfl.runs import Experiment, run
torch.set_num_threads(1)
experiment = Experiment.model_validate(json.loads(sys.argv[1]))
tell = lambda seed, end: print(end.state.round, flush=True)
run(experiment, sys.argv[2], resume=True, checkpoint_every=1, on_round_end=tell)
"""


@pytest.mark.processes
def test_a_killed_run_resumes_to_the_same_bits(tmp_path):
    experiment, out = small_experiment(**EXPERIMENTS["best output"], rounds=60), tmp_path / "out"
    seeded = random.Random(0)
    (whole,) = run(experiment, tmp_path / "whole")
    command = [sys.executable, "-c", KILLED, json.dumps(experiment.model_dump(mode="json")), str(out)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        for _ in range(seeded.randint(1, 20)):
            assert process.stdout.readline().strip().isdigit()
        time.sleep(seeded.uniform(0, 0.02))
        process.kill()
    assert not load_run(out / "seed-0").finished, "the run was over before it was killed"
    run(experiment, out, resume=True)
    assert_same(out / "seed-0", whole.folder)
