"""The tables, the charts and the Markdown page of a study. Tables are those of any comparison, with the results of the
paper and the cost until a run reaches an accuracy as further columns."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from ..io.files import folder_name
from ..report import Column, Comparison, Spread, Table
from ..report.run_tables import flatten_settings
from ..report.theme import MB, Metric, show_seconds
from ..runs.provenance import made_with
from ..runs.record import RunRecord
from .convergence import Series, all_series, chart_lines
from .figures import Figures, StoredTable, mean_cost, paper_results
from .studies import Case, Study

if TYPE_CHECKING:
    from ..report.charts import Chart

Runs = Mapping[str, Sequence[RunRecord]]  # by method, one run per seed
_POINTS = 100  # accuracies are in per cent, as in the paper
ABOUT = {
    "scores": "Accuracies are in per cent, ± standard deviation over seeds; MB are per client over all rounds.",
    "rates": (
        "The stationarity measure of Section 3.2 is the squared norm of grad_theta F and of (C - C₊) / eta, with C₊ "
        "the mirror step on the full gradient. E is the number of local steps; slopes are fitted to the logarithms."
    ),
}


def study_figures(study: Study, runs: Mapping[str, Runs], command: str) -> Figures:
    """Everything that was measured in a study."""
    if study.view == "rates":
        tables = [StoredTable.of(key, table) for key, table in _rates(study, runs)]
    else:
        tables = [StoredTable.of(case.name, score_table(study, case, runs[case.name])) for case in study.cases]
    every = [(case, label, run) for case, methods in runs.items() for label, own in methods.items() for run in own]
    values = [(case, label, run.seed, name, value) for case, label, run in every
              for name, value in run.scores.items() if isinstance(value, float)]  # fmt: skip
    settings = {f"{case}, {label}": flatten_settings(run.experiment) for case, label, run in every}
    made = made_with(run.versions for *_, run in every)
    return Figures(study.name, study.title, command, made, tuple(tables), tuple(values), settings)


def markdown_page(figures: Figures, about: str, charts: Sequence[str] = ()) -> str:
    """The page of a study on which nobody has written yet."""
    parts = [f"# {figures.title}", f"```\n{figures.command}\n```", figures.made_with, about]
    parts += [table.markdown() for table in figures.tables]
    return "\n\n".join([*parts, *(f"![{name}]({name}.svg)" for name in charts)]) + "\n"


def study_charts(study: Study, runs: Mapping[str, Runs]) -> Iterator[tuple[str, Chart]]:
    """Charts by the name of their file: the accuracy by round of every case, or the rates."""
    from ..report import charts

    if study.view == "rates":
        found, measure = all_series(study, runs), Metric("mean of the stationarity measure", False)
        for what, full in (("full gradients", True), ("batches", False)):
            if lines := chart_lines(found, full_gradients=full):
                yield f"{study.name}-{folder_name(what, 'case')}", charts.history(lines, measure, x="T", log=True)
        return
    for case in study.cases:
        compared = Comparison({label: runs[case.name][label] for label in case.compared})
        yield f"{study.name}-{folder_name(case.name, 'case')}", compared.plot_history()


# ---------------------------------------------------------------------- scores


def score_table(study: Study, case: Case, runs: Runs) -> Table:
    """One row per method in the order of the study: ours, the paper's, and the cost to reach the first target."""
    published = paper_results(*(case.paper or (study.name, case.name)))
    found = Comparison(runs)
    ours = {name: dict(zip((m.label for m in found.methods), column, strict=True))
            for name, column in _by_column(found.table).items()}  # fmt: skip
    measured = found.metric.name if found.metric else "accuracy"
    columns, rows = [Column("method", text=True)], {label: [label] for label in runs}

    def add(column: Column, values: Mapping[str, object]) -> None:
        columns.append(column)
        for label, row in rows.items():
            row.append(values.get(label))  # type: ignore[arg-type]

    if len({len(own) for own in runs.values()}) > 1:
        add(Column("seeds", show="{:.0f}".format), {label: len(own) for label, own in runs.items()})
    two = "{:.2f}".format
    scores = {label: _in_percent(cell) for label, cell in ours[measured].items()}
    add(Column("ours" if published else measured, show=two), scores)
    if published:
        paper = {label: result for label in runs if (result := published.get(_name_in_paper(case, label)))}
        add(Column("paper", show=two), {label: Spread(r.accuracy, r.sd) for label, r in paper.items()})
        differences = {label: scores[label].mean - r.accuracy for label, r in paper.items()}  # type: ignore[union-attr]
        add(Column("difference", show="{:+.2f}".format), differences)
    for name in ("client mean", "worst tenth"):
        add(Column(name, show=two), {label: _in_percent(cell) for label, cell in ours[name].items()})
    for name in ("in true group", "membership error", "seconds", "MB up", "MB down"):
        if name in ours:
            add(
                next(c for c in found.table.columns if c.name == name)._replace(about="", higher_is_better=None),
                ours[name],
            )
    for target in case.targets[:1]:
        costs = {label: mean_cost(own, target) for label, own in runs.items()}
        parts = (("rounds", "{:.0f}".format, 1.0), ("seconds", show_seconds, 1.0),
                 ("MB up", "{:.3g}".format, MB), ("MB down", "{:.3g}".format, MB))  # fmt: skip
        for at, (name, show, unit) in enumerate(parts):
            add(Column(f"{name} to {target:.1%}", show=show), {k: cost[at] / unit for k, cost in costs.items() if cost})
    sources = ", ".join(dict.fromkeys(result.source for result in published.values()))
    notes = (f"Paper: {sources}.",) if sources else ()
    return Table(_title(study, case, runs), tuple(columns), tuple(map(tuple, rows.values())), notes)


