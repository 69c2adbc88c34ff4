"""Runs grouped by method: the seeds of one experiment are one method, and its numbers are means over seeds."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, stdev
from typing import NamedTuple, TypeVar

from ..algorithms import METHODS
from ..errors import SettingError
from ..runs.record import RunRecord, metric_name
from .tables import Spread
from .theme import MB, Metric, metric

K = TypeVar("K")


class MethodRuns(NamedTuple):
    """The runs of one method, which differ in their seeds only."""

    label: str
    runs: tuple[RunRecord, ...]  # at least one

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

    @property
    def is_population(self) -> bool:
        """Whether it trains canonical models that clients mix."""
        return self.first.memberships is not None

    def curve(self, key: str) -> list[tuple[float, float]]:
        """(round, mean over seeds), at the rounds that all seeds have."""
        return [(t, value) for t, value in _shared_means([run.curve(key) for run in self.runs])]

    def curve_over_traffic(self, key: str) -> list[tuple[float, float]]:
        """Like `curve`, over the MB that a client has sent and received so far."""
        traffic = dict(_shared_means([run.traffic() for run in self.runs]))
        return [(traffic[int(t)] / MB, value) for t, value in self.curve(key) if t in traffic]

    def score(self, key: str) -> float | None:
        """The mean over seeds of a score of the state that a run returned."""
        found = self.spread(lambda run: run.final(key))
        return None if found is None else found.mean

    def spread(self, measure: Callable[[RunRecord], float | None]) -> Spread | None:
        """The mean over seeds with its standard deviation; None where a seed lacks the value."""
        values = [value for run in self.runs if (value := measure(run)) is not None and math.isfinite(value)]
        if len(values) < len(self.runs):
            return None
        return Spread(fmean(values), stdev(values) if len(values) > 1 else None)

    def per_client(self) -> dict[str, float]:
        return dict(_shared_means([run.per_client() for run in self.runs]))


def _shared_means(found: Sequence[Mapping[K, float]]) -> list[tuple[K, float]]:
    """Means over all mappings, for the keys that all of them have."""
    return [(key, fmean(one[key] for one in found)) for key in found[0] if all(key in one for one in found)]


def common_metric(methods: Sequence[MethodRuns]) -> Metric | None:
    """What the scores of the runs are called."""
    for method in methods:
        for run in method.runs:
            for row in (run.scores, *run.metrics):
                if (name := metric_name(row)) is not None:
                    return metric(name)
    return None


def group_by_label(records: Sequence[RunRecord], labels: Sequence[str]) -> dict[str, list[RunRecord]]:
    if len(labels) != len(records):
        raise SettingError(
            f"{len(labels)} labels for {len(records)} runs; give one label per run, the same one for all seeds of a "
            f"method"
        )
    groups: dict[str, list[RunRecord]] = {}
    for label, run in zip(labels, records, strict=True):
        groups.setdefault(label, []).append(run)
    return groups


def group_seeds(records: Sequence[RunRecord]) -> dict[str, list[RunRecord]]:
    """Runs that differ in their seeds only; a run without a recorded seed is a group of its own."""
    groups: dict[str, list[RunRecord]] = {}
    for at, run in enumerate(records):
        rest = {name: value for name, value in run.experiment.items() if name != "seeds"}
        key = json.dumps(rest, sort_keys=True, default=str) if "seeds" in run.experiment else str(at)
        groups.setdefault(key, []).append(run)
    return dict(zip(_labels([group[0] for group in groups.values()]), groups.values(), strict=True))


def _labels(firsts: Sequence[RunRecord]) -> list[str]:
    """Titles of methods if they are unique, otherwise experiment names, otherwise experiment names with a number."""
    methods = [run.method for run in firsts]
    spelled = [METHODS[name].title if name in METHODS else name.rpartition(":")[2] for name in methods]
    names = [run.name for run in firsts]
    numbered = [f"{name} ({at})" for at, name in enumerate(names, 1)]
    return next(labels for labels in (spelled, names, numbered) if len(set(labels)) == len(firsts))
