"""The picture of the memberships: a bar a client, a colour a canonical model, and below it the truth."""

from itertools import pairwise
from typing import NamedTuple

from torch import Tensor

from .drawing import LETTER, Axis, drawing, hint, text
from .markup import Markup, element
from .palette import model_colour
from .portrait import Portrait, letter

MOST_BARS = 300  # more would be thinner than three pixels, and heavy
_WIDTH, _LEFT, _RIGHT = 900.0, 52.0, 892.0
_WIDEST_BAR = 64.0


class Bar(NamedTuple):
    """A client, or neighbours in the order of the picture where there are too many to draw each."""

    ids: tuple[str, ...]
    memberships: list[float]
    truth: list[float] | None


def bars_of(drawn: Portrait) -> list[Bar]:
    """At most MOST_BARS, left to right."""
    size = -(-len(drawn.ids) // MOST_BARS)
    starts = range(0, len(drawn.ids), size)

    def mean(rows: Tensor, start: int) -> list[float]:
        return [float(value) for value in rows[start : start + size].mean(0)]

    return [
        Bar(
            drawn.ids[start : start + size],
            mean(drawn.memberships, start),
            None if drawn.truth is None else mean(drawn.truth, start),
        )
        for start in starts
    ]


def membership_bars(drawn: Portrait, title: str | None = None) -> Markup:
    """With a title the picture stands alone; without, it is part of a page that has one."""
    top = 74.0 if title else 22.0
    bottom, strip = top + 130, top + 140
    end = strip + (38 if drawn.truth is not None else 14)
    bars = bars_of(drawn)
    pitch = min(_WIDEST_BAR, (_RIGHT - _LEFT) / len(bars))
    gap = min(2.0, pitch / 8) if pitch > 4 else 0.0
    parts: list[Markup] = []
    if title:
        parts.append(text(_LEFT, 22, title, font_size=16, font_weight="bold"))
        parts.append(text(_LEFT, 42, "Each bar is a client, each colour a canonical model they share."))
    for share in (0.0, 0.5, 1.0):
        y = Axis(0, 1, bottom, top).at(share)
        parts.append(text(_LEFT - 6, y + 4, f"{share:.0%}", anchor="end"))
    parts += _headings(drawn, top - 8, pitch * len(bars) / len(drawn.ids))
    columns: list[Markup] = []
    for at, bar in enumerate(bars):
        x = _LEFT + at * pitch
        name = _heading(bar)
        column = _stack(bar.memberships, x, pitch - gap, bottom, top)
        said = f"{name}: {_shares(bar.memberships)}"
        columns.append(element("g", hint(said), *column, class_="client"))
        if bar.truth is not None:
            true = _stack(bar.truth, x, pitch - gap, strip + 14, strip)
            said = f"{name}, truth: {_shares(bar.truth)}"
            columns.append(element("g", hint(said), *true, class_="truth"))
    parts.append(element("g", *columns, shape_rendering="crispEdges"))  # no seams between bars
    if drawn.truth is not None:
        parts.append(text(_LEFT - 6, strip + 11, "truth", anchor="end"))
    parts.append(text(_LEFT, end - 2, _axis_words(len(drawn.ids), len(bars))))
    label = title or f"Memberships of {len(drawn.ids)} clients in {drawn.k} canonical models, by {drawn.label}"
    return drawing(_WIDTH, end + 8, label, *parts, alone=title is not None)


def no_bars(title: str) -> Markup:
    """The picture where no run has memberships to show."""
    said = "No run here has more than one canonical model, so there are no memberships to show."
    lines = (text(_LEFT, 22, title, font_size=16, font_weight="bold"), text(_LEFT, 46, said))
    return drawing(_WIDTH, 64, said, *lines, alone=True)


def _stack(shares: list[float], x: float, width: float, bottom: float, top: float) -> list[Markup]:
    """Rectangles that fill the height: the edges are rounded, not the heights, so that they add up."""
    edges, total = [bottom], 0.0
    for share in shares:
        total += share
        edges.append(round(bottom + min(total, 1.0) * (top - bottom), 2))
    edges[-1] = top
    return [
        element("rect", x=x, y=upper, width=width, height=lower - upper, fill=model_colour(j))
        for j, (lower, upper) in enumerate(pairwise(edges))
        if lower - upper >= 0.005
    ]


def _headings(drawn: Portrait, y: float, width: float) -> list[Markup]:
    """Above each stretch of clients of one kind its letter and, where there is room, their number."""
    parts, before = [], 0
    for j, count in enumerate(drawn.counts):
        long = f"{letter(j)} · {count} client{'s' * (count != 1)}"
        for words_ in (long, f"{letter(j)} · {count}", letter(j)):
            if LETTER * len(words_) < count * width:
                parts.append(text(_LEFT + (before + count / 2) * width, y, words_, anchor="middle"))
                break
        before += count
    return parts


def _heading(bar: Bar) -> str:
    if len(bar.ids) == 1:
        return bar.ids[0]
    return f"mean of {len(bar.ids)} clients, {bar.ids[0]} to {bar.ids[-1]}"


def _shares(shares: list[float]) -> str:
    large = sorted(((share, j) for j, share in enumerate(shares) if share >= 0.005), reverse=True)
    return ", ".join(f"{letter(j)} {share:.0%}" for share, j in large)


def _axis_words(clients: int, bars: int) -> str:
    if clients == 1:
        return "1 client"
    many = f" (a bar is the mean of up to {-(-clients // bars)})" if bars < clients else ""
    return f"{clients} clients{many}, sorted by their largest membership"
