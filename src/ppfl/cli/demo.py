"""The demo: Local, FedAvg and PPFL on the digits that come with scikit-learn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..runs import Experiment, run
from .program import program
from .progress import show_progress
from .run_tables import result_table
from .terminal import make_console, say

# half of the data are for testing, so that clients have few samples and can gain from each other
_SETTINGS = {
    "rounds": 40,
    "data": {"name": "digits", "test_fraction": 0.5},
    "model": {"name": "perceptron", "hidden": 32},
    "watch": {"every": 2},
}
_LOCAL_WORK = {"lr": 0.2, "batch_size": 16, "local_epochs": 2, "schedule": "cosine"}
_METHODS: dict[str, dict[str, Any]] = {
    "Local": {"method": {"name": "local", **_LOCAL_WORK}},
    "FedAvg": {"method": {"name": "fedavg", **_LOCAL_WORK}},
    "PPFL": {"method": {"name": "ppfl", **_LOCAL_WORK}, "population": {"k": 4, "mix": "weights"}},
}


def demo_experiments(seed: int) -> dict[str, Experiment]:
    """Local, FedAvg and PPFL with the same settings otherwise."""
    return {
        label: Experiment.model_validate({"name": f"demo-{label.lower()}", "seeds": [seed], **_SETTINGS, **method})
        for label, method in _METHODS.items()
    }


def run_demo(out: Path, seed: int) -> None:
    """Run the three methods, print a comparison and write the report; finished runs are not run again."""
    from ..report import write_report  # imported here because only this function needs it

    records = []
    for label, experiment in demo_experiments(seed).items():
        with show_progress(experiment, label=label) as on_round_end:
            records += run(experiment, out / experiment.method.name, resume=True, on_round_end=on_round_end)
    say("40 clients in 4 groups with different digits; no method knows the groups.")
    make_console().print(result_table(records, "method", list(_METHODS)))
    folders = [record.folder for record in records]
    page = write_report(folders, out, title="Who writes which digits: Local, FedAvg and PPFL")
    say(f"the report is {page}; look at the memberships here with: {program()} show {folders[-1]}")
