"""Curves show the recorded values, can be told apart and stay inside their frame."""

import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppfl.core.errors import SettingError
from ppfl.report import render, write_curves
from ppfl.report.curves import over_rounds, over_traffic, score_axis
from ppfl.report.drawing import log_ticks
from ppfl.report.line_chart import Curve, YAxisFormat, clip_line, line_chart
from ppfl.report.markup import shorten_distinct
from ppfl.report.methods import MethodRuns
from ppfl.report.metric import ACCURACY, METRICS
from ppfl.report.palette import method_colour, method_dash
from ppfl.report.records import traffic

SVG = "{http://www.w3.org/2000/svg}"
Make = Callable[..., Any]
HEIGHTS = st.floats(-100, 100)


def with_bytes(run: Any, each: float) -> Any:
    """Make every client send and receive so many bytes per round in total, half in each direction."""
    for row in run.metrics:
        row["bytes_up"] = row["bytes_down"] = each * len(run.ids) / 2
    return run


@pytest.fixture
def methods(make_run: Make) -> list[MethodRuns]:
    costs = {"ppfl": 8e5, "fedavg": 2e5, "local": 0.0}
    return [MethodRuns(name, (with_bytes(make_run(name, k=1), cost),)) for name, cost in costs.items()]


def strokes(picture: str, colour: str) -> list[ElementTree.Element]:
    """Thick lines: the curves, and the line samples beside their names."""
    paths = ElementTree.fromstring(picture).iter(f"{SVG}path")
    return [path for path in paths if path.get("stroke") == colour and path.get("stroke-width") == "2"]


def places(path: ElementTree.Element) -> list[tuple[float, float]]:
    numbers = [float(number) for number in re.findall(r"-?[\d.]+", path.attrib["d"])]
    return list(zip(numbers[::2], numbers[1::2], strict=True))


def test_traffic_is_the_total_a_client_has_sent_and_received_so_far(make_run: Make) -> None:
    run = make_run("ppfl", clients=7)
    for t, row in enumerate(run.metrics, 1):
        row["bytes_up"], row["bytes_down"] = 700 * t, 7
    assert traffic(run) == {t: pytest.approx(100 * t * (t + 1) / 2 + t) for t in range(1, 61)}


def test_traffic_ends_at_the_first_round_without_recorded_bytes(make_run: Make) -> None:
    run = make_run("ppfl")
    del run.metrics[20]["bytes_down"]
    assert list(traffic(run)) == list(range(1, 21))
    assert [t for t, _ in MethodRuns("m", (run,)).curve_over_traffic("accuracy")] == [
        traffic(run)[t] for t in (5, 10, 15, 20)
    ]


def test_both_coordinates_are_means_over_seeds_at_rounds_that_all_seeds_have(make_run: Make) -> None:
    cheap, expensive = (with_bytes(make_run("cfl", seed=seed), cost) for seed, cost in ((0, 1e5), (1, 3e5)))
    del expensive.metrics[9]["accuracy"]
    method = MethodRuns("m", (cheap, expensive))
    points = method.curve_over_traffic("accuracy")
    assert [sent for sent, _ in points] == pytest.approx([2e5 * t for t in range(5, 61, 5) if t != 10])
    assert [value for _, value in points] == [value for _, value in method.curve("accuracy")]


def test_a_method_that_sends_nothing_is_a_flat_line_at_its_last_value(methods: list[MethodRuns]) -> None:
    found = over_traffic(methods, "accuracy")
    assert found is not None
    assert {curve.label: curve.is_flat for curve in found.curves} == {"ppfl": False, "fedavg": False, "local": True}
    assert "dotted: none" in found.x_format.name
    chart = line_chart(found.curves, "t", YAxisFormat(ACCURACY.format_tick), found.x_format)
    lines = [places(path) for position in range(2) for path in strokes(chart, method_colour(position))]
    across, _ = (places(path) for path in strokes(chart, method_colour(2)))
    (start, y), (end, same) = across
    assert y == same
    assert start <= min(x for line in lines for x, _ in line)
    assert end == max(x for line in lines[::2] for x, _ in line)
    assert f"local, 0 MB: {ACCURACY.format_tick(methods[2].curve('accuracy')[-1][1])}" in chart


