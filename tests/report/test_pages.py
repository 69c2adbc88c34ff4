"""Report pages need no outside resources, escape all data, list every client and cope with missing values."""

import re
from pathlib import Path
from statistics import fmean, stdev
from xml.etree import ElementTree

import pytest
import torch

from kit.experiments import small_experiment
from kit.refusals import SettingError, assert_refused
from kit.reports import FakeRun, effect, fake_run, fake_table, tried
from ppfl.report import render, render_population, write_curves, write_report
from ppfl.report.detail_tables import MAX_CLIENTS
from ppfl.report.methods import rank_methods
from ppfl.report.metric import ACCURACY
from ppfl.report.records import final, per_client
from ppfl.report.sorted_memberships import truth_agreement
from ppfl.runs import run

HOSTILE = {  # as it comes, and as it is shown
    '<b>&"x"': '<b>&"x"',
    "'; alert(1) //": "'; alert(1) //",
    "</svg><script>alert(1)</script>": "</svg><script>alert(1)</script>",
    "患者": "患者",
    "a\x00\x1b[31m": r"a\x00\x1b[31m",
    "b\u202eb": r"b\u202eb",
    "\u2066c": r"\u2066c",
    "d\x9b31m": r"d\x9b31m",
    "e\x7f": r"e\x7f",
    "g\ud800": r"g\ud800",
    "h\u2028": r"h\u2028",
    "i\uffff": r"i\uffff",
    "j" * 10_000: "j" * 10_000,
}
HARMFUL = {"a", "i", "u", "s", "script", "link", "iframe", "img", "image", "object", "use", "foreignObject"}


def parsed(page: str) -> ElementTree.Element:
    """A page or a picture, which is also valid XML, harmless, and complete in itself."""
    page.encode("utf-8")
    root = ElementTree.fromstring(page)
    assert not {element.tag.split("}")[-1] for element in root.iter()} & HARMFUL
    assert not any(name.startswith("on") for element in root.iter() for name in element.attrib)
    markup = re.sub(r">[^<]*<", "><", page.replace("http://www.w3.org/2000/svg", ""))
    assert not re.search(r"https?:|\bsrc=|\bhref=|url\(|@import", markup)
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\uffff]", page)
    return root


def content(cell: ElementTree.Element) -> str:
    return "".join(cell.itertext())


def table(page: str, at: int) -> list[list[ElementTree.Element]]:
    return [list(row) for row in list(parsed(page).iter("table"))[at].iter("tr")]


def first_cells(page: str, at: int) -> list[str]:
    return [content(row[0]) for row in table(page, at)[1:]]


def comparison() -> list[FakeRun]:
    levels = {"fedavg": (1, 0.7), "ppfl": (4, 0.93), "local": (1, 0.85)}
    return [fake_run(name, k=k, level=level, seed=at) for at, (name, (k, level)) in enumerate(levels.items())]


# ---------------------------------------------------------------------- runs


def test_everything_from_data_is_shown_and_not_obeyed(tmp_path: Path) -> None:
    one = fake_run("<i>m</i>", clients=len(HOSTILE), k=2, groups=2)
    one.ids = tuple(HOSTILE)
    one.name = one.experiment["<u>"] = one.versions["<s>"] = '<a onclick="x">'
    for label, shown in HOSTILE.items():
        page, picture = render([one], label, [label])
        parsed(picture)
        assert set(HOSTILE.values()) == {*first_cells(page, 1)} and first_cells(page, 0) == [shown]
    write_curves({"<i>": [one], "b": [fake_run("b")]}, tmp_path / "new" / "curves.svg", "<Title> & more")
    root = parsed((tmp_path / "new" / "curves.svg").read_text("utf-8"))
    said = [content(text) for text in root.iter() if text.tag.endswith("text")]
    assert "<Title> & more" in said and said.count("<i>") == 2  # over rounds and over bytes
    write_curves({"a": [fake_run("a", sent=0.0)]}, tmp_path / "one.svg", "nothing is sent: over rounds alone")
    assert len([g for g in parsed((tmp_path / "one.svg").read_text("utf-8")).iter() if g.tag.endswith("}g")]) == 1


@pytest.mark.parametrize("clients", [1, MAX_CLIENTS, MAX_CLIENTS + 50])
def test_every_client_is_listed_up_to_the_limit(clients: int) -> None:
    one = fake_run("ppfl", clients=clients)
    page, _ = render([one], "t")
    names = first_cells(page, 1)
    assert len(names) == len({*names}) == min(clients, MAX_CLIENTS) and {*names} <= {*one.ids}
    assert (f"of {clients} clients, in the order" in page) == (clients > MAX_CLIENTS)


