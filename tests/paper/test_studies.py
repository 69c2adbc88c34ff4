"""The studies of the paper are complete, set up as in the paper, and their tables show what the runs recorded."""

from pathlib import Path
from statistics import fmean, stdev

import pytest
import torch

from kit.refusals import DataError, SettingError, assert_refused
from ppfl.paper import (
    STUDIES,
    Cost,
    Figures,
    cost_to_reach,
    load_study,
    markdown_page,
    mean_cost,
    paper_results,
    study_figures,
)
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
    packaged, extended = load_study("table1"), load_study(str(EXPERIMENTS / "table1.toml"))
    assert extended.cases[: len(packaged.cases)] == packaged.cases
    assert {case.name for case in extended.cases[len(packaged.cases) :]} == {"cifar10", "cifar10-groups"}
    picked = load_study("table1", cases=["mnist"], methods=["PPFL1", "FedAvg"])
    assert [list(case.experiments) for case in picked.cases] == [["FedAvg", "PPFL1"]]
    (started,) = load_study("table3", cases=["emnist"], methods=["FedAvg"]).cases
    assert set(started.experiments) == {"Pre-training", "FedAvg"} and started.compared == ["FedAvg"]
    for arguments, *words in (
        ({"name": "table9"}, "no study 'table9'", "table1"),
        ({"name": "table1", "overrides": ["rounds=0"]}, "study table1, mnist"),
        ({"name": str(EXPERIMENTS / "synthetic.toml")}, "no study", "ppfl run"),
    ):
        assert_refused(lambda: load_study(**arguments), SettingError, *words)


TRUTH = torch.eye(2)[[0, 0, 1, 1]]


def make_run(accuracies: dict[int, float | None], seed: int = 0) -> RunRecord:
    """Ten rounds of one second; each of four clients sends 3 bytes and receives 5 bytes per round."""
    rows = [{"round": t, "seconds": 1.0, "bytes_up": 12, "bytes_down": 20} for t in range(1, 11)]
    rows = [row | ({"accuracy": accuracies[row["round"]]} if row["round"] in accuracies else {}) for row in rows]
    experiment = {"name": "x", "seeds": [seed], "method": {"name": "ppfl"}}
    last = accuracies[max(accuracies)]
    scores = {"accuracy": last, "accuracy_mean": last - 0.1, "accuracy_worst_tenth": last - 0.2}
    versions = {"started": "2026-11-19", "ppfl": "0.1.0", "torch": "2.13.0", "commit": "0123abc", "cores": "2"}
    return RunRecord(Path("x"), experiment, versions, tuple("abcd"), TRUTH, rows, TRUTH, {}, scores, finished=True)


def test_the_cost_covers_all_rounds_up_to_the_first_that_reaches_the_accuracy():
    run, unmeasured = make_run({2: 0.5, 4: 0.8, 6: 0.7, 8: 0.9}), make_run({2: None, 4: 0.8})  # None: not finite
    assert cost_to_reach(run, 0.75) == cost_to_reach(unmeasured, 0.75) == Cost(4, 4.0, 12.0, 20.0)
    assert cost_to_reach(run, 0.91) is None
    assert mean_cost([make_run({2: 0.9}), run], 0.9).rounds == 5
    assert mean_cost([make_run({8: 0.2}), run], 0.9) is None  # there is one only if all seeds reach it


def test_figures_have_scores_compared_with_the_papers_costs_and_the_values_of_every_seed(tmp_path):
    study = load_study("table1", cases=["mnist"], methods=["FedAvg", "PPFL1"])
    scores = {"FedAvg": (0.95, 0.97), "PPFL1": (0.99, 0.991)}
    runs = {label: [make_run({10: s}, seed) for seed, s in enumerate(values)] for label, values in scores.items()}
    figures = study_figures(study, {"mnist": runs}, "ppfl reproduce table1")
    for label, values in scores.items():
        ours, published = [100 * s for s in values], paper_results("table1", "mnist")[label]
        assert figures.cell(f"mnist/{label}/ours") == f"{fmean(ours):.2f} ± {stdev(ours):.2f}"
        assert figures.cell(f"mnist/{label}/paper") == f"{published.accuracy:.2f} ± {published.sd:.2f}"
        assert figures.cell(f"mnist/{label}/difference") == f"{fmean(ours) - published.accuracy:+.2f}"
        for column, less in {"client mean": 10, "worst tenth": 20}.items():
            assert figures.cell(f"mnist/{label}/{column}") == f"{fmean(ours) - less:.2f} ± {stdev(ours):.2f}"
        assert {("mnist", label, seed, "accuracy", s) for seed, s in enumerate(values)} <= {*figures.values}
    (target,) = study.cases[0].targets[:1]
    assert figures.cell(f"mnist/FedAvg/rounds to {target:.1%}") == "–", "one seed did not reach it"
    assert figures.cell(f"mnist/PPFL1/rounds to {target:.1%}") == "10"
    assert Figures.read(figures.write(tmp_path)) == figures
    page = markdown_page(figures, "About.", ["table1-mnist"])
    assert "ppfl reproduce table1" in page and "| PPFL1 | 99.05 ± 0.07 |" in page and "table1-mnist.svg" in page
    for wrong in ("nowhere/PPFL1/ours", "mnist/nobody/ours", "mnist/PPFL1/nothing"):
        assert_refused(lambda: figures.cell(wrong), DataError, "no")
