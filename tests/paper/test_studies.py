"""The studies of the paper are complete, set up as in the paper, and their tables show what the runs recorded."""

from pathlib import Path
from statistics import fmean, stdev

import pytest
import torch

from kit.refusals import SettingError, assert_refused
from ppfl.paper import STUDIES, Cost, StudyTable, cost_to_reach, load_study, paper_results, study_tables
from ppfl.paper.costs import mean_cost
from ppfl.runs import RunRecord


@pytest.mark.parametrize("name", STUDIES)
def test_methods_of_a_case_differ_in_the_method_only(name: str) -> None:
    study = load_study(name)
    assert study.cases
    for case in study.cases:
        compared = [case.experiments[label] for label in case.compared]
        common = {e.model_dump_json(exclude={"algorithm", "population", "seeds"}) for e in compared}
        assert len(common) == 1, "methods differ in what must be common to them"
        assert {e.name for e in case.experiments.values()} == {f"{study.runs}-{case.name}"}
        if name in ("table1", "table2") and case.name.startswith("mnist"):
            assert (compared[0].rounds, len(compared[0].seeds), case.scale) == (200, 5, ""), "not the paper's scale"


def test_results_of_the_paper_and_methods_of_studies_belong_together() -> None:
    shown = named = 0
    for name in STUDIES:
        for case in load_study(name).cases:
            published = paper_results(name, case.name)
            assert published.keys() <= case.experiments.keys(), f"{name}, {case.name}"
            shown += len(published)
            if case.paper:
                named += 1
                methods = {label.split(", ")[0] for label in case.experiments} - {"Pre-training"}
                assert methods <= paper_results(*case.paper).keys(), f"{name}, {case.name}"
    assert shown > 0 and named > 0
    assert paper_results("k-sweep", "mnist") == {}  # it is not in the paper


def test_a_study_that_shows_runs_of_another_has_the_same_experiments() -> None:
    source = {case.name: case for case in load_study("table1").cases}
    for case in load_study("membership-recovery").cases:
        assert case.experiments.items() <= source[case.name].experiments.items()


def test_cases_and_methods_can_be_selected_and_bring_what_they_start_from() -> None:
    changed = load_study("table2", ["rounds=7"])
    assert {e.rounds for case in changed.cases for e in case.experiments.values()} == {7}
    picked = load_study("table1", cases=["mnist"], methods=["PPFL1", "FedAvg"])
    assert [list(case.experiments) for case in picked.cases] == [["FedAvg", "PPFL1"]]
    (started,) = load_study("table3", cases=["emnist"], methods=["FedAvg"]).cases
    assert set(started.experiments) == {"Pre-training", "FedAvg"} and started.compared == ["FedAvg"]
    (alone,) = load_study("table3", cases=["emnist"], methods=["Pre-training"]).cases
    assert alone.compared == ["Pre-training"] and alone.experiments["Pre-training"].start is None


