"""The report page needs no external resources, escapes all data, lists every client and copes with missing values."""

import re
from collections.abc import Callable
from pathlib import Path
from statistics import fmean, stdev
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

from ppfl.core.errors import SettingError
from ppfl.core.text import visible
from ppfl.report import render, write_report
from ppfl.report.detail_tables import MAX_CLIENTS
from ppfl.report.methods import common_metric, rank_methods
from ppfl.report.metric import ACCURACY
from ppfl.report.records import final, per_client
from ppfl.report.sorted_memberships import truth_agreement
from ppfl.runs import Experiment, run

Make = Callable[..., Any]
NASTY = ('<b>&"x"', "'; alert(1) //", "</svg><script>alert(1)</script>", "\x00\x1b[31m", "\ud800", "患者")


def parsed(page: str) -> ElementTree.Element:
    """The page is also valid XML, so tests can parse it."""
    return ElementTree.fromstring(page)


def table(page: str, at: int) -> list[list[ElementTree.Element]]:
    return [list(row) for row in list(parsed(page).iter("table"))[at].iter("tr")]


def content(cell: ElementTree.Element) -> str:
    return "".join(cell.itertext())


@pytest.fixture
def comparison(make_run: Make) -> list[Any]:
    return [
        make_run("fedavg", k=1, level=0.7, seed=1),
        make_run("ppfl", level=0.93),
        make_run("local", k=1, level=0.85, seed=2),
    ]


def test_page_and_picture_are_well_formed(comparison: list[Any]) -> None:
    for document in render(comparison, "Title"):
        parsed(document)


def test_the_page_needs_no_external_resources(comparison: list[Any]) -> None:
    for document in render(comparison, "Title"):
        bare = document.replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?:|\bsrc=|\bhref=|url\(|@import|<script|<link|<iframe", bare)


def test_everything_from_data_is_escaped(make_run: Make) -> None:
    run = make_run("<i>m</i>", clients=len(NASTY), ids=NASTY, k=2, groups=2)
    run.name = run.experiment["<u>"] = run.versions["<s>"] = '<a onclick="x">'
    for document in render([run], "<h1>&"):
        tags = {element.tag.split("}")[-1] for element in parsed(document).iter()}
        assert not tags & {"i", "u", "s", "a", "script"}
        document.encode("utf-8")
    page, _ = render([run], "<h1>&")
    assert NASTY[0] in [content(row[0]) for row in table(page, 1)]


INVISIBLE = ("a\u202eb", "\u2066c", "d\x9b31m", "e\x7f", "f\x00", "g\ud800", "h\u2028", "i\uffff", "j" * 10_000)


def test_what_cannot_be_seen_is_written_out_and_what_is_long_is_kept(make_run: Make) -> None:
    run = make_run("ppfl", clients=len(INVISIBLE), ids=INVISIBLE, k=2, groups=2)
    for label in INVISIBLE:
        for document in render([run], label, [label]):
            parsed(document)
            document.encode("utf-8")
            assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\uffff]", document)
        page, _ = render([run], label, [label])
        shown = [content(row[0]) for row in table(page, 1)]
        assert {visible(id_) for id_ in INVISIBLE} <= {*shown}
        assert visible(label) in [content(row[0]) for row in table(page, 0)]


def test_whose_updates_were_refused_is_said_in_the_table_and_the_text(make_run: Make) -> None:
    clean, run = make_run("fedavg"), make_run("ppfl")
    assert "refused" not in render([clean, run], "t")[0]
    ids = [run.ids[at] for at in (0, 1, 1, 2, 3, 1)]
    for row, id_ in zip(run.metrics, ids, strict=False):
        row |= {"refused": 1, "refusals": [[id_, "too large"]]}
    page, _ = render([clean, run], "t")
    assert f"3 of client {run.ids[1]!r}, 1 of client" in " ".join(parsed(page).itertext())
    assert ">refused</th>" in page
    run.metrics[0] |= {"refusals": 7}
    run.metrics[1] |= {"refusals": ["x", [1]]}
    render([clean, run], "t")


@pytest.mark.parametrize("clients", [1, 40, MAX_CLIENTS, 250])
def test_every_client_is_listed_up_to_the_limit(make_run: Make, clients: int) -> None:
    run = make_run("ppfl", clients=clients)
    page, _ = render([run], "t")
    join_names = {content(row[0]) for row in table(page, 1)[1:]}
    assert len(join_names) == min(clients, MAX_CLIENTS)
    assert join_names <= set(run.ids)
    assert (f"of {clients} clients, in the order" in page) == (clients > MAX_CLIENTS)


