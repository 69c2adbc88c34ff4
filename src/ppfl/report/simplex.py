"""Where clients are between canonical models: on a line for two of them, in a triangle for three."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from .drawing import LETTER, Axis, drawing, hint, marks, rule, text
from .markup import Markup, element, shortened
from .palette import mixed_colour, model_colour
from .portrait import letter

MOST_DOTS = 2000
_WIDTH = 900.0
MOST_STACKED = 400  # dots on a line; more clients become bars
_BINS = 40
_TALLEST = 180.0
_NAMED = 40  # clients; more names would hide each other
_LONGEST_NAME = 14
_MARKED = 0.8  # the line beyond which a client is clear

Place = Callable[[Sequence[float]], tuple[float, float]]  # where shares are in the picture


class Pile(NamedTuple):
    """What stands on a line at height 0."""

    height: float
    parts: list[Markup]


class Dot(NamedTuple):
    x: float
    y: float
    name: str
    shares: Sequence[float]


def simplex_chart(ids: Sequence[str], memberships: Sequence[Sequence[float]]) -> Markup:
    """Of two or three canonical models."""
    return (line_of_clients if len(memberships[0]) == 2 else triangle_of_clients)(ids, memberships)


def line_of_clients(ids: Sequence[str], memberships: Sequence[Sequence[float]]) -> Markup:
    """Clients that are alike on top of each other, from wholly the first model to wholly the second."""
    along = Axis(0, 1, 60, _WIDTH - 60)
    pile = (_dots if len(ids) <= MOST_STACKED else _bars)(ids, memberships, along)
    bottom = 14 + pile.height
    below = [rule(0, along.start, along.end), *marks(along, 18, "{:.0%}".format, about=10)]
    below.append(text((along.start + along.end) / 2, 38, f"share of {letter(1)}", anchor="middle"))
    for at, (x, anchor) in enumerate(((along.start, "start"), (along.end, "end"))):
        style = {"fill": model_colour(at), "font_weight": "bold"}
        below.append(text(x, 38, f"wholly {letter(at)}", anchor=anchor, **style))
    moved = element("g", *pile.parts, *below, transform=f"translate(0 {bottom:.1f})")
    return drawing(_WIDTH, bottom + 48, f"{len(ids)} clients between {letter(0)} and {letter(1)}", moved)


def triangle_of_clients(ids: Sequence[str], memberships: Sequence[Sequence[float]]) -> Markup:
    """The nearer a client is to a corner, the more of that model it is."""
    side, top, middle = 480.0, 34.0, _WIDTH / 2
    height = side * math.sqrt(3) / 2
    corners = [(middle - side / 2, top + height), (middle + side / 2, top + height), (middle, top)]

    def place(shares: Sequence[float]) -> tuple[float, float]:
        pairs = list(zip(shares, corners, strict=True))
        return sum(share * x for share, (x, _) in pairs), sum(share * y for share, (_, y) in pairs)

    parts = _grid(place)
    shown = [round(i * (len(ids) - 1) / max(1, min(len(ids), MOST_DOTS) - 1)) for i in range(min(len(ids), MOST_DOTS))]
    radius = 6.0 if len(ids) <= 60 else 4.5 if len(ids) <= 300 else 3.0
    dots = [Dot(*place(memberships[i]), ids[i], memberships[i]) for i in shown]
    parts += [_circle(dot, radius) for dot in dots]
    if len(ids) <= _NAMED:
        parts += _names(dots, radius)
    shares = [sum(column) / len(ids) for column in zip(*memberships, strict=True)]
    x, y = place(shares)
    cross = f"M{x - 7:.1f} {y:.1f}h14M{x:.1f} {y - 7:.1f}v14"
    said = hint(f"mean of all clients: {_said(shares)}")
    parts.append(element("path", said, d=cross, stroke="currentColor", stroke_width=2.2, fill="none"))
    for at, ((x, y), (right, down), anchor) in enumerate(
        zip(corners, ((-12, 6), (12, 6), (0, -14)), ("end", "start", "middle"), strict=True)
    ):
        said_at = f"{letter(at)} · {shares[at]:.0%}"
        colour = model_colour(at)
        parts.append(text(x + right, y + down, said_at, anchor=anchor, font_size=15, font_weight="bold", fill=colour))
    return drawing(_WIDTH, top + height + 24, f"{len(ids)} clients between three canonical models", *parts)


def _dots(ids: Sequence[str], memberships: Sequence[Sequence[float]], along: Axis) -> Pile:
    """A dot a client, as small as the tallest stack wants it."""
    radius = 7.0
    while True:
        columns: dict[int, list[int]] = {}
        for i in sorted(range(len(ids)), key=lambda i: memberships[i][1]):
            columns.setdefault(int((along.at(memberships[i][1]) - along.start) // (2 * radius)), []).append(i)
        height = 2 * radius * max(map(len, columns.values()))
        if height <= _TALLEST or radius < 1.5:
            break
        radius *= 0.85
    return Pile(
        height,
        [
            _circle(Dot(along.start + (2 * at + 1) * radius, -(2 * above + 1) * radius, ids[i], memberships[i]), radius)
            for at, stack in columns.items()
            for above, i in enumerate(stack)
        ],
    )


def _bars(ids: Sequence[str], memberships: Sequence[Sequence[float]], along: Axis) -> Pile:
    """A bar for all clients that have about as much of the second model."""
    counts = [0] * _BINS
    for membership in memberships:
        counts[min(_BINS - 1, int(membership[1] * _BINS))] += 1
    width = (along.end - along.start) / _BINS - 1
    bars = []
    for at, count in enumerate(counts):
        height = _TALLEST * count / max(counts)
        said = hint(f"{count} clients are {at / _BINS:.1%} to {(at + 1) / _BINS:.1%} {letter(1)}")
        middle = (at + 0.5) / _BINS
        place = {"x": along.at(at / _BINS) + 0.5, "y": -height, "width": width, "height": height}
        bars.append(element("rect", said, **place, fill=mixed_colour([1 - middle, middle])))
    return Pile(_TALLEST, bars)


def _grid(place: Place) -> list[Markup]:
    """The border, and lines of clients that have as much of one model."""
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
            seen = 0.3 if share == _MARKED else 0.12
            parts.append(element("line", x1=x1, y1=y1, x2=x2, y2=y2, stroke="currentColor", opacity=seen))
    return parts


def _circle(dot: Dot, radius: float) -> Markup:
    said = hint(f"{dot.name}: {_said(dot.shares)}")
    return element("circle", said, cx=dot.x, cy=dot.y, r=radius - 0.3, fill=mixed_colour(dot.shares), class_="client")


def _names(dots: Sequence[Dot], radius: float) -> list[Markup]:
    """Beside their dots, where they hide no other."""
    taken = [(dot.x - radius, dot.x + radius, dot.y) for dot in dots]
    parts = []
    for dot in dots:
        name = shortened(dot.name, _LONGEST_NAME)
        start = dot.x + radius + 3
        end = start + LETTER * len(name)
        if any(start < high and low < end and abs(y - dot.y) < 10 for low, high, y in taken):
            continue
        taken.append((start, end, dot.y))
        parts.append(text(start, dot.y + 3.5, name, font_size=10, opacity=0.8))
    return parts


def _said(shares: Sequence[float]) -> str:
    return ", ".join(f"{letter(at)} {share:.0%}" for at, share in enumerate(shares) if share >= 0.005)
