"""A fitted population in a notebook: its score, how it got there, and the share of every canonical model.

Colours are those of the notebook, light or dark: text is in its colour, lines are a faint shade of it. Styles are
written into the elements, because notebooks remove style sheets from what they do not trust.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from ..runs import metric_name
from ..server import Record
from .drawing import axis, drawing, text, tooltip
from .markup import Markup, element, escape, join
from .metric import show_score
from .palette import model_colour
from .sorted_memberships import MIXED_BELOW, letter

WIDTH = 420.0
POINTS = 200  # of a curve, which is not wider than twice as many pixels
NAMED = 8  # canonical models whose share is written out
_CARD = (
    "display:inline-block;max-width:42rem;padding:.7rem .9rem;border:1px solid rgba(128,128,128,.4);"
    "border-radius:6px;font-family:system-ui,-apple-system,'Segoe UI',Roboto,Helvetica,Arial,sans-serif;"
    "font-size:13px;line-height:1.5"
)
_FACTS = "display:grid;grid-template-columns:max-content 1fr;gap:0 1rem;margin:.25rem 0 0"


class FittedFacts(NamedTuple):
    """What is shown of a fitted population."""

    method: str  # its title
    settings: str  # those that differ from their defaults
    rounds: int  # of the state that was kept
    clients: int
    memberships: Tensor | None  # (M, K); None where clients have no canonical models in common
    history: Sequence[Record]

    def html(self) -> Markup:
        """One element for a notebook: a title, facts as pairs of a name and a value, and drawings below them."""
        facts = [
            ("method", self.settings),
            ("rounds", f"{self.rounds:,}" + (f" (of {ran:,} that ran)" if (ran := self._ran()) > self.rounds else "")),
            ("clients", f"{self.clients:,}"),
        ]
        metric, record = self._scored()
        if metric is not None:
            facts.append((metric, _scores(metric, record)))
        drawn = [_curve(self.history, metric or "loss"), self._shares_bar()]
        if (mixed := self._mixed()) is not None:
            facts.append(("mixed", f"{_count(mixed, 'client')} (largest membership below {MIXED_BELOW:.0%})"))
        rows = []
        for name, value in facts:
            rows += [element("div", escape(name), style="opacity:.65")]
            rows += [element("div", escape(value), style="margin:0;overflow-wrap:anywhere")]
        heading = escape(f"Population fitted by {self.method}")
        title = element("div", heading, style="font-weight:600;overflow-wrap:anywhere")
        below = [part for part in drawn if part is not None]
        return element("div", title, element("div", *rows, style=_FACTS), *below, style=_CARD)

    def line(self) -> str:
        """In one line."""
        metric, record = self._scored()
        parts = [f"{self.settings}, {_count(self.rounds, 'round')}, {_count(self.clients, 'client')}"]
        if metric is not None:
            parts.append(f"{metric} {show_score(metric, record[metric])}")
        if shares := self._shares():
            dots = " …" if len(shares) > NAMED else ""
            parts.append("shares " + " ".join(f"{share:.0%}" for share in shares[:NAMED]) + dots)
        return f"<Fitted {', '.join(parts)}>"

    def _ran(self) -> int:
        return int(self.history[-1]["round"]) if self.history else self.rounds

    def _scored(self) -> tuple[str | None, Record]:
        """The scores of the state that was kept, or the last ones before it."""
        for record in reversed(self.history):
            if record["round"] <= self.rounds and (metric := metric_name(record)) is not None:
                return metric, record
        return None, {}

    def _shares(self) -> list[float]:
        """Of the canonical models, from the largest to the smallest; empty where there is but one."""
        if self.memberships is None or self.memberships.shape[1] < 2:
            return []
        return sorted((float(share) for share in self.memberships.double().mean(0)), reverse=True)

    def _mixed(self) -> int | None:
        if self.memberships is None or self.memberships.shape[1] < 2:
            return None
        return int((self.memberships.amax(1) < MIXED_BELOW).sum())

    def _shares_bar(self) -> Markup | None:
        shares = self._shares()
        if not shares:
            return None
        parts, x, labels = [text(0, 12, "share of each canonical model", opacity=0.65)], 0.0, []
        for at, share in enumerate(shares):
            width, name = share * WIDTH, f"{letter(at)} {share:.0%}"
            block = element("rect", x=x, y=20, width=width, height=16, fill=model_colour(at))
            parts.append(element("g", tooltip(name), block))
            if at < NAMED and width > 8 * len(name):
                labels.append(text(x + width / 2, 52, name, anchor="middle"))
            x += width
        return _figure(WIDTH, 58, "share of each canonical model", *parts, *labels)


def _count(number: int, thing: str) -> str:
    """A number with its thing, in the plural unless it is one."""
    return f"{number:,} {thing}{'s' * (number != 1)}"


def _scores(metric: str, record: Record) -> str:
    mean, worst = (show_score(metric, record.get(f"{metric}_{name}")) for name in ("mean", "worst_tenth"))
    return f"{show_score(metric, record[metric])} (clients: mean {mean}, worst tenth {worst})"


def _curve(history: Sequence[Record], name: str) -> Markup | None:
    """A figure over the rounds, as one small line."""
    points = [(int(record["round"]), float(record[name])) for record in history if name in record]
    points = [point for point in points if math.isfinite(point[1])]
    if len(points) < 2:
        return None
    points = points[:: -(-len(points) // POINTS)] + points[-1:]
    x_axis, y_axis = axis([x for x, _ in points], 0, WIDTH - 60), axis([y for _, y in points], 58, 22)
    line = "M" + "L".join(f"{x_axis.at(x):.1f} {y_axis.at(y):.1f}" for x, y in points)
    (x, y), title = points[-1], f"{name} by round"
    return _figure(
        WIDTH,
        64,
        title,
        text(0, 12, title, opacity=0.65),
        element("path", d=line, fill="none", stroke=model_colour(0), stroke_width=2, stroke_linejoin="round"),
        element("circle", cx=x_axis.at(x), cy=y_axis.at(y), r=3, fill=model_colour(0)),
        text(WIDTH - 52, y_axis.at(y) + 4, show_score(name, y)),
    )


def _figure(width: float, height: float, label: str, *parts: Markup) -> Markup:
    picture = drawing(width, height, label, *parts)
    return element("div", join([picture]), style=f"max-width:{width:g}px;margin-top:.6rem")
