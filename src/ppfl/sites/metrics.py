"""Metrics of predictions: any function (prediction, target) -> number, or an object of torchmetrics.

A metric that is no mean over samples, such as F1, is computed for each client on its own predictions, and once on those
of all clients of a site. What leaves a site are sums: of the clients' values, their squares and a histogram, and the
value on all samples times their number, so that several sites are combined by their numbers of samples.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..core.losses import IGNORED
from ..errors import ModelError, SettingError
from .histogram import histogram

MetricFunction = Callable[[Tensor, Tensor], Any]
_TAKEN = ("loss", "round", "objective", "stationarity")  # in the record of a round
Metrics = Mapping[str, Any] | Iterable[Any]  # by name, or such as have a name of their own


@dataclass(frozen=True)
class PredictionMetric:
    """A function (prediction, target) -> number, on the CPU. Predictions are means, after the inverse link.

    Of sequences, one row per label that is not padding is given: predictions (rows, classes) and labels (rows,).
    A function returns nan where it is not defined, such as AUC with one class; that client is then left out.
    """

    function: MetricFunction
    higher_is_better: bool = True  # which tenth of the clients is the worst

    def __call__(self, prediction: Tensor, target: Tensor) -> float:
        """The value on these samples."""
        if prediction.dim() == target.dim() + 1 and target.dim() > 1 and not target.is_floating_point():
            counted = target != IGNORED
            prediction, target = prediction[counted], target[counted]
        return float(self.function(prediction, target))


def as_metrics(metrics: Metrics) -> dict[str, PredictionMetric]:
    """Metrics by name; those of a list are named after their function or class.

    >>> def bias(prediction, target):
    ...     return (prediction - target).mean()
    >>> list(as_metrics([bias]))
    ['bias']
    """
    if isinstance(metrics, str) or not isinstance(metrics, Iterable):
        raise SettingError(f"metrics is {metrics!r}; give a dict of functions by name, or a list of functions")
    named = metrics.items() if isinstance(metrics, Mapping) else [(_name_of(metric), metric) for metric in metrics]
    found: dict[str, PredictionMetric] = {}
    for name, metric in named:
        if not str(name).isidentifier() or name in found or name in _TAKEN:
            raise SettingError(f"a metric is named {name!r}; give each a name of its own, of letters and digits")
        found[str(name)] = _as_metric(metric)
    return found


class KeptPredictions:
    """Predictions and targets of every client, kept until a split has been passed through."""

    def __init__(self, metrics: Mapping[str, PredictionMetric], n_clients: int) -> None:
        self.metrics, self._kept = metrics, [list[tuple[Tensor, Tensor]]() for _ in range(n_clients)]

    def add(self, who: Tensor, prediction: Tensor, target: Tensor, real: Tensor) -> None:
        """The first `real` (C,) of the samples (C, B, ...) of these clients."""
        for at, client in enumerate(who.tolist()):
            n = int(real[at])
            self._kept[client].append((prediction[at, :n].cpu(), target[at, :n].cpu()))

    def values(self, ids: Sequence[str]) -> tuple[dict[str, Tensor], dict[str, float]]:
        """Of each metric: one value per client (M,), nan where there is none, and the one on all samples."""
        joined = [tuple(map(torch.cat, zip(*parts, strict=True))) if parts else None for parts in self._kept]
        scored = [pair for pair in joined if pair is not None]
        everything = tuple(map(torch.cat, zip(*scored, strict=True))) if scored else None
        values: dict[str, Tensor] = {}
        pooled: dict[str, float] = {}
        for name, metric in self.metrics.items():
            of_clients = [_value(name, metric, pair, client) for client, pair in zip(ids, joined, strict=True)]
            values[name] = torch.tensor(of_clients, dtype=torch.float64)
            pooled[name] = _value(name, metric, everything, "all together")
        return values, pooled


def metric_sums(values: Tensor, pooled: float, samples: float) -> dict[str, Tensor]:
    """What is reported of all clients together, from values (M,) of which some may not be defined."""
    defined = values[values.isfinite()]
    known = math.isfinite(pooled)
    return {
        "clients": torch.tensor(float(len(defined)), dtype=torch.float64),
        "sum": defined.sum(),
        "squared": defined.square().sum(),
        "pooled": torch.tensor(pooled * samples if known else 0.0, dtype=torch.float64),
        "samples": torch.tensor(samples if known else 0.0, dtype=torch.float64),
        "histogram": histogram(defined),
    }


def _value(name: str, metric: PredictionMetric, pair: Any, client: str) -> float:
    if pair is None:
        return math.nan
    try:
        return metric(*pair)
    except Exception as error:  # code of the user: whatever it raises
        raise ModelError(
            f"metric {name!r} failed on predictions {tuple(pair[0].shape)} and targets {tuple(pair[1].shape)} of "
            f"{client!r}: {(str(error) or type(error).__name__).splitlines()[0]}; return nan where it is not defined"
        ) from error


def _as_metric(metric: Any) -> PredictionMetric:
    if isinstance(metric, PredictionMetric):
        return metric
    if isinstance(metric, type):
        raise SettingError(f"a metric is the class {metric.__name__}; give an object of it")
    if all(hasattr(metric, part) for part in ("update", "compute", "reset")):  # of torchmetrics
        own = copy.deepcopy(metric)

        def computed(prediction: Tensor, target: Tensor) -> Any:
            own.reset()
            own.update(prediction, target)
            return own.compute()

        return PredictionMetric(computed, getattr(metric, "higher_is_better", True) is not False)
    if not callable(metric):
        raise SettingError(f"a metric is {metric!r}; give a function (prediction, target) -> number")
    return PredictionMetric(metric)


def _name_of(metric: Any) -> str:
    function = metric.function if isinstance(metric, PredictionMetric) else metric
    return str(getattr(function, "__name__", type(function).__name__))
