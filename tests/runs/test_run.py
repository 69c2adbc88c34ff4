"""A run is a folder that says everything and that nothing overwrites; loaded, it is a fitted population."""

import json
import shutil
import subprocess
from dataclasses import replace
from itertools import permutations
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import pad

from kit.experiments import file_bytes, small_experiment, stop_after
from kit.refusals import CheckpointError, SettingError, assert_refused
from ppfl import fit, load
from ppfl.algorithms import FedAvg
from ppfl.core import simplex
from ppfl.runs import Experiment, Interrupted, RunFolder, RunRecord, find_runs, group_agreement, load_run, run
from ppfl.runs.agreement import told_apart
from ppfl.runs.provenance import commit_of
from ppfl.runs.storage import read_json, read_tensors, write_json
from ppfl.server import RefusedUpdateWarning

FEDAVG = {"algorithm": {"name": "fedavg", "lr": 0.1}, "population": {"k": 1}}
PRIVATE = {"name": "ppfl", "lr": 0.3, "batch_size": 4, "share_memberships": False}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> RunRecord:
    """A run that tests read and do not change."""
    (record,) = run(small_experiment(), tmp_path_factory.mktemp("small") / "out")
    return record


def test_a_run_leaves_its_record(small):
    experiment = small_experiment()
    assert small.finished and small.folder.name == "seed-0"
    assert small.experiment == experiment.model_dump(mode="json")
    assert [row["round"] for row in small.metrics] == [1, 2, 3, 4, 5, 6]
    assert [row["round"] for row in small.evaluated] == [2, 4, 6] == sorted(small.memberships_by_round)
    federation = experiment.data.build()
    assert small.ids == federation.ids
    assert torch.equal(small.truth, federation.truth.memberships)
    assert torch.equal(small.memberships, small.memberships_by_round[6])
    assert small.agreement == group_agreement(small.memberships, small.truth)
    assert small.total("bytes_up") == sum(row["bytes_up"] for row in small.metrics)
    assert {"ppfl", "torch", "numpy", "python", "platform", "started"} <= small.versions.keys()
    tensors, about = read_tensors(small.folder / "result.safetensors")
    assert torch.equal(tensors["memberships"], tensors["server.memberships"])
    assert tensors["server.shared.classifier.weight"].shape == (2, 2, 3)
    assert tensors["clients.membership"].shape == (6, 2)
    assert about["round"] == 6
    assert not list(small.folder.parent.rglob("*.partial"))


def test_a_run_is_what_fit_computes(small):
    experiment = small_experiment()
    federation, method = experiment.data.build(), experiment.algorithm
    population, affinity = experiment.build_population(federation, 0), experiment.affinity.build(federation, method)
    fitted = fit(population, federation, method, rounds=6, seed=0, affinity=affinity)
    torch.testing.assert_close(small.memberships, fitted.memberships)
    assert small.scores["accuracy"] == pytest.approx(fitted.evaluate(federation).pooled)


def test_a_round_says_how_many_clients_it_lost(small, tmp_path):
    assert all("lost" not in row and row["participants"] == 6 for row in small.metrics)
    (record,) = run(small_experiment(dropout=0.5), tmp_path / "lossy")
    assert any("lost" in row for row in record.metrics)
    assert all(row["participants"] + row.get("lost", 0) == 6 and row.get("lost", 1) > 0 for row in record.metrics)
    (all_lost,) = run(small_experiment(dropout=1 - 1e-9, algorithm={"name": "ppfl"}), tmp_path / "all lost")
    assert [(row["participants"], row["lost"], row["loss"]) for row in all_lost.metrics] == 6 * [(0, 6, None)]
    assert all_lost.finished and all_lost.scores["accuracy"] is not None