REFUSED = {
    "study": (lambda: load_study("table9"), "no study 'table9'", "table1"),
    "case": (lambda: load_study("table1", cases=["emnist"]), "no case 'emnist'", "mnist"),
    "method": (lambda: load_study("table1", methods=["SGD"]), "no method 'SGD'", "FedAvg"),
    "setting": (lambda: load_study("table1", ["rounds=0"]), "study table1, mnist"),
    "target above one": (lambda: load_study("table1", ["targets=[98]"]), "targets"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_unknown_names_and_settings_are_refused(case: str) -> None:
    call, *words = REFUSED[case]
    assert_refused(call, SettingError, *words)


# ---------------------------------------------------------------------- tables

TRUTH = torch.eye(2)[[0, 0, 1, 1]]
RIGHT, WRONG = TRUTH[:, [1, 0]], TRUTH[[0, 2, 0, 2]]  # all four clients in their group, or two


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
        scores={"accuracy": last, "accuracy_mean": last, "accuracy_worst_tenth": last, "validation_accuracy": last},
        finished=True,
    )


def cells(table: StudyTable) -> list[dict[str, str]]:
    return [dict(zip(table.columns, row, strict=True)) for row in table.rows]


def test_the_cost_covers_all_rounds_up_to_the_first_that_reaches_the_accuracy() -> None:
    run, unmeasured = make_run({2: 0.5, 4: 0.8, 6: 0.7, 8: 0.9}), make_run({2: None, 4: 0.8})  # None: not finite
    assert cost_to_reach(run, 0.75) == cost_to_reach(unmeasured, 0.75) == Cost(4, 4.0, 12.0, 20.0)
    assert cost_to_reach(run, 0.9) == Cost(8, 8.0, 24.0, 40.0)
    assert cost_to_reach(run, 0.91) is None
    assert mean_cost([make_run({2: 0.9}), run], 0.9).rounds == 5
    assert mean_cost([make_run({8: 0.2}), run], 0.9) is None  # there is one only if all seeds reach it


def test_a_score_is_shown_beside_the_score_of_the_paper() -> None:
    study = load_study("table1", cases=["mnist"], methods=["FedAvg", "PPFL1"])
    scores = {"FedAvg": (0.95, 0.97), "PPFL1": (0.99, 0.991)}
    runs = {label: [make_run({10: s}, seed) for seed, s in enumerate(values)] for label, values in scores.items()}
    (table,) = study_tables(study, {"mnist": runs})
    for (method, *_), shown in zip(table.rows, cells(table), strict=True):
        ours, published = [100 * s for s in scores[method]], paper_results("table1", "mnist")[method]
        assert shown["ours"] == f"{fmean(ours):.2f} ± {stdev(ours):.2f}"
        assert shown["paper"] == f"{published.accuracy:.2f} ± {published.sd:.2f}"
        assert float(shown["difference"]) == pytest.approx(fmean(ours) - published.accuracy, abs=0.005)
        assert shown["s"] == "10.0"
    lines = table.markdown().splitlines()
    assert {line.count("|") for line in lines if line.startswith("|")} == {len(table.columns) + 1}


@pytest.mark.parametrize("method", ["FedAvg", "Pre-training"])
def test_the_title_tells_rounds_from_those_before_them(method: str) -> None:
    study = load_study("table3", cases=["emnist"], methods=[method])
    experiments = study.cases[0].experiments
    (table,) = study_tables(study, {"emnist": {label: [make_run({10: 0.9})] for label in experiments}})
    before = "" if method == "Pre-training" else f" after {experiments['Pre-training'].rounds} of Pre-training"
    assert f" {experiments[method].rounds} rounds{before}, 1 seed" in table.title


def test_costs_are_shown_for_every_target_and_recovery_by_round() -> None:
    study = load_study("communication", cases=["mnist"], methods=["FedAvg"])
    tables = study_tables(study, {"mnist": {"FedAvg": [make_run({10: 0.97})]}})
    reached = [cells(table)[0]["rounds"] for table in tables]
    assert reached == ["10" if target <= 0.97 else "–" for target in study.cases[0].targets]
    study = load_study("membership-recovery", cases=["mnist"], methods=["PPFL1"])
    runs = [make_run({10: 1.0}, 0, {1: WRONG, 10: RIGHT}), make_run({10: 1.0}, 1, {1: RIGHT, 10: RIGHT})]
    (table,) = study_tables(study, {"mnist": {"PPFL1": runs}})
    assert table.rows == (("1", "75.0%", "0.250", "50.0%"), ("10", "100.0%", "0.000", "100.0%"))


def test_participation_shows_scores_costs_and_memberships_of_the_last_round() -> None:
    study = load_study("participation", cases=["mnist"], methods=["0.1", "0.1, solved"])
    (target,) = study.cases[0].targets
    slow, fast = make_run({10: 0.5}, 0, {10: WRONG}), make_run({4: target, 10: target}, 0, {4: WRONG, 10: RIGHT})
    del slow.scores["validation_accuracy"]
    (table,) = study_tables(study, {"mnist": {"0.1": [slow], "0.1, solved": [fast]}})
    percent, names = f"{100 * target:.2f}", ("validation", "test", f"rounds to {target:.1%}", "in their group", "off")
    shown = [tuple(row[name] for name in names) for row in cells(table)]
    assert shown == [("–", "50.00", "–", "50.0%", "0.500"), (percent, percent, "4", "100.0%", "0.000")]
