"""Line charts over rounds or over bytes, with the name of each curve at its right end."""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple, TypeVar

from .drawing import LETTER_WIDTH, Axis, axis, drawing, grid_line, grid_lines, spans_decades, text, tick_labels, tooltip
from .drawing import separate as separate
from .markup import Markup, element, shorten_distinct
from .palette import method_colour, method_dash

WIDTH = 460.0
_LEFT, _TOP, _LOWEST, _BELOW = 50.0, 12.0, 228.0, 42.0
_NAME_HEIGHT, _KEY_WIDTH = 14.0, 20.0  # of a name beside the chart, and of the line sample before it
_MARGIN = 6.0  # pixels between the extreme values and the frame
_MAX_POINTS = 300  # about as many pixels as a curve is wide
_MAX_TOOLTIPS = 40
_MAX_NAME_LENGTH = 18

Point = tuple[float, float]  # (x, y) in pixels
T = TypeVar("T")


def round_label(value: float) -> str:
    """The number of a round; empty for a value between two rounds."""
    return f"{value:.0f}" if value == round(value) else ""


class XAxisFormat(NamedTuple):
    """The name of the x axis and how its values are written."""

    name: str
    format_tick: Callable[[float], str]
    format_tooltip: Callable[[float], str]
    log: bool = False


class YAxisFormat(NamedTuple):
    """How the values of the y axis are written, and which of them are shown."""

    format_tick: Callable[[float], str]
    maximum: float = math.inf
    window: tuple[float, float] | None = None  # lowest and highest value shown; curves are cut off at the frame
    log: bool = False  # logarithmic in any case, else where values span decades


class Curve(NamedTuple):
    label: str
    position: int  # of its method among all methods; determines colour and dashes
    points: Sequence[tuple[float, float]]  # (x, value), at least one
    is_flat: bool = False  # it has no x values: draw its last value as a horizontal line


ROUNDS = XAxisFormat("round", round_label, "round {:.0f}".format)


def line_chart(curves: Sequence[Curve], label: str, y_format: YAxisFormat, x_format: XAxisFormat = ROUNDS) -> Markup:
    """All curves in one chart; at least one must not be flat."""
    parts = line_parts(curves, y_format, x_format, tooltips=True)
    return drawing(WIDTH, chart_height(len(curves)), label, *parts)


def chart_height(curves: int) -> float:
    """The height of a chart, larger if the names of many curves need it."""
    return _bottom(curves) + _BELOW


def line_parts(
    curves: Sequence[Curve], y_format: YAxisFormat, x_format: XAxisFormat, *, tooltips: bool
) -> list[Markup]:
    """The elements of a line chart, of size WIDTH by `chart_height`; tooltips are useless in a standalone image."""
    names = shorten_distinct([curve.label for curve in curves], _MAX_NAME_LENGTH)
    right, bottom = WIDTH - LETTER_WIDTH * max(map(len, names)) - _KEY_WIDTH - 24, _bottom(len(curves))
    x_axis, y_axis = _x_axis(curves, x_format, right), _y_axis(curves, y_format, bottom)
    parts = grid_lines(y_axis, _LEFT, right, y_format.format_tick)
    parts += tick_labels(x_axis, bottom + 18, x_format.format_tick)
    parts.append(text((_LEFT + right) / 2, bottom + 36, x_format.name, anchor="middle"))
    if y_format.window is not None:
        parts += [grid_line(y, _LEFT, right) for y in (_TOP, bottom)]
    drawn = [_to_pixels(curve, x_axis, y_axis) for curve in curves]
    ends = separate([places[-1][1] for places in drawn], _NAME_HEIGHT, _TOP, bottom)
    for curve, places in reversed(list(zip(curves, drawn, strict=True))):  # the first curve on top
        parts += [_line(curve, piece) for piece in clip_line(places, _TOP, bottom)]
    for curve, places, name, y in zip(curves, drawn, names, ends, strict=True):
        parts += _name_at_end(curve, places[-1], name, (right + 8, y))
        parts += _tooltips(curve, x_axis, y_axis, y_format, x_format) if tooltips else []
    return parts


def _bottom(curves: int) -> float:
    return max(_LOWEST, _TOP + _NAME_HEIGHT * curves)


def _x_axis(curves: Sequence[Curve], x_format: XAxisFormat, right: float) -> Axis:
    """Starts at zero, or at the first point if the axis is logarithmic."""
    values = [x for curve in curves if not curve.is_flat for x, _ in curve.points]
    return axis([x for x in values if x > 0] if x_format.log else [0.0, *values], _LEFT, right, log=x_format.log)


