"""Plots of memberships on the simplex: a line for two canonical models, a triangle for three."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from .drawing import LETTER_WIDTH, Axis, drawing, grid_line, text, tick_labels, tooltip
from .markup import Markup, element, shorten
from .palette import mixed_colour, model_colour
from .sorted_memberships import letter

MAX_DOTS = 2000
_WIDTH = 900.0
MAX_STACKED = 400  # dots on a line; more clients are drawn as a histogram
_BINS = 40
_MAX_HEIGHT = 180.0
_MAX_NAMED = 40  # clients; more names would overlap
_MAX_NAME_LENGTH = 14
_CLEAR_FROM = 0.8  # this grid line is drawn darker: beyond it a client is clearly one model

Place = Callable[[Sequence[float]], tuple[float, float]]  # from memberships to pixels


class StackedMarks(NamedTuple):
    """Elements that stand on a line at height 0, and their total height."""

    height: float
    parts: list[Markup]


class ClientDot(NamedTuple):
    x: float
    y: float
    name: str
    shares: Sequence[float]


def simplex_chart(ids: Sequence[str], memberships: Sequence[Sequence[float]]) -> Markup:
    """The plot for two or three canonical models."""
    return (line_plot if len(memberships[0]) == 2 else ternary_plot)(ids, memberships)


def line_plot(ids: Sequence[str], memberships: Sequence[Sequence[float]]) -> Markup:
    """Clients on a line from the first model to the second; clients with similar memberships are stacked."""
    x_axis = Axis(0, 1, 60, _WIDTH - 60)
    pile = (_dots if len(ids) <= MAX_STACKED else _bars)(ids, memberships, x_axis)
    bottom = 14 + pile.height
    below = [grid_line(0, x_axis.start, x_axis.end), *tick_labels(x_axis, 18, "{:.0%}".format, about=10)]
    below.append(text((x_axis.start + x_axis.end) / 2, 38, f"share of {letter(1)}", anchor="middle"))
    for at, (x, anchor) in enumerate(((x_axis.start, "start"), (x_axis.end, "end"))):
        style = {"fill": model_colour(at), "font_weight": "bold"}
        below.append(text(x, 38, f"wholly {letter(at)}", anchor=anchor, **style))
    moved = element("g", *pile.parts, *below, transform=f"translate(0 {bottom:.1f})")
    return drawing(_WIDTH, bottom + 48, f"{len(ids)} clients between {letter(0)} and {letter(1)}", moved)


def ternary_plot(ids: Sequence[str], memberships: Sequence[Sequence[float]]) -> Markup:
    """Clients in a triangle: the nearer to a corner, the larger the membership in that model."""
    side, top, middle = 480.0, 34.0, _WIDTH / 2
    height = side * math.sqrt(3) / 2
    corners = [(middle - side / 2, top + height), (middle + side / 2, top + height), (middle, top)]

    def place(shares: Sequence[float]) -> tuple[float, float]:
        pairs = list(zip(shares, corners, strict=True))
        return sum(share * x for share, (x, _) in pairs), sum(share * y for share, (_, y) in pairs)

    parts = _grid(place)
    shown = [round(i * (len(ids) - 1) / max(1, min(len(ids), MAX_DOTS) - 1)) for i in range(min(len(ids), MAX_DOTS))]
    radius = 6.0 if len(ids) <= 60 else 4.5 if len(ids) <= 300 else 3.0
    dots = [ClientDot(*place(memberships[i]), ids[i], memberships[i]) for i in shown]
    parts += [_circle(dot, radius) for dot in dots]
    if len(ids) <= _MAX_NAMED:
        parts += _names(dots, radius)
    shares = [sum(column) / len(ids) for column in zip(*memberships, strict=True)]
    x, y = place(shares)
    cross = f"M{x - 7:.1f} {y:.1f}h14M{x:.1f} {y - 7:.1f}v14"
    tip = tooltip(f"mean of all clients: {_share_text(shares)}")
    parts.append(element("path", tip, d=cross, stroke="currentColor", stroke_width=2.2, fill="none"))
    for at, ((x, y), (right, down), anchor) in enumerate(
        zip(corners, ((-12, 6), (12, 6), (0, -14)), ("end", "start", "middle"), strict=True)
    ):
        label = f"{letter(at)} · {shares[at]:.0%}"
        colour = model_colour(at)
        parts.append(text(x + right, y + down, label, anchor=anchor, font_size=15, font_weight="bold", fill=colour))
    return drawing(_WIDTH, top + height + 24, f"{len(ids)} clients between three canonical models", *parts)


def _dots(ids: Sequence[str], memberships: Sequence[Sequence[float]], x_axis: Axis) -> StackedMarks:
    """One dot per client, small enough for the tallest stack to fit."""
    radius = 7.0
    while True:
        columns: dict[int, list[int]] = {}
        for i in sorted(range(len(ids)), key=lambda i: memberships[i][1]):
            columns.setdefault(int((x_axis.at(memberships[i][1]) - x_axis.start) // (2 * radius)), []).append(i)
        height = 2 * radius * max(map(len, columns.values()))
        if height <= _MAX_HEIGHT or radius < 1.5:
            break
        radius *= 0.85
    return StackedMarks(
        height,
        [
            _circle(
                ClientDot(x_axis.start + (2 * at + 1) * radius, -(2 * above + 1) * radius, ids[i], memberships[i]),
                radius,
            )
            for at, stack in columns.items()
            for above, i in enumerate(stack)
        ],
    )


def _bars(ids: Sequence[str], memberships: Sequence[Sequence[float]], x_axis: Axis) -> StackedMarks:
    """A histogram of the membership in the second model."""
    counts = [0] * _BINS
    for membership in memberships:
        counts[min(_BINS - 1, int(membership[1] * _BINS))] += 1
    width = (x_axis.end - x_axis.start) / _BINS - 1
    bars = []
    for at, count in enumerate(counts):
        height = _MAX_HEIGHT * count / max(counts)
        tip = tooltip(f"{count} clients are {at / _BINS:.1%} to {(at + 1) / _BINS:.1%} {letter(1)}")
        middle = (at + 0.5) / _BINS
        place = {"x": x_axis.at(at / _BINS) + 0.5, "y": -height, "width": width, "height": height}
        bars.append(element("rect", tip, **place, fill=mixed_colour([1 - middle, middle])))
    return StackedMarks(_MAX_HEIGHT, bars)


def _grid(place: Place) -> list[Markup]:
    """The border of the triangle, and lines of equal membership in each model."""
    (ax, ay), (bx, by), (cx, cy) = (place([float(i == j) for j in range(3)]) for i in range(3))
    border = f"M{ax:.1f} {ay:.1f}L{bx:.1f} {by:.1f}L{cx:.1f} {cy:.1f}Z"
    parts = [element("path", d=border, fill="none", stroke="currentColor", opacity=0.45)]
    for model in range(3):
        for share in (0.2, 0.4, 0.6, 0.8):
            ends = []
            for other in ((model + 1) % 3, (model + 2) % 3):
                shares = [0.0, 0.0, 0.0]
                shares[model], shares[other] = share, 1 - share
                ends.append(place(shares))
            (x1, y1), (x2, y2) = ends
            opacity = 0.3 if share == _CLEAR_FROM else 0.12
            parts.append(element("line", x1=x1, y1=y1, x2=x2, y2=y2, stroke="currentColor", opacity=opacity))
    return parts


def _circle(dot: ClientDot, radius: float) -> Markup:
    tip = tooltip(f"{dot.name}: {_share_text(dot.shares)}")
    return element("circle", tip, cx=dot.x, cy=dot.y, r=radius - 0.3, fill=mixed_colour(dot.shares), class_="client")


def _names(dots: Sequence[ClientDot], radius: float) -> list[Markup]:
    """Names beside their dots, left out where they would overlap."""
    taken = [(dot.x - radius, dot.x + radius, dot.y) for dot in dots]
    parts = []
    for dot in dots:
        name = shorten(dot.name, _MAX_NAME_LENGTH)
        start = dot.x + radius + 3
        end = start + LETTER_WIDTH * len(name)
        if any(start < high and low < end and abs(y - dot.y) < 10 for low, high, y in taken):
            continue
        taken.append((start, end, dot.y))
        parts.append(text(start, dot.y + 3.5, name, font_size=10, opacity=0.8))
    return parts


def _share_text(shares: Sequence[float]) -> str:
    return ", ".join(f"{letter(at)} {share:.0%}" for at, share in enumerate(shares) if share >= 0.005)
