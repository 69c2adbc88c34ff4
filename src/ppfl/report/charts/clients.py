"""Charts of who the clients are: their memberships, now and over the rounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt
import numpy as np

from ..memberships import SortedMemberships
from ..theme import GREY, evenly, mixed_colour, model_names
from .parts import (
    MAX_DOTS,
    MAX_POINTS,
    WIDTH,
    Array,
    Chart,
    Row,
    chosen_client,
    colour_of_models,
    finished,
    of_rows,
    said,
    short,
)  # fmt: skip

MAX_BARS = 300  # more would be thinner than three pixels
MAX_MOVING_BARS, MAX_STEPS = 150, 30  # of memberships over rounds
_STACKED = 400  # dots on a line; more clients are a histogram


def of_sorted(shown: SortedMemberships) -> Chart:
    """The memberships of a run, as they are sorted for display."""
    truth = None if shown.truth is None else shown.truth.numpy()
    return memberships(shown.memberships.numpy(), shown.ids, truth=truth, names=shown.names)


def memberships(
    c: Array, ids: Sequence[str], *, truth: Array | None = None, names: Sequence[str] | None = None, width: Any = WIDTH
) -> Chart:
    """One bar per client, one colour per canonical model; the truth is a band below. Clients stay in their order.

    Of many clients, a bar is the mean of several neighbours.
    """
    c = np.asarray(c, dtype=float)
    names = model_names(c.shape[1]) if names is None else list(names)
    rows = _bars(c, ids, names, 0.0, 1.0, MAX_BARS)
    if truth is not None:
        groups = model_names(max(len(names), np.asarray(truth).shape[1]))
        rows += _bars(np.asarray(truth, dtype=float), ids, groups, -0.2, -0.06, MAX_BARS, "truth")
        names = groups
    axis = alt.Axis(values=[0, 0.5, 1], format=".0%")
    y = alt.Y("low:Q", title="membership", axis=axis, scale=alt.Scale(domain=[-0.2 if truth is not None else 0, 1]))
    title = f"{len(c):,} clients" + ("; below, the truth" if truth is not None else "")
    chart = of_rows(rows).mark_rect(strokeWidth=0).encode(
        alt.X("from:Q", title=title, axis=alt.Axis(labels=False), scale=alt.Scale(domain=[0, len(c)], nice=False)),
        y, alt.X2("to"), alt.Y2("high"), colour_of_models(names), tooltip=["client:N", "of:N", "memberships:N"],
    )  # fmt: skip
    mark = chosen_client().mark_rule(strokeWidth=2).encode(alt.X("at:Q", title=title, axis=alt.Axis(labels=False)))
    return finished(chart + mark, width, 220, "bars")


def simplex(c: Array, ids: Sequence[str], *, names: Sequence[str] | None = None, width: Any = WIDTH) -> Chart:
    """Where clients are between the canonical models: on a line for two, in a triangle for three, and for more on a
    polygon, where a client is at the mean of the corners weighted by its memberships."""
    c = np.asarray(c, dtype=float)
    names = model_names(c.shape[1]) if names is None else list(names)
    return (_line if c.shape[1] == 2 else _map)(c, ids, list(names), width)


def membership_history(
    by_round: Mapping[int, Array], ids: Sequence[str], *, names: Sequence[str] | None = None, width: Any = WIDTH
) -> Chart:
    """The memberships of all clients at one round, which a slider chooses."""
    rounds = [sorted(by_round)[at] for at in evenly(len(by_round), MAX_STEPS)]
    k = np.asarray(by_round[rounds[0]]).shape[1]
    names = model_names(k) if names is None else list(names)
    rows = []
    for step, t in enumerate(rounds):
        bars = _bars(np.asarray(by_round[t], dtype=float), ids, names, 0.0, 1.0, MAX_MOVING_BARS)
        rows += [bar | {"step": step, "round": f"round {t}"} for bar in bars]
    slider = alt.binding_range(min=0, max=len(rounds) - 1, step=1, name=f"round {rounds[0]} to {rounds[-1]} ")
    at = alt.param(name="step", value=len(rounds) - 1, bind=slider)
    x = alt.X("from:Q", title=None, axis=None, scale=alt.Scale(domain=[0, len(ids)], nice=False))
    y = alt.Y("low:Q", title="membership", axis=alt.Axis(values=[0, 0.5, 1], format=".0%"),
              scale=alt.Scale(domain=[0, 1.12]))  # fmt: skip
    chosen = alt.datum.step == at
    base = of_rows(rows).transform_filter(chosen)
    bars = base.mark_rect(strokeWidth=0).encode(
        x, y, alt.X2("to"), alt.Y2("high"), colour_of_models(names), tooltip=["client:N", "round:N", "memberships:N"]
    )
    said = base.transform_aggregate(round="min(round)").mark_text(align="right", baseline="top", fontWeight=600)
    said = said.encode(text="round:N", x=alt.value("width"), y=alt.value(0))
    mark = chosen_client().mark_rule(strokeWidth=2).encode(alt.X("at:Q", axis=None))
    return finished((bars + said + mark).add_params(at), width, 200, "bars")


def shares(by_round: Mapping[int, Array], *, names: Sequence[str] | None = None, width: Any = WIDTH) -> Chart:
    """The share of each canonical model in the population, by round."""
    rounds = [sorted(by_round)[at] for at in evenly(len(by_round), MAX_POINTS)]
    means = {t: np.asarray(by_round[t], dtype=float).mean(0) for t in rounds}
    names = model_names(len(means[rounds[0]])) if names is None else list(names)
    rows = [{"round": t, "model": name, "share": short(mean[k]), "order": k}
            for t, mean in means.items() for k, name in enumerate(names)]  # fmt: skip
    chart = of_rows(rows).mark_area(line=False).encode(
        alt.X("round:Q", axis=alt.Axis(tickMinStep=1, format="d"), scale=alt.Scale(nice=False)),
        alt.Y("share:Q", stack="normalize", title="share of the population", axis=alt.Axis(format=".0%", tickCount=3)),
        colour_of_models(names), alt.Order("order:Q"),
        tooltip=["model:N", "round:Q", alt.Tooltip("share:Q", format=".1%")],
    )  # fmt: skip
    return finished(chart, width, 180)


def _bars(c: Array, ids: Sequence[str], names: Sequence[str], low: float, high: float, most: int, of: str = "found"
          ) -> list[Row]:  # fmt: skip
    """Stacked parts of bars between `low` and `high`; each bar is one client or the mean of several neighbours."""
    size = -(-len(c) // most)
    gap = 0.12 if len(c) <= 60 else 0.0
    rows = []
    for start in range(0, len(c), size):
        own = ids[start : start + size]
        mean = c[start : start + size].mean(0)
        edges = np.minimum(1.0, np.concatenate([[0.0], mean.cumsum()]))
        edges[-1] = 1.0
        name = own[0] if len(own) == 1 else f"mean of {len(own)} clients, {own[0]} to {own[-1]}"
        said = ", ".join(f"{names[k]} {mean[k]:.0%}" for k in np.argsort(-mean, kind="stable") if mean[k] >= 0.005)
        bar = {"from": start, "to": start + len(own) - gap, "client": name, "memberships": said, "of": of, "at": start}
        rows += [bar | {"model": names[k], "low": short(low + (high - low) * edges[k]),
                        "high": short(low + (high - low) * edges[k + 1])}
                 for k in range(len(mean)) if mean[k] >= 0.0005]  # fmt: skip
    return rows


def _line(c: Array, ids: Sequence[str], names: list[str], width: Any) -> Chart:
    bins = np.minimum((c[:, 1] * 50).astype(int), 49)
    x = alt.X("x:Q", title=f"from wholly {names[0]} to wholly {names[1]}", axis=alt.Axis(format=".0%"),
              scale=alt.Scale(domain=[0, 1]))  # fmt: skip
    mark = (
        chosen_client()
        .mark_point(shape="triangle-up", size=120, filled=True, color=GREY)
        .encode(x, y=alt.value("height"))
    )
    if len(c) > _STACKED:
        counts = np.bincount(bins, minlength=50)
        rows = [
            {"x": (i + 0.5) / 50, "count": int(n), "colour": _mix(1 - (i + 0.5) / 50)} for i, n in enumerate(counts)
        ]
        chart = of_rows(rows).mark_bar(size=9).encode(
            x, alt.Y("count:Q", title="clients"), alt.Color("colour:N", scale=None),
            tooltip=[alt.Tooltip("x:Q", title=f"share of {names[1]}", format=".0%"), "count:Q"],
        )  # fmt: skip
        return finished(chart + mark, width, 180, "simplex")
    rank = np.zeros(len(c), dtype=int)
    for at in np.unique(bins):
        rank[bins == at] = np.arange((bins == at).sum())
    rows = [
        {"x": (bins[i] + 0.5) / 50, "y": int(rank[i]), "client": ids[i], "memberships": said(c[i], names),
         "colour": _mix(c[i, 0])}
        for i in range(len(c))
    ]  # fmt: skip
    y = alt.Y("y:Q", axis=None, scale=alt.Scale(domain=[-1, max(10, int(rank.max()) + 1)]))
    chart = (
        of_rows(rows)
        .mark_circle(size=70, opacity=0.9)
        .encode(x, y, alt.Color("colour:N", scale=None), tooltip=["client:N", "memberships:N"])
    )
    return finished(chart + mark, width, 60 + 10 * int(rank.max()), "simplex")


def corners(k: int) -> Array:
    """Where k canonical models stand in the plane (k, 2): at the ends of a line, or evenly on a circle."""
    if k == 2:
        return np.array([[0.0, 0.0], [1.0, 0.0]])
    angles = np.pi / 2 - 2 * np.pi * (np.arange(k) + (2 if k == 3 else 0)) / k  # a triangle begins at its lower left
    return np.stack([np.cos(angles), np.sin(angles)], axis=1)


def _map(c: Array, ids: Sequence[str], names: list[str], width: Any) -> Chart:
    places = corners(c.shape[1])
    shown = evenly(len(c), MAX_DOTS)
    rows = [
        {"x": short(x), "y": short(y), "client": ids[i], "memberships": said(c[i], names),
         "model": names[int(c[i].argmax())]}
        for i, (x, y) in zip(shown, (c[shown] @ places).tolist(), strict=True)
    ]  # fmt: skip
    pad = 0.12 * max(np.ptp(places[:, 0]), np.ptp(places[:, 1]))
    (left, bottom), (right, top) = places.min(0) - pad, places.max(0) + pad
    x = alt.X("x:Q", axis=None, scale=alt.Scale(domain=[float(left), float(right)]))
    y = alt.Y("y:Q", axis=None, scale=alt.Scale(domain=[float(bottom), float(top)]))
    dots = (
        of_rows(rows)
        .mark_circle(size=60, opacity=0.75)
        .encode(x, y, colour_of_models(names, legend=False), tooltip=["client:N", "memberships:N"])
    )
    ends = [{"x": short(a), "y": short(b), "model": name, "label": f"{name} {share:.0%}"}
            for (a, b), name, share in zip(places.tolist(), names, c.mean(0), strict=True)]  # fmt: skip
    above, below = ([ends[k] for k in range(len(ends)) if (places[k, 1] >= 0) == wanted] for wanted in (True, False))
    labels = [
        of_rows(own).mark_text(fontSize=15, fontWeight=600, dy=dy).encode(x, y, dots.encoding.color, text="label:N")
        for own, dy in ((above, -14), (below, 18))
        if own
    ]
    layers = [_grid(places, x, y), dots, *labels]
    layers.append(chosen_client().mark_point(size=260, strokeWidth=2.5, color=GREY).encode(x, y))
    return finished(alt.layer(*layers), width, 380, "simplex")


def _grid(places: Array, x: alt.X, y: alt.Y) -> Any:
    """Of a triangle, lines at every fifth of a membership; of more corners, the lines between them."""
    k, steps = len(places), (0.2, 0.4, 0.6, 0.8) if len(places) == 3 else ()
    ends = [(places[i], places[j]) for i in range(k) for j in range(i)]
    ends += [((1 - s) * places[i] + s * places[j], (1 - s) * places[i] + s * places[m])
             for s in steps for i in range(3) for j in range(3) for m in range(j) if i not in (j, m)]  # fmt: skip
    rows = [{"x": short(a[0]), "y": short(a[1]), "x2": short(b[0]), "y2": short(b[1])} for a, b in ends]
    return of_rows(rows).mark_rule(opacity=0.2).encode(x, y, alt.X2("x2"), alt.Y2("y2"))


def _mix(share: float) -> str:
    return mixed_colour([share, 1 - share])
