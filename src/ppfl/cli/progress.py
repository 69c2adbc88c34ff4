"""What is seen while a run goes on: a bar on a terminal, a few lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from ..runs import Experiment, OnRoundEnd, metric_name
from ..server import Record, RoundEnd
from .run_tables import show_score
from .terminal import make_console, printable, say

LINES = 10  # printed in a run without a terminal
SECONDS = 60.0  # between two lines at most, if a round ends


@contextmanager
def show_progress(experiment: Experiment, *, label: str = "", quiet: bool = False) -> Iterator[OnRoundEnd | None]:
    """A callback that shows each round of the experiment on standard error."""
    console = make_console(error=True)
    if quiet:
        yield None
    elif not console.is_terminal:
        yield _Lines(experiment, label)
    else:
        name, news = (TextColumn(text, markup=False) for text in ("{task.description}", "{task.fields[news]}"))
        columns = (name, BarColumn(), MofNCompleteColumn(), news, TimeRemainingColumn())
        with Progress(*columns, console=console, transient=True) as progress:
            yield _Bars(experiment, label, progress)


class _Bars:
    def __init__(self, experiment: Experiment, label: str, progress: Progress) -> None:
        self.experiment, self.label, self.progress = experiment, label, progress
        self.tasks: dict[int, TaskID] = {}
        self.news = _News()
        self.search = self._announce_search()

    def _announce_search(self) -> TaskID | None:
        """Short trials for lr = "auto" come before the first round: say so, as they take a while."""
        if not self.experiment.algorithm.needs_lr:
            return None
        return self.progress.add_task("finding the step size", total=None, news="set algorithm.lr to skip this")

    def __call__(self, seed: int, end: RoundEnd) -> None:
        if self.search is not None:
            self.progress.remove_task(self.search)
            self.search = None
        if seed not in self.tasks:
            # time is estimated from here on: what a resumed run did before was not now
            self.tasks[seed] = self.progress.add_task(
                _describe(self.label, seed), total=self.experiment.rounds, completed=end.state.round, news=""
            )
        self.progress.update(
            self.tasks[seed], completed=end.state.round, news=self.news.text(seed, end.record), refresh=False
        )


class _Lines:
    def __init__(self, experiment: Experiment, label: str) -> None:
        self.rounds, self.label = experiment.rounds, label
        self.news, self.last, self.began = _News(), time.monotonic(), time.monotonic()
        self.first: dict[int, int] = {}

    def __call__(self, seed: int, end: RoundEnd) -> None:
        round, news = end.state.round, self.news.text(seed, end.record)
        now = time.monotonic()
        if seed not in self.first:
            self.first[seed], self.began = round, now
        if round * LINES // self.rounds == (round - 1) * LINES // self.rounds and now - self.last < SECONDS:
            return
        self.last = now
        done = round - self.first[seed]
        left = f", {(now - self.began) / done * (self.rounds - round):.0f} s left" if done else ""
        say(f"{_describe(self.label, seed)}: round {round} of {self.rounds}, {news}{left}", error=True)


class _News:
    """Training loss of each round, and the score when it was last measured."""

    def __init__(self) -> None:
        self.scores: dict[int, str] = {}

    def text(self, seed: int, record: Record) -> str:
        if (metric := metric_name(record)) is not None:
            self.scores[seed] = f", {metric} {show_score(metric, record[metric])}"
        return f"loss {show_score('loss', record['loss'])}{self.scores.get(seed, '')}"


def _describe(label: str, seed: int) -> str:
    return printable(label) or f"seed {seed}"
