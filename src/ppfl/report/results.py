"""The table of results: a row a method, the best of each column in bold."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from . import records
from .markup import Markup, element, join, words
from .methods import Method, mean, spread
from .metric import Metric
from .portrait import agreement
from .records import Run

NOTHING = "–"


class Column(NamedTuple):
    title: str
    explained: str
    values: list[list[float]]  # for each method, one a seed
    show: Callable[[float], str]
    show_spread: Callable[[float], str] | None = None
    higher_is_better: bool = False

    def best(self) -> str | None:
        """As it is shown, so that equal print is equally bold; None where all are alike or alone."""
        known = [value for values in self.values if (value := mean(values)) is not None]
        if len({self.show(value) for value in known}) < 2:
            return None
        return self.show(max(known) if self.higher_is_better else min(known))

    def cell(self, at: int) -> Markup:
        """Of the method at that place: the mean, and over seeds the spread."""
        value, over_seeds = mean(self.values[at]), spread(self.values[at])
        if value is None:
            return element("td", words(NOTHING), class_="number")
        shown = self.show(value)
        parts = [element("b", words(shown)) if shown == self.best() else words(shown)]
        if over_seeds is not None and self.show_spread is not None:
            parts.append(element("small", words(f" ± {self.show_spread(over_seeds)}")))
        return element("td", *parts, class_="number")


def result_table(methods: Sequence[Method], metric: Metric) -> Markup:
    """Columns of which nothing is known are left out."""
    columns = [column for column in _columns(methods, metric) if any(column.values)]
    heads = [
        element("th", words(column.title), scope="col", class_="number", title=column.explained) for column in columns
    ]
    rows = []
    for at, method in enumerate(methods):
        note = "" if method.finished else f" (unfinished, round {method.rounds})"
        cells = [column.cell(at) for column in columns]
        rows.append(element("tr", element("th", words(method.label + note), scope="row"), *cells))
    head = element("thead", element("tr", element("th", words("method"), scope="col"), *heads))
    notes = [element("li", element("b", words(c.title)), words(f": {c.explained}.")) for c in columns]
    if any(len(method.runs) > 1 for method in methods):
        notes.append(element("li", words("± is the standard deviation over seeds, after their mean.")))
    table = element("div", element("table", head, element("tbody", *rows)), class_="wide")
    return join([table, element("ul", *notes, class_="notes")])


def _columns(methods: Sequence[Method], metric: Metric) -> list[Column]:
    def over_methods(measure: Callable[[Run], float | None]) -> list[list[float]]:
        return [method.values(measure) for method in methods]

    def scores(title: str, explained: str, suffix: str) -> Column:
        values = over_methods(partial(records.final, key=metric.name + suffix))
        return Column(title, explained, values, metric.show, metric.show_spread, metric.higher_is_better)

    direction = "higher" if metric.higher_is_better else "lower"
    pooled = f"{metric.words} over all test samples, each client with its own model; {direction} is better"
    uploads = over_methods(records.upload)
    scale, unit = byte_unit([value for values in uploads for value in values])
    scaled = [[value / scale for value in values] for values in uploads]
    seconds = over_methods(partial(records.total, key="seconds"))
    return [
        scores(metric.name, pooled, ""),
        scores("mean of clients", "every client counts the same", "_mean"),
        scores("worst tenth", "mean over the tenth of the clients that fare worst", "_worst_tenth"),
        _agreement_column(methods),
        Column(f"{unit} up", "sent by a client in a round, on average", scaled, "{:.3g}".format),
        Column("seconds", "time to train, all rounds together", seconds, _duration),
    ]


def _agreement_column(methods: Sequence[Method]) -> Column:
    found = [[a for run in method.runs if (a := agreement(run)) is not None] for method in methods]
    groups = any(a.groups for of_method in found for a in of_method)
    means = (
        "share of clients whose largest membership is that of their true group"
        if groups
        else "mean overlap of memberships with the true mixture"
    )
    return Column(
        "agreement with truth",
        f"{means}, after matching models and groups",
        [[a.value for a in of_method] for of_method in found],
        "{:.0%}".format,
        lambda value: f"{100 * value:.0f}",
        higher_is_better=True,
    )


def byte_unit(values: Sequence[float]) -> tuple[float, str]:
    """One unit for a whole column, so that its numbers compare.

    >>> byte_unit([2600.0, 0.0]), byte_unit([4e6, 10.0])
    ((1000.0, 'kB'), (1000000.0, 'MB'))
    """
    return (1e6, "MB") if max(values, default=0) >= 1e5 else (1e3, "kB")


def _duration(seconds: float) -> str:
    return f"{seconds:.1f}" if seconds < 100 else f"{seconds:,.0f}"
