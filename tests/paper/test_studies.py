"""The studies of the paper are complete and set up as in the paper."""

import pytest

from ppfl.core.errors import SettingError
from ppfl.paper import STUDIES, load_study, paper_results, studies
from ppfl.paper.paper_results import _read_all


@pytest.mark.parametrize("name", STUDIES)
def test_methods_of_a_case_differ_in_the_method_only(name: str) -> None:
    study = load_study(name)
    assert study.cases
    for case in study.cases:
        compared = [case.experiments[label] for label in case.compared]
        common = {e.model_dump_json(exclude={"algorithm", "population", "seeds"}) for e in compared}
        assert len(common) == 1, "methods differ in what must be common to them"
        for label, experiment in case.experiments.items():
            assert experiment.name == f"{study.runs}-{case.name}", label


@pytest.mark.parametrize("name", ["table1", "table2"])
def test_mnist_has_the_scale_of_the_paper(name: str) -> None:
    for case in load_study(name).cases:
        if case.name.startswith("mnist"):
            first = next(iter(case.experiments.values()))
            assert (first.rounds, len(first.seeds), case.scale) == (200, 5, "")


def test_every_result_of_the_paper_belongs_to_a_method_of_its_study() -> None:
    for study, case, method in _read_all():
        cases = {c.name: c for c in load_study(study).cases}
        if case in cases:
            assert method in cases[case].experiments, f"{study}, {case} lacks {method}"


def test_a_case_that_names_results_of_the_paper_has_the_methods_they_are_of() -> None:
    named = [case for name in STUDIES for case in load_study(name).cases if case.paper]
    assert named
    for case in named:
        published = paper_results(*case.paper)
        for label in case.experiments:
            assert label.split(", ")[0] in published or label == "Pre-training", f"{case.name}: {label}"


def test_a_study_that_is_not_in_the_paper_has_no_paper_results() -> None:
    assert paper_results("k-sweep", "mnist") == {}


def test_overrides_reach_every_case_and_method() -> None:
    study = load_study("table2", ["rounds=7"])
    assert {e.rounds for case in study.cases for e in case.experiments.values()} == {7}


def test_a_study_that_shows_runs_of_another_has_the_same_experiments() -> None:
    source = {case.name: case for case in load_study("table1").cases}
    for case in load_study("membership-recovery").cases:
        assert case.experiments.items() <= source[case.name].experiments.items()


def test_cases_and_methods_can_be_selected() -> None:
    picked = load_study("table1", cases=["mnist"], methods=["PPFL1", "FedAvg"])
    assert [list(case.experiments) for case in picked.cases] == [["FedAvg", "PPFL1"]]


def test_unknown_names_are_refused_with_the_known_ones() -> None:
    with pytest.raises(SettingError, match=r"no study 'table9'.*table1"):
        load_study("table9")
    with pytest.raises(SettingError, match=r"no case 'emnist'.*mnist"):
        load_study("table1", cases=["emnist"], methods=[])
    with pytest.raises(SettingError, match=r"no method 'SGD'.*FedAvg"):
        load_study("table1", cases=[], methods=["SGD"])
    with pytest.raises(SettingError, match=r"study table1, mnist"):
        load_study("table1", ["rounds=0"])


def test_pre_training_is_compared_only_where_it_is_alone() -> None:
    (case,) = load_study("table3", cases=["emnist"]).cases
    assert "Pre-training" in case.experiments and "Pre-training" not in case.compared
    (alone,) = load_study("table3", cases=["emnist"], methods=["Pre-training"]).cases
    assert alone.compared == ["Pre-training"]


def test_a_chosen_method_brings_the_pre_training_that_it_starts_from() -> None:
    settings = {
        "rounds": 5,
        "start": {"method": "FedAvg"},
        "data": {"name": "synthetic"},
        "model": {"name": "linear"},
        "methods": {
            "FedAvg": {"rounds": 50, "algorithm": {"name": "fedavg"}},
            "PPFL": {"algorithm": {"name": "ppfl"}, "population": {"k": 3}},
            "Ditto": {"algorithm": {"name": "ditto"}},
        },
    }
    case = studies._with_methods(studies._case("some", "synthetic", settings, ()), ["PPFL"])
    assert list(case.experiments) == ["FedAvg", "PPFL"]
    assert case.experiments["FedAvg"].start is None
