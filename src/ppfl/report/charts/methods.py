"""Charts of how methods do: over the rounds, and client by client."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt
import numpy as np

from ..theme import GREY, Metric, evenly, method_looks
from .parts import MAX_DOTS, MAX_POINTS, WIDTH, Chart, chosen_client, finished, of_rows, short

_MOVE = "window:pointermove!"


def history(
    curves: Mapping[str, Sequence[tuple[float, float]]], metric: Metric, *, x: str = "round", log: bool = False,
    ours: Sequence[str] = (), width: Any = WIDTH,
) -> Chart:  # fmt: skip
    """A value by round, or by what `x` says, with one line for each label. log: both axes are logarithmic."""
    rows = []
    for label, points in curves.items():
        rows += [{"x": short(points[at][0]), "y": short(points[at][1]), "label": label}
                 for at in evenly(len(points), MAX_POINTS) if math.isfinite(points[at][1])]  # fmt: skip
    looks = method_looks(list(curves), ours)
    scale = alt.Scale(type="log") if log else alt.Scale(zero=False, nice=True)
    x_scale = alt.Scale(type="log") if log else alt.Scale(nice=False, zero=False)
    legend = alt.Legend(title=None) if len(curves) > 1 else None
    colours, dashes = zip(*looks.values(), strict=True)
    colour = alt.Color("label:N", sort=[*looks], legend=legend, scale=alt.Scale(domain=[*looks], range=[*colours]))
    dash = alt.StrokeDash("label:N", sort=[*looks], legend=legend, scale=alt.Scale(domain=[*looks], range=[*dashes]))
    steps = alt.Axis(grid=False, tickMinStep=1) if x == "round" and not log else alt.Axis(grid=False)
    picked = alt.selection_point(fields=["label"], bind="legend", name="picked")
    base = of_rows(rows).encode(
        alt.X("x:Q", title=x, scale=x_scale, axis=steps),
        alt.Y("y:Q", title=metric.name, scale=scale, axis=alt.Axis(format=metric.axis_format, tickCount=6)),
    )
    seen = alt.condition(picked, alt.value(1.0), alt.value(0.12))
    lines = base.mark_line(strokeWidth=2.2, clip=True).encode(colour, dash, opacity=seen).add_params(picked)
    tip = ["label:N", alt.Tooltip("x:Q", title=x), alt.Tooltip("y:Q", title=metric.name, format=".4~g")]
    points = base.mark_point(size=70, opacity=0).encode(tooltip=tip)
    zoom = alt.selection_interval(bind="scales", name="zoom", zoom="wheel![event.shiftKey]",
                                  translate=f"[pointerdown[event.shiftKey], window:pointerup] > {_MOVE}")  # fmt: skip
    return finished(lines + (points if log else points.add_params(zoom)), width, 260)


def client_scores(scores: Mapping[str, Mapping[str, float]], metric: Metric, *, width: Any = WIDTH) -> Chart:
    """One dot per client for each label, and the median client. Of many clients, some at even steps of the ranking."""
    rows, medians = [], []
    every = [value for own in scores.values() for value in own.values()]
    low, high = min(every), max(every)
    for label, own in scores.items():
        ranked = sorted(own.items(), key=lambda pair: pair[1])
        shown = [ranked[at] for at in evenly(len(ranked), MAX_DOTS)]
        bins = [round((value - low) / ((high - low) or 1.0) * 100) for _, value in shown]
        seen: dict[int, int] = {}
        fullest = max(map(bins.count, {*bins}))
        for (client, value), at in zip(shown, bins, strict=True):
            nth = seen[at] = seen.get(at, 0) + 1
            shift = (nth // 2) * (1 if nth % 2 else -1) / max(8, fullest)
            rows.append({"label": label, "client": client, "value": short(value), "offset": short(shift)})
        medians.append({"label": label, "value": short(float(np.median(list(own.values()))))})
    pad = 0.03 * (high - low) or 0.05
    x = alt.X("value:Q", title=metric.name, scale=alt.Scale(domain=[low - pad, high + pad], nice=False),
              axis=alt.Axis(format=metric.axis_format))  # fmt: skip
    y = alt.Y("label:N", title=None, sort=list(scores), axis=alt.Axis(grid=False), scale=alt.Scale(domain=list(scores)))
    offset = alt.YOffset("offset:Q", scale=alt.Scale(domain=[-0.6, 0.6]))
    tip = [
        "client:N",
        "label:N",
        alt.Tooltip("value:Q", title=metric.name, format=".2%" if metric.is_share else ".4~g"),
    ]
    dots = of_rows(rows).mark_circle(size=34, opacity=0.55, color=GREY).encode(x, y, offset, tooltip=tip)
    median = of_rows(medians).mark_tick(thickness=2.5, size=34, color="#D55E00").encode(x, y)
    mark = chosen_client().mark_point(size=170, strokeWidth=2.5, color="#0072B2").encode(x, y)
    return finished(dots + median + mark, width, 52 * len(scores), "scores")


def gains(
    ours: Mapping[str, float], theirs: Mapping[str, float], metric: Metric, labels: tuple[str, str], *,
    width: Any = WIDTH,
) -> Chart:  # fmt: skip
    """Every client's score with one method against another; on the side of the line where it is better, it gains."""
    both = sorted((id_ for id_ in ours if id_ in theirs), key=lambda id_: ours[id_] - theirs[id_])
    shown = [both[at] for at in evenly(len(both), MAX_DOTS)]
    kind = {True: "gains", False: "loses"}
    rows = [
        {"x": short(theirs[id_]), "y": short(ours[id_]), "client": id_,
         "what": "equal" if ours[id_] == theirs[id_] else kind[metric.better(ours[id_], theirs[id_])]}
        for id_ in shown
    ]  # fmt: skip
    every = [value for id_ in shown for value in (theirs[id_], ours[id_])]
    low, high = min(every), max(every)
    pad = 0.04 * (high - low) or 0.1
    scale = alt.Scale(domain=[low - pad, high + pad], nice=False)
    axis = alt.Axis(format=metric.axis_format)
    x = alt.X("x:Q", title=f"{metric.name} with {labels[1]}", scale=scale, axis=axis)
    y = alt.Y("y:Q", title=f"{metric.name} with {labels[0]}", scale=scale, axis=axis)
    colour = alt.Color("what:N", title=None, scale=alt.Scale(domain=["gains", "equal", "loses"],
                                                              range=["#0072B2", GREY, "#D55E00"]))  # fmt: skip
    show = ".2%" if metric.is_share else ".4~g"
    tip = ["client:N", "what:N", alt.Tooltip("y:Q", title=labels[0], format=show),
           alt.Tooltip("x:Q", title=labels[1], format=show)]  # fmt: skip
    ends = [{"x": low - pad, "y": low - pad, "x2": high + pad, "y2": high + pad}]
    line = of_rows(ends).mark_rule(opacity=0.5, strokeDash=[4, 4]).encode(x, y, alt.X2("x2"), alt.Y2("y2"))
    dots = of_rows(rows).mark_circle(size=55, opacity=0.65).encode(x, y, colour, tooltip=tip)
    mark = chosen_client().mark_point(size=260, strokeWidth=2.5, color=GREY).encode(x, y)
    return finished(line + dots + mark, width, 340, "pairs")