def test_clients_are_matched_by_name() -> None:
    """The order of clients in a run's files must not matter."""
    one, turned = fake_run("ppfl", k=1), fake_run("other", k=1)
    turned.ids = turned.ids[::-1]
    for row in turned.metrics:
        row["per_client"] = row.get("per_client", [])[::-1]
    assert all(content(row[-1]) == content(row[-2]) for row in table(render([one, turned], "t")[0], 1)[1:])


def test_methods_come_best_first_and_the_summary_names_the_winner_and_the_distance() -> None:
    runs = comparison()
    page, _ = render(runs, "t")
    assert first_cells(page, 0) == ["PPFL", "Local", "FedAvg"]
    assert [row[1].find("b") is not None for row in table(page, 0)[1:]] == [True, False, False]
    said = content(next(p for p in parsed(page).iter("p") if p.get("class") == "summary"))
    best, second = (final(each, "accuracy") for each in (runs[1], runs[2]))
    assert f"PPFL is best with an accuracy of {best:.1%}" in said and "40 clients" in said and "4 kinds" in said
    assert f"{100 * (best - second):.1f} points above Local" in said
    page, _ = render([fake_run("ppfl"), fake_run("fedem")], "t")
    assert "are level" in page and not any(row[1].find("b") is not None for row in table(page, 0)[1:])
    for metric in ("rmse", "deviance"):  # less is better
        runs = [fake_run("fedavg", metric=metric, level=0.5, k=1), fake_run("ppfl", metric=metric)]
        assert first_cells(render(runs, "t")[0], 0) == ["PPFL", "FedAvg"]
        assert "lower is better" in render(runs, "t")[0]


def test_agreement_ignores_the_order_of_models_and_decreases_with_each_mistake() -> None:
    one = fake_run("ppfl", clients=50)
    one.memberships = one.truth[:, [2, 0, 3, 1]].clone()
    assert truth_agreement(one).value == 1
    one.memberships[:5] = one.memberships[:5].roll(1, dims=1)
    assert truth_agreement(one).value == pytest.approx(0.9)
    mixed = fake_run("ppfl", soft=1.0, k=3, groups=3)  # true mixtures: the mean overlap
    mixed.memberships = 0.9 * mixed.truth + 0.1 / 3
    found, expected = truth_agreement(mixed), 1 - (mixed.memberships - mixed.truth).abs().sum(1).mean() / 2
    assert not found.groups and found.value == pytest.approx(float(expected))


def test_runs_with_other_seeds_are_one_method_and_its_scores_are_their_means() -> None:
    runs = [fake_run("ppfl", level=level, seed=seed) for seed, level in enumerate((0.8, 0.9, 0.7))]
    (method,) = rank_methods(runs, ACCURACY)
    finals = [final(each, "accuracy") for each in runs]
    assert method.score(ACCURACY) == method.curve("accuracy")[-1][1] == pytest.approx(sum(finals) / 3)
    assert content(table(render(runs, "t")[0], 0)[1][1]) == f"{fmean(finals):.1%} ± {100 * stdev(finals):.1f}"
    two = rank_methods([*runs, fake_run("ppfl", lr=0.5)], ACCURACY)
    assert sorted(len(each.runs) for each in two) == [1, 3] and len({each.label for each in two}) == 2


def test_labels_group_runs_into_methods_and_name_them() -> None:
    """Even where the records alone would be grouped differently."""
    runs = [fake_run("ppfl", seed=0), fake_run("ppfl", seed=1), fake_run("ppfl", seed=2, level=0.5), fake_run("local")]
    labels = ["PPFL1", "PPFL2", "PPFL1", "Alone, with a name that is longer than any chart has room for"]
    found = {method.label: len(method.runs) for method in rank_methods(runs, ACCURACY, labels)}
    assert found == {"PPFL1": 2, "PPFL2": 1, labels[3]: 1}
    page, _ = render(runs, "t", labels)
    assert {*first_cells(page, 0)} == {*labels} and "Local" not in page
    assert {*labels} <= {cell.get("title") for cell in table(page, 1)[0]}


def test_a_lead_within_the_spread_of_seeds_is_reported_as_such() -> None:
    for gap, small in ((0.01, True), (0.15, False)):
        levels = [("ppfl", 0.80 + gap), ("fedavg", 0.80)]
        runs = [fake_run(name, level=level + 0.05 * seed, seed=seed) for name, level in levels for seed in (0, 1)]
        assert ("though seeds differ by as much" in render(runs, "t")[0]) == small


def test_whose_updates_were_refused_and_what_is_not_finished_is_said() -> None:
    clean, one = fake_run("fedavg"), fake_run("ppfl")
    assert "refused" not in render([clean, one], "t")[0]
    for row, at in zip(one.metrics, (0, 1, 1, 2, 3, 1), strict=False):
        row |= {"refused": 1, "refusals": [[one.ids[at], "too large"]]}
    one.finished = False
    page, _ = render([clean, one], "t")
    assert f"3 of client {one.ids[1]!r}, 1 of client" in " ".join(parsed(page).itertext())
    assert ">refused</th>" in page and "Not finished yet: PPFL" in page
    one.metrics[0] |= {"refusals": 7}  # nonsense in a file is no reason to have no page
    one.metrics[1] |= {"refusals": ["x", [1]]}
    render([clean, one], "t")


