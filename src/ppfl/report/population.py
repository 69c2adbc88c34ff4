"""What the page of a fitted table reads: plain values, whoever found them."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from .metric import Metric, recorded_metric


class Term(Protocol):
    """A line of the table of coefficients."""

    @property
    def outcome(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def values(self) -> Sequence[float]:
        """Of the canonical models."""

    @property
    def pooled(self) -> float:
        """Of one model for all."""

    @property
    def is_shared(self) -> bool: ...
    @property
    def reach(self) -> Sequence[float] | None:
        """How far each moves the predictor; no bars without."""

    @property
    def pooled_reach(self) -> float: ...


class Score(Protocol):
    """A way to predict, on held-out rows."""

    @property
    def label(self) -> str: ...
    @property
    def figures(self) -> Mapping[str, float]: ...
    @property
    def seconds(self) -> float: ...


class Candidate(Protocol):
    """A number of canonical models that was tried."""

    @property
    def k(self) -> int: ...
    @property
    def bic(self) -> float: ...
    @property
    def aic(self) -> float: ...
    @property
    def score(self) -> Score | None: ...


class Population(NamedTuple):
    """Canonical models go from the one with the largest share to the smallest."""

    title: str
    command: str
    notes: Sequence[str]  # on what was done to the table
    client: str  # columns
    target: str
    features: Sequence[str]
    family: str
    classes: Sequence[str]  # none for numbers
    mix: str  # what a membership mixes, weights or predictions
    rows: int
    held_out_rows: int
    ids: Sequence[str]  # M
    sizes: Sequence[int]  # (M,), rows
    memberships: Sequence[Sequence[float]]  # (M, K)
    clear: Sequence[int]  # (K,), clients that are at least `clear_from` of it
    clear_from: float
    average: Sequence[Term]  # predictions for an average row
    coefficients: Sequence[Term]
    candidates: Sequence[Candidate]
    scores: Sequence[Score]  # ours first; none where nothing was held out

    @property
    def k(self) -> int:
        return len(self.memberships[0])

    @property
    def shares(self) -> list[float]:
        """(K,), of the population."""
        return [sum(column) / len(self.ids) for column in zip(*self.memberships, strict=True)]

    @property
    def mixed(self) -> int:
        """Clients that are clearly none."""
        return len(self.ids) - sum(self.clear)

    @property
    def best_predicting(self) -> int | None:
        """Another number of canonical models that predicts held-out rows better than the one taken."""
        if not self.metrics:
            return None
        metric = self.metrics[0]
        tried = {c.k: c.score.figures[metric.name] for c in self.candidates if c.score}
        best = min(tried, key=tried.__getitem__, default=self.k)
        return best if best != self.k else None

    @property
    def metrics(self) -> list[Metric]:
        """What held-out rows are judged by, the first one counts."""
        return [recorded_metric([name]) for name in self.scores[0].figures] if self.scores else []