def test_there_is_no_traffic_chart_if_nothing_is_sent(methods: list[MethodRuns]) -> None:
    assert over_traffic(methods[2:], "accuracy") is None
    assert "sent and received" not in render([methods[2].first], "t")[0]
    assert "Accuracy against what a client has sent and received" in render([methods[0].first], "t")[0]


@pytest.mark.parametrize(("times", "log"), [(9, False), (11, True)])
def test_very_different_traffic_has_a_logarithmic_axis(make_run: Make, times: int, log: bool) -> None:
    runs = [with_bytes(make_run("a"), 1e6), with_bytes(make_run("b"), times * 1e6)]
    found = over_traffic([MethodRuns(str(at), (run,)) for at, run in enumerate(runs)], "accuracy")
    assert found is not None
    assert found.x_format.log == log


def test_a_first_round_without_traffic_does_not_break_a_logarithmic_axis(make_run: Make) -> None:
    runs = [with_bytes(make_run("a"), 1e5), with_bytes(make_run("b"), 5e6)]
    for row in runs[1].metrics[:10]:
        row["bytes_up"] = row["bytes_down"] = 0
    ElementTree.fromstring(render(runs, "t")[0])


@pytest.mark.parametrize("count", [1, 13, 40])
def test_names_of_many_methods_do_not_overlap_and_stay_inside_the_chart(count: int) -> None:
    curves = [Curve(f"method {at}", at, [(1, 0.5), (2, 0.9 + 1e-4 * at)]) for at in range(count)]
    chart = ElementTree.fromstring(line_chart(curves, "t", YAxisFormat(ACCURACY.format_tick)))
    names = [element for element in chart.iter(f"{SVG}text") if (element.text or "").startswith("method")]
    heights = sorted(float(name.attrib["y"]) for name in names)
    assert len(names) == count
    assert all(b - a > 12 for a, b in pairwise(heights))
    assert heights[0] > 12
    assert heights[-1] < float(chart.attrib["viewBox"].split()[3])


def test_lines_of_many_methods_differ_in_colour_or_dashes() -> None:
    assert len({(method_colour(at), method_dash(at)) for at in range(28)}) == 28


