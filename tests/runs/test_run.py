"""A run is a folder that says everything, and that nothing overwrites."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ppfl.algorithms import FedAvg
from ppfl.core import CheckpointError, SettingError
from ppfl.runs import Experiment, find_runs, group_agreement, load_run, run
from ppfl.runs.storage import read_tensors
from ppfl.server import InProcess, RefusedUpdateWarning, begin, evaluate, make_problem, train_and_measure
from ppfl.sites import Site


def test_a_run_leaves_its_record(make_experiment, tmp_path):
    experiment = make_experiment()
    (record,) = run(experiment, tmp_path / "out")
    assert record.finished
    assert record.folder == tmp_path / "out" / "seed-0"
    assert record.experiment == experiment.model_dump(mode="json")
    assert [row["round"] for row in record.metrics] == [1, 2, 3, 4, 5, 6]
    assert [row["round"] for row in record.evaluated] == [2, 4, 6]
    assert sorted(record.memberships_by_round) == [2, 4, 6]
    federation = experiment.data.build()
    assert record.ids == federation.ids
    assert torch.equal(record.truth, federation.truth.memberships)
    assert torch.equal(record.memberships, record.memberships_by_round[6])
    assert record.agreement == group_agreement(record.memberships, record.truth)
    assert record.total("bytes_up") == sum(row["bytes_up"] for row in record.metrics)
    assert {"ppfl", "torch", "numpy", "python", "platform", "started"} <= record.versions.keys()
    assert not list(tmp_path.rglob("*.partial"))


def test_a_run_is_what_the_server_and_its_site_compute(make_experiment, tmp_path):
    experiment = make_experiment()
    (record,) = run(experiment, tmp_path)
    federation = experiment.data.build()
    population = experiment.build_population(federation, 0)
    method, watch = experiment.algorithm, experiment.watch.build()
    transport = InProcess(Site(federation, population, experiment.build_engine()))
    affinity = experiment.affinity.build(federation, method)
    problem = make_problem(population, transport, affinity, rounds=6, seed=0)
    *_, last = train_and_measure(method, problem, transport, watch, begin(method, problem, transport))
    assert torch.equal(record.memberships, last.state.server.memberships)
    score = evaluate(method, problem, transport, last.state.server).splits["test"]
    assert record.scores["accuracy"] == score.pooled


def test_a_round_says_how_many_it_lost(make_experiment, tmp_path):
    (whole,) = run(make_experiment(), tmp_path / "whole")
    assert all("lost" not in row and row["participants"] == 6 for row in whole.metrics)
    (record,) = run(make_experiment(dropout=0.5), tmp_path / "lossy")
    assert any("lost" in row for row in record.metrics)
    assert all(row["participants"] + row.get("lost", 0) == 6 and row.get("lost", 1) > 0 for row in record.metrics)
    (all_lost,) = run(make_experiment(dropout=1 - 1e-9, algorithm={"name": "ppfl"}), tmp_path / "all lost")
    assert [(row["participants"], row["lost"], row["loss"]) for row in all_lost.metrics] == 6 * [(0, 6, None)]
    assert all_lost.finished and all_lost.scores["accuracy"] is not None


@pytest.mark.parametrize("name", ["local", "fedavg"])
def test_methods_without_memberships_leave_none(make_experiment, tmp_path, name):
    (record,) = run(make_experiment(algorithm={"name": name}, population={"k": 1}), tmp_path)
    assert record.memberships is None
    assert record.agreement is None
    assert record.memberships_by_round == {}


def test_scores_are_those_of_the_state_that_is_returned(make_experiment, tmp_path):
    every = make_experiment(watch={"every": 1, "output": "random"}, seeds=list(range(4)))
    kept = [record.scores["round"] for record in run(every, tmp_path / "every")]
    assert set(kept) != {6}
    sparse = make_experiment(watch={"every": 6, "output": "random"}, seeds=list(range(4)))
    for record, full in zip(
        run(sparse, tmp_path / "sparse"), map(load_run, find_runs(tmp_path / "every")), strict=True
    ):
        at = record.scores["round"]
        assert at == full.scores["round"]
        assert record.scores["accuracy"] == full.metrics[at - 1]["accuracy"]
        assert torch.equal(record.memberships, full.memberships_by_round[at])


def test_every_seed_has_its_folder_and_more_can_be_added(make_experiment, tmp_path, snapshot):
    run(make_experiment(seeds=[2, 10]), tmp_path)
    assert [folder.name for folder in find_runs(tmp_path)] == ["seed-2", "seed-10"]
    before = snapshot(tmp_path)
    records = run(make_experiment(seeds=[2, 10, 3]), tmp_path, resume=True)
    assert [record.seed for record in records] == [2, 10, 3]
    after = snapshot(tmp_path)
    assert {name: after[name] for name in before} == before


def test_what_is_not_a_number_is_null(make_experiment, tmp_path):
    frozen = {"name": "ppfl", "order": "random", "membership_steps": 0}  # rounds in which no client computes a loss
    run(make_experiment(algorithm=frozen, rounds=12), tmp_path)
    text = (tmp_path / "seed-0" / "metrics.jsonl").read_text()
    assert "NaN" not in text
    assert any(json.loads(line)["loss"] is None for line in text.splitlines())


def test_nothing_is_overwritten(make_experiment, tmp_path, snapshot):
    out = tmp_path / "out"
    run(make_experiment(), out)
    before = snapshot(out)
    with pytest.raises(CheckpointError, match=r"seed-0 exists with rounds=6 \(6 done\); .*--out or use --resume"):
        run(make_experiment(), out)
    for resume in (False, True):
        with pytest.raises(CheckpointError, match="another experiment .*algorithm.lr is 0.3 there and 0.1 here"):
            run(make_experiment(algorithm={"name": "ppfl", "lr": 0.1, "batch_size": 4}), out, resume=resume)
    run(make_experiment(), out, resume=True)
    assert snapshot(out) == before


def test_a_run_from_before_a_setting_existed_is_the_run_with_its_default(
    make_experiment, tmp_path, snapshot, monkeypatch
):
    dump = Experiment.model_dump
    with monkeypatch.context() as patched:
        patched.setattr(
            Experiment, "model_dump", lambda self, **kw: {k: v for k, v in dump(self, **kw).items() if k != "dropout"}
        )
        run(make_experiment(), tmp_path)
    assert "dropout" not in json.loads((tmp_path / "seed-0" / "experiment.json").read_text())
    before = snapshot(tmp_path)
    run(make_experiment(), tmp_path, resume=True)
    assert snapshot(tmp_path) == before
    with pytest.raises(CheckpointError, match="dropout"):
        run(make_experiment(dropout=0.5), tmp_path, resume=True)


def test_a_folder_of_something_else_is_refused(make_experiment, tmp_path, snapshot):
    (tmp_path / "seed-0").mkdir()
    (tmp_path / "seed-0" / "thesis.txt").write_text("three years")
    before = snapshot(tmp_path)
    for resume in (False, True):
        with pytest.raises(CheckpointError, match="not a run; choose another --out"):
            run(make_experiment(), tmp_path, resume=resume)
    assert snapshot(tmp_path) == before
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(CheckpointError, match="file.*cannot be used"):
        run(make_experiment(), file)


def test_a_refused_seed_stops_all_before_any_starts(make_experiment, tmp_path):
    run(make_experiment(seeds=[1]), tmp_path)
    with pytest.raises(CheckpointError, match="seed-1 exists"):
        run(make_experiment(seeds=[0, 1]), tmp_path)
    assert not (tmp_path / "seed-0").exists()


def test_bad_settings_leave_no_folder(make_experiment, tmp_path):
    out = tmp_path / "out"
    for changes, message in (
        ({"population": {"k": 7}}, "k is 7 but there are 6 clients"),
        ({"algorithm": {"name": "fedavg"}}, "one model"),
        ({"device": "cuda:99"}, "'cuda:99', which cannot be used"),
        ({"device": "abacus"}, "'abacus', which cannot be used"),
    ):
        with pytest.raises(SettingError, match=message):
            run(make_experiment(**changes), out)
    with pytest.raises(SettingError, match="checkpoint_every >= 1"):
        run(make_experiment(), out, checkpoint_every=0)
    assert not out.exists()


def test_a_run_that_diverges_says_so_and_stays_readable(make_experiment, tmp_path):
    data = {"name": "synthetic_groups", "task": "regression", "n_clients": 4}
    experiment = make_experiment(data=data, algorithm={"name": "ppfl", "lr": 1e6}, rounds=30)
    with pytest.raises(SettingError, match="diverged: .* are not finite; use a smaller lr"):
        run(experiment, tmp_path)
    assert not load_run(tmp_path / "seed-0").finished


def test_a_server_whose_models_are_no_longer_finite_stops_before_a_checkpoint_of_them(
    make_experiment, tmp_path, monkeypatch
):
    merge = FedAvg.merge

    def overflow(self, problem, server, task, totals, rows):
        merged = merge(self, problem, server, task, totals, rows)
        return merged._replace(shared={name: leaf * 1e30 for name, leaf in merged.shared.items()})

    monkeypatch.setattr(FedAvg, "merge", overflow)
    monkeypatch.setattr("ppfl.sites.site.default_filters", tuple)  # which would refuse what such models give
    experiment = make_experiment(algorithm={"name": "fedavg", "lr": 0.1}, population={"k": 1})
    with pytest.raises(SettingError, match=r"diverged: after round \d shared\..* is not finite; use a smaller lr"):
        run(experiment, tmp_path, checkpoint_every=1)
    tensors, _ = read_tensors(tmp_path / "seed-0" / "checkpoint.safetensors")
    assert all(bool(leaf.isfinite().all()) for leaf in tensors.values())


def test_a_refused_client_is_named_in_the_record(make_experiment, tmp_path):
    def spoil(experiment, base):
        federation = experiment.data.build(base)
        x, train = federation.train.x.clone(), federation.train
        x[: train.offsets[1]] *= 1e6
        return replace(federation, train=replace(train, x=x))

    experiment = make_experiment(algorithm={"name": "fedavg", "lr": 0.1}, population={"k": 1})
    with pytest.warns(RefusedUpdateWarning, match="client 'c0' was left out") as said:
        (record,) = run(experiment, tmp_path, read=spoil)
    assert len(said) == 1  # once in a run
    assert [row["refused"] for row in record.metrics] == [1] * 6
    assert record.metrics[-1]["refusals"][0][0] == "c0"


def test_without_reports_of_clients_a_run_leaves_sums_alone(make_experiment, tmp_path):
    hidden = {"name": "ppfl", "lr": 0.3, "batch_size": 4, "share_memberships": False}
    (reported,) = run(make_experiment(algorithm=hidden), tmp_path / "reported")
    silent = make_experiment(algorithm=hidden, watch={"every": 2, "report_clients": False})
    (record,) = run(silent, tmp_path / "silent")
    assert record.finished and record.memberships is None and record.memberships_by_round == {}
    assert not any("per_client" in row for row in record.metrics)
    assert record.scores["accuracy"] == pytest.approx(reported.scores["accuracy"])
    assert reported.memberships is not None


@pytest.mark.parametrize("damage", ["memberships.log", "result.safetensors", "clients.json", "metrics.jsonl"])
def test_a_damaged_run_is_refused_by_name(make_experiment, tmp_path, damage):
    run(make_experiment(), tmp_path)
    file = tmp_path / "seed-0" / damage
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2] + b"\n")
    with pytest.raises(CheckpointError, match=Path(damage).name):
        load_run(tmp_path / "seed-0")


def test_no_run_is_an_error_that_says_what_is_one(tmp_path):
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(CheckpointError, match="there is no run in"):
            find_runs(path)
        with pytest.raises(CheckpointError, match=r"experiment\.json"):
            load_run(path)


def test_the_result_holds_the_whole_state(make_experiment, tmp_path):
    run(make_experiment(), tmp_path)
    tensors, metadata = read_tensors(tmp_path / "seed-0" / "result.safetensors")
    assert torch.equal(tensors["memberships"], tensors["server.memberships"])
    assert tensors["server.shared.classifier.weight"].shape == (2, 2, 3)
    assert tensors["clients.membership"].shape == (6, 2)
    assert metadata["round"] == 6
