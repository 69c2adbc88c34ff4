"""What the report reads from a run, and how: every field may be missing, and no number is trusted to be finite."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor


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
    def memberships(self) -> Tensor | None: ...
    @property
    def memberships_by_round(self) -> Mapping[int, Tensor]: ...
    @property
    def truth(self) -> Tensor | None: ...
    @property
    def versions(self) -> Mapping[str, Any]: ...
    @property
    def finished(self) -> bool: ...


class Metric(NamedTuple):
    """How predictions are judged, and how that is said."""

    name: str
    words: str
    higher_is_better: bool = False

    def show(self, value: float) -> str:
        return f"{value:.1%}" if self.higher_is_better else f"{value:#.3g}".rstrip(".")

    def tick(self, value: float) -> str:
        return f"{100 * value:.4g}%" if self.higher_is_better else f"{value:.4g}"

    def better(self, a: float, b: float) -> bool:
        return a > b if self.higher_is_better else a < b


ACCURACY = Metric("accuracy", "accuracy", higher_is_better=True)
METRICS = (ACCURACY, Metric("rmse", "root mean squared error"), Metric("deviance", "mean deviance"))

_SPELLINGS = {"ppfl": "PPFL", "fedavg": "FedAvg", "fedprox": "FedProx", "local": "Local", "ifca": "IFCA"}
_SPELLINGS |= {"cfl": "CFL", "fedem": "FedEM", "ditto": "Ditto", "apfl": "APFL", "pfedme": "pFedMe"}


class Method(NamedTuple):
    """A run under the name the report gives it."""

    label: str
    run: Run

    def curve(self, key: str) -> list[tuple[int, float]]:
        """(round, value) wherever the value was recorded and is a finite number."""
        rows = ((row.get("round", at), number(row.get(key))) for at, row in enumerate(self.run.metrics, 1))
        return [(int(round_), value) for round_, value in rows if value is not None]

    def final(self, key: str) -> float | None:
        """The last value that was recorded."""
        curve = self.curve(key)
        return curve[-1][1] if curve else None

    def total(self, key: str) -> float:
        return sum(value for _, value in self.curve(key))

    @property
    def rounds(self) -> int:
        return max((int(row.get("round", at)) for at, row in enumerate(self.run.metrics, 1)), default=0)

    def per_client(self, metric: Metric) -> dict[str, float]:
        """The metric of each client that has one, at the last evaluation."""
        lists = [row["per_client"] for row in self.run.metrics if row.get("per_client")]
        if not lists or len(lists[-1]) != len(self.run.ids):
            return {}
        scores = zip(self.run.ids, map(number, lists[-1]), strict=True)
        # runs keep what can be averaged over clients, which for rmse is the mean squared error
        root = metric.name == "rmse"
        return {id_: math.sqrt(s) if root else s for id_, s in scores if s is not None and not (root and s < 0)}


def number(value: object) -> float | None:
    """A finite float, or nothing.

    >>> number("x"), number(float("nan")), number(3)
    (None, None, 3.0)
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def algorithm_name(run: Run) -> str:
    """As the experiment has it, or the run's own name."""
    algorithm = run.experiment.get("algorithm")
    name = algorithm.get("name") if isinstance(algorithm, Mapping) else algorithm
    return str(name or run.name)


def common_metric(runs: Sequence[Run]) -> Metric:
    """The first that any run has recorded."""
    recorded = {key for run in runs for row in run.metrics for key in row}
    return next((metric for metric in METRICS if metric.name in recorded), ACCURACY)


def ranked(runs: Sequence[Run], metric: Metric) -> list[Method]:
    """Best first, then those without a score."""
    methods = [Method(label, run) for label, run in zip(_labels(runs), runs, strict=True)]

    def place(method: Method) -> float:
        score = method.final(metric.name)
        return math.inf if score is None else -score if metric.higher_is_better else score

    return sorted(methods, key=place)


def _labels(runs: Sequence[Run]) -> list[str]:
    """The algorithm's name where it tells the runs apart, else the run's, else that and a number."""
    algorithms = [algorithm_name(run) for run in runs]
    if len(set(algorithms)) == len(runs):
        return [_SPELLINGS.get(name, name) for name in algorithms]
    seen: Counter[str] = Counter()
    labels = []
    for run in runs:
        seen[run.name] += 1
        labels.append(run.name if seen[run.name] == 1 else f"{run.name} ({seen[run.name]})")
    return labels
