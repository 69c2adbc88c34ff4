"""The metric of every client with every method: one row per method, one dot per client."""

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import median
from typing import NamedTuple

from .drawing import LETTER_WIDTH, Axis, axis, drawing, text, tick_labels, tooltip
from .markup import Markup, element, shorten_distinct
from .metric import Metric

MAX_DOTS = 300
_WIDTH, _RIGHT, _ROW, _TOP = 900.0, 884.0, 58.0, 12.0
_RADIUS = 3.2
_MAX_NAME_LENGTH = 22


class DotRow(NamedTuple):
    label: str
    colour: str
    clients: Mapping[str, float]  # metric by client id, not empty


def dot_chart(rows: Sequence[DotRow], metric: Metric) -> Markup:
    """All rows on a common axis, from top to bottom."""
    names = shorten_distinct([row.label for row in rows], _MAX_NAME_LENGTH)
    left = 20 + LETTER_WIDTH * max(map(len, names))
    bottom = _TOP + _ROW * len(rows)
    x_axis = axis(
        [value for row in rows for value in row.clients.values()], left + 10, _RIGHT - 10, maximum=metric.maximum
    )
    parts = [_vertical_line(x_axis.at(value), _TOP, bottom, opacity=0.15) for value in x_axis.ticks(8)]
    for at, (row, name) in enumerate(zip(rows, names, strict=True)):
        middle = _TOP + _ROW * (at + 0.5)
        parts.append(text(left - 6, middle + 4, name, anchor="end"))
        parts += _draw_row(row, middle, x_axis, metric)
    parts += tick_labels(x_axis, bottom + 18, metric.format_tick, about=8)
    parts.append(text((left + _RIGHT) / 2, bottom + 38, f"{metric.full_name} of a client", anchor="middle"))
    return drawing(_WIDTH, bottom + 44, f"{metric.full_name} of every client by method".capitalize(), *parts)


def _draw_row(row: DotRow, middle: float, x_axis: Axis, metric: Metric) -> list[Markup]:
    dots = [
        element(
            "circle",
            tooltip(f"{name}, {row.label}: {metric.show(row.clients[name])}"),
            cx=x_axis.at(row.clients[name]),
            cy=middle + offset,
            r=_RADIUS,
        )
        for name, offset in beeswarm(row.clients, x_axis)
    ]
    centre = median(row.clients.values())
    reach = _ROW * 0.48
    tip = tooltip(f"{row.label}, median client: {metric.show(centre)}")
    return [
        _vertical_line(x_axis.at(centre), middle - reach, middle + reach, tip, stroke_width=2.5),
        element("g", *dots, fill=row.colour, fill_opacity=0.7),
    ]


def beeswarm(clients: Mapping[str, float], x_axis: Axis) -> list[tuple[str, float]]:
    """Client ids with the vertical offset of their dots, so that dots with similar values do not overlap.

    Of more than MAX_DOTS clients only MAX_DOTS are shown, at even steps of the ranking.
    """
    ranked = sorted(clients, key=clients.__getitem__)
    shown = min(len(ranked), MAX_DOTS)
    names = [ranked[round(i * (len(ranked) - 1) / max(1, shown - 1))] for i in range(shown)]
    bins = [round(x_axis.at(clients[name]) / (2 * _RADIUS)) for name in names]
    step = min(2 * _RADIUS, _ROW * 0.66 / max(Counter(bins).values()))
    seen: Counter[int] = Counter()
    placed = []
    for name, bin_ in zip(names, bins, strict=True):
        seen[bin_] += 1
        place = seen[bin_] // 2
        placed.append((name, step * (place if seen[bin_] % 2 else -place)))
    return placed


def _vertical_line(x: float, y1: float, y2: float, *children: Markup, **more: float) -> Markup:
    return element("line", *children, x1=x, x2=x, y1=y1, y2=y2, stroke="currentColor", **more)
