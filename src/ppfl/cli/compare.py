"""`ppfl compare`: methods side by side, live, and in the end as a table and a report."""

from __future__ import annotations

import json
import statistics
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.live import Live
from rich.table import Table

from ..runs import RunFolder, RunRecord, metric_name
from ..runs.comparison import Task
from .tables import NOTHING, show_score

REFRESH = 1.0  # seconds
TAIL = 1 << 16  # bytes of a record of rounds that are looked at


class Progress(NamedTuple):
    """How far a run is."""

    round: int
    metric: str | None
    score: float | None


def progress_of(folder: Path) -> Progress:
    """From the last whole lines of a run's record."""
    file = RunFolder(folder).metrics_file
    if not file.is_file():
        return Progress(0, None, None)
    with file.open("rb") as record:
        record.seek(max(0, file.stat().st_size - TAIL))
        lines = record.read().split(b"\n")[:-1]
    rows = [row for line in lines if (row := _parsed(line)) is not None]
    if not rows:
        return Progress(0, None, None)
    scored = next((row for row in reversed(rows) if metric_name(row)), {})
    metric = metric_name(scored)
    return Progress(int(rows[-1]["round"]), metric, scored[metric] if metric else None)


def _parsed(line: bytes) -> dict[str, float] | None:
    try:
        row = json.loads(line)
    except ValueError:  # the first one may be cut
        return None
    return row if isinstance(row, dict) and "round" in row else None


@contextmanager
def show_tasks(tasks: Sequence[Task], *, quiet: bool) -> Iterator[None]:
    """A live table on a terminal."""
    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield
        return
    done = threading.Event()
    with Live(live_table(tasks), console=console, transient=True, auto_refresh=False) as live:

        def keep_up() -> None:
            while not done.wait(REFRESH):
                live.update(live_table(tasks), refresh=True)

        watcher = threading.Thread(target=keep_up, daemon=True)
        watcher.start()
        try:
            yield
        finally:
            done.set()
            watcher.join()


def tell(task: Task) -> None:
    """One line for a run that is done, where nobody watches live."""
    found = progress_of(task.run_folder)
    score = f", {found.metric} {show_score(found.metric, found.score)}" if found.metric else ""
    print(f"{task.label}, seed {task.seed}: round {found.round} of {task.experiment.rounds}{score}", file=sys.stderr)


def live_table(tasks: Sequence[Task]) -> Table:
    """A row a method, a column a seed: its round while it runs, its score."""
    seeds = list(dict.fromkeys(task.seed for task in tasks))
    table = Table(box=SIMPLE_HEAD)
    table.add_column("method", no_wrap=True)
    for seed in seeds:
        table.add_column(f"seed {seed}", justify="right")
    cells: dict[str, dict[int, str]] = {}
    for task in tasks:
        cells.setdefault(task.label, {})[task.seed] = _cell(task)
    for label, by_seed in cells.items():
        table.add_row(label, *(by_seed.get(seed, NOTHING) for seed in seeds))
    return table


def _cell(task: Task) -> str:
    found = progress_of(task.run_folder)
    if found.round == 0:
        return NOTHING
    score = show_score(found.metric or "", found.score)
    return score if found.round >= task.experiment.rounds else f"{score} {found.round}/{task.experiment.rounds}"


def comparison_table(records: dict[str, list[RunRecord]]) -> Table:
    """A row a method: scores as mean and standard deviation over seeds, and what a seed cost."""
    metric = next((r.metric for runs in records.values() for r in runs if r.metric), None)
    table = Table(
        box=SIMPLE_HEAD,
        caption="± standard deviation over seeds; mean, worst 10%: over clients; MB: per client, all rounds; s: a seed",
        caption_justify="left",
        padding=(0, 1, 0, 0),
    )
    table.add_column("method", no_wrap=True)
    known = any(run.agreement for runs in records.values() for run in runs)
    names = [metric, "mean", "worst 10%"] if metric else []
    for name in (*names, *(["grouped", "off"] if known else []), "s", "MB up", "MB down"):
        table.add_column(name, justify="right", no_wrap=True)
    for label, runs in records.items():
        scores = [[run.scores.get(f"{metric}{part}") for run in runs] for part in ("", "_mean", "_worst_tenth")]
        cells = [with_spread(metric, values) for values in scores] if metric else []
        if known:
            found = [run.agreement for run in runs]
            share = statistics.mean(a.share for a in found if a) if all(found) else None
            off = statistics.mean(a.distance for a in found if a) if all(found) else None
            cells += [show_score("accuracy", share), NOTHING if off is None else f"{off:.3f}"]
        cost = [statistics.mean(run.total(key) for run in runs) for key in ("seconds", "bytes_up", "bytes_down")]
        clients = len(runs[0].ids)
        table.add_row(label, *cells, f"{cost[0]:.1f}", *(f"{value / clients / 1e6:.3g}" for value in cost[1:]))
    return table


def with_spread(metric: str, values: Sequence[float | None]) -> str:
    """Mean and standard deviation.

    >>> with_spread("accuracy", [0.5, 0.7])
    '60.00 ± 14.14%'
    """
    known = [value for value in values if value is not None]
    if len(known) < len(values) or not known:
        return NOTHING
    mean = show_score(metric, statistics.mean(known))
    if len(known) == 1:
        return mean
    spread = show_score(metric, statistics.stdev(known))
    return f"{mean.removesuffix('%')} ± {spread}"
