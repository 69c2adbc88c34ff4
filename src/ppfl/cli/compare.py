"""Several runs at once: how far each of them is, live."""

from __future__ import annotations

import json
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

from ..runs import RunFolder, metric_name
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
