"""What is seen while runs go on: a bar for one, a live table for several."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from rich.box import SIMPLE_HEAD
from rich.live import Live
from rich.table import Table

from ..report.progress import show_rounds
from ..report.run_tables import changed_settings
from ..report.theme import NOTHING, show_score
from ..runs import Experiment, OnRoundEnd, RunFolder, metric_name
from ..runs.comparison import RunTask
from ..runs.tuning import Trial
from .terminal import make_console, say

REFRESH = 1.0  # seconds
TAIL = 1 << 16  # bytes to read from the end of a metrics file


@contextmanager
def show_progress(experiment: Experiment, *, label: str = "", quiet: bool = False) -> Iterator[OnRoundEnd | None]:
    """A callback that shows each round of the experiment on standard error."""
    if quiet:
        yield None
        return
    search = "set method.lr to skip this" if experiment.method.local.lr == "auto" else None
    with show_rounds(experiment.rounds, search=search, transient=True) as show:
        yield None if show is None else lambda seed, end: show(label or f"seed {seed}", end.record)


class RunProgress(NamedTuple):
    """The last round of a run, and its last score."""

    round: int
    metric: str | None
    score: float | None


def progress_of(folder: Path) -> RunProgress:
    """Read the last complete lines of the metrics file of a run."""
    file = RunFolder(folder).log.metrics.path
    if not file.is_file():
        return RunProgress(0, None, None)
    with file.open("rb") as record:
        record.seek(max(0, file.stat().st_size - TAIL))
        lines = record.read().split(b"\n")[:-1]
    rows = [row for line in lines if (row := _parsed(line)) is not None]
    if not rows:
        return RunProgress(0, None, None)
    scored = next((row for row in reversed(rows) if metric_name(row)), {})
    metric = metric_name(scored)
    return RunProgress(int(rows[-1]["round"]), metric, scored[metric] if metric else None)


def _parsed(line: bytes) -> dict[str, float] | None:
    try:
        row = json.loads(line)
    except ValueError:  # the first line may be incomplete
        return None
    return row if isinstance(row, dict) and "round" in row else None


@contextmanager
def show_tasks(tasks: Sequence[RunTask], *, quiet: bool) -> Iterator[None]:
    """Show a live table while the tasks run, if the output is a terminal."""
    console = make_console(error=True)
    if quiet or not console.is_terminal:
        yield
        return
    done = threading.Event()
    with Live(live_table(tasks), console=console, transient=True, auto_refresh=False) as live:

        def refresh() -> None:
            while not done.wait(REFRESH):
                live.update(live_table(tasks), refresh=True)

        watcher = threading.Thread(target=refresh, daemon=True)
        watcher.start()
        try:
            yield
        finally:
            done.set()
            watcher.join()


def print_progress(task: RunTask) -> None:
    """Print one line for a finished run, where there is no live table."""
    found = progress_of(task.run_folder)
    score = f", {found.metric} {show_score(found.metric, found.score)}" if found.metric else ""
    say(f"{task.label}, seed {task.seed}: round {found.round} of {task.experiment.rounds}{score}", error=True)


def print_trial(label: str, trial: Trial) -> None:
    """Print one line for a finished trial of `ppfl tune`."""
    score = show_score(trial.metric, trial.score)
    say(f"{label}, {changed_settings(trial)}: validation {trial.metric} {score}", error=True)


def live_table(tasks: Sequence[RunTask]) -> Table:
    """One row per method, one column per seed: the score, and the round while the run is not finished."""
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


def _cell(task: RunTask) -> str:
    found = progress_of(task.run_folder)
    if found.round == 0:
        return NOTHING
    score = show_score(found.metric or "", found.score)
    return score if found.round >= task.experiment.rounds else f"{score} {found.round}/{task.experiment.rounds}"
