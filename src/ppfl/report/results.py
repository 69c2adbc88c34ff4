"""The table of results: a row a method, the best of each column in bold."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from .markup import Markup, element, join, words
from .portrait import Agreement
from .records import Method, Metric

NOTHING = "–"


class Column(NamedTuple):
    title: str
    explained: str
    values: list[float | None]
    show: Callable[[float], str]
    higher_is_better: bool

    def best(self) -> str | None:
        """As it is shown, so that equal print is equally bold; None where all are alike or alone."""
        shown = {self.show(value) for value in self.values if value is not None}
        if len(shown) < 2:
            return None
        known = [value for value in self.values if value is not None]
        return self.show(max(known) if self.higher_is_better else min(known))


def result_table(methods: Sequence[Method], metric: Metric, agreements: Sequence[Agreement | None]) -> Markup:
    columns = [column for column in _columns(methods, metric, agreements) if any(v is not None for v in column.values)]
    heads = [
        element("th", words(column.title), scope="col", class_="number", title=column.explained) for column in columns
    ]
    best = [column.best() for column in columns]
    rows = []
    for at, method in enumerate(methods):
        cells = [_cell(column, at, top) for column, top in zip(columns, best, strict=True)]
        note = "" if method.run.finished else f" (unfinished, round {method.rounds})"
        rows.append(element("tr", element("th", words(method.label + note), scope="row"), *cells))
    head = element("thead", element("tr", element("th", words("method"), scope="col"), *heads))
    notes = [element("li", element("b", words(c.title)), words(f": {c.explained}.")) for c in columns]
    table = element("div", element("table", head, element("tbody", *rows)), class_="wide")
    return join([table, element("ul", *notes, class_="notes")])


def _cell(column: Column, at: int, best: str | None) -> Markup:
    value = column.values[at]
    shown = NOTHING if value is None else column.show(value)
    content = element("b", words(shown)) if value is not None and shown == best else words(shown)
    return element("td", content, class_="number")


def _columns(methods: Sequence[Method], metric: Metric, agreements: Sequence[Agreement | None]) -> list[Column]:
    higher = metric.higher_is_better
    direction = "higher" if higher else "lower"
    uploads = [upload(method) for method in methods]
    scale, unit = byte_unit([value for value in uploads if value is not None])
    groups = any(found.groups for found in agreements if found is not None)
    means = (
        "share of clients whose largest membership is that of their true group"
        if groups
        else "mean overlap of memberships with the true mixture"
    )

    def finals(suffix: str) -> list[float | None]:
        return [method.final(metric.name + suffix) for method in methods]

    pooled = f"{metric.words} over all test samples, each client with its own model; {direction} is better"
    worst = "mean over the tenth of the clients that fare worst"
    return [
        Column(metric.name, pooled, finals(""), metric.show, higher),
        Column("mean of clients", "every client counts the same", finals("_mean"), metric.show, higher),
        Column("worst tenth", worst, finals("_worst_tenth"), metric.show, higher),
        Column(
            "agreement with truth",
            means + ", after matching models and groups",
            [None if found is None else found.value for found in agreements],
            "{:.0%}".format,
            True,
        ),
        Column(
            f"{unit} up",
            "sent by a client in a round, on average",
            [None if value is None else value / scale for value in uploads],
            "{:.3g}".format,
            False,
        ),
        Column("seconds", "time to train, all rounds together", [_seconds(m) for m in methods], _duration, False),
    ]


def upload(method: Method) -> float | None:
    """Bytes that a client sends in a round, on average."""
    turns = method.total("participants")
    return method.total("bytes_up") / turns if turns and method.curve("bytes_up") else None


def byte_unit(values: Sequence[float]) -> tuple[float, str]:
    """One unit for a whole column, so that its numbers compare.

    >>> byte_unit([2600.0, 0.0]), byte_unit([4e6, 10.0])
    ((1000.0, 'kB'), (1000000.0, 'MB'))
    """
    return (1e6, "MB") if max(values, default=0) >= 1e5 else (1e3, "kB")


def _seconds(method: Method) -> float | None:
    return method.total("seconds") if method.curve("seconds") else None


def _duration(seconds: float) -> str:
    return f"{seconds:.1f}" if seconds < 100 else f"{seconds:,.0f}"
