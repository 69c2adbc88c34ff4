"""Tables of runs for a terminal."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from rich.box import SIMPLE_HEAD
from rich.table import Table

from ..report.metric import NOTHING, show_score
from ..report.summary import refused_updates
from ..runs import RunRecord, mean_and_sd

ROWS = 12
MB = 1e6
_OVER_CLIENTS = "mean, worst 10%: over clients"
_CAPTION = f"{_OVER_CLIENTS}; MB: per client, all rounds"
_TRUTH = "; grouped: clients in their true group; off: mean distance of memberships from the truth"


class RunColumn(NamedTuple):
    """A value of a run, and how it is shown."""

    value: Callable[[RunRecord], float | None]
    show: Callable[[float | None], str]
    spreads: bool = False  # whether to show the standard deviation over seeds

    def over_seeds(self, runs: Sequence[RunRecord]) -> str:
        """The mean over seeds, if all of them have the value."""
        known = [value for run in runs if (value := self.value(run)) is not None]
        if len(known) < len(runs):
            return NOTHING
        return mean_and_sd(known, self.show) if self.spreads else self.show(statistics.mean(known))


def result_table(
    records: Sequence[RunRecord], heading: str, labels: Sequence[str], *, summarise: bool = False
) -> Table:
    """One row per run: scores of the state it returned, agreement with the truth, and cost; then mean and deviation."""
    columns = _result_columns(records)
    table = _empty_table(heading, columns, _CAPTION, records)
    rows = [[column.value(record) for column in columns.values()] for record in records]
    for label, row in zip(labels, rows, strict=True):
        table.add_row(label, *(column.show(value) for column, value in zip(columns.values(), row, strict=True)))
    if summarise and len(records) > 1:
        for label, summary in (("mean", statistics.mean), ("sd", statistics.stdev)):
            known = [[value for value in values if value is not None] for values in zip(*rows, strict=True)]
            figures = [summary(values) if len(values) == len(rows) else None for values in known]
            cells = (column.show(figure) for column, figure in zip(columns.values(), figures, strict=True))
            table.add_row(label, *cells, style="bold")
    return table


def comparison_table(records: Mapping[str, Sequence[RunRecord]]) -> Table:
    """One row per method: mean and standard deviation of the scores over seeds, and the mean cost of a seed."""
    everything = [run for runs in records.values() for run in runs]
    columns = _result_columns(everything)
    table = _empty_table("method", columns, f"± standard deviation over seeds; {_CAPTION}; s: per seed", everything)
    for label, runs in records.items():
        table.add_row(label, *(column.over_seeds(runs) for column in columns.values()))
    return table


def _empty_table(heading: str, columns: Collection[str], caption: str, records: Sequence[RunRecord]) -> Table:
    caption += _TRUTH if "off" in columns else ""
    caption += f"; {refused}" if (refused := refused_updates(records)) else ""
    table = Table(box=SIMPLE_HEAD, caption=caption, caption_justify="left", padding=(0, 1, 0, 0))
    table.add_column(heading, no_wrap=True)
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _result_columns(records: Sequence[RunRecord]) -> dict[str, RunColumn]:
    columns: dict[str, RunColumn] = {}
    metric = next((record.metric for record in records if record.metric), None)
    if metric is not None:
        show = partial(show_score, metric)
        columns |= {
            metric: RunColumn(lambda r: r.scores.get(metric), show, spreads=True),
            "mean": RunColumn(lambda r: r.scores.get(f"{metric}_mean"), show, spreads=True),
            "worst 10%": RunColumn(lambda r: r.scores.get(f"{metric}_worst_tenth"), show, spreads=True),
        }
    for name in dict.fromkeys(name for record in records for name in record.own_metrics):
        columns[name] = RunColumn(partial(RunRecord.final, key=name), partial(show_score, name), spreads=True)
    if any(record.agreement for record in records):
        columns["grouped"] = RunColumn(lambda r: r.agreement and r.agreement.share, partial(show_score, "accuracy"))
        columns["off"] = RunColumn(lambda r: r.agreement and r.agreement.distance, _show_distance)
    if any(record.total("refused") for record in records):
        columns["refused"] = RunColumn(lambda r: r.total("refused"), "{:.3g}".format)
    return columns | {
        "s": RunColumn(lambda r: r.total("seconds"), "{:.1f}".format),
        "MB up": RunColumn(lambda r: r.total("bytes_up") / len(r.ids) / MB, "{:.3g}".format),
        "MB down": RunColumn(lambda r: r.total("bytes_down") / len(r.ids) / MB, "{:.3g}".format),
    }


def metrics_table(record: RunRecord) -> Table:
    """At most ROWS evaluated rounds, at even steps from the first to the last."""
    shown = [record.evaluated[i] for i in spread_evenly(len(record.evaluated), ROWS)]
    metric = record.metric
    keys = {"loss": "training loss"}
    if metric is not None:
        keys |= {metric: metric, f"{metric}_mean": "mean", f"{metric}_worst_tenth": "worst 10%"}
    keys |= {name: name for name in record.own_metrics}
    keys |= {key: key for key in ("objective", "stationarity") if any(key in row for row in shown)}
    table = Table(box=SIMPLE_HEAD, caption=None if metric is None else _OVER_CLIENTS, caption_justify="left")
    for name in ("round", *keys.values()):
        table.add_column(name, justify="right")
    for row in shown:
        cells = (show_score(metric if metric and key.startswith(metric) else key, row.get(key)) for key in keys)
        table.add_row(str(row["round"]), *cells)
    return table


def summary_line(record: RunRecord) -> str:
    """What was run, and how many rounds are done."""
    rounds = record.experiment["rounds"]
    state = "finished" if record.finished else f"stopped or running, round {record.rounds_done} of {rounds}"
    data = record.experiment["data"]["name"]
    line = f"{record.name}: {record.method} on {data}, {len(record.ids)} clients, seed {record.seed}, {state}"
    if (agreement := record.agreement) is not None:
        share = show_score("accuracy", agreement.share)
        line += f"; {share} of the clients in their true group, {agreement.distance:.3f} from the truth"
    return f"{line}; {refused}" if (refused := refused_updates([record])) else line


def spread_evenly(count: int, most: int) -> list[int]:
    """At most so many positions at even steps, from the first to the last.

    >>> spread_evenly(100, 4), spread_evenly(2, 4)
    ([0, 33, 66, 99], [0, 1])
    """
    if count <= most:
        return list(range(count))
    return [round(i * (count - 1) / (most - 1)) for i in range(most)]


def _show_distance(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.3f}"
