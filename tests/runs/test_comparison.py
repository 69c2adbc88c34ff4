"""Comparisons: methods that differ in nothing but what their tables say, run once, whatever fails; and their tuning."""

import math
import multiprocessing
import os
import signal
import time
import unicodedata
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.experiments import call_ppfl, file_bytes, small_experiment, write_experiment
from kit.refusals import SettingError, assert_refused
from ppfl.algorithms import PPFL, FedAvg
from ppfl.runs import load_experiment, tuning
from ppfl.runs.comparison import load_comparison, refuse_twice, run_tasks, tasks_of
from ppfl.runs.names import MOST_BYTES, checked_name, folder_name, same_folder_key
from ppfl.runs.processes import ProcessPool
from ppfl.runs.tuning import attempt, candidates, tune, without_test
from ppfl.server import RefusedUpdateWarning, train_and_measure

COMPARISON = """
rounds = 3
seeds = [0, 1]
data = { name = "synthetic_groups", n_clients = 6, groups = 2, dim = 3, samples = 9, test_points = 4 }
model = { name = "linear" }
algorithm = { lr = 0.3, batch_size = 4 }
[methods.Local]
algorithm.name = "local"
[methods.FedAvg]
algorithm = { name = "fedavg", batch_size = 8 }
[methods."PPFL, weights"]
algorithm.name = "ppfl"
population = { k = 2, mix = "weights" }
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_experiment(tmp_path, COMPARISON, "few")


def test_methods_share_all_that_their_own_tables_do_not_say(file: Path) -> None:
    found = load_comparison(file, ["rounds=7", "methods.FedAvg.algorithm.lr=0.1"])
    assert list(found) == ["Local", "FedAvg", "PPFL, weights"]
    alike = [e.model_dump(exclude={"algorithm", "population"}) for e in found.values()]
    assert alike[0] == alike[1] == alike[2]
    assert {e.rounds for e in found.values()} == {7}, "an override reaches every method"
    assert [e.algorithm.lr for e in found.values()] == [0.3, 0.1, 0.3]
    assert [e.algorithm.batch_size for e in found.values()] == [4, 8, 4]
    assert [e.population.k for e in found.values()] == [1, 1, 2]


def test_an_experiment_file_is_a_comparison_of_one_and_not_the_reverse(file: Path) -> None:
    assert_refused(lambda: load_experiment(file), SettingError, "ppfl compare")
    text = COMPARISON[: COMPARISON.index("[methods")]
    file.write_text(text.replace("algorithm = { lr", 'algorithm = { name = "fedavg", lr'))
    assert load_comparison(file) == {"few": load_experiment(file)}


def test_every_seed_of_every_method_is_run_once(file: Path, tmp_path: Path) -> None:
    tasks, done = tasks_of(load_comparison(file), tmp_path / "out", tmp_path), []
    records = run_tasks(tasks, 1, done.append)
    seeds = {label: [run.seed for run in runs] for label, runs in records.items()}
    assert seeds == {"Local": [0, 1], "FedAvg": [0, 1], "PPFL, weights": [0, 1]}
    assert sorted(t.run_folder for t in done) == sorted(t.run_folder for t in tasks)
    assert all(run.finished for runs in records.values() for run in runs)
    before = file_bytes(tmp_path / "out")
    run_tasks(tasks, 1)
    assert file_bytes(tmp_path / "out") == before


def test_a_run_that_fails_stops_no_other(file: Path, tmp_path: Path) -> None:
    comparison = load_comparison(file, ["methods.FedAvg.population.k=3", "seeds=[0]"])
    tasks = tasks_of(comparison, tmp_path / "out", tmp_path)
    assert_refused(lambda: run_tasks(tasks, 1), SettingError, "1 of 3 runs failed", "FedAvg, seed 0", "k = 3")
    assert len(list((tmp_path / "out").rglob("result.safetensors"))) == 2


# ---------------------------------------------------------------------- refusals, and names that become folders

WRONG = {
    "methods.FedAvg.algorithm.lr=-1": "method 'FedAvg'",
    "methods=3": "one table",
    "methods.FedAvg=3": "one table",
    "name=5": "name",
    "name={ a = 1 }": "name",
}


@pytest.mark.parametrize("change", WRONG)
def test_what_is_wrong_is_said_with_its_method(file: Path, change: str) -> None:
    assert_refused(lambda: load_comparison(file, [change]), SettingError, WRONG[change])
    file.write_text(f"name = [1]\n{COMPARISON[: COMPARISON.index('[methods')]}")
    assert_refused(lambda: load_comparison(file), SettingError, "name is")


SHARED, NONE = "would share the folder", "would be written to folder"
LABELS = {"fedavg": SHARED, "FedAvg!": SHARED, "\uff26edAvg/": None, "Fed Avg": None}
LABELS |= dict.fromkeys(["..", ".", "///", "", "report.html", "x" * 300], NONE)


@pytest.mark.parametrize("label", LABELS)
def test_labels_without_a_folder_of_their_own_are_refused(file: Path, tmp_path: Path, label: str) -> None:
    file.write_text(f"{COMPARISON}\n[methods.'{label}']\nalgorithm.name = 'local'")
    comparison, said = load_comparison(file), LABELS[label]
    if said is None:
        tasks = tasks_of(comparison, tmp_path, None)
        assert len(tasks) == 8
        assert_refused(lambda: refuse_twice([*tasks, tasks[0]]), SettingError, "a name of its own")
    else:
        words = [f"'FedAvg' and '{label}'"] if said == SHARED else []
        assert_refused(lambda: tasks_of(comparison, tmp_path, None), SettingError, said, *words)


BAD = ["", ".", "..", "../../x", "/etc", "a/b", "a\\b", "a\0b", "a\nb", "a\x1b[31m", "x.", "CON", "nul.txt", "-rf"]
BAD += ["report.html", "Memberships.SVG", "a.partial", "é" * MOST_BYTES, "\ud800", "a:b", "a b", 5, None, ["x"]]
GOOD = ["table1", "k-sweep", "a.b+c_d", "7", "_x", "ünïcode", "हिन्दी", "x" * MOST_BYTES]


def test_names_that_file_systems_refuse_or_misread_are_refused() -> None:
    for name in BAD:
        assert_refused(lambda: checked_name(name, "here"), SettingError, "here: name is ")
    assert [checked_name(name, "here") for name in GOOD] == GOOD
    assert folder_name("a/b ../c") == "a-b-..-c"


@given(st.text() | st.text("./\\ -+\0\n\x1baé", max_size=8))
def test_a_folder_of_a_label_is_one_good_name_or_is_refused_with_the_label(label: str) -> None:
    try:
        folder = folder_name(label)
    except SettingError as error:
        refused = str(error)
        assert repr(label)[:40] in refused
        return
    assert checked_name(folder, "here") == folder
    assert (Path("runs") / folder).parent == Path("runs")
    assert len(f"{folder}.partial".encode()) < 255


@given(st.text(max_size=20))
def test_case_and_encoding_of_accents_make_no_other_folder(text: str) -> None:
    assert same_folder_key(unicodedata.normalize("NFD", text)) == same_folder_key(unicodedata.normalize("NFC", text))
    assert same_folder_key(text.casefold()) == same_folder_key(text)


# ---------------------------------------------------------------------- tuning


@pytest.mark.parametrize("method", [FedAvg(lr=0.1), PPFL(lr=0.1)])
def test_candidates_begin_with_the_method_itself_and_never_repeat(method) -> None:
    for budget in (1, 3, 6):
        found = candidates(method, budget, seed=0)
        assert len(found) == budget and found[0] == {}
        made = [method.model_copy(update=changes) for changes in found]
        assert len(set(made)) == budget
        assert all(value in method.search[name] for changes in found for name, value in changes.items())
        assert candidates(method, budget, seed=0) == found
    grid = math.prod(len(values) for values in method.search.values())
    assert len(candidates(method, 10**6, seed=0)) in (grid, grid + 1)  # its own values may be in the grid


def test_trials_see_no_test_data(monkeypatch) -> None:
    """Spoilt test labels change nothing. Nor does a trial warn of clients whose update did not count."""

    def with_a_refusal(*arguments):
        warnings.warn("client 'a' was left out of a round", RefusedUpdateWarning, stacklevel=1)
        yield from train_and_measure(*arguments)

    monkeypatch.setattr(tuning, "train_and_measure", with_a_refusal)
    experiment = small_experiment()
    federation = experiment.data.build(None)
    spoilt = replace(federation, test=replace(federation.test, y=1 - federation.test.y))
    scores = [attempt(experiment, without_test(f), {"lr": 0.1}, rounds=3).score for f in (federation, spoilt)]
    assert scores[0] == scores[1] > 0
    assert without_test(federation).test is None


def test_the_best_trial_comes_first_and_every_method_has_as_many() -> None:
    local = small_experiment(population={"k": 1}, algorithm={"name": "local", "lr": 0.1})
    experiments, reported = {"a": small_experiment(), "b": local}, []
    found = tune(experiments, None, budget=3, rounds=2, on_trial=lambda label, trial: reported.append(label))
    assert reported == ["a"] * 3 + ["b"] * 3
    for trials in found.values():
        assert [t.score for t in trials] == sorted((t.score for t in trials), reverse=True)
    assert_refused(lambda: tune(experiments, None, budget=0), SettingError, "at least one trial")


def test_tune_writes_a_comparison_with_what_it_found(file: Path, capsys) -> None:
    finished = call_ppfl(capsys, "tune", file, "--budget", 2, "--set", "algorithm.lr=0.001")
    assert finished.code == 0 and "validation accuracy" in finished.err
    assert list(load_comparison(file.with_name("few-tuned.toml"))) == ["Local", "FedAvg", "PPFL, weights"]
    again = call_ppfl(capsys, "tune", file, "--budget", 2)
    assert again.code == 2 and "exists" in again.err


# ---------------------------------------------------------------------- worker processes


@pytest.mark.processes
def test_every_task_gets_its_result_or_its_error(capfd):
    with ProcessPool(1, math.sqrt, threads=1) as pool:
        (_, good), (_, bad) = pool.run([4.0, -1.0])
    assert good == 2.0 and "exit code 1" in str(bad)
    assert "ValueError" in capfd.readouterr().err


@pytest.mark.processes
def test_a_killed_worker_is_an_error_of_its_task_alone_and_all_end_with_their_block():
    def killed_in_the_middle() -> None:
        with ProcessPool(1, time.sleep, threads=1) as pool:
            found = pool.run([0.0, 1000.0, 0.1, 1000.0])
            assert next(found) == (0.0, None)
            (worker,) = multiprocessing.active_children()
            signal.signal(signal.SIGALRM, lambda *_: os.kill(worker.pid, signal.SIGKILL))
            signal.alarm(1)
            task, error = next(found)
            assert task == 1000.0
            assert "was killed by SIGKILL" in str(error) and "again to go on" in str(error)
            assert next(found) == (0.1, None)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        killed_in_the_middle()
    assert multiprocessing.active_children() == []
