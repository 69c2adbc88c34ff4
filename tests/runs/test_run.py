"""A run is a folder that says everything and that nothing overwrites; loaded, it is a fitted population."""

import shutil
import subprocess
from itertools import permutations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import pad

from kit.experiments import file_bytes, small_experiment, stop_after, tensors_of
from kit.refusals import CheckpointError, SettingError, assert_refused
from ppfl import fit, load
from ppfl.algorithms import FedAvg
from ppfl.core import simplex
from ppfl.data import SampleSpec
from ppfl.runs import Interrupted, find_runs, group_agreement, load_run, run
from ppfl.runs.provenance import commit_of
from ppfl.server import part_newcomers

FEDAVG = {"method": {"name": "fedavg", "lr": 0.1}, "population": {"k": 1}}
PRIVATE = {"name": "ppfl", "lr": 0.3, "batch_size": 4, "share_memberships": False}


def test_a_run_leaves_its_record_and_is_what_fit_computes(tmp_path):
    experiment = small_experiment()
    (record,) = run(experiment, tmp_path)
    federation, method = experiment.build_data(), experiment.method
    assert record.finished and record.folder == tmp_path / "seed-0"
    assert record.experiment == experiment.model_dump(mode="json")
    assert [row["round"] for row in record.metrics] == [1, 2, 3, 4, 5, 6]
    assert [row["round"] for row in record.evaluated] == [2, 4, 6] == sorted(record.memberships_by_round)
    assert record.ids == federation.ids
    assert torch.equal(record.truth, federation.truth.memberships)
    assert torch.equal(record.memberships, record.memberships_by_round[6])
    assert record.agreement == group_agreement(record.memberships, record.truth)
    assert record.total("bytes_up") == sum(row["bytes_up"] for row in record.metrics)
    assert {"ppfl", "torch", "numpy", "python", "platform", "started"} <= record.versions.keys()
    assert not list(tmp_path.rglob("*.partial"))
    population = experiment.build_population(SampleSpec.of(federation), 0)
    affinity = experiment.build_affinity(federation)
    fitted = fit(population, federation, method, rounds=6, seed=0, affinity=affinity)
    torch.testing.assert_close(record.memberships, fitted.memberships)
    assert record.scores["accuracy"] == pytest.approx(fitted.evaluate(federation).pooled)


def test_a_round_says_how_many_clients_it_lost_and_a_loss_that_is_not_there_is_null(tmp_path):
    (record,) = run(small_experiment(dropout=0.5), tmp_path / "lossy")
    assert any("lost" in row for row in record.metrics)
    assert all(row["participants"] + row.get("lost", 0) == 6 and row.get("lost", 1) > 0 for row in record.metrics)
    (all_lost,) = run(small_experiment(dropout=1 - 1e-9, method={"name": "ppfl"}), tmp_path / "all lost")
    assert [(row["participants"], row["lost"], row["loss"]) for row in all_lost.metrics] == 6 * [(0, 6, None)]
    assert all_lost.finished and all_lost.scores["accuracy"] is not None
    assert "NaN" not in (all_lost.folder / "metrics.jsonl").read_text()


@pytest.mark.parametrize("method", [{"name": "ppfl", "lr": 0.3}, {"name": "ditto", "lr": 0.3}], ids=["ppfl", "ditto"])
def test_newcomers_of_a_run_have_the_scores_of_clients_that_are_onboarded(tmp_path, method):
    k = 2 if method["name"] == "ppfl" else 1
    experiment = small_experiment(newcomers=0.4, method=method, population={"k": k})
    (record,) = run(experiment, tmp_path)
    _, newcomers = part_newcomers(experiment.build_data(), 0.4, seed=0)
    scores = load(record.folder).onboard(newcomers).evaluate(newcomers)
    assert record.scores["newcomers_accuracy"] == pytest.approx(scores.pooled)


