"""Drawings are well-formed, complete and in the right colours."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ppfl.report import render
from ppfl.report.drawing import axis, round_ticks, separate
from ppfl.report.membership_bars import MAX_BARS
from ppfl.report.palette import model_colour
from ppfl.runs import group_agreement

SVG = "{http://www.w3.org/2000/svg}"
Make = Callable[..., Any]


def columns(picture: str, kind: str) -> list[ElementTree.Element]:
    return [g for g in ElementTree.fromstring(picture).iter(f"{SVG}g") if g.get("class") == kind]


def rectangles(column: ElementTree.Element) -> list[tuple[float, str]]:
    """(height, colour) from the bottom up."""
    return [(float(r.attrib["height"]), r.attrib["fill"]) for r in column.iter(f"{SVG}rect")]


def tooltips(picture: str) -> list[str]:
    return [title.text or "" for title in ElementTree.fromstring(picture).iter(f"{SVG}title")]


@pytest.mark.parametrize(("clients", "k", "soft"), [(1, 2, 0.01), (40, 4, 0.01), (300, 3, 0.4), (77, 11, 0.2)])
def test_bars_of_every_client_fill_the_height(make_run: Make, clients: int, k: int, soft: float) -> None:
    _, picture = render([make_run("ppfl", clients=clients, k=k, groups=k, soft=soft)], "t")
    for kind, height in (("client", 130), ("truth", 14)):
        drawn = columns(picture, kind)
        assert len(drawn) == clients
        for column in drawn:
            assert sum(h for h, _ in rectangles(column)) == pytest.approx(height, abs=0.011 * k)


def test_neighbours_touch_without_gap_or_overlap(make_run: Make) -> None:
    _, picture = render([make_run("ppfl", clients=30, k=5, groups=5, soft=1.0)], "t")
    for column in columns(picture, "client"):
        edges = [(float(r.attrib["y"]), float(r.attrib["height"])) for r in column.iter(f"{SVG}rect")]
        for (lower_top, _), (top, height) in pairwise(edges):
            assert top + height == pytest.approx(lower_top, abs=0.011)


def test_heights_are_memberships(make_run: Make) -> None:
    run = make_run("ppfl", clients=25, k=3, groups=3, soft=1.0)
    _, picture = render([run], "t")
    rows = dict(zip(run.ids, run.memberships, strict=True))
    for column in columns(picture, "client"):
        name = (column.find(f"{SVG}title").text or "").split(":")[0]  # type: ignore[union-attr]
        drawn = sorted(h / 130 for h, _ in rectangles(column))
        assert drawn == pytest.approx(sorted(rows[name].tolist()), abs=1e-3)


@pytest.mark.parametrize("seed", range(5))
def test_a_true_group_has_the_colour_of_its_model(make_run: Make, seed: int) -> None:
    """Memberships are the true groups in another order, so bar and strip must have the same colour."""
    run = make_run("ppfl", seed=seed)
    run.memberships = run.truth[:, torch.randperm(4, generator=torch.Generator().manual_seed(seed))]
    _, picture = render([run], "t")
    pairs = zip(columns(picture, "client"), columns(picture, "truth"), strict=True)
    assert all(rectangles(bar)[0][1] == rectangles(true)[0][1] for bar, true in pairs)


@pytest.mark.parametrize(("groups", "k"), [(4, 4), (5, 2), (2, 5)])
def test_colours_agree_as_often_as_the_table_says(make_run: Make, groups: int, k: int) -> None:
    run = make_run("ppfl", groups=groups, k=k, seed=3)
    run.memberships[:9] = run.memberships[:9].roll(1, dims=1)
    _, picture = render([run], "t")
    pairs = zip(columns(picture, "client"), columns(picture, "truth"), strict=True)
    same_colour = [max(rectangles(bar))[1] == max(rectangles(true))[1] for bar, true in pairs]
    assert sum(same_colour) / len(same_colour) == pytest.approx(group_agreement(run.memberships, run.truth).share)


def test_unmatched_true_groups_have_colours_that_no_model_has(make_run: Make) -> None:
    run = make_run("ppfl", groups=5, k=2)
    _, picture = render([run], "t")
    models = {colour for bar in columns(picture, "client") for _, colour in rectangles(bar)}
    groups = {colour for true in columns(picture, "truth") for _, colour in rectangles(true)}
    assert models == {model_colour(0), model_colour(1)}
    assert len(groups - models) == 3


def test_colours_follow_shares_and_not_the_order_of_columns(make_run: Make) -> None:
    run, turned = make_run("ppfl"), make_run("ppfl")
    turned.memberships = run.memberships.flip(1)
    turned.memberships_by_round = {t: c.flip(1) for t, c in run.memberships_by_round.items()}
    assert render([run], "t")[1] == render([turned], "t")[1]


def test_many_clients_are_averaged_without_losing_any(make_run: Make) -> None:
    _, picture = render([make_run("ppfl", clients=1000, truth=False)], "t")
    drawn = columns(picture, "client")
    assert len(drawn) <= MAX_BARS
    counts = [int(said.split()[2]) for said in tooltips(picture) if said.startswith("mean of")]
    assert sum(counts) == 1000


def test_runs_without_memberships_have_no_bars(make_run: Make) -> None:
    _, picture = render([make_run("fedavg", k=1)], "t")
    assert not columns(picture, "client")
    assert "no memberships" in picture


@given(st.lists(st.floats(0, 200), min_size=1, max_size=10))
def test_labels_keep_their_order_and_their_distance(wanted: list[float]) -> None:
    places = separate(wanted, gap=14, low=0, high=200)
    order = sorted(range(len(wanted)), key=wanted.__getitem__)
    steps = [places[b] - places[a] for a, b in pairwise(order)]
    assert all(step >= 14 - 1e-9 for step in steps)
    assert all(-1e-9 <= place <= 200 for place in places)


@given(st.floats(-1e6, 1e6), st.floats(1e-3, 1e6), st.integers(2, 9))
def test_ticks_are_few_and_inside_the_axis(low: float, width: float, about: int) -> None:
    high = low + width
    ticks = round_ticks(low, high, about)
    slack = 1e-6 * max(abs(low), abs(high), width)
    assert len(ticks) <= about + 1
    assert all(low - slack <= tick <= high + slack for tick in ticks)


@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=5), st.booleans())
def test_an_axis_covers_its_values(values: list[float], log: bool) -> None:
    drawn = axis(values, 10, 90, log=log)
    assert all(10 - 1e-6 <= drawn.at(value) <= 90 + 1e-6 for value in values)
