"""The studies of the paper are complete, set up as in the paper, and their tables show what the runs recorded."""

from pathlib import Path
from statistics import fmean, stdev

import pytest
import torch

from kit.refusals import SettingError, assert_refused
from ppfl.paper import STUDIES, Cost, cost_to_reach, load_study, paper_results, study_tables
from ppfl.paper.costs import mean_cost
from ppfl.runs import RunRecord

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
FILES = [str(file) for file in sorted(EXPERIMENTS.glob("*.toml")) if file.stem in STUDIES]


@pytest.mark.parametrize("name", [*STUDIES, *FILES], ids=lambda name: "/".join(Path(name).parts[-2:]))
def test_methods_of_a_case_differ_in_the_method_only_and_belong_to_results_of_the_paper(name):
    study = load_study(name)
    name = study.name
    for case in study.cases:
        compared, published = [case.experiments[label] for label in case.compared], paper_results(name, case.name)
        common = {e.model_dump_json(exclude={"method", "population", "seeds"}) for e in compared}
        assert len(common) == 1, "methods differ in what must be common to them"
        assert published.keys() <= case.experiments.keys()
        methods = {label.split(", ")[0] for label in case.experiments} - {"Pre-training"}
        assert not case.paper or methods <= paper_results(*case.paper).keys()
        if name in ("table1", "table2") and case.name.startswith("mnist"):
            assert published
            assert (compared[0].rounds, len(compared[0].seeds), case.scale) == (200, 5, ""), "not the paper's scale"


def test_cases_and_methods_can_be_selected_and_bring_what_they_start_from():
    source = {case.name: case for case in load_study("table1").cases}
    for case in load_study("membership-recovery").cases:  # it shows runs of the other
        assert case.experiments.items() <= source[case.name].experiments.items()
    for name, more in {"table1": {"cifar10", "cifar10-groups"}, "membership-recovery": {"cifar10"}}.items():
        packaged, extended = load_study(name), load_study(str(EXPERIMENTS / f"{name}.toml"))
        assert extended.cases[: len(packaged.cases)] == packaged.cases
        assert {case.name for case in extended.cases[len(packaged.cases) :]} == more  # which a file adds
    picked = load_study("table1", cases=["mnist"], methods=["PPFL1", "FedAvg"])
    assert [list(case.experiments) for case in picked.cases] == [["FedAvg", "PPFL1"]]
    (started,) = load_study("table3", cases=["emnist"], methods=["FedAvg"]).cases
    assert set(started.experiments) == {"Pre-training", "FedAvg"} and started.compared == ["FedAvg"]
    for arguments, *words in (
        ({"name": "table9"}, "no study 'table9'", "table1"),
        ({"name": "table1", "overrides": ["rounds=0"]}, "study table1, mnist"),
        ({"name": "communication", "overrides": ["targets=[2]"]}, "targets are [2]", "between 0 and 1"),
        ({"name": str(EXPERIMENTS / "synthetic.toml")}, "no study", "ppfl run"),
    ):
        assert_refused(lambda: load_study(**arguments), SettingError, *words)


TRUTH = torch.eye(2)[[0, 0, 1, 1]]
RIGHT, WRONG = TRUTH[:, [1, 0]], TRUTH[[0, 2, 0, 2]]  # all four clients in their group, or two


def make_run(accuracies: dict[int, float | None], seed: int = 0, memberships: dict | None = None) -> RunRecord:
    """Ten rounds of one second; each of four clients sends 3 bytes and receives 5 bytes per round."""
    rows = [{"round": t, "seconds": 1.0, "bytes_up": 12, "bytes_down": 20} for t in range(1, 11)]
    rows = [row | ({"accuracy": accuracies[row["round"]]} if row["round"] in accuracies else {}) for row in rows]
    experiment, by_round = {"name": "x", "seeds": [seed], "method": {"name": "ppfl"}}, memberships or {}
    last = accuracies[max(accuracies)]
    scores = {"accuracy": last, "accuracy_mean": last - 0.1, "accuracy_worst_tenth": last - 0.2}
    return RunRecord(Path("x"), experiment, {}, tuple("abcd"), TRUTH, rows, None, by_round, scores, finished=True)


def test_the_cost_covers_all_rounds_up_to_the_first_that_reaches_the_accuracy():
    run, unmeasured = make_run({2: 0.5, 4: 0.8, 6: 0.7, 8: 0.9}), make_run({2: None, 4: 0.8})  # None: not finite
    assert cost_to_reach(run, 0.75) == cost_to_reach(unmeasured, 0.75) == Cost(4, 4.0, 12.0, 20.0)
    assert cost_to_reach(run, 0.91) is None
    assert mean_cost([make_run({2: 0.9}), run], 0.9).rounds == 5
    assert mean_cost([make_run({8: 0.2}), run], 0.9) is None  # there is one only if all seeds reach it


def test_tables_show_scores_beside_the_papers_costs_for_every_target_and_recovery_by_round():
    study = load_study("table1", cases=["mnist"], methods=["FedAvg", "PPFL1"])
    scores = {"FedAvg": (0.95, 0.97), "PPFL1": (0.99, 0.991)}
    runs = {label: [make_run({10: s}, seed) for seed, s in enumerate(values)] for label, values in scores.items()}
    (table,) = study_tables(study, {"mnist": runs})
    for row in table.rows:
        shown, published = dict(zip(table.columns, row, strict=True)), paper_results("table1", "mnist")[row[0]]
        ours = [100 * s for s in scores[row[0]]]
        assert shown["ours"] == f"{fmean(ours):.2f} ± {stdev(ours):.2f}"
        for column, less in {"client mean": 10, "worst 10%": 20}.items():
            assert shown[column] == f"{fmean(ours) - less:.2f} ± {stdev(ours):.2f}"
        assert shown["paper"] == f"{published.accuracy:.2f} ± {published.sd:.2f}"
    (table,) = study_tables(study, {"mnist": {"a method of one's own": [make_run({10: 0.97})]}})
    assert table.rows[0][table.columns.index("paper")] == "–"
    study = load_study("communication", cases=["mnist"], methods=["FedAvg"])
    tables = study_tables(study, {"mnist": {"FedAvg": [make_run({10: 0.97})]}})
    reached = [table.rows[0][table.columns.index("rounds")] for table in tables]
    assert reached == ["10" if target <= 0.97 else "–" for target in study.cases[0].targets]
    study = load_study("membership-recovery", cases=["mnist"], methods=["PPFL1"])
    runs = [make_run({10: 1.0}, 0, {1: WRONG, 10: RIGHT}), make_run({10: 1.0}, 1, {1: RIGHT, 10: RIGHT})]
    (table,) = study_tables(study, {"mnist": {"PPFL1": runs}})
    by_round, table = (
        table,
        study_tables(
            load_study("participation", cases=["mnist"]),
            {"mnist": {"0.5": [make_run({4: 0.95, 10: 0.97}, 0, {10: RIGHT})]}},
        )[0],
    )
    shown = dict(zip(table.columns, table.rows[0], strict=True))
    assert [shown[name] for name in ("validation", "test", "worst 10%")] == ["–", "97.00", "77.00"]
    assert [shown[name] for name in ("rounds to 90.0%", "in their group", "off")] == ["4", "100.0%", "0.000"]
    assert by_round.rows == (("1", "75.0%", "0.250", "50.0%"), ("10", "100.0%", "0.000", "100.0%"))