def test_a_page_copes_with_what_is_missing_or_not_finite() -> None:
    for document in render([FakeRun()], "t"):
        parsed(document)
    for missing in ("accuracy", "accuracy_mean", "per_client", "loss", "seconds", "bytes_up", "participants", "round"):
        runs = comparison()
        for row in runs[1].metrics:
            row.pop(missing, None)
        parsed(render(runs, "t")[0])
    for value in (float("nan"), float("inf"), None, "x"):
        runs = comparison()
        for row in runs[1].metrics:
            row.update({key: value for key in row if key != "round"})
            row["per_client"] = [value] * len(runs[1].ids)
        runs[1].memberships = torch.full_like(runs[1].memberships, torch.nan)
        page, _ = render(runs, "t")
        assert first_cells(page, 0)[-1] == "PPFL" and not re.search(r"\bnan\b|\binf\b", page)


def test_a_hundred_clients_and_five_methods_fit_in_half_a_megabyte() -> None:
    names = ("ppfl", "ifca", "fedem", "fedavg", "local")
    runs = [fake_run(name, clients=100, k=5, groups=5, rounds=500, seed=s) for s, name in enumerate(names)]
    assert len(render(runs, "t")[0].encode()) < 500_000


def test_the_report_reads_what_runs_write(tmp_path: Path) -> None:
    methods = {"ppfl": {}, "local": {"algorithm": {"name": "local"}, "population": {"k": 1}}}
    records = [run(small_experiment(name=n, **m, rounds=2), tmp_path / n)[0] for n, m in methods.items()]
    page = write_report([record.folder for record in records], tmp_path / "new" / "out", "Title", ["Ours", "Theirs"])
    assert page == tmp_path / "new" / "out" / "report.html"
    parsed((page.parent / "memberships.svg").read_text(encoding="utf-8"))
    text = page.read_text(encoding="utf-8")
    assert {*first_cells(text, 0)} == {"Ours", "Theirs"}
    assert all(f"{record.scores['accuracy']:.1%}" in text for record in records)
    one = fake_run("ppfl")  # scores are those of the state that the run returned
    one.scores = {"accuracy": 0.123, "per_client": [0.5] * len(one.ids)}
    assert final(one, "accuracy") == 0.123 and {*per_client(one, ACCURACY).values()} == {0.5}


def test_reports_of_nothing_are_refused(tmp_path: Path) -> None:
    two = [fake_run("a", rounds=4), fake_run("b", rounds=4)]
    assert_refused(lambda: render(two, "t", ["PPFL"]), SettingError, "1 labels for 2 runs")
    assert_refused(lambda: write_report([], tmp_path, "t"), SettingError, "at least one run folder")
    picture = tmp_path / "x.svg"
    assert_refused(lambda: write_curves({"a": two}, picture, "t"), SettingError, "none of 2 runs was evaluated")
    assert not picture.exists()


# ---------------------------------------------------------------------- fitted tables


def test_the_page_of_a_table_is_complete_and_escapes_everything() -> None:
    for k in (1, 2, 3, 5):
        page = render_population(fake_table(k))
        parsed(page)
        assert "ppfl glm shops.csv" in page
    for text, shown in HOSTILE.items():
        texts = dict.fromkeys(("title", "command", "client", "target"), text) | {"notes": [text], "features": [text]}
        lines = [effect(text, text, [1.0, 2.0, 3.0], 1.0), effect("b", "x", [1.0, 2.0, 3.0], 1.0)]
        page = render_population(fake_table(3, ids=[text] * 20, coefficients=lines, average=[], **texts))
        assert shown[:30] in content(parsed(page))
    assert "all are in memberships.csv" in render_population(fake_table(3, MAX_CLIENTS + 1))


def test_the_choice_of_k_is_explained_and_sections_without_data_are_left_out() -> None:
    page = render_population(fake_table(3))
    assert "chosen by the BIC" in page and "lowest BIC is that of" not in page
    candidates = [tried(1, 100.0, held_out=-1.25, error=0.125), tried(3, 200.0, held_out=-1.0)]
    page = render_population(fake_table(3, candidates=candidates, chosen_by="the held-out likelihood"))
    for words in ("chosen by the held-out likelihood", "The lowest BIC is that of 1", "-1.2500", "0.1250"):
        assert words in page
    page = render_population(fake_table(1, scores=[], candidates=[tried(1, 300.0)]))
    assert "How well" not in page and "Where the clients are" not in page and "One model for all was fitted" in page
