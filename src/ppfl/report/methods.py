"""Runs grouped by method: the seeds of one experiment are one method, and its numbers are means over seeds."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, stdev
from typing import NamedTuple, TypeVar

from ppfl.algorithms import METHODS
from ppfl.errors import SettingError
from ppfl.runs.record import RunRecord

from .metric import Metric, recorded_metric

K = TypeVar("K")


class MethodRuns(NamedTuple):
    label: str  # unique among the methods of a report
    runs: tuple[RunRecord, ...]  # at least one; they differ in their seeds only

    @property
    def first(self) -> RunRecord:
        """The run to show where a mean makes no sense: the order of canonical models differs between seeds."""
        return self.runs[0]

    @property
    def rounds(self) -> int:
        return max(run.rounds_done for run in self.runs)

    @property
    def finished(self) -> bool:
        return all(run.finished for run in self.runs)

    def curve(self, key: str) -> list[tuple[int, float]]:
        """(round, mean over seeds), at the rounds that all seeds have."""
        return _shared_means([run.curve(key) for run in self.runs])

    def curve_over_traffic(self, key: str) -> list[tuple[float, float]]:
        """Like `curve`, but over the bytes a client has sent and received so far instead of the round."""
        traffic = dict(_shared_means([run.traffic() for run in self.runs]))
        return [(traffic[t], value) for t, value in self.curve(key) if t in traffic]

    def values(self, measure: Callable[[RunRecord], float | None]) -> list[float]:
        """One value per seed, without the seeds where it is unknown."""
        return [value for run in self.runs if (value := measure(run)) is not None]

    def score(self, metric: Metric) -> float | None:
        return mean(self.values(lambda run: run.final(metric.name)))

    def per_client(self) -> dict[str, float]:
        return dict(_shared_means([run.per_client() for run in self.runs]))


def mean(values: Sequence[float]) -> float | None:
    """The mean, or None if there are no values."""
    return fmean(values) if values else None


def spread(values: Sequence[float]) -> float | None:
    """The standard deviation over seeds, or None if there is only one."""
    return stdev(values) if len(values) > 1 else None


def common_metric(runs: Sequence[RunRecord]) -> Metric:
    """The metric that the runs have recorded."""
    return recorded_metric(key for run in runs for row in (*run.metrics, run.scores) for key in row)


def rank_methods(runs: Sequence[RunRecord], metric: Metric, labels: Sequence[str] | None = None) -> list[MethodRuns]:
    """Methods from best to worst, then those without a score. Runs with the same label are seeds of one method."""
    if labels is None:
        groups = _group_seeds(runs)
        methods = [MethodRuns(label, group) for label, group in zip(_labels(groups), groups, strict=True)]
    else:
        methods = _group_by_label(runs, labels)

    def sort_key(method: MethodRuns) -> float:
        score = method.score(metric)
        return math.inf if score is None else -score if metric.higher_is_better else score

    return sorted(methods, key=sort_key)


def _shared_means(found: Sequence[Mapping[K, float]]) -> list[tuple[K, float]]:
    """Means over all mappings, for the keys that all of them have."""
    return [(key, fmean(one[key] for one in found)) for key in found[0] if all(key in one for one in found)]


def _group_by_label(runs: Sequence[RunRecord], labels: Sequence[str]) -> list[MethodRuns]:
    if len(labels) != len(runs):
        raise SettingError(
            f"{len(labels)} labels for {len(runs)} runs; give one label per run, the same one for all seeds of a method"
        )
    groups: dict[str, list[RunRecord]] = {}
    for label, run in zip(labels, runs, strict=True):
        groups.setdefault(label, []).append(run)
    return [MethodRuns(label, tuple(group)) for label, group in groups.items()]


def _group_seeds(runs: Sequence[RunRecord]) -> list[tuple[RunRecord, ...]]:
    """Group runs that differ in their seeds only; a run without a recorded seed is a group of its own."""
    groups: dict[str, list[RunRecord]] = {}
    for at, run in enumerate(runs):
        rest = {name: value for name, value in run.experiment.items() if name != "seeds"}
        key = json.dumps(rest, sort_keys=True, default=str) if "seeds" in run.experiment else str(at)
        groups.setdefault(key, []).append(run)
    return [tuple(group) for group in groups.values()]


def _labels(groups: Sequence[tuple[RunRecord, ...]]) -> list[str]:
    """Titles of methods if they are unique, otherwise experiment names, otherwise experiment names with a number."""
    methods = [group[0].method for group in groups]
    spelled = [METHODS[name].title if name in METHODS else name.rpartition(":")[2] for name in methods]
    names = [group[0].name for group in groups]
    numbered = [f"{name} ({at})" for at, name in enumerate(names, 1)]
    return next(labels for labels in (spelled, names, numbered) if len(set(labels)) == len(groups))
