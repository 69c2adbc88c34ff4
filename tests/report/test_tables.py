"""The same values in every view: a terminal, a page, Markdown, LaTeX, csv and DataFrames; clients matched by id."""

import io
import re
from dataclasses import replace
from statistics import fmean, stdev

import pandas as pd
import pytest
import torch

from kit.experiments import small_experiment
from kit.refusals import SettingError, assert_refused
from kit.reports import fake_run
from ppfl.report import Column, Comparison, Spread, Table
from ppfl.report.run_tables import client_table, gain_table, round_table, seed_table, settings_tables
from ppfl.report.terminal import as_text
from ppfl.report.text import summary
from ppfl.runs import load_run, run

COLUMNS = (Column("method", text=True), Column("rmse", "lower is better", higher_is_better=False), Column("n"))


def column(table, name):
    return [row[[c.name for c in table.columns].index(name)] for row in table.rows]


def test_all_views_show_the_same_texts_and_the_best_in_bold_ties_too():
    rows = (("a|b <i>", Spread(0.50001, 0.01), 3), ("PPFL_1", Spread(0.5, 0.02), None), ("z", 0.75, 1.5))
    table = Table("T & U", COLUMNS, rows, ("A note.",))
    assert table.best == {(0, 1), (1, 1)}
    assert table.texts[0] == ["a|b <i>", "0.5 ± 0.01", "3"] and table.texts[1][2] == "–"
    shown = as_text(table)
    assert all(text in shown for row in table.texts for text in row) and "A note." in shown
    assert "| a\\|b &lt;i> | **0.5** ± 0.01 | 3 |" in table.to_markdown()
    assert r"PPFL\_1 & \textbf{0.5} $\pm$ 0.02 & -- \\" in table.to_latex()
    assert "<b>0.5</b><small> ± 0.01</small>" in table._repr_html_() and "a|b &lt;i&gt;" in table._repr_html_()
    frame = table.to_frame()
    pd.testing.assert_frame_equal(pd.read_csv(io.StringIO(table.to_csv())), frame)
    assert frame["rmse"].tolist() == [0.50001, 0.5, 0.75] and frame["rmse sd"].iloc[:2].tolist() == [0.01, 0.02]


def test_what_is_alike_has_no_best_and_what_is_missing_is_a_dash():
    table = Table("", COLUMNS, (("a", 0.5, float("nan")), ("b", 0.5, None)))
    assert not table.best and table.texts == [["a", "0.5", "–"], ["b", "0.5", "–"]]
    assert [c.name for c in table.without_empty_columns().columns] == ["method", "rmse", "n"]
    assert [c.name for c in table._replace(rows=(("a", 0.5, None),)).without_empty_columns().columns] == [
        "method",
        "rmse",
    ]


@pytest.mark.parametrize("metric", ["accuracy", "rmse", "deviance"])
def test_methods_come_best_first_with_mean_and_deviation_of_their_seeds(metric):
    levels = {"fedavg": 0.5, "ppfl": 0.93, "local": 0.7}
    runs = [fake_run(name, k=1, level=level, metric=metric, seed=seed)
            for name, level in levels.items() for seed in (0, 1)]  # fmt: skip
    table = Comparison.of(runs).table
    assert column(table, "method") == ["PPFL", "Local", "FedAvg"]
    for row, name in zip(table.rows, ("ppfl", "local", "fedavg"), strict=True):
        finals = [each.metrics[-1][metric] for each in runs if each.name == name]
        assert row[1] == Spread(pytest.approx(fmean(finals)), pytest.approx(stdev(finals)))
    assert "PPFL is best" in summary(Comparison.of(runs))
    one, other = fake_run("ppfl", lr=0.1), fake_run("ppfl", lr=0.5)
    assert len(Comparison.of([one, other]).methods) == 2, "other settings are another method"


def test_a_lead_within_the_spread_of_seeds_is_reported_as_such():
    assert "are level" in summary(Comparison.of([fake_run("ppfl"), fake_run("fedem")]))
    for gap, small in ((0.01, True), (0.15, False)):
        levels = [("ppfl", 0.80 + gap), ("fedavg", 0.80)]
        runs = [fake_run(name, level=level + 0.05 * seed, seed=seed) for name, level in levels for seed in (0, 1)]
        assert ("though seeds differ by as much" in summary(Comparison.of(runs))) == small