def test_clients_are_matched_by_name(make_run: Make) -> None:
    """The order of clients in a run's files must not matter."""
    run, turned = make_run("ppfl", k=1), make_run("other", k=1)
    turned.ids = turned.ids[::-1]
    for row in turned.metrics:
        row["per_client"] = row.get("per_client", [])[::-1]
    page, _ = render([run, turned], "t")
    for row in table(page, 1)[1:]:
        assert content(row[-1]) == content(row[-2])


def test_methods_come_best_first_and_the_best_is_bold(comparison: list[Any]) -> None:
    page, _ = render(comparison, "t")
    rows = table(page, 0)[1:]
    assert [content(row[0]) for row in rows] == ["PPFL", "Local", "FedAvg"]
    assert [row[1].find("b") is not None for row in rows] == [True, False, False]


@pytest.mark.parametrize("metric", ["rmse", "deviance"])
def test_errors_are_better_when_smaller(make_run: Make, metric: str) -> None:
    runs = [make_run("ppfl", metric=metric, level=0.9), make_run("fedavg", metric=metric, level=0.5, k=1)]
    assert [method.label for method in rank_methods(runs[::-1], common_metric(runs))] == ["PPFL", "FedAvg"]
    assert "lower is better" in render(runs, "t")[0]


def test_summary_names_the_winner_and_the_distance(comparison: list[Any]) -> None:
    page, _ = render(comparison, "t")
    said = content(next(p for p in parsed(page).iter("p") if p.get("class") == "summary"))
    best, second = (final(run, "accuracy") or 0 for run in (comparison[1], comparison[2]))
    assert "40 clients" in said
    assert f"PPFL is best with an accuracy of {best:.1%}" in said
    assert f"{100 * (best - second):.1f} points above Local" in said
    assert "4 kinds" in said


def test_equal_runs_are_level_and_none_is_bold(make_run: Make) -> None:
    page, _ = render([make_run("ppfl"), make_run("fedem")], "t")
    assert "are level" in page
    assert not any(row[1].find("b") is not None for row in table(page, 0)[1:])


def test_agreement_ignores_the_order_of_models_and_decreases_with_each_mistake(make_run: Make) -> None:
    run = make_run("ppfl", clients=50)
    run.memberships = run.truth[:, [2, 0, 3, 1]].clone()

    def value() -> float:
        found = truth_agreement(run)
        assert found is not None
        return found.value

    assert value() == 1
    run.memberships[:5] = run.memberships[:5].roll(1, dims=1)
    assert value() == pytest.approx(0.9)


def test_agreement_with_true_mixtures_is_the_mean_overlap(make_run: Make) -> None:
    run = make_run("ppfl", soft=1.0, k=3, groups=3)
    run.memberships = 0.9 * run.truth + 0.1 / 3
    found = truth_agreement(run)
    expected = 1 - (run.memberships - run.truth).abs().sum(1).mean() / 2
    assert found is not None
    assert not found.groups
    assert found.value == pytest.approx(float(expected))


def test_runs_with_other_seeds_are_one_method_and_runs_with_other_settings_are_not(make_run: Make) -> None:
    runs = [make_run("ppfl", seed=seed) for seed in (0, 1, 2)] + [make_run("ppfl", lr=0.5)]
    methods = rank_methods(runs, ACCURACY)
    assert sorted(len(method.runs) for method in methods) == [1, 3]
    assert len({method.label for method in methods}) == 2


def test_labels_group_runs_into_methods_and_name_them(make_run: Make) -> None:
    """Even where the records alone would be grouped differently."""
    runs = [make_run("ppfl", seed=0), make_run("ppfl", seed=1), make_run("ppfl", seed=2, level=0.5), make_run("local")]
    labels = ["PPFL1", "PPFL2", "PPFL1", "Alone, with a name that is longer than any chart has room for"]
    methods = rank_methods(runs, ACCURACY, labels)
    assert {method.label: len(method.runs) for method in methods} == {"PPFL1": 2, "PPFL2": 1, labels[3]: 1}
    page, _ = render(runs, "t", labels)
    assert {content(row[0]) for row in table(page, 0)[1:]} == set(labels)
    heads = [cell.get("title") for cell in table(page, 1)[0]]
    assert set(labels) <= set(heads)
    assert "Local" not in page


def test_labels_must_be_as_many_as_runs(make_run: Make) -> None:
    with pytest.raises(SettingError, match="1 labels for 2 runs"):
        render([make_run("ppfl"), make_run("local")], "t", ["PPFL"])


