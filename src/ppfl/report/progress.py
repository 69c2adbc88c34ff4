"""What is seen while training goes on: a bar on a terminal or in a notebook, a few lines elsewhere.

Everything goes to standard error (in a notebook, to the cell), so that standard output has results alone.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cache
from importlib.util import find_spec

from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn, TimeRemainingColumn
from rich.text import Text

from ..runs import metric_name
from ..server import Record
from ..sites.frozen_features import watch_frozen_layers
from .terminal import PlainConsole, make_console, printable, say
from .theme import show_score

LINES = 10  # printed in a run without a terminal
SECONDS = 60.0  # between two lines at most, if a round ends

ShowRound = Callable[[str, Record], None]  # the name of a run, and the record of its round


@contextmanager
def show_rounds(
    rounds: int, *, search: str | None = None, lines: bool = True, transient: bool = False
) -> Iterator[ShowRound | None]:
    """A function that shows each round of one or several runs; None where there is nothing to show it on.

    search: what to say while trials look for the step size, before the first round; None where there are no trials.
    lines: print a few lines where no bar can be shown. transient: take the bar away at the end.
    """
    console = make_console(error=True)
    if not can_show_bar(console):
        with watch_frozen_layers(_SampleLines()) if lines else nullcontext():
            yield _Lines(rounds) if lines else None
        return
    with _open_bars(console, transient) as progress, watch_frozen_layers(_SampleBar(lambda: progress)):
        yield _Bars(rounds, search, progress)


@contextmanager
def show_frozen_layers(*, lines: bool = False) -> Iterator[None]:
    """Show how many samples have run through the frozen layers of a network, where there are any."""
    console = make_console(error=True)
    if not can_show_bar(console):
        with watch_frozen_layers(_SampleLines()) if lines else nullcontext():
            yield
        return
    with ExitStack() as stack:
        bar = _SampleBar(lambda: stack.enter_context(_open_bars(console, transient=True)))
        with watch_frozen_layers(bar):
            yield


@contextmanager
def _open_bars(console: PlainConsole, transient: bool) -> Iterator[Progress]:
    name, news = (TextColumn(text, markup=False) for text in ("{task.description}", "{task.fields[news]}"))
    columns = (name, BarColumn(), _Round(), news, _TimeLeft(elapsed_when_finished=True))
    # What is printed on the way appears above the bar. Only where both are one terminal: rich would else write what
    # is meant for standard output to standard error.
    same_screen = not console.is_jupyter and sys.stdout is not None and sys.stdout.isatty()
    with Progress(*columns, console=console, transient=transient, redirect_stdout=same_screen) as progress:
        try:
            yield progress
        finally:
            if console.is_jupyter:  # there, rich does not draw the last state by itself
                progress.refresh()


def can_show_bar(console: PlainConsole) -> bool:
    """Whether it writes to a terminal, or to a notebook that has the widgets which rich needs to draw a bar there."""
    if console.is_jupyter:
        return find_spec("ipywidgets") is not None
    return sys.stderr is not None and sys.stderr.isatty()


class _Bars:
    def __init__(self, rounds: int, search: str | None, progress: Progress) -> None:
        self.rounds, self.progress, self.news = rounds, progress, _News()
        self.tasks: dict[str, TaskID] = {}
        # short trials for lr = "auto" come before the first round: say so, as they take a while
        self.search = None if search is None else progress.add_task("finding the step size", total=None, news=search)

    def __call__(self, run: str, record: Record) -> None:
        if self.search is not None:
            self.progress.remove_task(self.search)
            self.search = None
        round = record["round"]
        if run not in self.tasks:
            # time is estimated from here on: what a resumed run did before was not now
            self.tasks[run] = self.progress.add_task(printable(run), total=self.rounds, completed=round, news="")
        self.progress.update(self.tasks[run], completed=round, news=self.news.text(run, record), refresh=False)


class _SampleBar:
    def __init__(self, open_bars: Callable[[], Progress]) -> None:
        self.open_bars = cache(open_bars)  # most networks have no frozen layers and need no bar
        self.task: TaskID | None = None

    def __call__(self, done: int, total: int) -> None:
        progress = self.open_bars()
        if self.task is None:
            self.task = progress.add_task("frozen layers", total=total, news="", unit="sample")
        progress.update(self.task, completed=done)
        if done == total:
            progress.remove_task(self.task)
            self.task = None


class _SampleLines:
    def __init__(self) -> None:
        self.last = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        if time.monotonic() - self.last >= SECONDS:
            self.last = time.monotonic()
            say(f"frozen layers: {done:,} of {total:,} samples", error=True)


class _Lines:
    def __init__(self, rounds: int) -> None:
        self.rounds, self.news = rounds, _News()
        self.last, self.began = time.monotonic(), time.monotonic()
        self.first: dict[str, int] = {}

    def __call__(self, run: str, record: Record) -> None:
        round, news = record["round"], self.news.text(run, record)
        now = time.monotonic()
        if run not in self.first:
            self.first[run], self.began = round, now
        if round * LINES // self.rounds == (round - 1) * LINES // self.rounds and now - self.last < SECONDS:
            return
        self.last = now
        done = round - self.first[run]
        left = f", {(now - self.began) / done * (self.rounds - round):.0f} s left" if done else ""
        say(f"{run}: round {round} of {self.rounds}, {news}{left}", error=True)


class _News:
    """Training loss of each round, and the score when it was last measured."""

    def __init__(self) -> None:
        self.scores: dict[str, str] = {}

    def text(self, run: str, record: Record) -> str:
        if (metric := metric_name(record)) is not None:
            self.scores[run] = f", {metric} {show_score(metric, record[metric])}"
        return f"loss {show_score('loss', record['loss'])}{self.scores.get(run, '')}"


class _Round(ProgressColumn):
    def render(self, task: Task) -> Text:
        unit = task.fields.get("unit", "round")
        return Text("" if task.total is None else f"{unit} {task.completed:.0f}/{task.total:.0f}")


class _TimeLeft(TimeRemainingColumn):
    def render(self, task: Task) -> Text:
        shown = super().render(task)
        return shown if task.finished or task.total is None else shown.append(" left")
