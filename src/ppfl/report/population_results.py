"""The data of the page of a fitted table, as plain values."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from .metric import Metric, recorded_metric


class EffectRow(Protocol):
    """A row of the table of coefficients."""

    @property
    def outcome(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def values(self) -> Sequence[float]:
        """The coefficient in each canonical model, (K,)."""

    @property
    def pooled(self) -> float:
        """The coefficient in one model for all clients."""

    @property
    def is_shared(self) -> bool: ...
    @property
    def reach(self) -> Sequence[float] | None:
        """How far each coefficient moves the predictor, drawn as bars; None for no bars."""

    @property
    def pooled_reach(self) -> float: ...


class ScoreRow(Protocol):
    """How well one kind of model predicts held-out rows."""

    @property
    def label(self) -> str: ...
    @property
    def figures(self) -> Mapping[str, float]: ...
    @property
    def seconds(self) -> float: ...


class SelectionRow(Protocol):
    """A number of canonical models that was tried, and its criteria."""

    @property
    def k(self) -> int: ...
    @property
    def log_likelihood(self) -> float: ...
    @property
    def bic(self) -> float: ...
    @property
    def aic(self) -> float: ...
    @property
    def held_out(self) -> float | None:
        """Mean log-likelihood per row held out within clients."""

    @property
    def held_out_error(self) -> float | None:
        """The standard error of its difference to the best."""


class PopulationResults(NamedTuple):
    """Everything on the page. Canonical models are ordered from the largest share of the population to the smallest."""

    title: str
    command: str
    notes: Sequence[str]  # on how the table was prepared
    client: str  # name of the client column
    target: str  # name of the target column
    features: Sequence[str]  # names of the feature columns
    family: str
    classes: Sequence[str]  # empty if the target is a number
    mix: str  # what memberships mix: "weights" or "predictions"
    rows: int
    held_out_rows: int
    ids: Sequence[str]  # of M clients
    sizes: Sequence[int]  # (M,), rows of each client
    memberships: Sequence[Sequence[float]]  # (M, K)
    clear: Sequence[int]  # (K,), clients whose membership in the model is at least `clear_from`
    clear_from: float
    average: Sequence[EffectRow]  # predictions for an average row
    coefficients: Sequence[EffectRow]
    candidates: Sequence[SelectionRow]
    scores: Sequence[ScoreRow]  # PPFL first; empty if no rows were held out
    chosen_by: str = "the BIC"  # how the number of canonical models was chosen

    @property
    def k(self) -> int:
        return len(self.memberships[0])

    @property
    def shares(self) -> list[float]:
        """Share of each canonical model in the population, (K,)."""
        return [sum(column) / len(self.ids) for column in zip(*self.memberships, strict=True)]

    @property
    def mixed(self) -> int:
        """Number of clients without a clear model."""
        return len(self.ids) - sum(self.clear)

    @property
    def metrics(self) -> list[Metric]:
        """The metrics on held-out rows; the first one is used for rankings."""
        return [recorded_metric([name]) for name in self.scores[0].figures] if self.scores else []
