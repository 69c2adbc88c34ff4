"""Every client's personal model on its own data, at a site: the loss, its score, and metrics of predictions.

Each of them is one number per client, and all of them leave a site as the same sums over its clients; also the worst
tenth, which comes from a histogram. The clients' own numbers are rows, for runs that ask for them.

A metric is any function (prediction, target) -> number, or an object of torchmetrics. One that is no mean over samples,
such as F1, is computed for each client on its own predictions, and once on those of all clients of a site; several
sites are combined by their numbers of samples.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..algorithms.local.batches import LocalData
from ..core.backends import Backend
from ..core.losses import IGNORED, SCORES, Loss
from ..core.population import Models
from ..data import Samples
from ..data.samples import similar_sizes
from ..errors import ModelError, SettingError
from .totals import Spread

BLOCK_BYTES = 16 * 2**20
BINS = 512
_TAKEN = ("loss", "score", "round", "objective", "stationarity")  # in a reply, or in the record of a round
Metrics = Mapping[str, Any] | Iterable[Any]  # by name, or such as have a name of their own
Predictions = tuple[Tensor, Tensor]  # with their targets


@dataclass(frozen=True)
class PredictionMetric:
    """A function (prediction, target) -> number, on the CPU. Predictions are means, after the inverse link.

    Of sequences, one row per label that is not padding is given: predictions (rows, classes) and labels (rows,).
    A function returns nan where it is not defined, such as AUC with one class; that client is then left out. It says
    which way is better by an attribute `higher_is_better`, as objects of torchmetrics do; early stopping and the worst
    tenth of the clients go by it.
    """

    function: Callable[[Tensor, Tensor], Any]
    higher_is_better: bool | None = None  # None: not known; the worst tenth is then the lowest

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
        found[str(name)] = _as_metric(metric, SCORES.get(str(name)))
    return found


class SplitScores(NamedTuple):
    """One number per client for each of the loss, its score and the metrics that were asked for."""

    values: dict[str, Tensor]  # (N,), float64; nan where a client has none
    samples: Tensor  # (N,), how many each client has
    pooled: dict[str, float]  # of each metric, on the samples of all these clients together

    def sums(self, importance: Tensor, loss: Loss, fewest: float = 0) -> dict[str, Tensor]:
        """What is reported of all clients together; a client whose value is not finite is only counted.

        `shown` is what a record shows: the root of a squared error, and otherwise the value as it is. Sums over
        effectively fewer clients than `fewest` are 0, and bins of the histogram with fewer are joined.
        """
        found: dict[str, Tensor] = {}
        for name, all_values in self.values.items():
            finite = all_values.isfinite()
            values, n, p = all_values[finite], self.samples[finite], importance[finite].double()
            shown = loss.metric(values) if name == "score" else values
            total, samples = (values * n).sum(), n.sum()
            if name in self.pooled:
                known, pooled = math.isfinite(self.pooled[name]), self.pooled[name]
                total, samples = self.samples.sum() * (pooled if known else 0), self.samples.sum() * known
            sums = {
                "total": total,
                "samples": samples,
                "sum": values.sum(),
                "clients": finite.sum().double(),
                "shown": shown.sum(),
                "shown_squared": shown.square().sum(),
                "weighted": (p * values).sum(),
                "importance": p.sum(),
                "not_finite": ((self.samples > 0) & ~finite).sum().double(),
                "histogram": joined_bins(histogram(values), fewest) if fewest else histogram(values),
            }
            if fewest and any(Spread.of(weights[:, None]).is_few(fewest) for weights in (n, p)):
                sums = {field: torch.zeros_like(value) for field, value in sums.items()}
            found |= {f"{name}.{field}": value for field, value in sums.items()}
        return found


def score_clients(
    backend: Backend,
    samples: Samples,
    who: Tensor,
    clients_at: Callable[[Tensor], tuple[Models, LocalData]],
    predictions: KeptPredictions,
    hard: bool = False,
) -> SplitScores:
    """Scores of the clients at the positions `who` (N,) on their own samples.

    clients_at: the models and the data of clients at some positions. hard: by the max rule.
    """
    sizes = samples.cpu_sizes[who]
    sums = torch.zeros(3, len(who), dtype=torch.float64)
    for which in _blocks(backend, samples, sizes):
        with backend.space.frame():
            models, data = clients_at(who[which])
            models = models.hardened() if hard else models
            for batch in data.everything(block=max(1, BLOCK_BYTES // (_bytes_of(backend, samples) * len(which)))):
                n = len(batch.x)
                prediction, loss = backend.evaluate(models.first(n), batch.x, batch.y)
                score = backend.loss.score(prediction.flatten(0, 1), batch.y.flatten(0, 1)).reshape(batch.share.shape)
                means = torch.stack([loss * batch.share, score * batch.share, batch.share]).sum(dim=2)
                sums[:, which[:n]] += (means * batch.real).double().cpu()
                predictions.add(which[:n], prediction, batch.y, batch.real)
    means = sums[:2] / sums[2]
    loss, score = torch.where(means.isfinite().all(dim=0), means, math.nan)
    values, pooled = predictions.metric_values()
    return SplitScores({"loss": loss, "score": score, **values}, sizes.double(), pooled)


def _blocks(backend: Backend, samples: Samples, sizes: Tensor) -> Iterator[Tensor]:
    """Blocks of clients of similar size that have samples, as positions in `sizes`. Networks that run one client at a
    time gain nothing from a block, and would run its padding: they have blocks of one client."""
    largest_first = sizes.argsort(descending=True, stable=True)[: int((sizes > 0).sum())]
    if not len(largest_first):
        return
    per_client = int(sizes.max()) * _bytes_of(backend, samples) + backend.population.bytes_of_local_run
    most = 1 if backend.clients.one_by_one else max(1, BLOCK_BYTES // per_client)
    for run in similar_sizes(sizes[largest_first], most):
        yield largest_first[run]


def _bytes_of(backend: Backend, samples: Samples) -> int:
    """Bytes of one sample and its outputs."""
    return samples.bytes_per_sample + backend.output_bytes


class KeptPredictions:
    """Predictions and targets of every client, kept until a split has been passed through; none without metrics."""

    def __init__(self, metrics: Mapping[str, PredictionMetric], clients: Sequence[str]) -> None:
        self.metrics, self.clients = metrics, clients
        self._kept: list[list[Predictions]] = [[] for _ in clients]

    def add(self, which: Tensor, prediction: Tensor, target: Tensor, real: Tensor) -> None:
        """The first `real` (C,) of the samples (C, B, ...) of these clients."""
        for at, client in enumerate(which.tolist() if self.metrics else ()):
            n = int(real[at])
            self._kept[client].append((prediction[at, :n].cpu(), target[at, :n].cpu()))

    def metric_values(self) -> tuple[dict[str, Tensor], dict[str, float]]:
        """Of each metric: one value per client (N,), nan where there is none, and the one on all samples."""
        each = [_joined(parts) for parts in self._kept]
        everything = _joined([pair for pair in each if pair is not None])
        values: dict[str, Tensor] = {}
        pooled: dict[str, float] = {}
        for name, metric in self.metrics.items():
            found = [_value(name, metric, pair, client) for client, pair in zip(self.clients, each, strict=True)]
            values[name] = torch.tensor(found, dtype=torch.float64)
            pooled[name] = _value(name, metric, everything, "all together")
        return values, pooled


def histogram(scores: Tensor) -> Tensor:
    """(2, BINS): how many clients have a score in each bin, and the sum of their scores."""
    bins = bin_of(scores)
    counts = torch.bincount(bins, minlength=BINS).double()
    return torch.stack([counts, torch.bincount(bins, weights=scores, minlength=BINS).double()])


def joined_bins(bins: Tensor, fewest: float) -> Tensor:
    """A histogram (2, BINS) in which every bin that is not empty has so many clients: bins next to each other share
    the first one's place."""
    joined = torch.zeros_like(bins)
    at: int | None = None  # the bin that is being filled
    before = 0
    for bin in bins[0].nonzero()[:, 0].tolist():
        at = bin if at is None else at
        joined[:, at] += bins[:, bin]
        if joined[0, at] >= fewest:
            before, at = at, None
    if at is not None and at != before:  # too few are left for a bin of their own
        left = joined[:, at].clone()
        joined[:, at] = 0
        joined[:, before] += left
    return joined