def test_labels_group_runs_into_methods_and_name_them():
    """Even where the records alone would be grouped differently."""
    runs = [fake_run("ppfl", seed=0), fake_run("ppfl", seed=1), fake_run("ppfl", seed=2, level=0.5), fake_run("local")]
    found = Comparison.of(runs, ["ours", "theirs", "ours", "alone"])
    assert {m.label: len(m.runs) for m in found.methods} == {"ours": 2, "theirs": 1, "alone": 1}
    assert_refused(lambda: Comparison.of(runs, ["ours"]), SettingError, "1 labels for 4 runs")


def test_clients_are_matched_by_name_and_not_by_their_order_in_files():
    one, turned = fake_run("ppfl", k=1), fake_run("other", k=1)
    turned = replace(turned, ids=turned.ids[::-1])
    for row in turned.metrics:
        row["per_client"] = row.get("per_client", [])[::-1]
    table = client_table(Comparison.of([one, turned]))
    assert len(table.rows) == 40 and all(row[-1] == row[-2] for row in table.rows)
    (row,) = gain_table(found := Comparison.of([one, turned]), found.methods[0].label).rows
    assert row[1:4] == (0, 40, 0)


def test_gains_and_losses_are_counted_and_the_client_that_loses_most_is_named():
    ours, theirs = fake_run("ppfl", clients=4), fake_run("local", clients=4, k=1)
    for one, scores in ((ours, [0.9, 0.5, 0.2, 0.7]), (theirs, [0.8, 0.5, 0.6, 0.8])):
        one.metrics[-1]["per_client"] = scores
    found = Comparison.of([ours, theirs])
    (row,) = gain_table(found, "PPFL").rows
    assert row == ("Local", 1, 1, 2, "site-002: 60.00% to 20.00%")


def test_metrics_of_ones_own_are_columns_of_results_and_of_rounds():
    one = fake_run("ppfl")
    for row in one.metrics:
        if "accuracy" in row:
            row |= {"f1": 0.25, "f1_mean": 0.25, "f1_worst_tenth": 0.125}
    found = Comparison.of([replace(one, scores=one.metrics[-1])])
    assert column(found.table, "f1") == [Spread(0.25)] and column(round_table(found.records[0]), "f1")[-1] == 0.25


@pytest.mark.parametrize("name", ["gini", "my_loss"])
def test_a_metric_whose_direction_is_not_known_is_shown_and_ranks_nothing(name):
    runs = [fake_run("ppfl", metric=name), fake_run("fedavg", metric=name, level=0.5)]
    found = Comparison.of(runs)
    assert found.metric.name == name and not found.table.best
    assert "reaches" in summary(found) and " is best" not in summary(found)


def test_seeds_are_rows_and_settings_that_differ_come_first():
    runs = [fake_run("ppfl", seed=seed) for seed in (0, 3)]
    assert column(seed_table(Comparison.of(runs)), "seed") == ["0", "3", "mean ± sd"]
    differ, shared = settings_tables(Comparison.of([fake_run("ppfl", lr=0.1), fake_run("ppfl", lr=0.5)], ["a", "b"]))
    assert ("method.lr", "0.1", "0.5") in differ.rows and ("method.name", "ppfl") in shared.rows


def test_tables_cope_with_what_is_missing_or_not_finite():
    for missing in ("accuracy", "accuracy_mean", "per_client", "loss", "seconds", "bytes_up", "participants", "round"):
        runs = [fake_run("fedavg", k=1, level=0.7), fake_run("ppfl"), fake_run("local", k=1, level=0.85)]
        for row in runs[1].metrics:
            row.pop(missing, None)
        assert len(Comparison.of(runs).table.rows) == 3
    for value in (float("nan"), float("inf"), None, "x"):
        runs = [fake_run("fedavg", k=1, level=0.7), fake_run("ppfl"), fake_run("local", k=1, level=0.85)]
        for row in runs[1].metrics:
            row.update({key: value for key in row if key != "round"} | {"refusals": 7})
            row["per_client"] = [value] * len(runs[1].ids)
        runs[1] = replace(runs[1], memberships=torch.full_like(runs[1].memberships, torch.nan))
        table = Comparison.of(runs).table
        assert column(table, "method")[-1] == "PPFL" and not re.search(r"\bnan\b|\binf\b", as_text(table))


def test_scores_are_those_of_the_state_that_a_run_returned(tmp_path):
    (record,) = run(small_experiment(rounds=2), tmp_path / "ppfl")
    table = Comparison.of([load_run(record.folder)]).table
    assert column(table, "accuracy")[0].mean == record.scores["accuracy"]
    one = fake_run("ppfl")
    one = replace(one, scores={"accuracy": 0.123, "accuracy_worst_tenth": 0.1, "per_client": [0.5] * len(one.ids)})
    assert column(Comparison.of([one]).table, "accuracy") == [Spread(0.123)]