@given(st.lists(HEIGHTS, min_size=1, max_size=12), HEIGHTS, st.floats(0.1, 50))
def test_a_clipped_line_is_the_part_inside_the_frame(heights: list[float], top: float, height: float) -> None:
    line = [(10.0 * at, y) for at, y in enumerate(heights)]
    pieces = clip_line(line, top, top + height)
    drawn = [place for piece in pieces for place in piece]
    assert all(top <= y <= top + height for _, y in drawn)
    assert [place for place in line if top <= place[1] <= top + height] == [p for p in drawn if p in line]
    for x, y in drawn:
        (x0, y0), (_, y1) = line[int(x // 10)], line[min(int(x // 10) + 1, len(line) - 1)]
        assert y == pytest.approx(y0 + (y1 - y0) * (x - x0) / 10, abs=1e-6)
    for piece in pieces:
        for end, outermost in ((piece[0], line[0]), (piece[-1], line[-1])):
            assert end == outermost or end[1] in (top, top + height)


@pytest.mark.parametrize("metric", METRICS)
def test_a_window_contains_the_second_half_of_every_curve_and_the_best_value(make_run: Make, metric: Any) -> None:
    levels = {"a": 0.9, "b": 0.87, "c": 0.8}
    methods = [
        MethodRuns(name, (make_run(name, metric=metric.name, level=level, rounds=200),))
        for name, level in levels.items()
    ]
    curves = over_rounds(methods, metric.name)
    y_format = score_axis(curves, metric)
    assert y_format.window is not None
    low, high = y_format.window
    every = [value for curve in curves for _, value in curve.points]
    assert all(low <= value <= high for curve in curves for _, value in curve.points[len(curve.points) // 2 :])
    assert high >= max(every) if metric.higher_is_better else low <= min(every)
    assert high <= metric.maximum


def test_curves_that_already_use_the_height_are_not_cut() -> None:
    spread = [Curve("a", 0, [(1, 0.1), (2, 0.2)]), Curve("b", 1, [(1, 0.1), (2, 0.9)])]
    flat = [Curve("a", 0, [(1, 0.5), (2, 0.5)])]
    alone = [Curve("a", 0, [(1, 0.1), (2, 0.5), (3, 0.9), (4, 0.91)])]
    assert score_axis(spread, ACCURACY).window is None
    assert score_axis(flat, ACCURACY).window is None
    assert score_axis(alone, ACCURACY).window is None  # there is nothing to tell it apart from
    assert score_axis([*alone, alone[0]._replace(label="b")], ACCURACY).window is not None


def test_cut_curves_end_at_the_frame(make_run: Make, tmp_path: Path) -> None:
    records = {name: [make_run(name, level=level, rounds=200)] for name, level in (("a", 0.9), ("b", 0.85))}
    write_curves(records, tmp_path / "new" / "curves.svg", "Title")
    picture = (tmp_path / "new" / "curves.svg").read_text("utf-8")
    assert "is cut off" in picture
    lines = {float(line.attrib["y1"]) for line in ElementTree.fromstring(picture).iter(f"{SVG}line")}
    for position in range(2):
        curves = [places(path) for path in strokes(picture, method_colour(position)) if len(places(path)) > 2]
        assert curves
        assert all(min(lines) <= y <= max(lines) for curve in curves for _, y in curve)
        assert all(curve[0][1] == max(lines) for curve in curves)


def test_the_picture_has_both_charts_and_no_external_resources(methods: list[MethodRuns], tmp_path: Path) -> None:
    write_curves({m.label: m.runs for m in methods}, tmp_path / "curves.svg", "<Title> & more")
    picture = (tmp_path / "curves.svg").read_text("utf-8")
    root = ElementTree.fromstring(picture)
    assert len({group.get("transform") for group in root.iter(f"{SVG}g")}) == 2
    said = [text.text for text in root.iter(f"{SVG}text")]
    assert "<Title> & more" in said
    assert [said.count(m.label) for m in methods] == [2, 2, 2]
    assert not re.search(r"https?:|href=|url\(|<script", picture.replace(SVG[1:-1], ""))
    write_curves({"local": methods[2].runs}, tmp_path / "one.svg", "t")
    assert len(list(ElementTree.parse(tmp_path / "one.svg").iter(f"{SVG}g"))) == 1


def test_runs_without_scores_have_no_picture(make_run: Make, tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="none of 2 runs was evaluated"):
        write_curves({"a": [make_run("a", rounds=4)], "b": [make_run("b", rounds=4)]}, tmp_path / "x.svg", "t")
    assert not (tmp_path / "x.svg").exists()


@given(st.text("ab ", min_size=0, max_size=60), st.text("ab ", max_size=60), st.text("ab ", max_size=60))
def test_two_shortened_names_stay_different(start: str, one: str, other: str) -> None:
    texts = [start + one, start + other]
    names = shorten_distinct(texts, 18)
    assert (names[0] == names[1]) == (texts[0] == texts[1])
    assert all(len(name) <= 18 for name in names)


def test_names_with_the_same_beginning_stay_different(make_run: Make) -> None:
    labels = [f"PPFL with mixed weights and K={k} canonical models" for k in (4, 8)]
    page, _ = render([make_run("ppfl"), make_run("ppfl")], "t", labels)
    names = [element.text or "" for element in ElementTree.fromstring(page).iter(f"{SVG}text")]
    for k in (4, 8):
        assert sum(f"K={k}" in name for name in names) >= 4  # in every chart with both methods


@given(st.floats(-6, 6), st.floats(0.01, 12), st.integers(4, 9))
def test_ticks_of_a_logarithmic_axis_are_few_and_inside(power: float, decades: float, about: int) -> None:
    low, high = 10**power, 10 ** (power + decades)
    ticks = log_ticks(low, high, about)
    assert 1 <= len(ticks) <= about + 1
    assert all(low * (1 - 1e-6) <= tick <= high * (1 + 1e-6) for tick in ticks)
    assert ticks == sorted(ticks)
