"""Curves over rounds, or over what they cost, each with its name at its end."""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple, TypeVar

from .drawing import LETTER, Axis, axis, drawing, hint, marks, rule, rules, spans_decades, text
from .drawing import apart as set_apart
from .markup import Markup, element, shortened_apart
from .palette import method_colour, method_dash

WIDTH = 460.0
_LEFT, _TOP, _LOWEST, _BELOW = 50.0, 12.0, 228.0, 42.0
_NAME_HEIGHT, _SAMPLE = 14.0, 20.0
_ROOM = 6.0  # pixels between the extremes and the frame
_MOST_POINTS = 300  # a curve has no more pixels than that
_MOST_HINTS = 40
_LONGEST_NAME = 18

Place = tuple[float, float]  # pixels
T = TypeVar("T")


def whole(value: float) -> str:
    """A round, or nothing between rounds."""
    return f"{value:.0f}" if value == round(value) else ""


class Along(NamedTuple):
    """What lies along the horizontal axis."""

    name: str
    tick: Callable[[float], str]
    said: Callable[[float], str]  # in hints
    log: bool = False


class Upward(NamedTuple):
    """What lies along the vertical axis."""

    tick: Callable[[float], str]
    most: float = math.inf
    window: tuple[float, float] | None = None  # what is shown of it; curves leave through the frame


class Curve(NamedTuple):
    label: str
    position: int  # of its method, for colour and dashes
    points: Sequence[tuple[float, float]]  # (along, value), at least one
    level: bool = False  # nothing lies along: its last value, across the drawing


ROUNDS = Along("round", whole, "round {:.0f}".format)


def line_chart(curves: Sequence[Curve], label: str, upward: Upward, along: Along = ROUNDS) -> Markup:
    """All curves that have points; there must be one that is not level."""
    parts = line_parts(curves, upward, along, hints=True)
    return drawing(WIDTH, chart_height(len(curves)), label, *parts)


def chart_height(curves: int) -> float:
    """Taller where names would not fit beside the curves."""
    return _bottom(curves) + _BELOW


def line_parts(curves: Sequence[Curve], upward: Upward, along: Along, *, hints: bool) -> list[Markup]:
    """What `line_chart` draws, for a drawing of WIDTH and of the height of the chart; an image has no use for hints."""
    names = shortened_apart([curve.label for curve in curves], _LONGEST_NAME)
    right, bottom = WIDTH - LETTER * max(map(len, names)) - _SAMPLE - 24, _bottom(len(curves))
    x_axis, y_axis = _x_axis(curves, along, right), _y_axis(curves, upward, bottom)
    parts = rules(y_axis, _LEFT, right, upward.tick) + marks(x_axis, bottom + 18, along.tick)
    parts.append(text((_LEFT + right) / 2, bottom + 36, along.name, anchor="middle"))
    if upward.window is not None:
        parts += [rule(y, _LEFT, right) for y in (_TOP, bottom)]
    drawn = [_places(curve, x_axis, y_axis) for curve in curves]
    ends = set_apart([places[-1][1] for places in drawn], _NAME_HEIGHT, _TOP, bottom)
    for curve, places in reversed(list(zip(curves, drawn, strict=True))):  # the first above the others
        parts += [_line(curve, piece) for piece in clipped(places, _TOP, bottom)]
    for curve, places, name, y in zip(curves, drawn, names, ends, strict=True):
        parts += _ending(curve, places[-1], name, (right + 8, y))
        parts += _hints(curve, x_axis, y_axis, upward, along) if hints else []
    return parts


def _bottom(curves: int) -> float:
    return max(_LOWEST, _TOP + _NAME_HEIGHT * curves)


def _x_axis(curves: Sequence[Curve], along: Along, right: float) -> Axis:
    """From zero, or where that is infinitely far, from the first point."""
    met = [x for curve in curves if not curve.level for x, _ in curve.points]
    return axis([x for x in met if x > 0] if along.log else [0.0, *met], _LEFT, right, log=along.log)


