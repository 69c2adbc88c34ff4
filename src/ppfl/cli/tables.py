"""Runs as tables for a terminal."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from ..runs import RunRecord

NOTHING = "–"
ROWS = 12
MB = 1e6


def result_table(records: Sequence[RunRecord], heading: str, labels: Sequence[str]) -> Table:
    """A row a run: scores of the state it returned, the true groups it found, and what it cost."""
    metric = next((record.metric for record in records if record.metric), None)
    columns: dict[str, Callable[[RunRecord], str]] = {}
    if metric is not None:
        columns |= {
            metric: lambda r: show_score(metric, r.scores.get(metric)),
            "client mean": lambda r: show_score(metric, r.scores.get(f"{metric}_mean")),
            "worst tenth": lambda r: show_score(metric, r.scores.get(f"{metric}_worst_tenth")),
        }
    if any(record.agreement for record in records):
        columns["groups found"] = lambda r: show_score("accuracy", r.agreement and r.agreement.share)
    columns |= {
        "seconds": lambda r: f"{r.total('seconds'):.1f}",
        "MB up": lambda r: _megabytes(r, "bytes_up"),
        "MB down": lambda r: _megabytes(r, "bytes_down"),
    }
    table = Table(box=SIMPLE_HEAD, caption="MB per client", caption_justify="left")
    table.add_column(heading)
    for name in columns:
        table.add_column(name, justify="right")
    for record, label in zip(records, labels, strict=True):
        table.add_row(label, *(cell(record) for cell in columns.values()))
    return table


def metrics_table(record: RunRecord) -> Table:
    """A dozen rounds, evenly from the first to the last that was evaluated."""
    shown = [record.evaluated[i] for i in spread_evenly(len(record.evaluated), ROWS)]
    metric = record.metric
    keys = {"loss": "training loss"}
    if metric is not None:
        keys |= {metric: metric, f"{metric}_mean": "client mean", f"{metric}_worst_tenth": "worst tenth"}
    keys |= {key: key for key in ("objective", "stationarity") if any(key in row for row in shown)}
    table = Table(box=SIMPLE_HEAD)
    for name in ("round", *keys.values()):
        table.add_column(name, justify="right")
    for row in shown:
        cells = (show_score(metric if metric and key.startswith(metric) else key, row.get(key)) for key in keys)
        table.add_row(str(row["round"]), *cells)
    return table


def summary_line(record: RunRecord) -> str:
    """What was run, and how far it came."""
    rounds = record.experiment["rounds"]
    state = "finished" if record.finished else f"stopped or running, round {record.rounds_done} of {rounds}"
    data = record.experiment["data"]["name"]
    line = f"{record.name}: {record.method} on {data}, {len(record.ids)} clients, seed {record.seed}, {state}"
    agreement = record.agreement
    if agreement is None:
        return line
    share = show_score("accuracy", agreement.share)
    return f"{line}; {share} of the clients in their true group, {agreement.distance:.3f} from the truth"


def show_score(metric: str, value: Any) -> str:
    """A number as it is read: shares in per cent, and nothing where nothing was measured.

    >>> show_score("accuracy", 0.9123), show_score("rmse", 0.51234), show_score("rmse", None)
    ('91.2 %', '0.5123', '–')
    """
    if value is None or not math.isfinite(value):
        return NOTHING
    return f"{100 * value:.1f} %" if metric == "accuracy" else f"{value:.4g}"


def spread_evenly(count: int, most: int) -> list[int]:
    """At most so many positions, from the first to the last.

    >>> spread_evenly(100, 4), spread_evenly(2, 4)
    ([0, 33, 66, 99], [0, 1])
    """
    if count <= most:
        return list(range(count))
    return [round(i * (count - 1) / (most - 1)) for i in range(most)]


def _megabytes(record: RunRecord, key: str) -> str:
    return f"{record.total(key) / len(record.ids) / MB:.3g}"
