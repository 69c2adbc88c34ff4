"""Bars that compare the scores of several models, starting at zero."""

from collections.abc import Sequence
from typing import NamedTuple

from .drawing import LETTER_WIDTH, Axis, drawing, text, tooltip
from .markup import Markup, element
from .metric import Metric
from .palette import MIDDLE_GREY, method_colour

_ROW, _BAR = 34.0, 20.0


class ScoreBar(NamedTuple):
    label: str
    value: float


def score_bars(bars: Sequence[ScoreBar], metric: Metric, width: float) -> Markup:
    """One bar per model; the first one is PPFL and is drawn in colour."""
    left = 12 + LETTER_WIDTH * max(len(bar.label) for bar in bars)
    right = width - 12 - LETTER_WIDTH * max(len(metric.show(bar.value)) for bar in bars)
    x_axis = Axis(0, max(bar.value for bar in bars) or 1.0, left, right)
    parts = []
    for at, bar in enumerate(bars):
        middle = 4 + _ROW * (at + 0.5)
        end = x_axis.at(bar.value)
        colour = MIDDLE_GREY if at else method_colour(0)
        tip = tooltip(f"{bar.label}: {metric.full_name} {metric.show(bar.value)}")
        parts.append(text(left - 8, middle + 4, bar.label, anchor="end"))
        parts.append(element("rect", tip, x=left, y=middle - _BAR / 2, width=end - left, height=_BAR, fill=colour))
        parts.append(text(end + 6, middle + 4, metric.show(bar.value)))
    return drawing(width, 8 + _ROW * len(bars), f"{metric.full_name} of ways to predict".capitalize(), *parts)