def _y_axis(curves: Sequence[Curve], upward: Upward, bottom: float) -> Axis:
    if upward.window is not None:
        return Axis(*upward.window, bottom, _TOP, log=spans_decades(upward.window))
    values = [value for curve in curves for _, value in curve.points]
    return axis(values, bottom - _ROOM, _TOP + _ROOM, log=spans_decades(values), most=upward.most)


def _shown(curve: Curve, x_axis: Axis, most: int) -> list[tuple[float, float]]:
    if curve.level:
        return [(x, curve.points[-1][1]) for x in (x_axis.low, x_axis.high)]
    return thinned([(x, value) for x, value in curve.points if x > 0 or not x_axis.log], most)


def _places(curve: Curve, x_axis: Axis, y_axis: Axis) -> list[Place]:
    return [(x_axis.at(x), y_axis.at(value)) for x, value in _shown(curve, x_axis, _MOST_POINTS)]


def _line(curve: Curve, places: Sequence[Place]) -> Markup:
    look: dict[str, str | float | None] = {"stroke_dasharray": method_dash(curve.position), "stroke_width": 2}
    if curve.level:
        look = {"stroke_dasharray": "1 4", "stroke_linecap": "round", "stroke_width": 2}
    colour = method_colour(curve.position)
    return element("path", d=_path(places), fill="none", stroke=colour, stroke_linejoin="round", **look)


def _ending(curve: Curve, last: Place, name: str, beside: Place) -> list[Markup]:
    """The name, a sample of the line before it, and a hair from the curve's last point to there."""
    x, y = beside
    colour = method_colour(curve.position)
    parts = [
        element("path", d=_path([last, beside]), fill="none", stroke=colour, stroke_width=0.75, opacity=0.6),
        _line(curve, [(x, y), (x + _SAMPLE, y)]),
        text(x + _SAMPLE + 5, y + 4, name),
    ]
    if not curve.level:
        parts.append(element("circle", cx=last[0], cy=last[1], r=3, fill=colour))
    return parts


def _hints(curve: Curve, x_axis: Axis, y_axis: Axis, upward: Upward, along: Along) -> list[Markup]:
    parts = []
    for x, value in _shown(curve, x_axis, _MOST_HINTS):
        place = (x_axis.at(x), y_axis.at(value))
        said = hint(f"{curve.label}, {along.said(curve.points[-1][0] if curve.level else x)}: {upward.tick(value)}")
        if min(y_axis.start, y_axis.end) <= place[1] <= max(y_axis.start, y_axis.end):
            parts.append(element("circle", said, cx=place[0], cy=place[1], r=6, fill_opacity=0))
    return parts


def _path(places: Sequence[Place]) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in places)


def clipped(places: Sequence[Place], top: float, bottom: float) -> list[list[Place]]:
    """The pieces of a line between two heights, cut where it crosses them.

    >>> clipped([(0, 10), (10, 0), (20, 0)], top=-5, bottom=5)
    [[(5.0, 5), (10, 0), (20, 0)]]
    """
    pieces: list[list[Place]] = [[]]
    for a, b in pairwise([*places, places[-1]]):
        inside = [place for place in (a, *_crossings(a, b, top, bottom)) if top <= place[1] <= bottom]
        pieces[-1] += inside
        if pieces[-1] and not top <= b[1] <= bottom:
            pieces.append([])
    return [piece for piece in pieces if piece]


def _crossings(a: Place, b: Place, top: float, bottom: float) -> list[Place]:
    """Where the line from a to b crosses the heights, in its order; not its ends."""
    met = [edge for edge in (top, bottom) if min(a[1], b[1]) < edge < max(a[1], b[1])]
    return [(a[0] + (edge - a[1]) / (b[1] - a[1]) * (b[0] - a[0]), edge) for edge in met[:: 1 if a[1] < b[1] else -1]]


def thinned(points: Sequence[T], most: int) -> list[T]:
    """Evenly fewer points, the first and the last among them.

    >>> thinned([1, 2, 3, 4, 5], most=3)
    [1, 3, 5]
    """
    if len(points) <= most:
        return list(points)
    return [points[round(i * (len(points) - 1) / (most - 1))] for i in range(most)]
