"""Scores of all clients' personal models, from sums over clients, or client by client where sites report that."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..algorithms.contract import Method, Problem
from ..core.losses import Loss
from ..core.trees import Tree
from ..errors import SettingError
from ..sites import Evaluate, PredictionMetric, Reply
from ..sites.histogram import worst_tenth
from .loop import MAIN, in_roster_order
from .transports import Transport


class MetricScores(NamedTuple):
    """One metric of predictions on one split. A client it is not defined for is left out; nan where there is no other.

    `pooled` is the metric on all samples of a site together; several sites are weighted by their numbers of samples.
    """

    sums: dict[str, Tensor]  # as `sites.metrics.metric_sums` has them
    values: Tensor | None  # (M,), nan where it is not defined; None: not reported client by client
    higher_is_better: bool

    @property
    def pooled(self) -> float:
        return float(self.sums["pooled"] / self.sums["samples"])

    @property
    def mean(self) -> float:
        """Over clients, all alike."""
        return float(self.sums["sum"] / self.sums["clients"])

    @property
    def sd(self) -> float:
        """Over clients."""
        mean = self.sums["sum"] / self.sums["clients"]
        return float((self.sums["squared"] / self.sums["clients"] - mean.square()).clamp_min(0).sqrt())

    @property
    def worst_tenth(self) -> float:
        """Mean over the tenth of the clients that fares worst: exact, or from a histogram."""
        if not self.sums["clients"]:
            return math.nan
        if self.values is None:
            return worst_tenth(self.sums["histogram"], self.higher_is_better)
        return _worst_tenth_of(self.values[self.values.isfinite()], self.higher_is_better)


class Evaluation(NamedTuple):
    """Scores on one split. Without rows, `loss`, `score` and `samples` are None."""

    sums: dict[str, Tensor]  # as `sites.evaluation.score_sums` has them
    loss: Tensor | None  # (M,), mean over samples
    score: Tensor | None  # (M,), mean over samples: accuracy for classifiers
    samples: Tensor | None  # (M,)
    metrics: dict[str, MetricScores] = {}  # those that were asked for, by name

    def __repr__(self) -> str:
        samples, clients = (int(self.sums[name]) for name in ("samples", "clients"))
        return (
            f"<Evaluation of {clients} clients with {samples} samples: score {self.pooled:.4g} "
            f"(mean over clients {self.mean:.4g}), loss {self.pooled_loss:.4g}>"
        )

    @property
    def pooled(self) -> float:
        """Mean score over samples: every client's own model on its own data, as in the paper."""
        return float(self.sums["score"] / self.sums["samples"])

    @property
    def pooled_loss(self) -> float:
        """Mean loss over samples."""
        return float(self.sums["loss"] / self.sums["samples"])

    @property
    def weighted_loss(self) -> float:
        """sum_i p_i f_i."""
        return float(self.sums["importance_loss"] / self.sums["importance"])

    @property
    def per_client(self) -> Tensor | None:
        """Scores of the clients that have samples."""
        return None if self.score is None or self.samples is None else self.score[self.samples > 0]

    @property
    def mean(self) -> float:
        """Mean score over clients, all alike."""
        return float(self.sums["client_score"] / self.sums["clients"])

    def metric_sd(self) -> float:
        """Standard deviation of the metric over clients."""
        mean = self.sums["metric"] / self.sums["clients"]
        return float((self.sums["metric_squared"] / self.sums["clients"] - mean.square()).clamp_min(0).sqrt())

    def worst_tenth(self, higher_is_better: bool = True) -> float:
        """Mean score over the tenth of the clients that fares worst: exact, or from a histogram."""
        scores = self.per_client
        if scores is None:
            return worst_tenth(self.sums["histogram"], higher_is_better)
        return _worst_tenth_of(scores, higher_is_better)


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
    without: clients that are not part of the sums. share: of the clients that are evaluated; below 1 there are sums
    alone."""
    shared, own = method.send(problem, server, None, None)
    asked = Evaluate(session, splits, shared, own, per_client, hard, tuple(metrics or ()), without, share)
    (reply,) = transport.ask([asked])
    return read_evaluation(reply, splits, transport, metrics)


def read_evaluation(
    reply: Reply, splits: tuple[str, ...], transport: Transport, metrics: Mapping[str, PredictionMetric] | None = None
) -> Measured:
    """What a reply to `Evaluate` says."""
    rows: dict[str, Any] = in_roster_order(reply.rows, transport).values if reply.rows.values else {}

    def of_split(split: str) -> Evaluation:
        prefix = f"{split}."
        sums = {name.removeprefix(prefix): v.cpu() for name, v in reply.metrics.items() if name.startswith(prefix)}
        found = {
            name: MetricScores(_fields_of(sums, name), rows.get(f"{split}.{name}.values"), metric.higher_is_better)
            for name, metric in (metrics or {}).items()
        }
        loss, score, samples = (rows.get(f"{split}.{name}") for name in ("loss", "score", "samples"))
        return Evaluation(sums, loss, score, samples, found)

    return Measured({split: of_split(split) for split in splits}, rows.get("membership"))


def summary(evaluation: Evaluation, split: str, loss: Loss) -> dict[str, Any]:
    """The figures of a split, as a record has them."""
    prefix = "" if split == "test" else f"{split}_"

    def metric(score: float) -> float:
        return float(loss.metric(torch.tensor(score, dtype=torch.float64)))

    found: dict[str, Any] = {
        f"{prefix}{loss.metric_name}": metric(evaluation.pooled),
        f"{prefix}{loss.metric_name}_mean": metric(evaluation.mean),
        f"{prefix}{loss.metric_name}_sd": evaluation.metric_sd(),
        f"{prefix}{loss.metric_name}_worst_tenth": metric(evaluation.worst_tenth(loss.metric_name == "accuracy")),
        f"{split}_loss": evaluation.pooled_loss,
    }
    for name, scores in evaluation.metrics.items():
        figures = {"": scores.pooled, "_mean": scores.mean, "_sd": scores.sd, "_worst_tenth": scores.worst_tenth}
        if f"{prefix}{name}" in found:
            raise SettingError(f"a metric is named {name!r}, as the loss's own is; give it another name")
        found |= {f"{prefix}{name}{figure}": value for figure, value in figures.items()}
    if evaluation.score is not None and evaluation.samples is not None:
        each = zip(loss.metric(evaluation.score).tolist(), evaluation.samples.tolist(), strict=True)
        found[f"{prefix}per_client"] = [round(value, 6) if samples > 0 else None for value, samples in each]
    return found


def _fields_of(sums: dict[str, Tensor], metric: str) -> dict[str, Tensor]:
    prefix = f"{metric}."
    return {name.removeprefix(prefix): value for name, value in sums.items() if name.startswith(prefix)}


def _worst_tenth_of(scores: Tensor, higher_is_better: bool) -> float:
    ordered = scores.sort(descending=not higher_is_better).values
    return float(ordered[: max(1, len(ordered) // 10)].mean())
