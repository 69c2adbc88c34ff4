"""Charts are given the recorded numbers, in the right order, and colours say who belongs to which group."""

import re
from xml.etree import ElementTree

import numpy as np
import pytest
import torch

from kit.reports import fake_run, fake_table
from kit.tables import classifier, make_client_table, regressor
from ppfl.report import plot_residuals, render, render_population
from ppfl.report.curves import over_rounds, over_traffic, score_axis
from ppfl.report.membership_bars import MAX_BARS
from ppfl.report.methods import MethodRuns
from ppfl.report.metric import ACCURACY, METRICS
from ppfl.report.palette import method_colour, method_dash, mixed_colour, model_colour
from ppfl.report.records import traffic
from ppfl.report.residual_plots import residual_drawing
from ppfl.report.simplex_plot import MAX_DOTS, MAX_STACKED, simplex_chart
from ppfl.runs import group_agreement

SVG = "{http://www.w3.org/2000/svg}"


def methods(*runs) -> list[MethodRuns]:
    return [MethodRuns(run.name, (run,)) for run in runs]


# ---------------------------------------------------------------------- curves


def test_traffic_is_the_total_a_client_has_sent_and_received_until_a_round_lacks_it() -> None:
    run = fake_run("ppfl", clients=7)
    for t, row in enumerate(run.metrics, 1):
        row["bytes_up"], row["bytes_down"] = 700 * t, 7
    assert traffic(run) == {t: pytest.approx(100 * t * (t + 1) / 2 + t) for t in range(1, 61)}
    del run.metrics[20]["bytes_down"]
    assert list(traffic(run)) == list(range(1, 21))
    points = MethodRuns("m", (run,)).curve_over_traffic("accuracy")
    assert [sent for sent, _ in points] == [traffic(run)[t] for t in (5, 10, 15, 20)]


def test_both_coordinates_are_means_over_seeds_at_rounds_that_all_seeds_have() -> None:
    cheap, expensive = (fake_run("cfl", seed=seed, sent=cost) for seed, cost in ((0, 1e5), (1, 3e5)))
    del expensive.metrics[9]["accuracy"]
    method = MethodRuns("m", (cheap, expensive))
    points = method.curve_over_traffic("accuracy")
    assert [sent for sent, _ in points] == pytest.approx([2e5 * t for t in range(5, 61, 5) if t != 10])
    assert [value for _, value in points] == [value for _, value in method.curve("accuracy")]


def test_a_method_that_sends_nothing_is_a_flat_line_and_alone_it_has_no_chart() -> None:
    runs = [fake_run(name, k=1, sent=cost) for name, cost in (("ppfl", 8e5), ("fedavg", 2e5), ("local", 0.0))]
    found = over_traffic(methods(*runs), "accuracy")
    assert {curve.label: curve.is_flat for curve in found.curves} == {"ppfl": False, "fedavg": False, "local": True}
    assert over_traffic(methods(runs[2]), "accuracy") is None
    assert "sent and received" not in render([runs[2]], "t")[0]
    last = ACCURACY.format_tick(runs[2].metrics[-1]["accuracy"])
    assert f"Local, 0 MB: {last}" in render(runs, "t")[0]


