"""Comparisons: methods that differ in nothing but what their tables say; their names, their tuning, their processes."""

import math
import multiprocessing
import os
import shlex
import signal
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kit.experiments import TEXT, call_ppfl, small_experiment, write_experiment
from kit.refusals import SettingError, assert_refused
from ppfl import load
from ppfl.algorithms import PPFL, FedAvg
from ppfl.runs import load_experiment
from ppfl.runs.comparison import load_comparison, refuse_twice, run_tasks, tasks_of
from ppfl.runs.processes import ProcessPool
from ppfl.runs.tuning import attempt, candidates, tune, without_test

COMPARISON = f"""{TEXT}
batch_size = 4
[methods.Local]
method.name = "local"
population.k = 1
[methods.FedAvg]
method = {{ name = "fedavg", batch_size = 8 }}
population.k = 1
[methods."PPFL, weights"]
population.mix = "weights"
"""


@pytest.fixture
def file(tmp_path):
    return write_experiment(tmp_path, COMPARISON, "few")


def test_methods_share_all_that_their_own_tables_do_not_say(file):
    found = load_comparison(file, ["rounds=7", "methods.FedAvg.method.lr=0.1"])
    assert list(found) == ["Local", "FedAvg", "PPFL, weights"]
    alike = [e.model_dump(exclude={"method", "population"}) for e in found.values()]
    assert alike[0] == alike[1] == alike[2]
    assert [e.method.lr for e in found.values()] == [0.3, 0.1, 0.3]
    assert [e.method.batch_size for e in found.values()] == [4, 8, 4]
    assert [(e.rounds, e.population.k) for e in found.values()] == [(7, 1), (7, 1), (7, 2)]


def test_an_experiment_file_is_a_comparison_of_one_and_not_the_reverse(file):
    assert_refused(lambda: load_experiment(file), SettingError, "ppfl compare")
    for change, words in (("methods.FedAvg.method.lr=-1", "method 'FedAvg'"), ("methods.FedAvg=3", "one table")):
        assert_refused(lambda: load_comparison(file, [change]), SettingError, words)
    file.write_text(TEXT)
    assert load_comparison(file) == {"few": load_experiment(file)}


def test_labels_without_a_folder_of_their_own_are_refused(file, tmp_path):
    tasks = tasks_of(load_comparison(file), tmp_path, None)
    assert_refused(lambda: refuse_twice([*tasks, tasks[0]]), SettingError, "a name of its own")
    words = {"fedavg": "would share the folder", "": "would be written to folder", "x" * 300: "would be written to"}
    for label, said in words.items():
        file.write_text(f"{COMPARISON}\n[methods.'{label}']\nmethod.name = 'local'")
        assert_refused(lambda: tasks_of(load_comparison(file), tmp_path, None), SettingError, said)


@pytest.mark.parametrize("method", [FedAvg(lr=0.1), PPFL(lr=0.1)])
def test_candidates_begin_with_the_method_itself_and_never_repeat(method):
    for budget in (1, 3, 6):
        found = candidates(method, budget, seed=0)
        assert len(found) == budget and found[0] == {}
        assert len({method.changed(changes) for changes in found}) == budget
        assert all(value in method.search[name] for changes in found for name, value in changes.items())
        assert candidates(method, budget, seed=0) == found
    grid = math.prod(len(values) for values in method.search.values())
    assert len(candidates(method, 10**6, seed=0)) in (grid, grid + 1)  # its own values may be in the grid


def test_trials_see_no_test_data():
    experiment = small_experiment()
    federation = experiment.build_data()
    spoilt = replace(federation, test=replace(federation.test, y=1 - federation.test.y))
    scores = [attempt(experiment, without_test(f), {"lr": 0.1}, rounds=3).score for f in (federation, spoilt)]
    assert scores[0] == scores[1] > 0
    assert without_test(federation).test is None
    assert_refused(lambda: tune({"small": experiment}, None, budget=0), SettingError, "budget is 0")


