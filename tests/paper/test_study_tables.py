"""Tables of our results beside the paper: they show what the runs recorded."""

from pathlib import Path
from statistics import fmean, stdev

import pytest
import torch

from ppfl.core.errors import SettingError
from ppfl.paper import Cost, cost_to_reach, load_study, paper_results, study_tables
from ppfl.paper.costs import mean_cost
from ppfl.runs import RunRecord

TRUTH = torch.eye(2)[[0, 0, 1, 1]]


def make_run(
    accuracies: dict[int, float | None], seed: int = 0, memberships: dict[int, torch.Tensor] | None = None
) -> RunRecord:
    """Ten rounds of one second; each of four clients sends 3 bytes and receives 5 bytes per round."""
    rows = [{"round": t, "seconds": 1.0, "bytes_up": 12, "bytes_down": 20} for t in range(1, 11)]
    rows = [row | ({"accuracy": accuracies[row["round"]]} if row["round"] in accuracies else {}) for row in rows]
    last = accuracies[max(accuracies)]
    return RunRecord(
        folder=Path("x"),
        experiment={"name": "x", "seeds": [seed], "algorithm": {"name": "ppfl"}},
        versions={},
        ids=("a", "b", "c", "d"),
        truth=TRUTH,
        metrics=rows,
        memberships=None,
        memberships_by_round=memberships or {},
        scores={"accuracy": last, "accuracy_mean": last, "accuracy_worst_tenth": last},
        finished=True,
    )


def test_the_cost_covers_all_rounds_up_to_the_first_that_reaches_the_accuracy() -> None:
    run = make_run({2: 0.5, 4: 0.8, 6: 0.7, 8: 0.9})
    assert cost_to_reach(run, 0.75) == Cost(4, 4.0, 12.0, 20.0)
    assert cost_to_reach(run, 0.9) == Cost(8, 8.0, 24.0, 40.0)
    assert cost_to_reach(run, 0.91) is None
    # None: the score was not finite
    assert cost_to_reach(make_run({2: None, 4: 0.8}), 0.75) == Cost(4, 4.0, 12.0, 20.0)


def test_there_is_a_mean_cost_only_if_all_seeds_reach_the_accuracy() -> None:
    fast, slow = make_run({2: 0.9}), make_run({2: 0.1, 8: 0.9})
    found = mean_cost([fast, slow], 0.9)
    assert found is not None and found.rounds == 5
    assert mean_cost([fast, make_run({8: 0.2})], 0.9) is None


def test_a_score_is_shown_beside_the_score_of_the_paper() -> None:
    study = load_study("table1", cases=["mnist"], methods=["FedAvg", "PPFL1"])
    scores = {"FedAvg": (0.95, 0.97), "PPFL1": (0.99, 0.991)}
    runs = {label: [make_run({10: s}, seed) for seed, s in enumerate(values)] for label, values in scores.items()}
    (table,) = study_tables(study, {"mnist": runs})
    for row in table.rows:
        cells, published = dict(zip(table.columns, row, strict=True)), paper_results("table1", "mnist")[row[0]]
        ours = [100 * s for s in scores[row[0]]]
        assert cells["ours"] == f"{fmean(ours):.2f} ± {stdev(ours):.2f}"
        assert cells["paper"] == f"{published.accuracy:.2f} ± {published.sd:.2f}"
        assert float(cells["difference"]) == pytest.approx(fmean(ours) - published.accuracy, abs=0.005)
        assert cells["s"] == "10.0"
    lines = table.markdown().splitlines()
    assert {line.count("|") for line in lines if line.startswith("|")} == {len(table.columns) + 1}


@pytest.mark.parametrize("method", ["FedAvg", "Pre-training"])
def test_the_title_tells_rounds_from_those_before_them(method: str) -> None:
    study = load_study("table3", cases=["emnist"], methods=[method])
    experiments = study.cases[0].experiments
    assert "Pre-training" in experiments
    (table,) = study_tables(study, {"emnist": {label: [make_run({10: 0.9})] for label in experiments}})
    before = "" if method == "Pre-training" else f" after {experiments['Pre-training'].rounds} of Pre-training"
    assert f" {experiments[method].rounds} rounds{before}, 1 seed" in table.title


def test_costs_are_shown_for_every_target() -> None:
    study = load_study("communication", cases=["mnist"], methods=["FedAvg"])
    tables = study_tables(study, {"mnist": {"FedAvg": [make_run({10: 0.97})]}})
    reached = [dict(zip(table.columns, table.rows[0], strict=True))["rounds"] for table in tables]
    assert reached == ["10" if target <= 0.97 else "–" for target in study.cases[0].targets]


def test_recovery_is_shown_by_round_and_averaged_over_seeds() -> None:
    study = load_study("membership-recovery", cases=["mnist"], methods=["PPFL1"])
    right, wrong = TRUTH[:, [1, 0]], TRUTH[[0, 2, 0, 2]]
    runs = [make_run({10: 1.0}, 0, {1: wrong, 10: right}), make_run({10: 1.0}, 1, {1: right, 10: right})]
    (table,) = study_tables(study, {"mnist": {"PPFL1": runs}})
    assert table.rows == (("1", "75.0%", "0.250", "50.0%"), ("10", "100.0%", "0.000", "100.0%"))


def test_a_target_above_one_is_refused() -> None:
    with pytest.raises(SettingError, match="targets"):
        load_study("table1", ["targets=[98]"])


def test_participation_shows_scores_costs_and_memberships_of_the_last_round() -> None:
    study = load_study("participation", cases=["mnist"], methods=["0.1", "0.1, solved"])
    (target,) = study.cases[0].targets
    right, wrong = TRUTH[:, [1, 0]], TRUTH[[0, 2, 0, 2]]
    fast, slow = make_run({4: target, 10: target}, 0, {4: wrong, 10: right}), make_run({10: 0.5}, 0, {10: wrong})
    fast.scores["validation_accuracy"] = 0.91
    (table,) = study_tables(study, {"mnist": {"0.1": [slow], "0.1, solved": [fast]}})
    shown = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
    reached = f"rounds to {target:.1%}"
    assert [row["validation"] for row in shown] == ["–", "91.00"]
    assert [row["test"] for row in shown] == ["50.00", f"{100 * target:.2f}"]
    assert [row[reached] for row in shown] == ["–", "4"]
    assert [(row["in their group"], row["off"]) for row in shown] == [("50.0%", "0.500"), ("100.0%", "0.000")]
