"""Curves over rounds, each with its name at its end."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from .drawing import LETTER, axis, drawing, hint, marks, rules, spans_decades, text
from .drawing import apart as set_apart
from .markup import Markup, element, shortened

_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM = 460.0, 270.0, 50.0, 12.0, 228.0
_MOST_POINTS = 300  # a curve has no more pixels than that
_MOST_HINTS = 40
_LONGEST_NAME = 18


class Curve(NamedTuple):
    label: str
    colour: str
    points: Sequence[tuple[int, float]]  # (round, value), at least one


def line_chart(curves: Sequence[Curve], label: str, tick: Callable[[float], str], most: float = math.inf) -> Markup:
    """All curves that have points; there must be one."""
    names = [shortened(curve.label, _LONGEST_NAME) for curve in curves]
    right = _WIDTH - LETTER * max(map(len, names)) - 22
    values = [value for curve in curves for _, value in curve.points]
    x_axis = axis([0.0, *(float(t) for curve in curves for t, _ in curve.points)], _LEFT, right)
    y_axis = axis(values, _BOTTOM - 6, _TOP + 6, log=spans_decades(values), most=most)
    ends = [y_axis.at(curve.points[-1][1]) for curve in curves]
    parts = rules(y_axis, _LEFT, right, tick) + marks(x_axis, _BOTTOM + 18, whole)
    parts.append(text((_LEFT + right) / 2, _BOTTOM + 36, "round", anchor="middle"))
    for curve, name, y in zip(curves, names, set_apart(ends, 14, _TOP, _BOTTOM), strict=True):
        last = (x_axis.at(curve.points[-1][0]), y_axis.at(curve.points[-1][1]))
        places = [(x_axis.at(t), y_axis.at(value)) for t, value in thinned(curve.points, _MOST_POINTS)]
        path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
        stroke = {"fill": "none", "stroke": curve.colour}
        parts.append(element("path", d=path, stroke_width=2, stroke_linejoin="round", **stroke))
        parts.append(element("path", d=f"M{last[0]:.1f} {last[1]:.1f}L{right + 10:.1f} {y:.1f}", opacity=0.6, **stroke))
        parts.append(element("circle", cx=last[0], cy=last[1], r=3, fill=curve.colour))
        parts.append(text(right + 14, y + 4, name))
        for t, value in thinned(curve.points, _MOST_HINTS):
            said = hint(f"{curve.label}, round {t}: {tick(value)}")
            parts.append(element("circle", said, cx=x_axis.at(t), cy=y_axis.at(value), r=6, fill_opacity=0))
    return drawing(_WIDTH, _HEIGHT, label, *parts)


def thinned(points: Sequence[tuple[int, float]], most: int) -> list[tuple[int, float]]:
    """Evenly fewer points, the first and the last among them.

    >>> thinned([(1, 0.5), (2, 0.6), (3, 0.7)], most=2)
    [(1, 0.5), (3, 0.7)]
    """
    if len(points) <= most:
        return list(points)
    return [points[round(i * (len(points) - 1) / (most - 1))] for i in range(most)]


def whole(value: float) -> str:
    """A round, or nothing between rounds."""
    return f"{value:.0f}" if value == round(value) else ""
