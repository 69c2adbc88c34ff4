"""Trials of `ppfl tune` for a terminal."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table

from ..runs.tuning import Trial
from .tables import show_score


def tell_trial(label: str, trial: Trial) -> None:
    """A line a trial, as it ends."""
    score = show_score(trial.metric, trial.score)
    print(f"{label}, {settings_of(trial)}: validation {trial.metric} {score}", file=sys.stderr)


def trials_table(found: Mapping[str, Sequence[Trial]]) -> Table:
    """Every method's best trial, and what its own settings gave."""
    table = Table(box=SIMPLE_HEAD, caption="scores on validation samples of the clients' training data")
    for name in ("method", "best settings", "score", "as it stood", "trials"):
        table.add_column(name, justify="left" if name in ("method", "best settings") else "right")
    for label, trials in found.items():
        best, own = trials[0], next(trial for trial in trials if not trial.changes)
        scores = (show_score(trial.metric, trial.score) for trial in (best, own))
        table.add_row(label, settings_of(best), *scores, str(len(trials)))
    return table


def settings_of(trial: Trial) -> str:
    return ", ".join(f"{name} = {value}" for name, value in trial.changes.items()) or "as it stands"
