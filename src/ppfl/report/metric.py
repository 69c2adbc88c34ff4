"""The metrics of a report: their names, directions and formats."""

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

NOTHING = "–"


class Metric(NamedTuple):
    name: str  # as recorded in runs
    full_name: str  # in sentences and titles
    higher_is_better: bool = False

    @property
    def maximum(self) -> float:
        """The largest possible value."""
        return 1.0 if self.higher_is_better else math.inf

    def show(self, value: float) -> str:
        return f"{value:.1%}" if self.higher_is_better else f"{value:#.3g}".rstrip(".")

    def format_tick(self, value: float) -> str:
        return f"{100 * value:.4g}%" if self.higher_is_better else f"{value:.4g}"

    def show_spread(self, value: float) -> str:
        return f"{100 * value:.1f}" if self.higher_is_better else f"{value:.2g}"

    def better(self, a: float, b: float) -> bool:
        return a > b if self.higher_is_better else a < b


ACCURACY = Metric("accuracy", "accuracy", higher_is_better=True)
METRICS = (ACCURACY, Metric("rmse", "root mean squared error"), Metric("deviance", "mean deviance"))


def recorded_metric(keys: Iterable[str]) -> Metric:
    """The first known metric among the keys; accuracy if there is none.

    >>> recorded_metric({"loss", "rmse"}).full_name
    'root mean squared error'
    """
    keys = set(keys)
    return next((metric for metric in METRICS if metric.name in keys), ACCURACY)


def show_score(metric: str, value: Any) -> str:
    """A score as text: accuracies in per cent, and a dash for a value that was not measured.

    >>> show_score("accuracy", 0.9123), show_score("rmse", 0.51234), show_score("rmse", None)
    ('91.23%', '0.512', '–')
    """
    if value is None or not math.isfinite(value):
        return NOTHING
    return f"{100 * value:.2f}%" if metric == "accuracy" else f"{value:.3g}"
