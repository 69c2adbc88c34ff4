"""The page of a fitted table needs no external resources, escapes all data and draws every client at its place."""

import re
from typing import Any, NamedTuple
from xml.etree import ElementTree

import numpy as np
import pytest

from ppfl.report import PopulationResults, render_population
from ppfl.report.detail_tables import MAX_CLIENTS
from ppfl.report.palette import mixed_colour, model_colour
from ppfl.report.simplex_plot import MAX_DOTS, MAX_STACKED, simplex_chart

SVG = "{http://www.w3.org/2000/svg}"
NASTY = '</svg><script>alert("&")</script>'


class EffectRow(NamedTuple):
    outcome: str
    name: str
    values: list[float]
    pooled: float
    is_shared: bool = False
    reach: list[float] | None = None
    pooled_reach: float = 0.0


class ScoreRow(NamedTuple):
    label: str
    figures: dict[str, float]
    seconds: float = 0.5


class SelectionRow(NamedTuple):
    k: int
    bic: float
    aic: float
    log_likelihood: float = -100.0
    held_out: float | None = None
    held_out_error: float | None = None


def population(k: int = 3, clients: int = 20, **changes: Any) -> PopulationResults:
    random = np.random.default_rng(0)
    c = random.dirichlet(np.full(k, 0.5), clients)
    values = random.normal(size=k).tolist()
    scores = [
        ScoreRow("ours", {"rmse": 2.0}),
        ScoreRow("one model for all", {"rmse": 4.0}),
        ScoreRow("each", {"rmse": 3.0}),
    ]
    found = PopulationResults(
        title="sold in shops", command="ppfl glm shops.csv", notes=["family gaussian"], client="shop", target="sold",
        features=["price", "day"], family="gaussian", classes=(), mix="weights", rows=100, held_out_rows=20,
        ids=[f"s{i}" for i in range(clients)], sizes=[5] * clients, memberships=c.tolist(),
        clear=(c >= 0.8).sum(0).tolist(), clear_from=0.8,
        average=[EffectRow("sold", "an average row", values, 0.1, reach=values)],
        coefficients=[
            EffectRow("sold", "intercept", values, 1.0),
            EffectRow("sold", "price", values, -1.0, reach=values, pooled_reach=0.3),
            EffectRow("sold", "day", [0.5] * k, 0.5, is_shared=True, reach=[0.2] * k, pooled_reach=0.2),
        ],
        candidates=[SelectionRow(1, 300.0, 290.0), SelectionRow(k, 200.0, 190.0)],
        scores=scores,
    )  # fmt: skip
    return found._replace(**changes)


def drawings(page: str) -> list[ElementTree.Element]:
    return list(ElementTree.fromstring(page).iter(f"{SVG}svg"))


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_the_page_is_well_formed_and_needs_no_external_resources(k: int) -> None:
    page = render_population(population(k))
    ElementTree.fromstring(page)
    assert not re.search(
        r"https?:|\bsrc=|\bhref=|url\(|@import|<script", page.replace("http://www.w3.org/2000/svg", "")
    )
    assert "ppfl glm shops.csv" in page


def test_everything_from_data_is_escaped() -> None:
    drawn = population(3, ids=[NASTY] * 20, title=NASTY, command=NASTY, notes=[NASTY], client=NASTY, target=NASTY)
    drawn = drawn._replace(
        features=[NASTY],
        coefficients=[
            EffectRow(NASTY, NASTY, [1.0, 2.0, 3.0], 1.0),
            EffectRow("b", "x", [1.0, 2.0, 3.0], 1.0),
        ],
        average=[],
        scores=[score._replace(label=NASTY) for score in drawn.scores],
    )
    page = render_population(drawn)
    ElementTree.fromstring(page)
    assert "<script" not in page


def circles(picture: str) -> list[ElementTree.Element]:
    return [dot for dot in ElementTree.fromstring(picture).iter(f"{SVG}circle") if dot.get("class") == "client"]