def test_memberships_are_recorded_only_where_there_are_some_and_clients_report(tmp_path):
    silent = {"method": PRIVATE, "watch": {"every": 2, "report_clients": False}}
    for name, changes in {"silent": silent, "fedavg": FEDAVG}.items():
        (record,) = run(small_experiment(**changes), tmp_path / name)
        assert record.finished and record.memberships is None and record.agreement is None
        assert record.memberships_by_round == {}
        assert any("per_client" in row for row in record.metrics) == (name != "silent")
    (reported,) = run(small_experiment(method=PRIVATE), tmp_path / "reported")
    sums = load_run(tmp_path / "silent" / "seed-0")
    assert sums.scores["accuracy"] == pytest.approx(reported.scores["accuracy"])
    assert reported.memberships is not None


def test_scores_are_those_of_the_state_that_is_returned(tmp_path):
    settings = {"seeds": [0, 1, 2, 3]}
    every = run(small_experiment(watch={"every": 1, "output": "random"}, **settings), tmp_path / "every")
    sparse = run(small_experiment(watch={"every": 6, "output": "random"}, **settings), tmp_path / "sparse")
    assert {record.scores["round"] for record in every} != {6}, "no state from before the end is returned"
    for record, full in zip(sparse, every, strict=True):
        at = record.scores["round"]
        assert at == full.scores["round"]
        assert record.scores["accuracy"] == full.metrics[at - 1]["accuracy"]
        assert torch.equal(record.memberships, full.memberships_by_round[at])


def test_every_seed_has_its_folder_and_nothing_is_overwritten(tmp_path):
    assert_refused(lambda: find_runs(tmp_path), CheckpointError, "there is no run in")
    assert_refused(lambda: run(small_experiment(), tmp_path, checkpoint_every=0), SettingError, "checkpoint_every >= 1")
    run(small_experiment(seeds=[2, 10]), tmp_path)
    assert [folder.name for folder in find_runs(tmp_path)] == ["seed-2", "seed-10"]
    foreign, before = tmp_path / "seed-0" / "thesis.txt", file_bytes(tmp_path)
    assert_refused(lambda: run(small_experiment(seeds=[3, 10]), tmp_path), CheckpointError, "seed-10 exists")
    other = small_experiment(seeds=[2], method={"name": "ppfl", "lr": 0.1, "batch_size": 4})
    foreign.parent.mkdir()
    foreign.write_text("three years")
    for resume in (False, True):
        assert_refused(lambda: run(other, tmp_path, resume=resume), CheckpointError, "lr is 0.3 there and 0.1")
        assert_refused(lambda: run(small_experiment(), tmp_path, resume=resume), CheckpointError, "not a run", "--out")
    assert_refused(lambda: run(other, foreign), CheckpointError, "thesis.txt", "cannot be used")
    assert file_bytes(tmp_path) == before | {"seed-0/thesis.txt": b"three years"}
    records = run(small_experiment(seeds=[2, 10, 3]), tmp_path, resume=True)
    assert [record.seed for record in records] == [2, 10, 3]
    after = file_bytes(tmp_path)
    assert {name: after[name] for name in before} == before


def test_a_run_that_diverges_says_so_and_has_no_checkpoint_of_it(tmp_path, monkeypatch):
    data = {"name": "synthetic_groups", "task": "regression", "n_clients": 4}
    experiment = small_experiment(data=data, method={"name": "ppfl", "lr": 1e6}, rounds=30)
    assert_refused(lambda: run(experiment, tmp_path / "lr"), SettingError, "diverged", "not finite", "smaller lr")
    assert not load_run(tmp_path / "lr" / "seed-0").finished
    merge, calls = FedAvg.merge, iter(range(6))

    def overflow(*arguments):
        merged, factor = merge(*arguments), float("inf") if next(calls) == 2 else 1.0
        return merged._replace(shared={name: leaf * factor for name, leaf in merged.shared.items()})

    monkeypatch.setattr(FedAvg, "merge", overflow)
    refused = "diverged: after round 3 shared.", "is not finite", "smaller lr"
    assert_refused(lambda: run(small_experiment(**FEDAVG), tmp_path, checkpoint_every=1), SettingError, *refused)
    tensors = tensors_of(tmp_path / "seed-0" / "checkpoint.safetensors")
    assert tensors and all(bool(leaf.isfinite().all()) for leaf in tensors.values())


