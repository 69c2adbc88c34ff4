"""Charts are given the recorded numbers, in the right order, and none is lost."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.special import ndtri

from kit.reports import fake_run
from kit.tables import make_client_table, regressor
from ppfl.report import Comparison, charts, plot_coefficients
from ppfl.report.memberships import sort_memberships
from ppfl.report.method_runs import MethodRuns
from ppfl.report.theme import metric, model_colour
from ppfl.runs import group_agreement

ACCURACY = metric("accuracy")


def data_of(chart, key):
    """The rows of the first data in a chart that have this key."""
    spec = chart.to_dict()
    json.dumps(spec, allow_nan=False)
    return next(rows for rows in spec["datasets"].values() if key in rows[0])


def test_traffic_is_the_total_a_client_has_sent_and_received_until_a_round_lacks_it():
    run = fake_run("ppfl", clients=7)
    for t, row in enumerate(run.metrics, 1):
        row["bytes_up"], row["bytes_down"] = 700 * t, 7
    assert run.traffic() == {t: pytest.approx(100 * t * (t + 1) / 2 + t) for t in range(1, 61)}
    del run.metrics[20]["bytes_down"]
    points = MethodRuns("m", (run,)).curve_over_traffic("accuracy")
    assert [1e6 * sent for sent, _ in points] == pytest.approx([run.traffic()[t] for t in (5, 10, 15, 20)])


def test_both_coordinates_are_means_over_seeds_at_rounds_that_all_seeds_have():
    cheap, expensive = (fake_run("cfl", seed=seed, sent=cost) for seed, cost in ((0, 1e5), (1, 3e5)))
    del expensive.metrics[9]["accuracy"]
    method = MethodRuns("m", (cheap, expensive))
    points, curve = method.curve_over_traffic("accuracy"), method.curve("accuracy")
    assert [sent for sent, _ in points] == pytest.approx([0.2 * t for t in range(5, 61, 5) if t != 10])
    means = [(cheap.metrics[t - 1]["accuracy"] + expensive.metrics[t - 1]["accuracy"]) / 2 for t, _ in curve]
    assert [value for _, value in points] == [value for _, value in curve] == pytest.approx(means)
    drawn = data_of(charts.history({"m": curve}, ACCURACY), "y")
    assert [row["x"] for row in drawn] == [t for t, _ in curve]
    assert [row["y"] for row in drawn] == pytest.approx(means, rel=1e-3)


@pytest.mark.parametrize(("groups", "k", "wrong"), [(4, 4, 0), (4, 4, 9), (5, 2, 9), (2, 5, 9)])
def test_clients_are_sorted_by_model_models_by_share_and_true_groups_have_the_colour_of_their_model(groups, k, wrong):
    run = fake_run("ppfl", groups=groups, k=k, seed=3)
    run.memberships[:wrong] = run.memberships[:wrong].roll(1, dims=1)
    found, rows = sort_memberships("PPFL", run), dict(zip(run.ids, run.memberships, strict=True))
    assert found.shares == sorted(found.shares, reverse=True) and {*found.ids} == {*run.ids}
    for client, row in zip(found.ids, found.memberships, strict=True):
        torch.testing.assert_close(row, rows[client][list(found.columns)])
    largest = found.memberships.argmax(1)
    assert largest.tolist() == sorted(largest.tolist())
    share = group_agreement(run.memberships, run.truth).share
    assert float((largest == found.truth.argmax(1)).double().mean()) == pytest.approx(share)
    drawn = [row for row in data_of(charts.of_sorted(found), "model") if row["of"] == "truth"]
    assert [row["model"] for row in drawn] == [found.true_name(i) for i in range(len(found.ids))]


@pytest.mark.parametrize("clients", [1, 40, 1000])
def test_the_parts_of_a_bar_fill_it_and_no_client_is_lost_where_bars_are_means(clients):
    found = sort_memberships("PPFL", fake_run("ppfl", clients=clients))
    rows = [row for row in data_of(charts.of_sorted(found), "model") if row["of"] == "found"]
    bars = {}
    for row in rows:
        bars.setdefault(row["at"], []).append(row)
    assert len(bars) <= charts.MAX_BARS
    for parts in bars.values():
        edges = [parts[0]["low"], *(part["high"] for part in parts)]
        assert edges[0] == 0 and edges[-1] == 1 and edges == sorted(edges)
    starts = [*sorted(bars), clients]
    sizes = np.diff(starts)
    shares = dict.fromkeys(found.names, 0.0)
    for size, at in zip(sizes, starts[:-1], strict=True):
        for part in bars[at]:
            shares[part["model"]] += size * (part["high"] - part["low"]) / clients
    assert list(shares.values()) == pytest.approx(found.shares, abs=2e-3)
    scale = charts.of_sorted(found).to_dict()["layer"][0]["encoding"]["color"]["scale"]
    assert scale["range"] == [model_colour(at) for at in range(len(scale["domain"]))]


def test_pictures_do_not_depend_on_the_order_of_columns():
    run = fake_run("ppfl")
    by_round = {t: c.flip(1) for t, c in run.memberships_by_round.items()}
    turned = replace(run, memberships=run.memberships.flip(1), memberships_by_round=by_round)
    one, other = (charts.of_sorted(sort_memberships("PPFL", each)).to_dict() for each in (run, turned))
    assert one == other


@pytest.mark.parametrize("k", [2, 3, 6])
def test_a_client_stands_at_the_mean_of_the_corners_weighted_by_its_memberships(k):
    c = np.random.default_rng(0).dirichlet([0.3] * k, 50)
    ids = [f"c{i}" for i in range(50)]
    rows = data_of(charts.simplex(c, ids), "client")
    places = charts.corners(k)
    assert len(rows) == 50
    for row in rows:
        expected = c[ids.index(row["client"])] @ places
        assert row["x"] == pytest.approx(expected[0], abs=0.011 if k == 2 else 1e-3)  # a line has fifty places
        assert k == 2 or row["y"] == pytest.approx(expected[1], abs=1e-3)
    apart = np.linalg.norm(places[:, None] - places[None], axis=2)
    assert apart[~np.eye(k, dtype=bool)].min() > 0.5, "corners are apart"


def test_more_clients_than_can_be_stacked_are_a_histogram_of_all_of_them():
    shares = np.random.default_rng(0).random(3000)
    rows = data_of(charts.simplex(np.stack([1 - shares, shares], 1), [str(i) for i in range(3000)]), "count")
    assert [row["count"] for row in rows] == np.histogram(shares, 50, (0, 1))[0].tolist()


@pytest.mark.parametrize("clients", [30, 5000])
def test_a_dot_is_a_client_with_its_score_and_the_best_and_the_worst_are_always_drawn(clients):
    scores = {"PPFL": {f"c{i}": i / clients for i in range(clients)}, "Local": {"c1": 0.5, "c0": 0.25}}
    rows = data_of(charts.client_scores(scores, ACCURACY), "client")
    own = [row for row in rows if row["label"] == "PPFL"]
    assert len(own) == min(clients, charts.MAX_DOTS)
    assert {"c0", f"c{clients - 1}"} <= {row["client"] for row in own}
    assert all(row["value"] == pytest.approx(scores[row["label"]][row["client"]], rel=1e-3) for row in rows)


@pytest.mark.parametrize("name", ["accuracy", "rmse"])
def test_who_gains_and_who_loses_follows_the_direction_of_the_metric(name):
    chart = charts.gains({"a": 1.0, "b": 2.0, "c": 3.0}, {"a": 2.0, "b": 2.0, "c": 1.0}, metric(name), ("x", "y"))
    found = {row["client"]: row["what"] for row in data_of(chart, "what")}
    better, worse = ("loses", "gains") if name == "accuracy" else ("gains", "loses")
    assert found == {"a": better, "b": "equal", "c": worse}


def test_every_residual_is_a_dot_in_both_panels_and_normal_ones_lie_on_the_line():
    normal = ndtri((np.arange(200) + 0.5) / 200)
    chart = charts.residuals(np.arange(200.0), np.random.default_rng(0).permutation(normal))
    spec = chart.to_dict()
    left, right = ([spec["datasets"][layer["data"]["name"]] for layer in panel["layer"]] for panel in spec["hconcat"])
    assert sorted(row["x"] for row in max(left, key=len)) == list(range(200))
    ordered = max(right, key=len)
    assert len(ordered) == 200 and all(row["x"] == pytest.approx(row["y"], abs=1e-3) for row in ordered)


def test_memberships_over_rounds_have_every_client_at_every_step():
    run = fake_run("ppfl", clients=20)
    shown = sort_memberships("PPFL", run)
    by_round = dict(zip(shown.rounds, shown.history.numpy(), strict=True))
    rows = data_of(charts.membership_history(by_round, shown.ids), "step")
    found = {(row["step"], row["client"]) for row in rows}
    assert found == {(step, client) for step in range(len(shown.rounds)) for client in shown.ids}


def test_a_comparison_draws_what_it_has_and_refuses_what_it_lacks():
    found = Comparison.of([fake_run("ppfl"), fake_run("fedavg", k=1, level=0.7)])
    for chart in (found.plot_history(), found.plot_clients(), found.plot_memberships(), found.plot_simplex()):
        assert chart.to_dict()["config"]["background"] == "transparent"
    with pytest.raises(Exception, match="no memberships to draw"):
        Comparison.of([fake_run("fedavg", k=1)]).plot_memberships()


def test_coefficients_are_drawn_with_their_intervals_by_the_names_of_reports():
    table = make_client_table()
    model = regressor(k=2).fit(table.x, table.y, clients=table.clients)
    rows = data_of(plot_coefficients(model), "value")
    shares = np.asarray(model.memberships_).mean(0)
    largest = model.canonical_coef_[shares.argmax()]
    drawn = {row["term"]: row for row in rows if row["model"] == "A" and row["term"] != "intercept"}
    assert [row["value"] for row in drawn.values()] == pytest.approx(largest.tolist(), rel=1e-3)
    assert all(row["low"] < row["value"] < row["high"] for row in rows)
    assert {row["model"] for row in rows} == {"A", "B", "population"}