def _y_axis(curves: Sequence[Curve], y_format: YAxisFormat, bottom: float) -> Axis:
    if y_format.window is not None:
        return Axis(*y_format.window, bottom, _TOP, log=y_format.log or spans_decades(y_format.window))
    values = [value for curve in curves for _, value in curve.points]
    log = y_format.log or spans_decades(values)
    return axis(values, bottom - _MARGIN, _TOP + _MARGIN, log=log, maximum=y_format.maximum)


def _points_shown(curve: Curve, x_axis: Axis, max_points: int) -> list[tuple[float, float]]:
    if curve.is_flat:
        return [(x, curve.points[-1][1]) for x in (x_axis.low, x_axis.high)]
    return thin_out([(x, value) for x, value in curve.points if x > 0 or not x_axis.log], max_points)


def _to_pixels(curve: Curve, x_axis: Axis, y_axis: Axis) -> list[Point]:
    return [(x_axis.at(x), y_axis.at(value)) for x, value in _points_shown(curve, x_axis, _MAX_POINTS)]


def _line(curve: Curve, places: Sequence[Point]) -> Markup:
    look: dict[str, str | float | None] = {"stroke_dasharray": method_dash(curve.position), "stroke_width": 2}
    if curve.is_flat:
        look = {"stroke_dasharray": "1 4", "stroke_linecap": "round", "stroke_width": 2}
    colour = method_colour(curve.position)
    return element("path", d=_path(places), fill="none", stroke=colour, stroke_linejoin="round", **look)


def _name_at_end(curve: Curve, last: Point, name: str, beside: Point) -> list[Markup]:
    """The name, a short sample of the line before it, and a thin line that connects them to the end of the curve."""
    x, y = beside
    colour = method_colour(curve.position)
    parts = [
        element("path", d=_path([last, beside]), fill="none", stroke=colour, stroke_width=0.75, opacity=0.6),
        _line(curve, [(x, y), (x + _KEY_WIDTH, y)]),
        text(x + _KEY_WIDTH + 5, y + 4, name),
    ]
    if not curve.is_flat:
        parts.append(element("circle", cx=last[0], cy=last[1], r=3, fill=colour))
    return parts


def _tooltips(curve: Curve, x_axis: Axis, y_axis: Axis, y_format: YAxisFormat, x_format: XAxisFormat) -> list[Markup]:
    parts = []
    for x, value in _points_shown(curve, x_axis, _MAX_TOOLTIPS):
        place = (x_axis.at(x), y_axis.at(value))
        where = x_format.format_tooltip(curve.points[-1][0] if curve.is_flat else x)
        tip = tooltip(f"{curve.label}, {where}: {y_format.format_tick(value)}")
        if min(y_axis.start, y_axis.end) <= place[1] <= max(y_axis.start, y_axis.end):
            parts.append(element("circle", tip, cx=place[0], cy=place[1], r=6, fill_opacity=0))
    return parts


def _path(places: Sequence[Point]) -> str:
    return "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in places)


def clip_line(places: Sequence[Point], top: float, bottom: float) -> list[list[Point]]:
    """The parts of a line between two heights, cut where the line crosses them.

    >>> clip_line([(0, 10), (10, 0), (20, 0)], top=-5, bottom=5)
    [[(5.0, 5), (10, 0), (20, 0)]]
    """
    pieces: list[list[Point]] = [[]]
    for a, b in pairwise([*places, places[-1]]):
        inside = [place for place in (a, *_crossings(a, b, top, bottom)) if top <= place[1] <= bottom]
        pieces[-1] += inside
        if pieces[-1] and not top <= b[1] <= bottom:
            pieces.append([])
    return [piece for piece in pieces if piece]


def _crossings(a: Point, b: Point, top: float, bottom: float) -> list[Point]:
    """The points where the line from a to b crosses the two heights, in the direction of the line, without a and b."""
    edges = [edge for edge in (top, bottom) if min(a[1], b[1]) < edge < max(a[1], b[1])]
    return [(a[0] + (edge - a[1]) / (b[1] - a[1]) * (b[0] - a[0]), edge) for edge in edges[:: 1 if a[1] < b[1] else -1]]


def thin_out(points: Sequence[T], max_points: int) -> list[T]:
    """At most so many points at even steps, including the first and the last.

    >>> thin_out([1, 2, 3, 4, 5], max_points=3)
    [1, 3, 5]
    """
    if len(points) <= max_points:
        return list(points)
    return [points[round(i * (len(points) - 1) / (max_points - 1))] for i in range(max_points)]
