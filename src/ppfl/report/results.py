"""The table of results: one row per method, the best value of each column in bold."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from ppfl.runs.record import RunRecord

from .markup import Markup, element, escape, join
from .methods import MethodRuns, mean, spread
from .metric import Metric
from .sorted_memberships import truth_agreement

NOTHING = "–"


class ResultColumn(NamedTuple):
    title: str
    explanation: str
    values: list[list[float]]  # for each method, one value per seed
    show: Callable[[float], str]
    show_spread: Callable[[float], str] | None = None
    higher_is_better: bool | None = False  # None: not known

    def best(self) -> str | None:
        """The best value as text, so that all values that look equal are bold; None if there is nothing to compare."""
        known = [value for values in self.values if (value := mean(values)) is not None]
        if self.higher_is_better is None or len({self.show(value) for value in known}) < 2:
            return None
        return self.show(max(known) if self.higher_is_better else min(known))

    def cell(self, at: int) -> Markup:
        """The cell of one method: the mean over seeds, and their standard deviation if there are several."""
        value, over_seeds = mean(self.values[at]), spread(self.values[at])
        if value is None:
            return element("td", escape(NOTHING), class_="number")
        shown = self.show(value)
        parts = [element("b", escape(shown)) if shown == self.best() else escape(shown)]
        if over_seeds is not None and self.show_spread is not None:
            parts.append(element("small", escape(f" ± {self.show_spread(over_seeds)}")))
        return element("td", *parts, class_="number")


def result_table(methods: Sequence[MethodRuns], metric: Metric) -> Markup:
    """The whole table; columns without any value are left out."""
    columns = [column for column in _columns(methods, metric) if any(column.values)]
    heads = [
        element("th", escape(column.title), scope="col", class_="number", title=column.explanation)
        for column in columns
    ]
    rows = []
    for at, method in enumerate(methods):
        note = "" if method.finished else f" (unfinished, round {method.rounds})"
        cells = [column.cell(at) for column in columns]
        rows.append(element("tr", element("th", escape(method.label + note), scope="row"), *cells))
    head = element("thead", element("tr", element("th", escape("method"), scope="col"), *heads))
    notes = [element("li", element("b", escape(c.title)), escape(f": {c.explanation}.")) for c in columns]
    if any(len(method.runs) > 1 for method in methods):
        notes.append(element("li", escape("± is the standard deviation over seeds, after their mean.")))
    table = element("div", element("table", head, element("tbody", *rows)), class_="wide")
    return join([table, element("ul", *notes, class_="notes")])


def _columns(methods: Sequence[MethodRuns], metric: Metric) -> list[ResultColumn]:
    def over_methods(measure: Callable[[RunRecord], float | None]) -> list[list[float]]:
        return [method.values(measure) for method in methods]

    def scores(title: str, explanation: str, suffix: str) -> ResultColumn:
        values = over_methods(lambda run: run.final(metric.name + suffix))
        return ResultColumn(title, explanation, values, metric.show, metric.show_spread, metric.higher_is_better)

    direction = "higher" if metric.higher_is_better else "lower"
    pooled = f"{metric.full_name} over all test samples, each client with its own model; {direction} is better"
    own = dict.fromkeys(name for method in methods for run in method.runs for name in run.own_metrics)
    traffic = {"up": over_methods(lambda run: run.upload), "down": over_methods(lambda run: run.download)}
    scale, unit = byte_unit([value for found in traffic.values() for values in found for value in values])
    scaled = {way: [[value / scale for value in values] for values in found] for way, found in traffic.items()}
    seconds = over_methods(lambda run: run.total("seconds"))
    refused = over_methods(lambda run: run.total("refused"))
    refused = refused if any(map(any, refused)) else []
    return [
        scores(metric.name, pooled, ""),
        scores("mean", "over clients, which all count the same", "_mean"),
        scores("worst 10%", "mean over the tenth of the clients with the worst scores", "_worst_tenth"),
        *(_own_metric(methods, name) for name in own),
        _truth_column(methods),
        ResultColumn("refused", "updates that were left out", refused, "{:.3g}".format),
        ResultColumn(f"{unit} up", "sent by a client in a round, on average", scaled["up"], "{:.3g}".format),
        ResultColumn(f"{unit} down", "received by a client in a round, on average", scaled["down"], "{:.3g}".format),
        ResultColumn("seconds", "time to train, all rounds together", seconds, _duration),
    ]


def _own_metric(methods: Sequence[MethodRuns], name: str) -> ResultColumn:
    values = [method.values(lambda run: run.final(name)) for method in methods]
    return ResultColumn(name, "a metric of this experiment", values, "{:.3g}".format, "{:.2g}".format, None)


def _truth_column(methods: Sequence[MethodRuns]) -> ResultColumn:
    found = [[a for run in method.runs if (a := truth_agreement(run)) is not None] for method in methods]
    groups = any(a.groups for method in found for a in method)
    means = (
        "share of clients whose largest membership is that of their true group"
        if groups
        else "mean overlap of memberships with the true mixture"
    )
    return ResultColumn(
        "agreement with truth",
        f"{means}, after matching models and groups",
        [[a.value for a in method] for method in found],
        "{:.0%}".format,
        lambda value: f"{100 * value:.0f}",
        higher_is_better=True,
    )


def byte_unit(values: Sequence[float]) -> tuple[float, str]:
    """One unit for a whole column, so that its numbers can be compared.

    >>> byte_unit([2600.0, 0.0]), byte_unit([4e6, 10.0])
    ((1000.0, 'kB'), (1000000.0, 'MB'))
    """
    return (1e6, "MB") if max(values, default=0) >= 1e5 else (1e3, "kB")


def _duration(seconds: float) -> str:
    return f"{seconds:.1f}" if seconds < 100 else f"{seconds:,.0f}"