def test_memberships_are_recorded_only_where_there_are_some_and_clients_report(tmp_path):
    silent = {"algorithm": PRIVATE, "watch": {"every": 2, "report_clients": False}}
    cases = {"silent": silent, "fedavg": FEDAVG, "local": FEDAVG | {"algorithm": {"name": "local", "lr": 0.1}}}
    for name, changes in cases.items():
        (record,) = run(small_experiment(**changes), tmp_path / name)
        assert record.finished and record.memberships is None and record.agreement is None
        assert record.memberships_by_round == {}
        assert any("per_client" in row for row in record.metrics) == (name != "silent")
    (reported,) = run(small_experiment(algorithm=PRIVATE), tmp_path / "reported")
    sums = load_run(tmp_path / "silent" / "seed-0")
    assert sums.scores["accuracy"] == pytest.approx(reported.scores["accuracy"])
    assert reported.memberships is not None


def test_scores_are_those_of_the_state_that_is_returned(tmp_path):
    every, sparse = (
        run(small_experiment(watch={"every": n, "output": "random"}, seeds=[0, 1, 2, 3]), tmp_path / str(n))
        for n in (1, 6)
    )
    assert {record.scores["round"] for record in every} != {6}, "no state from before the end is returned"
    for record, full in zip(sparse, every, strict=True):
        at = record.scores["round"]
        assert at == full.scores["round"]
        assert record.scores["accuracy"] == full.metrics[at - 1]["accuracy"]
        assert torch.equal(record.memberships, full.memberships_by_round[at])


def test_every_seed_has_its_folder_and_more_can_be_added(tmp_path):
    run(small_experiment(seeds=[2, 10]), tmp_path)
    assert [folder.name for folder in find_runs(tmp_path)] == ["seed-2", "seed-10"]
    before = file_bytes(tmp_path)
    assert_refused(lambda: run(small_experiment(seeds=[0, 10]), tmp_path), CheckpointError, "seed-10 exists")
    assert file_bytes(tmp_path) == before, "a refused seed stops all before any starts"
    records = run(small_experiment(seeds=[2, 10, 3]), tmp_path, resume=True)
    assert [record.seed for record in records] == [2, 10, 3]
    after = file_bytes(tmp_path)
    assert {name: after[name] for name in before} == before


def test_what_is_not_a_number_is_null(tmp_path):
    frozen = {"name": "ppfl", "order": "random", "membership_steps": 0}  # rounds in which no client computes a loss
    run(small_experiment(algorithm=frozen, rounds=12), tmp_path)
    text = (tmp_path / "seed-0" / "metrics.jsonl").read_text()
    assert "NaN" not in text
    assert any(json.loads(line)["loss"] is None for line in text.splitlines())


# ---------------------------------------------------------------------- refusals


def test_nothing_that_is_not_this_run_is_read_or_overwritten(small, tmp_path):
    for path in (tmp_path, tmp_path / "nowhere"):
        assert_refused(lambda: find_runs(path), CheckpointError, "there is no run in")
        assert_refused(lambda: load_run(path), CheckpointError, "experiment.json")
    out, foreign = small.folder.parent, tmp_path / "seed-0"
    before = file_bytes(out)
    assert_refused(lambda: run(small_experiment(), out), CheckpointError, "seed-0 exists", "(6 done)", "--resume")
    other = small_experiment(algorithm={"name": "ppfl", "lr": 0.1, "batch_size": 4})
    foreign.mkdir()
    (foreign / "thesis.txt").write_text("three years")
    for resume in (False, True):
        assert_refused(lambda: run(other, out, resume=resume), CheckpointError, "algorithm.lr is 0.3 there and 0.1")
        assert_refused(lambda: run(other, tmp_path, resume=resume), CheckpointError, "not a run", "--out")
    run(small_experiment(), out, resume=True)
    assert file_bytes(out) == before
    assert file_bytes(tmp_path) == {"seed-0/thesis.txt": b"three years"}
    assert_refused(lambda: run(other, foreign / "thesis.txt"), CheckpointError, "thesis.txt", "cannot be used")


