"""Charts are given the recorded numbers, in the right order."""

import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from kit.reports import fake_run
from kit.tables import classifier, make_client_table, regressor
from ppfl.report import plot_residuals, render
from ppfl.report.curves import over_rounds, score_axis
from ppfl.report.membership_bars import MAX_BARS, make_bars
from ppfl.report.methods import MethodRuns
from ppfl.report.metric import METRICS
from ppfl.report.simplex_plot import MAX_STACKED, line_plot
from ppfl.report.sorted_memberships import sort_memberships, truth_agreement
from ppfl.runs import group_agreement


def test_traffic_is_the_total_a_client_has_sent_and_received_until_a_round_lacks_it():
    run = fake_run("ppfl", clients=7)
    for t, row in enumerate(run.metrics, 1):
        row["bytes_up"], row["bytes_down"] = 700 * t, 7
    assert run.traffic() == {t: pytest.approx(100 * t * (t + 1) / 2 + t) for t in range(1, 61)}
    del run.metrics[20]["bytes_down"]
    points = MethodRuns("m", (run,)).curve_over_traffic("accuracy")
    assert [sent for sent, _ in points] == [run.traffic()[t] for t in (5, 10, 15, 20)]


def test_both_coordinates_are_means_over_seeds_at_rounds_that_all_seeds_have():
    cheap, expensive = (fake_run("cfl", seed=seed, sent=cost) for seed, cost in ((0, 1e5), (1, 3e5)))
    del expensive.metrics[9]["accuracy"]
    method = MethodRuns("m", (cheap, expensive))
    points, curve = method.curve_over_traffic("accuracy"), method.curve("accuracy")
    assert [sent for sent, _ in points] == pytest.approx([2e5 * t for t in range(5, 61, 5) if t != 10])
    means = [(cheap.metrics[t - 1]["accuracy"] + expensive.metrics[t - 1]["accuracy"]) / 2 for t, _ in curve]
    assert [value for _, value in points] == [value for _, value in curve] == pytest.approx(means)


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_what_is_cut_off_is_neither_the_second_half_of_a_curve_nor_the_best_value(metric):
    runs = [fake_run("ppfl", metric=metric.name, level=level, rounds=200) for level in (0.9, 0.87, 0.8)]
    curves = over_rounds([MethodRuns(str(at), (run,)) for at, run in enumerate(runs)], metric.name)
    low, high = score_axis(curves, metric).window
    every = [value for curve in curves for _, value in curve.points]
    assert all(low <= value <= high for curve in curves for _, value in curve.points[len(curve.points) // 2 :])
    assert high >= max(every) if metric.higher_is_better else low <= min(every)


@pytest.mark.parametrize(("groups", "k", "wrong"), [(4, 4, 0), (4, 4, 9), (5, 2, 9), (2, 5, 9)])
def test_clients_are_sorted_by_model_models_by_share_and_true_groups_stand_by_their_models(groups, k, wrong):
    run = fake_run("ppfl", groups=groups, k=k, seed=3)
    run.memberships[:wrong] = run.memberships[:wrong].roll(1, dims=1)
    found, rows = sort_memberships("PPFL", run), dict(zip(run.ids, run.memberships, strict=True))
    assert found.shares == sorted(found.shares, reverse=True) and {*found.ids} == {*run.ids}
    for client, row in zip(found.ids, found.memberships, strict=True):
        torch.testing.assert_close(row, rows[client][list(found.columns)])
    drawn = found.memberships.argmax(1)
    assert drawn.tolist() == sorted(drawn.tolist())
    share = group_agreement(run.memberships, run.truth).share
    assert float((drawn == found.truth.argmax(1)).double().mean()) == pytest.approx(share)


def test_pictures_do_not_depend_on_the_order_of_columns_and_many_clients_are_averaged():
    run = fake_run("ppfl")
    by_round = {t: c.flip(1) for t, c in run.memberships_by_round.items()}
    turned = replace(run, memberships=run.memberships.flip(1), memberships_by_round=by_round)
    assert render([run], "t")[1] == render([turned], "t")[1]
    many = sort_memberships("PPFL", fake_run("ppfl", clients=1000))
    bars = make_bars(many)
    assert len(bars) <= MAX_BARS and [client for bar in bars for client in bar.ids] == [*many.ids]
    weights = [len(bar.ids) / 1000 for bar in bars]
    assert np.array(weights) @ np.array([bar.memberships for bar in bars]) == pytest.approx(many.shares)


def test_agreement_with_true_mixtures_is_the_mean_overlap_whatever_the_order_of_models():
    mixed = fake_run("ppfl", soft=1.0, k=3, groups=3)
    found = 0.9 * mixed.truth + 0.1 / 3
    expected = 1 - (found - mixed.truth).abs().sum(1).mean() / 2
    assert truth_agreement(replace(mixed, memberships=found[:, [2, 0, 1]])).value == pytest.approx(float(expected))


def test_every_row_is_a_dot_in_both_panels_of_residuals(tmp_path):
    table = make_client_table()
    for model, y in ((regressor(k=1), table.y), (classifier(k=1), table.labels)):
        picture = plot_residuals(model.fit(table.x, y), table.x, y, path=tmp_path / "residuals.svg")
        assert (tmp_path / "residuals.svg").read_text() == picture
        dots = np.array(re.findall(r'<circle cx="([-\d.]+)" cy="([-\d.]+)"', picture), dtype=float)
        assert len(dots) == 2 * len(y)
        width, height = (float(size) for size in re.search(r'viewBox="0 0 (\d+) (\d+)"', picture).groups())
        left, right = dots[: len(y)], dots[len(y) :]  # one panel each, and nothing outside of the picture
        assert left[:, 0].min() > 0 and left[:, 0].max() < width / 2 < right[:, 0].min() and right[:, 0].max() < width
        assert dots[:, 1].min() > 0 and dots[:, 1].max() < height
    plot_residuals(model, table.x, y, path=tmp_path / "residuals.html", kind="pearson")
    page = (tmp_path / "residuals.html").read_text()
    assert page.startswith("<!doctype html>") and "pearson residual" in page


def test_more_clients_than_can_be_stacked_are_a_histogram_of_all_of_them():
    shares = [i / (2 * MAX_STACKED) for i in range(2 * MAX_STACKED)] + [1.0] * 20
    drawn = str(line_plot([f"client-{i}" for i in range(len(shares))], [(1 - share, share) for share in shares]))
    counts = [int(count) for count in re.findall(r"(\d+) clients are", drawn)]
    assert counts == [20] * 39 + [40] and sum(counts) == len(shares)
    heights = [float(height) for height in re.findall(r"<rect[^>]* height=\"([\d.]+)\"", drawn)]
    assert heights[-40:] == pytest.approx([count * 180 / 40 for count in counts])
