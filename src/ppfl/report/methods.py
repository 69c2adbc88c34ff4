"""Runs as the report speaks of them: one method for all seeds of an experiment, numbers their means."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, stdev
from typing import NamedTuple, TypeVar

from ppfl.core.errors import SettingError

from . import records
from .metric import Metric, recorded_metric
from .records import Run, algorithm_name

K = TypeVar("K")

_SPELLINGS = {"ppfl": "PPFL", "fedavg": "FedAvg", "fedprox": "FedProx", "local": "Local", "ifca": "IFCA"}
_SPELLINGS |= {"cfl": "CFL", "fedem": "FedEM", "ditto": "Ditto", "pfedme": "pFedMe", "centralized": "Centralized"}
_SPELLINGS |= {"lg-fedavg": "LG-FedAvg", "fedper": "FedPer", "fedrep": "FedRep", "fedalt": "FedAlt", "fedsim": "FedSim"}
_SPELLINGS |= {"finetune": "Fine-tuned"}


class Method(NamedTuple):
    label: str  # no other method has it
    runs: tuple[Run, ...]  # at least one; alike but for their seeds

    @property
    def first(self) -> Run:
        """Where a mean makes no sense: canonical models have no order that seeds share."""
        return self.runs[0]

    @property
    def rounds(self) -> int:
        return max(map(records.rounds_done, self.runs))

    @property
    def finished(self) -> bool:
        return all(run.finished for run in self.runs)

    def curve(self, key: str) -> list[tuple[int, float]]:
        """(round, mean over seeds), at rounds that all of them have."""
        return _shared_means([records.curve(run, key) for run in self.runs])

    def curve_over_traffic(self, key: str) -> list[tuple[float, float]]:
        """As `curve`, with the bytes that a client has sent and received until then in place of the round."""
        traffic = dict(_shared_means([records.traffic(run) for run in self.runs]))
        return [(traffic[t], value) for t, value in self.curve(key) if t in traffic]

    def values(self, measure: Callable[[Run], float | None]) -> list[float]:
        """One a seed, where it is known."""
        return [value for run in self.runs if (value := measure(run)) is not None]

    def score(self, metric: Metric) -> float | None:
        return mean(self.values(lambda run: records.final(run, metric.name)))

    def per_client(self, metric: Metric) -> dict[str, float]:
        return dict(_shared_means([records.per_client(run, metric) for run in self.runs]))


def mean(values: Sequence[float]) -> float | None:
    """Nothing of nothing."""
    return fmean(values) if values else None


def spread(values: Sequence[float]) -> float | None:
    """Standard deviation over seeds, where there are some."""
    return stdev(values) if len(values) > 1 else None


def common_metric(runs: Sequence[Run]) -> Metric:
    """What any of the runs has recorded."""
    return recorded_metric(key for run in runs for row in (*run.metrics, run.scores) for key in row)


def ranked(runs: Sequence[Run], metric: Metric, labels: Sequence[str] | None = None) -> list[Method]:
    """Best first, then those without a score. Labels, one a run, say which runs are seeds of one method."""
    if labels is None:
        groups = _repeats(runs)
        methods = [Method(label, group) for label, group in zip(_labels(groups), groups, strict=True)]
    else:
        methods = _labelled(runs, labels)

    def place(method: Method) -> float:
        score = method.score(metric)
        return math.inf if score is None else -score if metric.higher_is_better else score

    return sorted(methods, key=place)


def _shared_means(found: Sequence[Mapping[K, float]]) -> list[tuple[K, float]]:
    """Of what all have."""
    return [(key, fmean(one[key] for one in found)) for key in found[0] if all(key in one for one in found)]


def _labelled(runs: Sequence[Run], labels: Sequence[str]) -> list[Method]:
    if len(labels) != len(runs):
        raise SettingError(f"{len(labels)} labels for {len(runs)} runs; give one a run, the same for seeds of a method")
    groups: dict[str, list[Run]] = {}
    for label, run in zip(labels, runs, strict=True):
        groups.setdefault(label, []).append(run)
    return [Method(label, tuple(group)) for label, group in groups.items()]


def _repeats(runs: Sequence[Run]) -> list[tuple[Run, ...]]:
    """Runs together that differ in their seeds alone; one that does not say its seed stays alone."""
    groups: dict[str, list[Run]] = {}
    for at, run in enumerate(runs):
        rest = {key: value for key, value in run.experiment.items() if key != "seeds"}
        alike = json.dumps(rest, sort_keys=True, default=str) if "seeds" in run.experiment else str(at)
        groups.setdefault(alike, []).append(run)
    return [tuple(group) for group in groups.values()]


def _labels(groups: Sequence[tuple[Run, ...]]) -> list[str]:
    """The algorithm's name where it tells the methods apart, else the experiment's, else that and a number."""
    algorithms = [algorithm_name(group[0]) for group in groups]
    spelled = [_SPELLINGS.get(name, name) for name in algorithms]
    names = [group[0].name for group in groups]
    numbered = [f"{name} ({at})" for at, name in enumerate(names, 1)]
    return next(labels for labels in (spelled, names, numbered) if len(set(labels)) == len(groups))
