"""How each method treats each client: a row a method, a dot a client."""

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import median
from typing import NamedTuple

from .drawing import LETTER, Axis, axis, drawing, hint, marks, text
from .markup import Markup, element, shortened_apart
from .metric import Metric

MOST_DOTS = 300
_WIDTH, _RIGHT, _ROW, _TOP = 900.0, 884.0, 58.0, 12.0
_RADIUS = 3.2
_LONGEST_NAME = 22


class Row(NamedTuple):
    label: str
    colour: str
    clients: Mapping[str, float]  # at least one


def dot_chart(rows: Sequence[Row], metric: Metric) -> Markup:
    """The rows from top to bottom on one axis."""
    names = shortened_apart([row.label for row in rows], _LONGEST_NAME)
    left = 20 + LETTER * max(map(len, names))
    bottom = _TOP + _ROW * len(rows)
    x_axis = axis([value for row in rows for value in row.clients.values()], left + 10, _RIGHT - 10, most=metric.most)
    parts = [_upright(x_axis.at(value), _TOP, bottom, opacity=0.15) for value in x_axis.ticks(8)]
    for at, (row, name) in enumerate(zip(rows, names, strict=True)):
        middle = _TOP + _ROW * (at + 0.5)
        parts.append(text(left - 6, middle + 4, name, anchor="end"))
        parts += _marks_of(row, middle, x_axis, metric)
    parts += marks(x_axis, bottom + 18, metric.tick, about=8)
    parts.append(text((left + _RIGHT) / 2, bottom + 38, f"{metric.words} of a client", anchor="middle"))
    return drawing(_WIDTH, bottom + 44, f"{metric.words} of every client by method".capitalize(), *parts)


def _marks_of(row: Row, middle: float, x_axis: Axis, metric: Metric) -> list[Markup]:
    dots = [
        element(
            "circle",
            hint(f"{name}, {row.label}: {metric.show(row.clients[name])}"),
            cx=x_axis.at(row.clients[name]),
            cy=middle + offset,
            r=_RADIUS,
        )
        for name, offset in swarm(row.clients, x_axis)
    ]
    centre = median(row.clients.values())
    reach = _ROW * 0.48
    said = hint(f"{row.label}, median client: {metric.show(centre)}")
    return [
        _upright(x_axis.at(centre), middle - reach, middle + reach, said, stroke_width=2.5),
        element("g", *dots, fill=row.colour, fill_opacity=0.7),
    ]


def swarm(clients: Mapping[str, float], x_axis: Axis) -> list[tuple[str, float]]:
    """Names with the distance of their dots from the middle of the row: neighbours give way up and down.

    With too many clients, evenly ranked ones stand for all.
    """
    ranked = sorted(clients, key=clients.__getitem__)
    shown = min(len(ranked), MOST_DOTS)
    names = [ranked[round(i * (len(ranked) - 1) / max(1, shown - 1))] for i in range(shown)]
    bins = [round(x_axis.at(clients[name]) / (2 * _RADIUS)) for name in names]
    step = min(2 * _RADIUS, _ROW * 0.66 / max(Counter(bins).values()))
    met: Counter[int] = Counter()
    placed = []
    for name, bin_ in zip(names, bins, strict=True):
        met[bin_] += 1
        place = met[bin_] // 2
        placed.append((name, step * (place if met[bin_] % 2 else -place)))
    return placed


def _upright(x: float, y1: float, y2: float, *children: Markup, **more: float) -> Markup:
    return element("line", *children, x1=x, x2=x, y1=y1, y2=y2, stroke="currentColor", **more)
