"""The membership picture: one bar per client, one colour per canonical model, and the truth in a strip below."""

from itertools import pairwise
from typing import NamedTuple

from torch import Tensor

from .drawing import LETTER_WIDTH, Axis, drawing, text, tooltip
from .markup import Markup, element
from .palette import model_colour
from .sorted_memberships import SortedMemberships, letter

MAX_BARS = 300  # more bars would be thinner than three pixels and make a large file
_WIDTH, _LEFT, _RIGHT = 900.0, 52.0, 892.0
_WIDEST_BAR = 64.0


class Bar(NamedTuple):
    """One client, or the mean of several neighbouring clients where there are too many to draw one bar each."""

    ids: tuple[str, ...]
    memberships: list[float]
    truth: list[float] | None


def make_bars(shown: SortedMemberships) -> list[Bar]:
    """At most MAX_BARS bars, from left to right."""
    size = -(-len(shown.ids) // MAX_BARS)
    starts = range(0, len(shown.ids), size)

    def mean(rows: Tensor, start: int) -> list[float]:
        return [float(value) for value in rows[start : start + size].mean(0)]

    return [
        Bar(
            shown.ids[start : start + size],
            mean(shown.memberships, start),
            None if shown.truth is None else mean(shown.truth, start),
        )
        for start in starts
    ]


def membership_bars(shown: SortedMemberships, title: str | None = None) -> Markup:
    """A standalone picture if a title is given, otherwise a drawing for a page that has its own title."""
    top = 74.0 if title else 22.0
    bottom, strip = top + 130, top + 140
    end = strip + (38 if shown.truth is not None else 14)
    bars = make_bars(shown)
    pitch = min(_WIDEST_BAR, (_RIGHT - _LEFT) / len(bars))
    gap = min(2.0, pitch / 8) if pitch > 4 else 0.0
    parts: list[Markup] = []
    if title:
        parts.append(text(_LEFT, 22, title, font_size=16, font_weight="bold"))
        parts.append(text(_LEFT, 42, "Each bar is a client, and each colour is a canonical model that clients share."))
    for share in (0.0, 0.5, 1.0):
        y = Axis(0, 1, bottom, top).at(share)
        parts.append(text(_LEFT - 6, y + 4, f"{share:.0%}", anchor="end"))
    parts += _headings(shown, top - 8, pitch * len(bars) / len(shown.ids))
    columns: list[Markup] = []
    for at, bar in enumerate(bars):
        x = _LEFT + at * pitch
        name = _bar_name(bar)
        column = _stack(bar.memberships, x, pitch - gap, bottom, top)
        tip = f"{name}: {_share_text(bar.memberships)}"
        columns.append(element("g", tooltip(tip), *column, class_="client"))
        if bar.truth is not None:
            true = _stack(bar.truth, x, pitch - gap, strip + 14, strip)
            tip = f"{name}, truth: {_share_text(bar.truth)}"
            columns.append(element("g", tooltip(tip), *true, class_="truth"))
    parts.append(element("g", *columns, shape_rendering="crispEdges"))  # no seams between bars
    if shown.truth is not None:
        parts.append(text(_LEFT - 6, strip + 11, "truth", anchor="end"))
    parts.append(text(_LEFT, end - 2, _axis_label(len(shown.ids), len(bars))))
    label = title or f"Memberships of {len(shown.ids)} clients in {shown.k} canonical models, by {shown.label}"
    return drawing(_WIDTH, end + 8, label, *parts, standalone=title is not None)


def empty_picture(title: str) -> Markup:
    """The picture if no run has memberships to show."""
    note = "No run here has more than one canonical model, so there are no memberships to show."
    lines = (text(_LEFT, 22, title, font_size=16, font_weight="bold"), text(_LEFT, 46, note))
    return drawing(_WIDTH, 64, note, *lines, standalone=True)


def _stack(shares: list[float], x: float, width: float, bottom: float, top: float) -> list[Markup]:
    """Stacked rectangles that fill the height. Edges are rounded instead of heights, so that the heights add up."""
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


def _headings(shown: SortedMemberships, y: float, width: float) -> list[Markup]:
    """The letter of each model above its clients and, where there is room, the number of clients."""
    parts, before = [], 0
    for j, count in enumerate(shown.counts):
        long = f"{letter(j)} · {count} client{'s' * (count != 1)}"
        for heading in (long, f"{letter(j)} · {count}", letter(j)):
            if LETTER_WIDTH * len(heading) < count * width:
                parts.append(text(_LEFT + (before + count / 2) * width, y, heading, anchor="middle"))
                break
        before += count
    return parts


def _bar_name(bar: Bar) -> str:
    if len(bar.ids) == 1:
        return bar.ids[0]
    return f"mean of {len(bar.ids)} clients, {bar.ids[0]} to {bar.ids[-1]}"


def _share_text(shares: list[float]) -> str:
    large = sorted(((share, j) for j, share in enumerate(shares) if share >= 0.005), reverse=True)
    return ", ".join(f"{letter(j)} {share:.0%}" for share, j in large)


def _axis_label(clients: int, bars: int) -> str:
    if clients == 1:
        return "1 client"
    many = f" (a bar is the mean of up to {-(-clients // bars)})" if bars < clients else ""
    return f"{clients} clients{many}, sorted by their largest membership"