FINETUNE = {"name": "finetune", "method": {"name": "fedavg", "lr": 0.3}}
LOADED = {
    "best": {"watch": {"output": "best"}, "population": {"k": 2, "mix": "weights"}, "seeds": [3]},
    "private": {"method": PRIVATE},
    "finetune": {"method": FINETUNE, "population": {"k": 1}, "model": {"name": "perceptron", "hidden": [4, 3]}},
    "newcomers, and a step that is chosen": {"newcomers": 0.4, "engine": "loop", "method": {"name": "ppfl"}},
}


@pytest.mark.parametrize("name", LOADED)
def test_a_run_folder_scores_as_the_run_did(name, tmp_path):
    experiment = small_experiment(**LOADED[name])
    (record,) = run(experiment, tmp_path)
    fitted = load(tmp_path)  # the only run there
    assert fitted.ids == record.ids and len(fitted.history) == experiment.rounds
    found = fitted.evaluate(experiment.build_data().select(record.ids))
    assert found.pooled == pytest.approx(record.scores[record.metric])
    assert [round(float(s), 6) for s in found.score.values] == record.scores["per_client"]
    if record.memberships is not None:
        assert torch.equal(fitted.memberships, record.memberships)


def test_a_run_that_is_unfinished_or_not_alone_is_not_loaded(tmp_path):
    with pytest.raises(Interrupted):
        run(small_experiment(), tmp_path, on_round_end=stop_after(4, KeyboardInterrupt))
    assert_refused(lambda: load(tmp_path / "seed-0"), CheckpointError, "not finished", "--resume")
    run(small_experiment(seeds=[1]), tmp_path)
    assert_refused(lambda: load(tmp_path), CheckpointError, "has 2 runs", "seed-0")


@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 4), st.integers(0, 2**31))
def test_agreement_is_that_of_the_best_matching_and_a_nearest_group_has_the_nearest_mean_of_the_others(
    clients, k, true, seed
):
    generator = torch.Generator().manual_seed(seed)
    rows = (torch.rand(clients, n, generator=generator, dtype=torch.float64) + 0.01 for n in (k, true))
    found, truth = (c / c.sum(1, keepdim=True) for c in rows)
    a, b = (pad(c, (0, max(k, true) - c.shape[1])) for c in (found, truth))
    matched = [b[:, order] for order in permutations(range(max(k, true)))]
    agreement = group_agreement(found, truth)
    shares = [float((simplex.harden(a) * simplex.harden(c)).sum(1).mean()) for c in matched]
    assert agreement.share == pytest.approx(max(shares))
    assert agreement.distance == pytest.approx(min(float(simplex.total_variation(a, c).mean()) for c in matched))
    assert group_agreement(found.flip(1), truth) == pytest.approx(agreement)


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_the_recorded_commit_is_that_of_the_packages_own_repository(tmp_path):
    def git(*words: str) -> str:
        me = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
        return subprocess.run(("git", "-C", tmp_path, *me, *words), capture_output=True, text=True, check=True).stdout

    git("init")
    assert commit_of(tmp_path) is None  # nothing was committed
    (tmp_path / "source").write_text("1")
    git("add", "source")
    git("commit", "-m", "one")
    commit = git("rev-parse", "HEAD")[:7]
    assert commit_of(tmp_path) == commit
    (tmp_path / "source").write_text("2")
    assert commit_of(tmp_path) == f"{commit}-dirty"
    (tmp_path / ".venv").mkdir()
    assert commit_of(tmp_path / ".venv") is None  # it is somebody else's repository