def bin_of(scores: Tensor) -> Tensor:
    """Bins that grow with the score: even steps up to 1, where accuracies are, and in powers of 2 above."""
    low, high = scores.clamp(0, 1), scores.clamp_min(1).log2()
    half = BINS // 2
    return torch.where(scores <= 1, (low * (half - 1)).long(), (half + 4 * high).clamp_max(BINS - 1).long())


def _joined(parts: Sequence[Predictions]) -> Predictions | None:
    """All samples of these parts; None where there is no part."""
    if not parts:
        return None
    predictions, targets = zip(*parts, strict=True)
    return torch.cat(predictions), torch.cat(targets)


def _value(name: str, metric: PredictionMetric, pair: Any, client: str) -> float:
    if pair is None:
        return math.nan
    try:
        return metric(*pair)
    except Exception as error:  # code of the user: whatever it raises
        raise ModelError(
            f"metric {name!r} failed on predictions {tuple(pair[0].shape)} and targets {tuple(pair[1].shape)} of "
            f"{client!r}: {(str(error) or type(error).__name__).splitlines()[0]}; expected a function "
            f"(prediction, target) -> one number, or nan where it is not defined"
        ) from error


def _as_metric(metric: Any, by_name: bool | None) -> PredictionMetric:
    """by_name: whether higher is better, by the metric's name; what the metric itself says goes before that."""
    if isinstance(metric, PredictionMetric):
        return metric
    if isinstance(metric, type):
        raise SettingError(f"a metric is the class {metric.__name__}; give an object of it")
    said = getattr(metric, "higher_is_better", None)
    higher_is_better = by_name if said is None else bool(said)
    if all(hasattr(metric, part) for part in ("update", "compute", "reset")):  # of torchmetrics
        own = copy.deepcopy(metric)

        def computed(prediction: Tensor, target: Tensor) -> Any:
            own.reset()
            own.update(prediction, target)
            return own.compute()

        return PredictionMetric(computed, higher_is_better)
    if not callable(metric):
        raise SettingError(f"a metric is {metric!r}; give a function (prediction, target) -> number")
    return PredictionMetric(metric, higher_is_better)


def _name_of(metric: Any) -> str:
    function = metric.function if isinstance(metric, PredictionMetric) else metric
    return str(getattr(function, "__name__", type(function).__name__))
