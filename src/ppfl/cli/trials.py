"""Show the trials of `ppfl tune` on a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table

from ..report.metric import show_score
from ..runs.tuning import Trial
from .terminal import say


def print_trial(label: str, trial: Trial) -> None:
    """Print one line for a finished trial."""
    score = show_score(trial.metric, trial.score)
    say(f"{label}, {changed_settings(trial)}: validation {trial.metric} {score}", error=True)


def trials_table(found: Mapping[str, Sequence[Trial]]) -> Table:
    """The best trial of every method, and the score of its original settings."""
    table = Table(box=SIMPLE_HEAD, caption="scores on validation samples of the clients' training data")
    for name in ("method", "best settings", "score", "original score", "trials"):
        table.add_column(name, justify="left" if name in ("method", "best settings") else "right")
    for label, trials in found.items():
        best, own = trials[0], next(trial for trial in trials if not trial.changes)
        scores = (show_score(trial.metric, trial.score) for trial in (best, own))
        table.add_row(label, changed_settings(best), *scores, str(len(trials)))
    return table


def changed_settings(trial: Trial) -> str:
    return ", ".join(f"{name} = {value}" for name, value in trial.changes.items()) or "original settings"
