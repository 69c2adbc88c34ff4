"""Ways to predict side by side: a bar each, from nothing."""

from collections.abc import Sequence
from typing import NamedTuple

from .drawing import LETTER, Axis, drawing, hint, text
from .markup import Markup, element
from .metric import Metric
from .palette import MIDDLE_GREY, method_colour

_ROW, _BAR = 34.0, 20.0


class ScoreBar(NamedTuple):
    label: str
    value: float


def score_bars(bars: Sequence[ScoreBar], metric: Metric, width: float) -> Markup:
    """The first is ours, and has a colour."""
    left = 12 + LETTER * max(len(bar.label) for bar in bars)
    right = width - 12 - LETTER * max(len(metric.show(bar.value)) for bar in bars)
    along = Axis(0, max(bar.value for bar in bars) or 1.0, left, right)
    parts = []
    for at, bar in enumerate(bars):
        middle = 4 + _ROW * (at + 0.5)
        end = along.at(bar.value)
        colour = MIDDLE_GREY if at else method_colour(0)
        said = hint(f"{bar.label}: {metric.words} {metric.show(bar.value)}")
        parts.append(text(left - 8, middle + 4, bar.label, anchor="end"))
        parts.append(element("rect", said, x=left, y=middle - _BAR / 2, width=end - left, height=_BAR, fill=colour))
        parts.append(text(end + 6, middle + 4, metric.show(bar.value)))
    return drawing(width, 8 + _ROW * len(bars), f"{metric.words} of ways to predict".capitalize(), *parts)
