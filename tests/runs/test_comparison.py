"""Comparisons: methods that differ in nothing but what their tables say, run once, whatever fails."""

from pathlib import Path

import pytest

from ppfl.core.errors import SettingError
from ppfl.runs import load_experiment
from ppfl.runs.comparison import load_comparison, refuse_twice, run_tasks, tasks_of
from ppfl.runs.names import folder_name

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
    path = tmp_path / "few.toml"
    path.write_text(COMPARISON)
    return path


def test_methods_share_all_that_their_own_tables_do_not_say(file: Path) -> None:
    found = load_comparison(file)
    assert list(found) == ["Local", "FedAvg", "PPFL, weights"]
    alike = [e.model_dump(exclude={"algorithm", "population"}) for e in found.values()]
    assert alike[0] == alike[1] == alike[2]
    assert {e.algorithm.lr for e in found.values()} == {0.3}
    assert [e.algorithm.batch_size for e in found.values()] == [4, 8, 4]
    assert [e.population.k for e in found.values()] == [1, 1, 2]


def test_overrides_reach_every_method(file: Path) -> None:
    assert {e.rounds for e in load_comparison(file, ["rounds=7"]).values()} == {7}
    assert load_comparison(file, ["methods.FedAvg.algorithm.lr=0.1"])["FedAvg"].algorithm.lr == 0.1


def test_an_experiment_file_is_a_comparison_of_one(file: Path) -> None:
    text = COMPARISON[: COMPARISON.index("[methods")].replace("algorithm = { lr", 'algorithm = { name = "fedavg", lr')
    file.write_text(text)
    assert load_comparison(file) == {"few": load_experiment(file)}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("methods.FedAvg.algorithm.lr=-1", "method 'FedAvg'"),
        ("methods=3", "one table"),
        ("methods.FedAvg=3", "one table"),
    ],
)
def test_what_is_wrong_is_said_with_its_method(file: Path, change: str, said: str) -> None:
    with pytest.raises(SettingError, match=said):
        load_comparison(file, [change])


def test_a_comparison_is_no_experiment(file: Path) -> None:
    with pytest.raises(SettingError, match="ppfl compare"):
        load_experiment(file)


def test_every_seed_of_every_method_is_run_once(file: Path, tmp_path: Path) -> None:
    tasks = tasks_of(load_comparison(file), tmp_path / "out", tmp_path)
    done = []
    records = run_tasks(tasks, 1, done.append)
    assert {label: [run.seed for run in runs] for label, runs in records.items()} == {
        "Local": [0, 1], "FedAvg": [0, 1], "PPFL, weights": [0, 1],
    }  # fmt: skip
    assert sorted(t.run_folder for t in done) == sorted(t.run_folder for t in tasks)
    assert all(run.finished for runs in records.values() for run in runs)
    written = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*") if path.is_file()}
    run_tasks(tasks, 1)
    assert written == {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*") if path.is_file()}


def test_a_run_that_fails_stops_no_other(file: Path, tmp_path: Path) -> None:
    tasks = tasks_of(load_comparison(file, ["methods.FedAvg.population.k=3"]), tmp_path / "out", tmp_path)
    with pytest.raises(SettingError, match=r"2 of 6 runs failed.*FedAvg, seed 0.*k = 3"):
        run_tasks(tasks, 1)
    assert len(list((tmp_path / "out").rglob("result.safetensors"))) == 4


def test_jobs_in_processes_of_their_own_do_and_refuse_the_same(file: Path, tmp_path: Path) -> None:
    comparison = load_comparison(file, ["methods.FedAvg.population.k=3", "seeds=[0]"])
    for jobs in (1, 2):
        with pytest.raises(SettingError, match=r"1 of 3 runs failed.*FedAvg, seed 0.*k = 3"):
            run_tasks(tasks_of(comparison, tmp_path / str(jobs), tmp_path), jobs)
    results = [sorted((tmp_path / jobs).rglob("result.safetensors")) for jobs in ("1", "2")]
    assert len(results[0]) == 2
    assert [path.read_bytes() for path in results[0]] == [path.read_bytes() for path in results[1]]


def test_two_methods_of_one_name_are_refused(file: Path, tmp_path: Path) -> None:
    tasks = tasks_of(load_comparison(file), tmp_path, None)
    refuse_twice(tasks)
    with pytest.raises(SettingError, match="a name of its own"):
        refuse_twice([*tasks, tasks[0]])


@pytest.mark.parametrize("other", ["fedavg", "FedAvg!", "\uff26edAvg/", "Fed Avg"])
def test_labels_with_one_folder_are_refused_and_both_are_named(file: Path, tmp_path: Path, other: str) -> None:
    file.write_text(f"{COMPARISON}\n[methods.'{other}']\nalgorithm.name = 'local'")
    comparison = load_comparison(file)
    if folder_name(other).casefold() != "fedavg":
        assert len(tasks_of(comparison, tmp_path, None)) == 8
        return
    with pytest.raises(SettingError, match=f"methods 'FedAvg' and '{other}' would share the folder"):
        tasks_of(comparison, tmp_path, None)


@pytest.mark.parametrize("label", ["..", ".", "///", "", "report.html", "x" * 300])
def test_labels_without_a_folder_are_refused(file: Path, tmp_path: Path, label: str) -> None:
    file.write_text(f"{COMPARISON}\n[methods.'{label}']\nalgorithm.name = 'local'")
    with pytest.raises(SettingError, match="would be written to folder"):
        tasks_of(load_comparison(file), tmp_path, None)


def test_a_name_that_is_no_text_is_refused(file: Path) -> None:
    for name in ("5", "[1]", "{ a = 1 }"):
        with pytest.raises(SettingError, match="name"):
            load_comparison(file, [f"name={name}"])
    file.write_text(f"name = [1]\n{COMPARISON[: COMPARISON.index('[methods')]}")
    with pytest.raises(SettingError, match="name is"):
        load_comparison(file)


def test_labels_become_folders() -> None:
    assert folder_name("a/b ../c") == "a-b-..-c"
