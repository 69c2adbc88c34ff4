"""How predictions are judged, and how that is said."""

import math
from collections.abc import Iterable
from typing import NamedTuple


class Metric(NamedTuple):
    name: str  # as runs record it
    words: str
    higher_is_better: bool = False

    @property
    def most(self) -> float:
        """The largest value there can be."""
        return 1.0 if self.higher_is_better else math.inf

    def show(self, value: float) -> str:
        return f"{value:.1%}" if self.higher_is_better else f"{value:#.3g}".rstrip(".")

    def tick(self, value: float) -> str:
        return f"{100 * value:.4g}%" if self.higher_is_better else f"{value:.4g}"

    def show_spread(self, value: float) -> str:
        return f"{100 * value:.1f}" if self.higher_is_better else f"{value:.2g}"

    def better(self, a: float, b: float) -> bool:
        return a > b if self.higher_is_better else a < b


ACCURACY = Metric("accuracy", "accuracy", higher_is_better=True)
METRICS = (ACCURACY, Metric("rmse", "root mean squared error"), Metric("deviance", "mean deviance"))


def recorded_metric(keys: Iterable[str]) -> Metric:
    """The first that is among the keys.

    >>> recorded_metric({"loss", "rmse"}).words
    'root mean squared error'
    """
    keys = set(keys)
    return next((metric for metric in METRICS if metric.name in keys), ACCURACY)