def test_tune_tries_every_method_as_often_and_writes_a_comparison_with_the_best(file, capsys, monkeypatch):
    """The comparison runs as it is suggested, also after the same methods ran with other settings."""
    monkeypatch.chdir(file.parent)
    assert call_ppfl(capsys, "compare", file, "--jobs", 1).code == 0
    experiments, reported = load_comparison(file), []
    found = tune(experiments, None, budget=3, rounds=2, on_trial=lambda label, trial: reported.append(label))
    assert reported == [label for label in experiments for _ in range(3)]
    for trials in found.values():
        assert [t.score for t in trials] == sorted((t.score for t in trials), reverse=True)
    done = call_ppfl(capsys, "tune", file, "--budget", 2, "--set", "method.lr=0.001")
    assert done.code == 0 and "validation accuracy" in done.err
    assert list(load_comparison(file.with_name("few-tuned.toml"))) == list(experiments)
    suggested = shlex.split(done.out.partition("compare them with: ppfl ")[2])
    compared = call_ppfl(capsys, *suggested, "--jobs", 1)
    assert compared.code == 0, compared.err
    elsewhere = call_ppfl(capsys, "tune", file, "--out", file.parent / "deeper" / "tuned.toml")
    assert elsewhere.code == 2 and "is in another folder" in elsewhere.err
    again = call_ppfl(capsys, "tune", file, "--budget", 2)
    assert again.code == 2 and "exists" in again.err


def test_data_that_changed_since_the_last_command_are_read_anew(tmp_path):
    experiments = load_comparison(write_experiment(tmp_path), ["data={name='npz', file='data.npz'}"])
    for ids in ("ab", "cd"):
        clients = np.repeat(np.array([*ids]), 10)
        np.savez(tmp_path / "data.npz", x=np.eye(20, 3, dtype="float32"), y=np.arange(20) % 2, client=clients)
        (found,) = run_tasks(tasks_of(experiments, tmp_path / ids, tmp_path), jobs=1)["groups"]
        assert found.ids == tuple(ids)
        tune(experiments, tmp_path, budget=1, rounds=1)


def work_until_ctrl_c() -> None:
    with ProcessPool(1, time.sleep, threads=1) as pool:
        found = pool.run([0.0, 1000.0, -1.0, 0.1, 1000.0])
        assert next(found) == (0.0, None)
        (worker,) = multiprocessing.active_children()
        signal.signal(signal.SIGALRM, lambda *_: os.kill(worker.pid, signal.SIGKILL))
        signal.alarm(1)
        task, error = next(found)
        assert task == 1000.0
        assert "was killed by SIGKILL" in str(error) and "again to go on" in str(error)
        assert "exit code 1" in str(next(found)[1])  # nobody sleeps less than no time
        assert next(found) == (0.1, None)
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.alarm(1)
        next(found)


@pytest.mark.processes
def test_every_command_reads_the_data_anew(tmp_path, monkeypatch):
    """In one process, commands in other folders may name other files by the same relative path."""
    for folder, width in (("a", 2), ("b", 3)):
        (tmp_path / folder).mkdir()
        random = np.random.default_rng(0)
        x, y, clients = random.normal(size=(40, width)), np.arange(40) % 2, np.arange(40) // 10
        np.savez(tmp_path / folder / "rows.npz", x=x, y=y, client=clients)
        monkeypatch.chdir(tmp_path / folder)
        changes = {"data": {"name": "npz", "file": "rows.npz"}, "rounds": 1}
        experiments = {"ppfl": small_experiment(**changes)}
        tune(experiments, None, budget=1)
        records = run_tasks(tasks_of(experiments, Path("out"), None), jobs=1)
        assert load(records["ppfl"][0].folder).spec.shape == (width,)
        tune(experiments, None, budget=1)


def test_a_lost_worker_is_an_error_of_its_task_alone_and_all_end_with_their_block(capfd):
    with pytest.raises(KeyboardInterrupt):
        work_until_ctrl_c()
    assert multiprocessing.active_children() == []
    assert "ValueError" in capfd.readouterr().err
