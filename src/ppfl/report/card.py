"""A fitted population in a notebook: its score, and the share of every canonical model.

Colours are those of the notebook, light or dark: text is in its colour, lines are a faint shade of it. Styles are
written into the elements, because notebooks remove style sheets from what they do not trust.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from ..runs import metric_name
from ..server import Record
from .page import environment
from .theme import CLEAR, metric, model_name, plural, show_share

_NAMED = 8  # canonical models whose share is written out


class FittedFacts(NamedTuple):
    """What is shown of a fitted population."""

    method: str  # its title
    settings: str  # those that differ from their defaults
    rounds: int  # of the state that was kept
    clients: int
    memberships: Tensor | None  # (M, K); None where clients have no canonical models in common
    history: Sequence[Record]

    def html(self) -> str:
        """One element for a notebook: a title, facts as pairs of a name and a value, and a bar of shares."""
        ran = int(self.history[-1]["round"]) if self.history else self.rounds
        more = f" (of {ran:,} that ran)" if ran > self.rounds else ""
        facts = {"method": self.settings, "rounds": f"{self.rounds:,}{more}", "clients": f"{self.clients:,}"}
        name, record = self._scored()
        if name is not None:
            show = metric(name).show
            mean, worst = (show(record.get(f"{name}_{part}")) for part in ("mean", "worst_tenth"))
            facts[name] = f"{show(record[name])} (client mean {mean}, worst tenth {worst})"
        if self.memberships is not None and self.shares:
            mixed = int((self.memberships.amax(1) < CLEAR).sum())
            facts["mixed"] = f"{plural(mixed, 'client')} (no membership of {show_share(CLEAR)})"
        shares = [(model_name(at), share) for at, share in enumerate(self.shares)]
        title = f"Population fitted by {self.method}"
        return environment().get_template("card.html.j2").render(title=title, facts=facts, shares=shares, named=_NAMED)

    def line(self) -> str:
        """In one line."""
        name, record = self._scored()
        parts = [f"{self.settings}, {plural(self.rounds, 'round')}, {plural(self.clients, 'client')}"]
        if name is not None:
            parts.append(f"{name} {metric(name).show(record[name])}")
        if self.shares:
            dots = " …" if len(self.shares) > _NAMED else ""
            parts.append("shares " + " ".join(f"{share:.0%}" for share in self.shares[:_NAMED]) + dots)
        return f"<Fitted {', '.join(parts)}>"

    def _scored(self) -> tuple[str | None, Record]:
        """The scores of the state that was kept, or the last ones before it."""
        for record in reversed(self.history):
            if record["round"] <= self.rounds and (name := metric_name(record)) is not None:
                return name, record
        return None, {}

    @property
    def shares(self) -> list[float]:
        """Of the canonical models, from the largest to the smallest; empty where there is but one."""
        if self.memberships is None or self.memberships.shape[1] < 2:
            return []
        return sorted((float(share) for share in self.memberships.double().mean(0)), reverse=True)
