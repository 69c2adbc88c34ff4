"""Experiments as files and runs as folders: TOML in, checked; metrics, memberships and checkpoints out, written so
that a run killed at any instant can be resumed and ends with the same bits."""

from .experiment import Experiment
from .folder import RunFolder
from .load import load_experiment
from .provenance import package_version
from .record import Agreement, RunRecord, find_runs, group_agreement, load_run, metric_name
from .run import Interrupted, OnRoundEnd, run

__all__ = [
    "Agreement",
    "Experiment",
    "Interrupted",
    "OnRoundEnd",
    "RunFolder",
    "RunRecord",
    "find_runs",
    "group_agreement",
    "load_experiment",
    "load_run",
    "metric_name",
    "package_version",
    "run",
]
