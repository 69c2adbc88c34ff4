"""What is seen while the command line runs an experiment."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ..report.progress_bar import show_rounds
from ..runs import Experiment, OnRoundEnd


@contextmanager
def show_progress(experiment: Experiment, *, label: str = "", quiet: bool = False) -> Iterator[OnRoundEnd | None]:
    """A callback that shows each round of the experiment on standard error."""
    if quiet:
        yield None
        return
    search = "set method.lr to skip this" if experiment.method.local.lr == "auto" else None
    with show_rounds(experiment.rounds, search=search, transient=True) as show:
        yield None if show is None else lambda seed, end: show(label or f"seed {seed}", end.record)