REFUSED = {
    "too many models": ({"population": {"k": 7}}, {}, "k is 7 but there are 6 clients"),
    "a method of one model": ({"algorithm": {"name": "fedavg"}}, {}, "one model"),
    "a device that is not there": ({"device": "cuda:99"}, {}, "'cuda:99', which cannot be used"),
    "no device": ({"device": "abacus"}, {}, "'abacus', which cannot be used"),
    "no checkpoints": ({}, {"checkpoint_every": 0}, "checkpoint_every >= 1"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_settings_leave_no_folder(tmp_path, case):
    changes, options, words = REFUSED[case]
    assert_refused(lambda: run(small_experiment(**changes), tmp_path / "out", **options), SettingError, words)
    assert not (tmp_path / "out").exists()


def without_dropout(settings: dict) -> dict:
    return {key: value for key, value in settings.items() if key != "dropout"}


def test_a_run_from_before_a_setting_existed_is_the_run_with_its_default(tmp_path, monkeypatch):
    dump = Experiment.model_dump
    with monkeypatch.context() as older:
        older.setattr(Experiment, "model_dump", lambda self, **settings: without_dropout(dump(self, **settings)))
        run(small_experiment(), tmp_path)
    assert "dropout" not in read_json(tmp_path / "seed-0" / "experiment.json")
    before = file_bytes(tmp_path)
    run(small_experiment(), tmp_path, resume=True)
    assert file_bytes(tmp_path) == before
    assert_refused(lambda: run(small_experiment(dropout=0.5), tmp_path, resume=True), CheckpointError, "dropout")


def test_a_run_that_diverges_says_so_and_stays_readable(tmp_path):
    data = {"name": "synthetic_groups", "task": "regression", "n_clients": 4}
    experiment = small_experiment(data=data, algorithm={"name": "ppfl", "lr": 1e6}, rounds=30)
    assert_refused(lambda: run(experiment, tmp_path), SettingError, "diverged", "not finite", "smaller lr")
    assert not load_run(tmp_path / "seed-0").finished


def test_a_server_whose_models_are_no_longer_finite_stops_before_a_checkpoint_of_them(tmp_path, monkeypatch):
    merge, calls = FedAvg.merge, iter(range(6))

    def overflow(*arguments):
        merged, factor = merge(*arguments), float("inf") if next(calls) == 2 else 1.0
        return merged._replace(shared={name: leaf * factor for name, leaf in merged.shared.items()})

    monkeypatch.setattr(FedAvg, "merge", overflow)
    refused = "diverged: after round 3 shared.", "is not finite", "smaller lr"
    assert_refused(lambda: run(small_experiment(**FEDAVG), tmp_path, checkpoint_every=1), SettingError, *refused)
    tensors, _ = read_tensors(tmp_path / "seed-0" / "checkpoint.safetensors")
    assert all(bool(leaf.isfinite().all()) for leaf in tensors.values())


def test_a_refused_client_is_named_in_the_record(tmp_path):
    def spoil(experiment, base):
        federation = experiment.data.build(base)
        x, train = federation.train.x.clone(), federation.train
        x[: train.offsets[1]] *= 1e6
        return replace(federation, train=replace(train, x=x))

    with pytest.warns(RefusedUpdateWarning, match="client 'c0' was left out") as said:
        (record,) = run(small_experiment(**FEDAVG), tmp_path, read=spoil)
    assert len(said) == 1  # once in a run
    assert [row["refused"] for row in record.metrics] == [1] * 6
    assert record.metrics[-1]["refusals"][0][0] == "c0"


# ---------------------------------------------------------------------- a run folder is a fitted population

LOADED = {
    "best": {"watch": {"output": "best"}, "population": {"k": 2, "mix": "weights"}, "seeds": [3]},
    "private": {"algorithm": PRIVATE},
    "ditto": {"algorithm": {"name": "ditto", "lr": 0.3}, "population": {"k": 1}},
    "finetune": {
        "algorithm": {"name": "finetune", "method": {"name": "fedavg", "lr": 0.3}},
        "population": {"k": 1},
        "model": {"name": "perceptron", "hidden": [4, 3]},
    },
    "newcomers, and a step that is chosen": {"newcomers": 0.4, "engine": "loop", "algorithm": {"name": "ppfl"}},
}


@pytest.mark.parametrize("name", LOADED)
def test_a_run_folder_scores_as_the_run_did(name: str, tmp_path: Path) -> None:
    experiment = small_experiment(**LOADED[name])
    (record,) = run(experiment, tmp_path)
    fitted = load(tmp_path)  # the only run there
    assert fitted.ids == record.ids and len(fitted.history) == experiment.rounds
    found = fitted.evaluate(experiment.build_data().select(record.ids))
    assert found.pooled == pytest.approx(record.scores[record.metric])
    assert [round(float(s), 6) for s in found.score] == record.scores["per_client"]
    if record.memberships is not None:
        assert torch.equal(fitted.memberships, record.memberships)


def test_a_run_that_is_unfinished_or_older_or_not_alone_is_not_loaded(tmp_path: Path) -> None:
    """Older: from before it was recorded what a sample is. Such a run can be resumed and shown."""
    with pytest.raises(Interrupted):
        run(small_experiment(), tmp_path, on_round_end=stop_after(4, KeyboardInterrupt))
    folder = RunFolder(tmp_path / "seed-0")
    assert_refused(lambda: load(folder.path), CheckpointError, "not finished", "--resume")
    clients = read_json(folder.clients_file)
    write_json(folder.clients_file, {key: value for key, value in clients.items() if key != "kind"})
    assert run(small_experiment(), tmp_path, resume=True)[0].finished
    assert_refused(lambda: load(folder.path), CheckpointError, "does not say what a sample is")
    run(small_experiment(seeds=[1]), tmp_path)
    assert_refused(lambda: load(tmp_path), CheckpointError, "has 2 runs", "seed-0")


# ---------------------------------------------------------------------- agreement with the truth, and the code

SHAPES = st.tuples(st.integers(1, 6), st.integers(1, 4), st.integers(1, 4), st.integers(0, 2**31))


def draw(clients: int, k: int, true: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    rows = (torch.rand(clients, n, generator=generator, dtype=torch.float64) + 0.01 for n in (k, true))
    found, truth = (c / c.sum(1, keepdim=True) for c in rows)
    return found, truth


@given(SHAPES)
def test_agreement_is_that_of_the_best_matching_whatever_the_order_of_models(shape):
    found, truth = draw(*shape)
    k = max(found.shape[1], truth.shape[1])
    a, b = (pad(c, (0, k - c.shape[1])) for c in (found, truth))
    orders = [list(order) for order in permutations(range(k))]
    agreement = group_agreement(found, truth)
    assert agreement.share == pytest.approx(
        max(float((simplex.harden(a) * simplex.harden(b)[:, o]).sum(1).mean()) for o in orders)
    )
    assert agreement.distance == pytest.approx(min(float(simplex.total_variation(a, b[:, o]).mean()) for o in orders))
    assert group_agreement(found.flip(1), truth) == pytest.approx(agreement)
    assert group_agreement(truth.flip(1), truth) == pytest.approx((1.0, 0.0))


@given(SHAPES)
def test_told_apart_is_the_nearest_mean_of_the_others(shape):
    found, truth = draw(*shape)
    group = truth.argmax(1).tolist()
    right = 0
    for i, mine in enumerate(found):
        members = {g: [found[j] for j in range(len(group)) if group[j] == g and j != i] for g in set(group)}
        distances = {g: float((torch.stack(rows).mean(0) - mine).norm()) for g, rows in members.items() if rows}
        right += bool(distances) and min(distances, key=distances.__getitem__) == group[i]
    assert told_apart(found, truth) == pytest.approx(right / len(group))


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_the_recorded_commit_is_that_of_the_packages_own_repository(tmp_path):
    def git(*words: str) -> str:
        me = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
        return subprocess.run(("git", "-C", tmp_path, *me, *words), capture_output=True, text=True, check=True).stdout

    assert commit_of(tmp_path) is None
    git("init")
    assert commit_of(tmp_path) is None  # nothing was committed
    source, installed = tmp_path / "source", tmp_path / ".venv"
    source.write_text("1")
    git("add", "source")
    git("commit", "-m", "one")
    git("tag", "v1")  # a name may be moved
    commit = git("rev-parse", "HEAD")[:7]
    assert commit_of(tmp_path) == commit
    source.write_text("2")
    assert commit_of(tmp_path) == f"{commit}-dirty"
    installed.mkdir()
    assert commit_of(installed) is None  # it is somebody else's repository
