"""Values that the report reads from a run. Every number may be missing or not finite."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, takewhile
from typing import Any, Protocol

from torch import Tensor

from .markup import shorten
from .metric import Metric

_MOST_NAMED, _MAX_ID_LENGTH = 3, 40


class Run(Protocol):
    """The attributes of `ppfl.runs.RunRecord` that are read here."""

    @property
    def name(self) -> str: ...
    @property
    def experiment(self) -> Mapping[str, Any]: ...
    @property
    def ids(self) -> Sequence[str]: ...
    @property
    def metrics(self) -> Sequence[Mapping[str, Any]]: ...
    @property
    def scores(self) -> Mapping[str, Any]: ...
    @property
    def memberships(self) -> Tensor | None: ...
    @property
    def memberships_by_round(self) -> Mapping[int, Tensor]: ...
    @property
    def truth(self) -> Tensor | None: ...
    @property
    def versions(self) -> Mapping[str, Any]: ...
    @property
    def finished(self) -> bool: ...


def number(value: object) -> float | None:
    """The value as a float if it is a finite number, otherwise None.

    >>> number("x"), number(float("nan")), number(3)
    (None, None, 3.0)
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def method_name(run: Run) -> str:
    """The name of the method in the experiment, otherwise the name of the run."""
    method = run.experiment.get("method")
    name = method.get("name") if isinstance(method, Mapping) else method
    return str(name or run.experiment.get("name") or run.name)


def rounds_done(run: Run) -> int:
    return max(_rounds(run), default=0)


def curve(run: Run, key: str) -> dict[int, float]:
    """The recorded values by round."""
    rows = zip(_rounds(run), run.metrics, strict=True)
    return {t: value for t, row in rows if (value := number(row.get(key))) is not None}


def _rounds(run: Run) -> list[int]:
    return [int(row.get("round", at)) for at, row in enumerate(run.metrics, 1)]


def final(run: Run, key: str) -> float | None:
    """The value of the state that the run returned (not always the last round), otherwise the last recorded value."""
    return next((v for v in (number(run.scores.get(key)), *reversed(curve(run, key).values())) if v is not None), None)


def total(run: Run, key: str) -> float | None:
    """The sum over rounds, or None if nothing was recorded."""
    values = curve(run, key).values()
    return sum(values) if values else None


def refused_updates(runs: Iterable[Run]) -> str:
    """How many updates were refused, and whose; empty if none was."""
    refusals = [refusal for run in runs for row in run.metrics for refusal in _refusals(row)]
    if not refusals:
        return ""
    reasons = dict(refusals)
    most = Counter(id_ for id_, _ in refusals).most_common()
    named = [f"{count} of client {shorten(repr(id_), _MAX_ID_LENGTH)}" for id_, count in most[:_MOST_NAMED]]
    named += [f"{sum(count for _, count in most[_MOST_NAMED:])} of others"] if len(most) > _MOST_NAMED else []
    return f"updates refused: {', '.join(named)} ({reasons[most[0][0]]}); look at the data there"


def _refusals(row: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Clients and reasons; a file may hold anything."""
    found = row.get("refusals")
    pairs = found if isinstance(found, list | tuple) else []
    return [(str(pair[0]), str(pair[1])) for pair in pairs if isinstance(pair, list | tuple) and len(pair) == 2]


def upload(run: Run) -> float | None:
    """Mean number of bytes that a participating client sends in a round."""
    sent, uploads = total(run, "bytes_up"), total(run, "participants")
    return sent / uploads if sent is not None and uploads else None


def traffic(run: Run) -> dict[int, float]:
    """Mean bytes a client has sent and received by the end of each round, up to the first round without a record."""
    up, down = curve(run, "bytes_up"), curve(run, "bytes_down")
    rounds = list(takewhile(lambda t: t in up and t in down, _rounds(run)))
    return dict(zip(rounds, accumulate((up[t] + down[t]) / max(1, len(run.ids)) for t in rounds), strict=True))


def per_client(run: Run, metric: Metric) -> dict[str, float]:
    """The metric by client id, without the clients that have none."""
    lists = [row["per_client"] for row in (*run.metrics, run.scores) if row.get("per_client")]
    if not lists or len(lists[-1]) != len(run.ids):
        return {}
    found = zip(run.ids, map(number, lists[-1]), strict=True)
    return {id_: score for id_, score in found if score is not None}
