"""`Comparison`: the runs of one or several methods, with their tables, charts and page."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import SettingError
from ..runs.record import RunRecord
from .memberships import SortedMemberships, sort_memberships
from .method_runs import MethodRuns, common_metric, group_by_label, group_seeds
from .run_tables import client_table, result_table
from .tables import Table
from .theme import metric

if TYPE_CHECKING:
    import pandas as pd

    from .charts import Chart


class Comparison:
    """Methods on the same data, best first: what a run, a comparison and `ppfl.compare` give to tables and charts.

    It prints as a table. `frame` and `clients` are DataFrames, `plot_*` charts of Altair, and `report` writes a page.
    """

    def __init__(self, runs: Mapping[str, Sequence[RunRecord]]) -> None:
        if not any(runs.values()):
            raise SettingError("there is nothing to show: no run was given")
        found = [MethodRuns(label, tuple(own)) for label, own in runs.items() if own]
        self.metric = common_metric(found)
        self.methods: list[MethodRuns] = sorted(found, key=self._rank)

    @classmethod
    def of(cls, records: Sequence[RunRecord], labels: Sequence[str] | None = None) -> Comparison:
        """Runs by the labels of their methods; without labels, runs that differ in their seeds only are one method."""
        return cls(group_by_label(records, labels) if labels is not None else group_seeds(records))

    def _rank(self, method: MethodRuns) -> float:
        score = None if self.metric is None else method.score(self.metric.name)
        if self.metric is None or score is None:
            return math.inf
        return -score if self.metric.higher_is_better else score

    def __getitem__(self, label: str) -> MethodRuns:
        return next(method for method in self.methods if method.label == label)

    def __repr__(self) -> str:
        from .terminal import as_text

        return as_text(self.table)

    def _repr_html_(self) -> str:
        return self.table._repr_html_()

    @property
    def records(self) -> list[RunRecord]:
        return [run for method in self.methods for run in method.runs]

    @cached_property
    def scores(self) -> dict[str, dict[str, float]]:
        """The score of every client by the label of the method, for methods that have such scores; best first."""
        return {method.label: found for method in self.methods if (found := method.per_client())}

    @cached_property
    def memberships(self) -> list[SortedMemberships]:
        """Those of the first seed of every method that has them, PPFL first."""
        ppfl_first = sorted(self.methods, key=lambda method: method.first.method != "ppfl")
        found = ((sort_memberships(method.label, method.first), len(method.runs)) for method in ppfl_first)
        return [one._replace(seeds=seeds) for one, seeds in found if one is not None]

    # ------------------------------------------------------------------ for people in Python

    @property
    def table(self) -> Table:
        """One row per method, best first."""
        return result_table(self)

    @property
    def frame(self) -> pd.DataFrame:
        """The table of results as a DataFrame."""
        return self.table.to_frame()

    @property
    def clients(self) -> pd.DataFrame:
        """One row per client: its memberships, and its score with each method."""
        return client_table(self).to_frame()

    def plot_history(self, of: str | None = None) -> Chart:
        """A value by round, with one line for each method: by default the score on test data."""
        from . import charts

        key = of or (self.metric.name if self.metric else "loss")
        return charts.history(self.curves(key), metric(key), ours=self.ours)

    def plot_clients(self) -> Chart:
        """The score of every client with each method."""
        from . import charts

        return charts.client_scores(self.scores, self.metric or metric("score"))

    def plot_memberships(self) -> Chart:
        """The memberships of all clients."""
        from . import charts

        return charts.of_sorted(_first(self.memberships))

    def plot_simplex(self) -> Chart:
        """Where the clients are between the canonical models."""
        from . import charts

        found = _first(self.memberships)
        return charts.simplex(found.memberships.numpy(), found.ids, names=found.names)

    def report(self, folder: str | Path = "report", title: str = "Methods compared") -> Path:
        """Writes one page with everything into a folder, and returns its path."""
        from .page import write_report

        return write_report(self, Path(folder), title)

    def curves(self, key: str, *, over_traffic: bool = False) -> dict[str, list[tuple[float, float]]]:
        """The curve of every method that recorded this value; over traffic, of those that send something."""
        found = {m.label: m.curve_over_traffic(key) if over_traffic else m.curve(key) for m in self.methods}
        return {label: points for label, points in found.items() if points and (not over_traffic or points[-1][0] > 0)}

    @property
    def ours(self) -> list[str]:
        """Labels of the methods that train canonical models; they have a colour of their own."""
        return [method.label for method in self.methods if method.is_population]


def _first(found: list[SortedMemberships]) -> SortedMemberships:
    if not found:
        raise SettingError("there are no memberships to draw: no method here has more than one canonical model")
    return found[0]