def test_a_method_is_the_mean_of_its_seeds(make_run: Make) -> None:
    runs = [make_run("ppfl", level=level, seed=seed) for seed, level in enumerate((0.8, 0.9, 0.7))]
    (method,) = rank_methods(runs, ACCURACY)
    finals = [final(run, "accuracy") or 0 for run in runs]
    assert method.score(ACCURACY) == pytest.approx(sum(finals) / 3)
    assert method.curve("accuracy")[-1][1] == pytest.approx(sum(finals) / 3)
    shown = content(table(render(runs, "t")[0], 0)[1][1])
    assert shown == f"{fmean(finals):.1%} ± {100 * stdev(finals):.1f}"


def test_a_lead_within_the_spread_of_seeds_is_reported_as_such(make_run: Make) -> None:
    def pair(gap: float) -> list[Any]:
        levels = [("ppfl", 0.80 + gap), ("fedavg", 0.80)]
        return [make_run(name, level=level + 0.05 * seed, seed=seed) for name, level in levels for seed in (0, 1)]

    assert "though seeds differ by as much" in render(pair(0.01), "t")[0]
    assert "though seeds differ by as much" not in render(pair(0.15), "t")[0]


def test_scores_are_those_of_the_state_that_the_run_returned(make_run: Make) -> None:
    run = make_run("ppfl")
    run.scores = {"accuracy": 0.123, "per_client": [0.5] * len(run.ids)}
    assert final(run, "accuracy") == 0.123
    assert set(per_client(run, ACCURACY).values()) == {0.5}


def test_an_empty_run_still_has_a_page(blank_run: Make) -> None:
    for document in render([blank_run()], "t"):
        parsed(document)


@pytest.mark.parametrize(
    "missing", ["accuracy", "accuracy_mean", "per_client", "loss", "seconds", "bytes_up", "participants", "round"]
)
def test_a_page_without_one_of_the_numbers(comparison: list[Any], missing: str) -> None:
    for row in comparison[1].metrics:
        row.pop(missing, None)
    parsed(render(comparison, "t")[0])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), None, "x"])
def test_a_diverged_run_is_reported_without_its_numbers(comparison: list[Any], value: Any) -> None:
    run = comparison[1]
    for row in run.metrics:
        row.update({key: value for key in row if key != "round"})
        row["per_client"] = [value] * len(run.ids)
    run.memberships = torch.full_like(run.memberships, torch.nan)
    page, _ = render(comparison, "t")
    assert content(table(page, 0)[-1][0]) == "PPFL"
    assert not re.search(r"\bnan\b|\binf\b", page)


def test_unfinished_runs_are_marked(make_run: Make) -> None:
    run = make_run("ppfl")
    run.finished = False
    assert "Not finished yet: PPFL" in render([run], "t")[0]


def test_a_hundred_clients_and_five_methods_fit_in_half_a_megabyte(make_run: Make) -> None:
    names = ("ppfl", "ifca", "fedem", "fedavg", "local")
    runs = [make_run(name, clients=100, k=5, groups=5, rounds=500, seed=s) for s, name in enumerate(names)]
    assert len(render(runs, "t")[0].encode()) < 500_000


def test_write_report_writes_both_files(make_run: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ppfl.runs.load_run", lambda folder: make_run(folder.name))
    page = write_report([Path("ppfl"), Path("fedavg")], tmp_path / "new" / "out", "Title", ["Ours", "Theirs"])
    assert {content(row[0]) for row in table(page.read_text(encoding="utf-8"), 0)[1:]} == {"Ours", "Theirs"}
    assert page == tmp_path / "new" / "out" / "report.html"
    parsed(page.read_text(encoding="utf-8"))
    parsed((page.parent / "memberships.svg").read_text(encoding="utf-8"))


def test_the_report_reads_what_runs_write(tmp_path: Path) -> None:
    settings = {"rounds": 2, "data": {"name": "synthetic_groups"}, "model": {"name": "linear"}}
    methods = {
        "ppfl": {"algorithm": {"name": "ppfl"}, "population": {"k": 3}},
        "local": {"algorithm": {"name": "local"}},
    }
    records = [run(Experiment.model_validate({"name": n, **settings, **m}), tmp_path / n) for n, m in methods.items()]
    page = write_report([record.folder for (record,) in records], tmp_path / "report", "Title").read_text("utf-8")
    assert {content(row[0]) for row in table(page, 0)[1:]} == {"PPFL", "Local"}
    for (record,) in records:
        assert record.metric == "accuracy"
        assert f"{record.scores['accuracy']:.1%}" in page


def test_a_report_without_folders_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="at least one run folder"):
        write_report([], tmp_path, "Title")