def _by_column(table: Table) -> dict[str, list[object]]:
    return {column.name: [row[at] for row in table.rows] for at, column in enumerate(table.columns)}


def _in_percent(cell: object) -> Spread | None:
    if not isinstance(cell, Spread):
        return None
    return Spread(_POINTS * cell.mean, None if cell.sd is None else _POINTS * cell.sd)


def _name_in_paper(case: Case, label: str) -> str:
    return label.split(", ")[0] if case.paper else label


def _title(study: Study, case: Case, runs: Runs) -> str:
    before = [f"{e.rounds} of {label}" for label, e in case.experiments.items() if label not in case.compared]
    rounds = " after ".join([f"{case.experiments[case.compared[0]].rounds} rounds", *before])
    clients = len(next(iter(runs.values()))[0].ids)
    seeds = {len(method_runs) for method_runs in runs.values()}
    many = f"{min(seeds)} to {max(seeds)} seeds" if len(seeds) > 1 else f"{min(seeds)} seed{'s' * (min(seeds) > 1)}"
    title = f"{study.title}, {case.name}: {clients} clients, {rounds}, {many}"
    return f"{title}; {case.scale}" if case.scale else title


# ---------------------------------------------------------------------- rates


def _rates(study: Study, runs: Mapping[str, Runs]) -> Iterator[tuple[str, Table]]:
    """The mean of the measure by horizon with its slope, and the bounds of the theorems."""
    found = all_series(study, runs)
    horizons = sorted({T for series in found for T in series.means})
    names = [f"{series.promise.theorem}, {series.promise.about}: {series.label}" for series in found]
    each_T = [Column(f"T = {T:,}", show="{:.2e}".format) for T in horizons]
    columns = (Column("runs", text=True), Column("eta at the largest T"), *each_T,
               Column("slope", show="{:.2f}".format), Column("promised"))  # fmt: skip
    measured = [
        (name, series.eta, *(series.means.get(T) for T in horizons), series.slope, _exponent(series.promise.exponent))
        for name, series in zip(names, found, strict=True)
    ]
    title = f"{study.title}: mean of the stationarity measure over T rounds"
    yield "measured", Table(title, columns, tuple(measured), tuple(_promises_kept(found)))
    bounds = [(name, *(s.bounds.get(T) for T in horizons)) for name, s in zip(names, found, strict=True)]
    title = "The bounds of the theorems for the same runs"
    yield "bounds", Table(title, (Column("runs", text=True), *each_T), tuple(bounds))


def _promises_kept(found: Sequence[Series]) -> Iterator[str]:
    """One sentence per theorem: what it promises, and what was measured."""
    for promise in dict.fromkeys(series.promise for series in found):
        own = [series for series in found if series.promise == promise]
        slopes = ", ".join(f"T^{'–' if math.isnan(s.slope) else f'{s.slope:.2f}'} ({s.label})" for s in own)
        promised = f"T^{promise.exponent:g}" if promise.exponent else "no rate, as the noise of a constant step stays"
        least = min(series.bounds[T] / series.means[T] for series in own for T in series.means)
        yield (
            f"- {promise.theorem} ({promise.about}) promises {promised}; measured {slopes}, "
            f"at least {least:.0f} times below its bound."
        )


def _exponent(value: float) -> str:
    return f"{value:g}" if value else "to a floor"
