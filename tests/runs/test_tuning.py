"""Tuning: the same number of trials for all, on validation data, and a file that can be run."""

import warnings
from dataclasses import replace

import pytest

from ppfl.algorithms import PPFL, FedAvg
from ppfl.core.errors import SettingError
from ppfl.runs import tuning
from ppfl.runs.comparison import load_comparison
from ppfl.runs.tuning import attempt, candidates, tune, without_test
from ppfl.server import RefusedUpdateWarning, train_and_measure


@pytest.mark.parametrize("method", [FedAvg(lr=0.1), PPFL(lr=0.1)])
@pytest.mark.parametrize("budget", [1, 3, 6])
def test_candidates_begin_with_the_method_itself_and_never_repeat(method, budget: int) -> None:
    found = candidates(method, budget, seed=0)
    assert len(found) == budget and found[0] == {}
    made = [method.model_copy(update=changes) for changes in found]
    assert len(set(made)) == budget
    assert all(value in method.search[name] for changes in found for name, value in changes.items())
    assert candidates(method, budget, seed=0) == found


def test_more_trials_than_the_grid_has_are_all_of_it() -> None:
    assert len(candidates(FedAvg(lr=0.1), 1000, seed=0)) == len(FedAvg.search["lr"])  # its own lr is in the grid


def test_trials_see_no_test_data(make_experiment) -> None:
    """Spoilt test labels change nothing."""
    experiment = make_experiment()
    federation = experiment.data.build(None)
    assert federation.test is not None
    spoilt = replace(federation, test=replace(federation.test, y=1 - federation.test.y))
    scores = [attempt(experiment, without_test(f), {"lr": 0.1}, rounds=3).score for f in (federation, spoilt)]
    assert scores[0] == scores[1]
    assert without_test(federation).test is None


def test_the_best_trial_comes_first_and_every_method_has_as_many(make_experiment) -> None:
    reported = []
    experiments = {
        "a": make_experiment(),
        "b": make_experiment(population={"k": 1}, algorithm={"name": "local", "lr": 0.1}),
    }
    found = tune(experiments, None, budget=3, rounds=2, on_trial=lambda label, trial: reported.append(label))
    assert reported == ["a"] * 3 + ["b"] * 3
    for trials in found.values():
        assert [t.score for t in trials] == sorted((t.score for t in trials), reverse=True)


def test_a_trial_warns_of_no_client_whose_update_did_not_count(make_experiment, monkeypatch) -> None:
    def with_a_refusal(*arguments):
        warnings.warn("client 'a' was left out of a round", RefusedUpdateWarning, stacklevel=1)
        yield from train_and_measure(*arguments)

    monkeypatch.setattr(tuning, "train_and_measure", with_a_refusal)
    experiment = make_experiment()
    assert attempt(experiment, without_test(experiment.data.build(None)), {"lr": 0.1}, rounds=1).score > 0


def test_a_budget_of_nothing_is_refused(make_experiment) -> None:
    with pytest.raises(SettingError, match="at least one trial"):
        tune({"a": make_experiment()}, None, budget=0)


def test_tune_writes_a_comparison_with_what_it_found(tmp_path, capsys) -> None:
    from ppfl.cli import main

    file = tmp_path / "few.toml"
    file.write_text(
        'rounds = 2\ndata = { name = "synthetic_groups", n_clients = 6, groups = 2, dim = 3, samples = 9 }\n'
        'model = { name = "linear" }\nalgorithm = { lr = 0.001 }\n'
        '[methods.Local]\nalgorithm.name = "local"\n[methods.FedAvg]\nalgorithm.name = "fedavg"\n'
    )
    with pytest.raises(SystemExit) as ended:
        main(["tune", str(file), "--budget", "2"])
    assert ended.value.code == 0
    tuned = load_comparison(tmp_path / "few-tuned.toml")
    assert list(tuned) == ["Local", "FedAvg"]
    assert "validation accuracy" in capsys.readouterr().err
    with pytest.raises(SystemExit) as refused:
        main(["tune", str(file), "--budget", "2"])
    assert refused.value.code == 2 and "exists" in capsys.readouterr().err