def test_a_client_in_the_triangle_is_the_mean_of_the_corners_weighted_by_its_memberships() -> None:
    drawn = population(3, 50)
    corners = np.array([[c.get("cx"), c.get("cy")] for c in circles(simplex_chart("abc", np.eye(3).tolist()))], float)
    found = np.array([[c.get("cx"), c.get("cy")] for c in circles(simplex_chart(drawn.ids, drawn.memberships))], float)
    np.testing.assert_allclose(found, np.array(drawn.memberships) @ corners, atol=0.02)
    sides = np.linalg.norm(corners - np.roll(corners, 1, 0), axis=1)
    np.testing.assert_allclose(sides, sides[0], rtol=1e-3)


@pytest.mark.parametrize("clients", [1, 30, MAX_STACKED])
def test_clients_on_the_line_are_in_order_and_do_not_overlap(clients: int) -> None:
    drawn = population(2, clients)
    dots = circles(simplex_chart(drawn.ids, drawn.memberships))
    assert len(dots) == clients
    share = {client: c[1] for client, c in zip(drawn.ids, drawn.memberships, strict=True)}
    places = {(dot.find(f"{SVG}title").text or "").split(":")[0]: dot for dot in dots}  # type: ignore[union-attr]
    across = [float(places[client].attrib["cx"]) for client in sorted(share, key=share.__getitem__)]
    assert across == sorted(across)
    assert len({(dot.get("cx"), dot.get("cy")) for dot in dots}) == clients


def test_many_clients_are_counted_without_losing_any() -> None:
    drawn = population(2, MAX_STACKED + 1)
    picture = ElementTree.fromstring(simplex_chart(drawn.ids, drawn.memberships))
    counts = [int((title.text or "").split()[0]) for title in picture.iter(f"{SVG}title")]
    assert sum(counts) == MAX_STACKED + 1
    drawn = population(3, MAX_DOTS + 500)
    assert len(circles(simplex_chart(drawn.ids, drawn.memberships))) == MAX_DOTS
    assert "all are in memberships.csv" in render_population(population(3, MAX_CLIENTS + 1))


def test_bar_lengths_are_proportional_to_their_values() -> None:
    drawn = population(2)
    table = next(iter(ElementTree.fromstring(render_population(drawn)).iter("table")))
    bars = [float(rect.attrib["width"]) for rect in table.iter("rect")]
    lines = [term for term in (*drawn.average, *drawn.coefficients) if term.reach]
    # a shared row has one bar for all canonical models
    reach = [r for t in lines for r in (*(t.reach[:1] if t.is_shared else t.reach), t.pooled_reach)]
    assert bars == pytest.approx([50 * abs(r) / max(map(abs, reach)) for r in reach], abs=0.01)


def test_score_bars_start_at_zero() -> None:
    picture = next(d for d in drawings(render_population(population())) if "ways to predict" in d.get("aria-label", ""))
    ours, pooled, own = (float(rect.attrib["width"]) for rect in picture.iter(f"{SVG}rect"))
    assert (ours / pooled, own / pooled) == pytest.approx((0.5, 0.75), abs=1e-3)


def test_the_choice_of_k_is_explained() -> None:
    drawn = population(3)
    page = render_population(drawn)
    assert "chosen by the BIC" in page
    assert "lowest BIC is that of" not in page
    tried = [
        SelectionRow(1, 100.0, 290.0, held_out=-1.25, held_out_error=0.125),
        SelectionRow(3, 200.0, 190.0, held_out=-1.0),
    ]
    page = render_population(drawn._replace(candidates=tried, chosen_by="the held-out likelihood"))
    assert "chosen by the held-out likelihood" in page
    assert "The lowest BIC is that of 1" in page
    assert "-1.2500" in page
    assert "0.1250" in page


def test_sections_without_data_are_left_out() -> None:
    drawn = population(1)
    page = render_population(drawn._replace(scores=[], candidates=drawn.candidates[:1]))
    assert "How well" not in page
    assert "Where the clients are" not in page
    assert "One model for all was fitted" in page


def test_a_client_of_one_model_has_the_colour_of_that_model() -> None:
    assert [mixed_colour(row) for row in np.eye(3).tolist()] == [model_colour(at) for at in range(3)]
