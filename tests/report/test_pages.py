"""Report pages need no outside resources, escape all data, list every client and cope with missing values."""

import re
from dataclasses import replace
from statistics import fmean, stdev
from xml.etree import ElementTree

import pytest
import torch

from kit.experiments import small_experiment
from kit.refusals import SettingError, assert_refused
from kit.reports import effect, empty_run, fake_run, fake_table, tried
from ppfl.report import render, render_population, write_curves, write_report
from ppfl.report.detail_tables import MAX_CLIENTS
from ppfl.runs import run

HOSTILE = {  # as it comes, and as it is shown
    "</svg><script>&alert('\"1\"')</script>": "</svg><script>&alert('\"1\"')</script>",
    "患者": "患者",
    "a\x00\x1b[31m": r"a\x00\x1b[31m",
    "b\u202eb": r"b\u202eb",
    "d\x9b31m": r"d\x9b31m",
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


def table(page: str, at: int) -> list[list[str]]:
    """The text of all cells but those of the heading."""
    rows = list(list(parsed(page).iter("table"))[at].iter("tr"))[1:]
    return [["".join(cell.itertext()) for cell in row] for row in rows]


def first_cells(page: str, at: int) -> list[str]:
    return [row[0] for row in table(page, at)]


def test_everything_from_data_is_shown_and_not_obeyed(tmp_path):
    one = fake_run("<i>m</i>", clients=len(HOSTILE), k=2, groups=2)
    one = replace(one, ids=tuple(HOSTILE))
    one.experiment["name"] = one.experiment["<u>"] = one.versions["<s>"] = '<a onclick="x">'
    for label, shown in HOSTILE.items():
        page, picture = render([one], label, [label])
        parsed(picture)
        assert set(HOSTILE.values()) == {*first_cells(page, 1)} and first_cells(page, 0) == [shown]
    write_curves({"<i>": [one], "b": [fake_run("b")]}, tmp_path / "new" / "curves.svg", "<Title> & more")
    said = [*parsed((tmp_path / "new" / "curves.svg").read_text("utf-8")).itertext()]
    assert "<Title> & more" in said and "<i>" in said


@pytest.mark.parametrize("clients", [1, MAX_CLIENTS, MAX_CLIENTS + 50])
def test_every_client_is_listed_up_to_the_limit(clients):
    one = fake_run("ppfl", clients=clients)
    page, _ = render([one], "t")
    names = first_cells(page, 1)
    assert len(names) == len({*names} & {*one.ids}) == min(clients, MAX_CLIENTS)
    assert (f"of {clients} clients, in the order" in page) == (clients > MAX_CLIENTS)


def test_clients_are_matched_by_name_and_not_by_their_order_in_files():
    one, turned = fake_run("ppfl", k=1), fake_run("other", k=1)
    turned = replace(turned, ids=turned.ids[::-1])
    for row in turned.metrics:
        row["per_client"] = row.get("per_client", [])[::-1]
    assert all(row[-1] == row[-2] for row in table(render([one, turned], "t")[0], 1))


@pytest.mark.parametrize("metric", ["accuracy", "rmse", "deviance"])
def test_methods_come_best_first_with_mean_and_deviation_of_their_seeds(metric):
    levels = {"fedavg": 0.5, "ppfl": 0.93, "local": 0.7}
    runs = [fake_run(name, k=1, level=level, metric=metric, seed=seed)
            for name, level in levels.items() for seed in (0, 1)]  # fmt: skip
    page, _ = render(runs, "t")
    assert first_cells(page, 0) == ["PPFL", "Local", "FedAvg"]
    assert ("lower is better" in page) == (metric != "accuracy") and "PPFL is best" in page
    if metric == "accuracy":
        for row, name in zip(table(page, 0), ("ppfl", "local", "fedavg"), strict=True):
            finals = [each.metrics[-1][metric] for each in runs if each.name == name]
            assert row[1] == f"{fmean(finals):.1%} ± {100 * stdev(finals):.1f}"
    one, other = fake_run("ppfl", lr=0.1), fake_run("ppfl", lr=0.5)
    assert len({*first_cells(render([one, other], "t")[0], 0)}) == 2, "other settings are another method"


def test_results_have_what_clients_receive_and_metrics_of_ones_own():
    runs = [fake_run(name, sent=8e4) for name in ("ppfl", "local")]
    for at, one in enumerate(runs):
        one.experiment["watch"]["metrics"] = ["mine:recall"]
        one.scores["recall"] = 0.25 + at
        for row in one.metrics:
            row["bytes_down"] *= 2
    page, _ = render(runs, "t")
    (head,) = re.findall("<thead>.*?</thead>", page, re.DOTALL)[:1]
    titles = re.findall("<th[^>]*>([^<]*)</th>", head)
    columns = {title: [row[at] for row in table(page, 0)] for at, title in enumerate(titles)}
    assert columns["kB up"] == ["40", "40"] and columns["kB down"] == ["80", "80"]
    assert columns["recall"] == ["0.25", "1.25"]


def test_a_lead_within_the_spread_of_seeds_is_reported_as_such():
    assert "are level" in render([fake_run("ppfl"), fake_run("fedem")], "t")[0]
    for gap, small in ((0.01, True), (0.15, False)):
        levels = [("ppfl", 0.80 + gap), ("fedavg", 0.80)]
        runs = [fake_run(name, level=level + 0.05 * seed, seed=seed) for name, level in levels for seed in (0, 1)]
        assert ("though seeds differ by as much" in render(runs, "t")[0]) == small


def test_labels_group_runs_into_methods_and_name_them():
    """Even where the records alone would be grouped differently."""
    runs = [fake_run("ppfl", seed=0), fake_run("ppfl", seed=1), fake_run("ppfl", seed=2, level=0.5), fake_run("local")]
    page, _ = render(runs, "t", ["PPFL1", "PPFL2", "PPFL1", "Alone"])
    assert {*first_cells(page, 0)} == {"PPFL1", "PPFL2", "Alone"} and "Local" not in page
    assert_refused(lambda: render(runs, "t", ["PPFL"]), SettingError, "1 labels for 4 runs")


def test_a_page_copes_with_what_is_missing_or_not_finite():
    def comparison():
        return [fake_run("fedavg", k=1, level=0.7), fake_run("ppfl"), fake_run("local", k=1, level=0.85)]

    for document in render([empty_run()], "t"):
        parsed(document)
    for missing in ("accuracy", "accuracy_mean", "per_client", "loss", "seconds", "bytes_up", "participants", "round"):
        runs = comparison()
        for row in runs[1].metrics:
            row.pop(missing, None)
        parsed(render(runs, "t")[0])
    for value in (float("nan"), float("inf"), None, "x"):
        runs = comparison()
        for row in runs[1].metrics:
            row.update({key: value for key in row if key != "round"} | {"refusals": 7})
            row["per_client"] = [value] * len(runs[1].ids)
        runs[1] = replace(runs[1], memberships=torch.full_like(runs[1].memberships, torch.nan))
        page, _ = render(runs, "t")
        assert first_cells(page, 0)[-1] == "PPFL" and not re.search(r"\bnan\b|\binf\b", page)


def test_the_report_reads_what_runs_write(tmp_path):
    methods = {"ppfl": {}, "local": {"method": {"name": "local"}, "population": {"k": 1}}}
    records = [run(small_experiment(name=n, **m, rounds=2), tmp_path / n)[0] for n, m in methods.items()]
    page = write_report([record.folder for record in records], tmp_path / "new" / "out", "Title", ["Ours", "Theirs"])
    parsed((tmp_path / "new" / "out" / "memberships.svg").read_text("utf-8"))
    text = page.read_text("utf-8")
    assert {*first_cells(text, 0)} == {"Ours", "Theirs"}
    assert all(f"{record.scores['accuracy']:.1%}" in text for record in records)
    one = fake_run("ppfl")  # scores are those of the state that the run returned, and not of the last round
    one = replace(one, scores={"accuracy": 0.123, "per_client": [0.5] * len(one.ids)})
    assert table(render([one], "t")[0], 0)[0][1] == "12.3%"


def test_the_page_of_a_table_is_complete_and_escapes_everything():
    for k in (1, 2, 3, 5):
        found = fake_table(k)
        page = render_population(found)
        assert "ppfl glm shops.csv" in page and ("Where the clients are" in page) == (k > 1)
        price = next(row for row in table(page, 0) if row[0] == "price")
        shown = [float(re.match(r"-?[\d.]+", cell.replace("−", "-"))[0]) for cell in price[1:]]
        assert shown == pytest.approx([*found.coefficients[0].values, -1.0], abs=1e-3)
    for text, shown in HOSTILE.items():
        texts = dict.fromkeys(("title", "command", "client", "target"), text) | {"notes": [text], "features": [text]}
        lines = [effect(text, text, [1.0, 2.0, 3.0], 1.0), effect("b", "x", [1.0, 2.0, 3.0], 1.0)]
        page = render_population(fake_table(3, ids=[text] * 20, coefficients=lines, average=[], **texts))
        assert shown[:30] in "".join(parsed(page).itertext())
    assert "all are in memberships.csv" in render_population(fake_table(3, MAX_CLIENTS + 1))
    candidates = [tried(1, 100.0, held_out=-1.25, held_out_error=0.125), tried(3, 200.0, held_out=-1.0)]
    page = render_population(fake_table(3, candidates=candidates, chosen_by="the held-out likelihood"))
    assert all(said in page for said in ("chosen by the held-out likelihood", "-1.2500", "0.1250"))
    assert "How well" not in render_population(fake_table(1, scores=[], candidates=[tried(1, 300.0)]))