def test_very_different_traffic_has_a_logarithmic_axis_and_rounds_without_any_do_not_break_it() -> None:
    late = fake_run("b", sent=5e6)
    for row in late.metrics[:10]:
        row["bytes_up"] = row["bytes_down"] = 0
    assert over_traffic(methods(fake_run("a"), late), "accuracy").x_format.log
    ElementTree.fromstring(render([fake_run("a"), late], "t")[0])


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_what_is_cut_off_is_neither_the_second_half_of_a_curve_nor_the_best_value(metric) -> None:
    levels = {"a": 0.9, "b": 0.87, "c": 0.8}
    runs = [fake_run(name, metric=metric.name, level=level, rounds=200) for name, level in levels.items()]
    curves = over_rounds(methods(*runs), metric.name)
    low, high = score_axis(curves, metric).window
    every = [value for curve in curves for _, value in curve.points]
    assert all(low <= value <= high for curve in curves for _, value in curve.points[len(curve.points) // 2 :])
    assert high >= max(every) if metric.higher_is_better else low <= min(every)
    assert high <= metric.maximum
    assert score_axis(curves[:1], metric).window is None  # there is nothing to tell it apart from


def test_lines_and_names_of_many_methods_differ() -> None:
    assert len({(method_colour(at), method_dash(at)) for at in range(28)}) == 28
    labels = [f"PPFL with mixed weights and K={k} canonical models" for k in (4, 8)]
    page, _ = render([fake_run("ppfl"), fake_run("ppfl")], "t", labels)
    names = [element.text or "" for element in ElementTree.fromstring(page).iter(f"{SVG}text")]
    assert all(sum(f"K={k}" in name for name in names) >= 4 for k in (4, 8))  # in every chart with both methods


# ---------------------------------------------------------------------- memberships


def columns(picture: str, kind: str) -> list[list[tuple[float, str]]]:
    """Height and colour of the blocks of every column, from the bottom up."""
    groups = [g for g in ElementTree.fromstring(picture).iter(f"{SVG}g") if g.get("class") == kind]
    return [[(float(r.attrib["height"]), r.attrib["fill"]) for r in group.iter(f"{SVG}rect")] for group in groups]


def titles(picture: str) -> list[str]:
    return [title.text or "" for title in ElementTree.fromstring(picture).iter(f"{SVG}title")]


@pytest.mark.parametrize(("clients", "k", "soft"), [(1, 2, 0.0), (40, 4, 0.0), (300, 3, 0.4), (77, 11, 0.2)])
def test_every_client_is_a_bar_whose_heights_are_its_memberships(clients: int, k: int, soft: float) -> None:
    run = fake_run("ppfl", clients=clients, k=k, groups=k, soft=soft)
    _, picture = render([run], "t")
    rows = dict(zip(run.ids, run.memberships, strict=True))
    names = [title.split(":")[0] for title in titles(picture) if title.split(":")[0] in rows]
    bars, strips = columns(picture, "client"), columns(picture, "truth")
    assert len(bars) == len(strips) == clients == len({*names})
    for name, bar, strip in zip(dict.fromkeys(names), bars, strips, strict=True):
        total, heights = sum(height for height, _ in bar), sorted((height for height, _ in bar), reverse=True)
        drawn = [height / total for height in heights] + [0.0] * (k - len(heights))  # a block may be too thin to draw
        assert drawn == pytest.approx(sorted(rows[name].tolist(), reverse=True), abs=2e-3)
        assert sum(height for height, _ in strip) == pytest.approx(14, abs=0.011 * k)


@pytest.mark.parametrize(("groups", "k", "wrong"), [(4, 4, 0), (4, 4, 9), (5, 2, 9), (2, 5, 9)])
def test_true_groups_have_the_colours_of_their_models_as_often_as_the_table_says(
    groups: int, k: int, wrong: int
) -> None:
    run = fake_run("ppfl", groups=groups, k=k, seed=3)
    run.memberships[:wrong] = run.memberships[:wrong].roll(1, dims=1)
    bars, strips = (columns(render([run], "t")[1], kind) for kind in ("client", "truth"))
    same_colour = [max(bar)[1] == max(strip)[1] for bar, strip in zip(bars, strips, strict=True)]
    share = group_agreement(run.memberships, run.truth).share
    assert sum(same_colour) / len(same_colour) == pytest.approx(share)
    models, truths = ({colour for column in drawn for _, colour in column} for drawn in (bars, strips))
    assert models == {model_colour(at) for at in range(k)} and len(truths - models) == max(0, groups - k)
    assert wrong or share == 1


def test_colours_follow_shares_and_not_the_order_of_columns() -> None:
    run, turned = fake_run("ppfl"), fake_run("ppfl")
    turned.memberships = run.memberships.flip(1)
    turned.memberships_by_round = {t: c.flip(1) for t, c in run.memberships_by_round.items()}
    assert render([run], "t")[1] == render([turned], "t")[1]
    assert [mixed_colour(row) for row in np.eye(3).tolist()] == [model_colour(at) for at in range(3)]


def test_many_clients_are_averaged_without_losing_any_and_one_model_has_no_bars() -> None:
    _, picture = render([fake_run("ppfl", clients=1000, truth=False)], "t")
    counts = [int(said.split()[2]) for said in titles(picture) if said.startswith("mean of")]
    assert len(columns(picture, "client")) <= MAX_BARS and sum(counts) == 1000
    _, picture = render([fake_run("fedavg", k=1)], "t")
    assert not columns(picture, "client") and "no memberships" in picture


def dots(table) -> dict[str, np.ndarray]:
    """Where clients are drawn among the canonical models, by id."""
    drawn = ElementTree.fromstring(simplex_chart(table.ids, table.memberships)).iter(f"{SVG}circle")
    found = {dot.find(f"{SVG}title").text.split(":")[0]: dot for dot in drawn if dot.get("class") == "client"}
    return {client: np.array([float(dot.get("cx")), float(dot.get("cy"))]) for client, dot in found.items()}


def test_a_client_is_drawn_at_the_mean_of_the_models_weighted_by_its_memberships() -> None:
    table = fake_table(3, 50)
    corners = np.stack([*dots(table._replace(ids=list("abc"), memberships=np.eye(3).tolist())).values()])
    found = np.stack([dots(table)[client] for client in table.ids])
    np.testing.assert_allclose(found, np.array(table.memberships) @ corners, atol=0.02)
    for clients in (1, 30, MAX_STACKED):  # two models are the ends of a line
        table = fake_table(2, clients)
        order = np.argsort([c[1] for c in table.memberships], kind="stable")
        places = dots(table)
        across = [places[table.ids[at]][0] for at in order]
        assert across == sorted(across) and len({tuple(place) for place in places.values()}) == clients


def test_clients_that_are_too_many_for_dots_are_counted() -> None:
    table = fake_table(2, MAX_STACKED + 1)
    counts = [int(said.split()[0]) for said in titles(simplex_chart(table.ids, table.memberships))]
    assert sum(counts) == MAX_STACKED + 1
    assert len(dots(fake_table(3, MAX_DOTS + 500))) == MAX_DOTS


# ---------------------------------------------------------------------- fitted tables


def test_bars_of_effects_and_scores_are_proportional_to_their_values() -> None:
    table = fake_table(2)
    page = ElementTree.fromstring(render_population(table))
    bars = [float(rect.attrib["width"]) for rect in next(page.iter("table")).iter("rect")]
    lines = [term for term in (*table.average, *table.coefficients) if term.reach]
    # a shared row has one bar for all canonical models
    reach = [r for t in lines for r in (*(t.reach[:1] if t.is_shared else t.reach), t.pooled_reach)]
    assert bars == pytest.approx([50 * abs(r) / max(map(abs, reach)) for r in reach], abs=0.01)
    picture = next(d for d in page.iter(f"{SVG}svg") if "ways to predict" in d.get("aria-label", ""))
    ours, pooled, own = (float(rect.attrib["width"]) for rect in picture.iter(f"{SVG}rect"))
    assert (ours / pooled, own / pooled) == pytest.approx((0.5, 0.75), abs=1e-3)


def test_every_row_is_a_dot_in_both_panels_of_residuals(tmp_path) -> None:
    table = make_client_table()
    model = regressor(k=1).fit(table.x, table.y)
    picture = plot_residuals(model, table.x, table.y, path=tmp_path / "residuals.svg")
    assert ElementTree.fromstring(picture).tag.endswith("svg") and (tmp_path / "residuals.svg").read_text() == picture
    assert picture.count("<circle") == 2 * len(table.y)
    plot_residuals(model, table.x, table.y, path=tmp_path / "residuals.html", kind="pearson")
    page = (tmp_path / "residuals.html").read_text()
    assert page.startswith("<!doctype html>") and "pearson residual" in page
    labels = classifier(k=1).fit(table.x, table.labels)
    assert plot_residuals(labels, table.x, table.labels).count("<circle") == 2 * len(table.y)
    assert "nan" not in residual_drawing(np.full(10, 2.0), np.linspace(-1, 1, 10), "deviance")
    assert residual_drawing(np.ones(1), np.ones(1), "quantile").count("<circle") == 2


def test_normal_residuals_lie_on_the_line() -> None:
    """In the right panel dots and line have the same slope and place."""
    normal = torch.randn(20_000, generator=torch.Generator().manual_seed(0)).numpy()
    picture = residual_drawing(np.arange(20_000.0), normal, "quantile")
    drawn = np.array(re.findall(r'<circle cx="([\d.]+)" cy="([\d.]+)"', picture), dtype=float)
    assert len(drawn) < 20_000
    ends = re.findall(r'<line x1="([\d.]+)" y1="([\d.]+)" x2="([\d.]+)" y2="([\d.]+)" stroke="#7A8088"', picture)[-1]
    x1, y1, x2, y2 = map(float, ends)
    right = drawn[len(drawn) // 2 :]
    middle = right[len(right) // 10 : -len(right) // 10]
    on_line = y1 + (middle[:, 0] - x1) / (x2 - x1) * (y2 - y1)
    assert np.abs(middle[:, 1] - on_line).max() < 3
