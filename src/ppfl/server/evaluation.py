"""Scores of all clients' personal models, from sums over clients, or client by client where sites report that."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..algorithms.contract import Method, Problem
from ..core.losses import Loss
from ..core.trees import Tree
from ..errors import SettingError
from ..sites import Evaluate, PredictionMetric, Reply
from .loop import MAIN, in_roster_order
from .transports import Transport

FIGURES = ("", "_mean", "_worst_tenth", "_sd")  # what a record has of a score, after the score's name


class Scores(NamedTuple):
    """The loss, its score or one metric of predictions on one split. A client that has none is left out; nan where
    nobody has one.

    `pooled` is the mean over all samples; of a metric, its value on all samples of a site together, where several sites
    are weighted by their numbers of samples. A squared error is shown by its root, after the mean was taken.
    """

    sums: dict[str, Tensor]  # as `sites.evaluation.SplitScores.sums` has them
    rows: Tensor | None  # (M,), one per client, nan where it has none; None: not reported client by client
    higher_is_better: bool = False
    metric: Callable[[Tensor], Tensor] = torch.clone  # what is shown of a mean: `Loss.metric`

    @property
    def values(self) -> Tensor | None:
        """(M,), one per client, nan where it has none; None where they are not reported client by client."""
        return None if self.rows is None else self.metric(self.rows)

    @property
    def pooled(self) -> float:
        return float(self.metric(self.sums["total"] / self.sums["samples"]))

    @property
    def mean(self) -> float:
        """Over clients, all alike."""
        return float(self.metric(self.sums["sum"] / self.sums["clients"]))

    @property
    def sd(self) -> float:
        """Over clients, of what a record shows: the root of a squared error, and otherwise the values."""
        mean = self.sums["shown"] / self.sums["clients"]
        return float((self.sums["shown_squared"] / self.sums["clients"] - mean.square()).clamp_min(0).sqrt())

    @property
    def weighted(self) -> float:
        """Mean over clients by their importance; for the loss, sum_i p_i f_i."""
        return float(self.sums["weighted"] / self.sums["importance"])

    @property
    def worst_tenth(self) -> float:
        """Mean over the tenth of the clients that fares worst, at least of one: exact, or from a histogram."""
        if self.rows is not None:
            ordered = self.rows[self.rows.isfinite()].sort(descending=not self.higher_is_better).values
            return float(self.metric(ordered[: max(1, len(ordered) // 10)].mean()))
        counts, totals = self.sums["histogram"] if self.higher_is_better else self.sums["histogram"].flip(1)
        worst = (counts.sum() // 10).clamp_min(1)
        taken = torch.minimum(counts.cumsum(0), worst).diff(prepend=counts.new_zeros(1))
        return float(self.metric((taken * totals / counts.clamp_min(1)).sum() / taken.sum()))

    def figures(self, name: str) -> dict[str, float]:
        """The figures of a record by name."""
        shown = {"": self.pooled, "_mean": self.mean, "_worst_tenth": self.worst_tenth, "_sd": self.sd}  # FIGURES
        return {f"{name}{key}": value for key, value in shown.items()}


class Evaluation(NamedTuple):
    """Scores of every client's own model on its own data, on one split."""

    loss: Scores
    score: Scores  # the loss's metric: accuracy for classifiers, rmse for numbers
    metrics: dict[str, Scores] = {}  # those that were asked for, by name

    def __repr__(self) -> str:
        samples, clients = (int(self.score.sums[name]) for name in ("samples", "clients"))
        return (
            f"<Evaluation of {clients} clients with {samples} samples: score {self.pooled:.4g} "
            f"(mean over clients {self.score.mean:.4g}), loss {self.loss.pooled:.4g}>"
        )

    @property
    def pooled(self) -> float:
        """The score over all samples, as in the paper."""
        return self.score.pooled


class Measured(NamedTuple):
    """Scores by split, and the memberships that clients report with them."""

    splits: dict[str, Evaluation]
    memberships: Tensor | None  # (M, K)


def evaluate(
    method: Method,
    problem: Problem,
    transport: Transport,
    server: Tree,
    splits: tuple[str, ...] = ("test",),
    *,
    session: str = MAIN,
    per_client: bool = True,
    hard: bool = False,
    metrics: Mapping[str, PredictionMetric] | None = None,
    without: tuple[str, ...] = (),
    share: float = 1.0,
) -> Measured:
    """Every client's personal model on its own data. hard: by the max rule. metrics: those that the sites have.
    without: clients that are not evaluated. share: of the clients that are evaluated. Where some are left out there are
    sums alone."""
    shared, own = method.send(problem, server, None, None)
    asked = Evaluate(session, splits, shared, own, per_client, hard, tuple(metrics or ()), without, share)
    (reply,) = transport.ask([asked])
    return read_evaluation(reply, splits, transport, problem.population.loss, metrics)


def read_evaluation(
    reply: Reply,
    splits: tuple[str, ...],
    transport: Transport,
    loss: Loss,
    metrics: Mapping[str, PredictionMetric] | None = None,
) -> Measured:
    """What a reply to `Evaluate` says."""
    rows: dict[str, Any] = in_roster_order(reply.rows, transport).values if reply.rows.values else {}

    def scores(split: str, name: str, higher_is_better: bool) -> Scores:
        prefix = f"{split}.{name}."
        sums = {key.removeprefix(prefix): v.cpu() for key, v in reply.metrics.items() if key.startswith(prefix)}
        metric = loss.metric if name == "score" else torch.clone
        return Scores(sums, rows.get(f"{split}.{name}"), higher_is_better, metric)

    better = {name: metric.higher_is_better is not False for name, metric in (metrics or {}).items()}
    found = {
        split: Evaluation(
            scores(split, "loss", higher_is_better=False),
            scores(split, "score", higher_is_better=loss.higher_is_better is True),
            {name: scores(split, name, higher_is_better) for name, higher_is_better in better.items()},
        )
        for split in splits
    }
    return Measured(found, rows.get("membership"))


def figures_of_split(
    split: str, loss: Loss, metrics: Mapping[str, PredictionMetric] | None = None
) -> dict[str, bool | None]:
    """The names of the figures that `summary` gives, and whether higher is better; None where that is not known."""
    prefix = _prefix(split)
    better = {loss.metric_name: loss.higher_is_better}
    better |= {name: metric.higher_is_better for name, metric in (metrics or {}).items()}
    found = {f"{prefix}{name}{end}": end != "_sd" and up for name, up in better.items() for end in FIGURES}
    return {**found, f"{split}_loss": False}


def _prefix(split: str) -> str:
    return "" if split == "test" else f"{split}_"


def summary(evaluation: Evaluation, split: str, loss: Loss) -> dict[str, Any]:
    """The figures of a split, as a record has them."""
    prefix = _prefix(split)
    found: dict[str, Any] = evaluation.score.figures(f"{prefix}{loss.metric_name}")
    found[f"{split}_loss"] = evaluation.loss.pooled
    for name, scores in evaluation.metrics.items():
        if f"{prefix}{name}" in found:
            raise SettingError(f"a metric is named {name!r}, as the loss's own is; give it another name")
        found |= scores.figures(f"{prefix}{name}")
    if (shown := evaluation.score.values) is not None:
        found[f"{prefix}per_client"] = [None if math.isnan(value) else round(value, 6) for value in shown.tolist()]
    return found
