"""The parts of every drawing: the SVG frame, text and axes."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from .markup import Markup, element, escape
from .palette import MIDDLE_GREY

_FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, Helvetica, Arial, sans-serif"
LETTER_WIDTH = 6.4  # pixels at the usual font size, an estimate: fonts cannot be measured here


class Axis(NamedTuple):
    """Maps values from low to high to pixels from start to end."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def at(self, value: float) -> float:
        low, high, value = (math.log10(v) if self.log else v for v in (self.low, self.high, value))
        return self.start + (value - low) / (high - low) * (self.end - self.start)

    def ticks(self, about: int = 5) -> list[float]:
        """About so many round values between low and high."""
        return (log_ticks if self.log else round_ticks)(self.low, self.high, about)


def axis(values: Sequence[float], start: float, end: float, *, log: bool = False, maximum: float = math.inf) -> Axis:
    """An axis that covers the values; if all are equal, with a margin that does not go above `maximum`."""
    low, high = min(values), max(values)
    if low == high:
        margin = abs(low) * 0.1 or 1.0
        low, high = low - margin, min(high + margin, maximum)
    return Axis(low, high, start, end, log)


def round_ticks(low: float, high: float, about: int) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten.

    >>> round_ticks(3, 42, 5)
    [10.0, 20.0, 30.0, 40.0]
    """
    power = 10.0 ** math.floor(math.log10((high - low) / about))
    step = next(power * m for m in (1, 2, 5, 10) if power * m * about >= (high - low) * (1 - 1e-9))
    return [i * step for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def log_ticks(low: float, high: float, about: int) -> list[float]:
    """Powers of ten, with values between them if there are only a few powers.

    >>> log_ticks(3, 150, 5), log_ticks(3, 1e9, 5)
    ([5.0, 10.0, 20.0, 50.0, 100.0], [10.0, 1000.0, 100000.0, 10000000.0, 1000000000.0])
    """
    powers = range(math.floor(math.log10(low)), math.floor(math.log10(high) + 1e-9) + 1)
    for between in ((1, 2, 5), (1, 3), (1,)):
        steps = [at * 10.0**power for power in powers for at in between]
        steps = [step for step in steps if low * (1 - 1e-9) <= step <= high * (1 + 1e-9)]
        if len(steps) <= about:
            break
    return steps[:: math.ceil(len(steps) / about)] if len(steps) > 1 else round_ticks(low, high, about)


def spans_decades(values: Sequence[float], decades: int = 2) -> bool:
    """Whether the values need a logarithmic axis: one run that diverges must not flatten the others."""
    return min(values) > 0 and max(values) > 10**decades * min(values)


def separate(positions: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Move positions so that they are at least `gap` apart, in the same order and between low and high if they fit.

    >>> separate([10, 11, 50], gap=12, low=0, high=100)
    [10, 22, 50]
    """
    order = sorted(range(len(positions)), key=positions.__getitem__)
    moved = list(positions)
    floor = low
    for i in order:
        moved[i] = floor = max(moved[i], floor)
        floor += gap
    ceiling = high
    for i in reversed(order):
        moved[i] = ceiling = min(moved[i], ceiling)
        ceiling -= gap
    return moved


def drawing(width: float, height: float, label: str, *children: Markup, standalone: bool = False) -> Markup:
    """An SVG in the colour of the surrounding text; standalone, in a grey that is readable on any background."""
    return element(
        "svg",
        *children,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {width:g} {height:g}",
        width=width if standalone else None,
        height=height if standalone else None,
        role="img",
        aria_label=label,
        font_family=_FONT,
        font_size=12,
        fill="currentColor",
        color=MIDDLE_GREY if standalone else None,
    )


def text(x: float, y: float, content: str, *, anchor: str | None = None, **more: str | float) -> Markup:
    return element("text", escape(content), x=x, y=y, text_anchor=anchor, **more)


def tooltip(content: str) -> Markup:
    """The text shown when the pointer rests on an element."""
    return element("title", escape(content))


def grid_lines(y_axis: Axis, left: float, right: float, show: Callable[[float], str]) -> list[Markup]:
    """Horizontal lines across the drawing, with their values on the left."""
    parts = []
    for value in y_axis.ticks(6):
        y = y_axis.at(value)
        parts.append(grid_line(y, left, right))
        parts.append(text(left - 6, y + 4, show(value), anchor="end", opacity=0.75))
    return parts


def grid_line(y: float, left: float, right: float) -> Markup:
    return element("line", x1=left, x2=right, y1=y, y2=y, stroke="currentColor", opacity=0.15)


def tick_labels(x_axis: Axis, y: float, show: Callable[[float], str], about: int = 5) -> list[Markup]:
    """The values of the x axis, written at height y."""
    return [text(x_axis.at(value), y, show(value), anchor="middle", opacity=0.75) for value in x_axis.ticks(about)]
