"""Small experiments, and folders compared byte by byte."""

from pathlib import Path
from typing import Any

from ppfl.runs import Experiment

SMALL: dict[str, Any] = {
    "name": "small",
    "rounds": 6,
    "data": {"name": "synthetic_groups", "n_clients": 6, "groups": 2, "dim": 3, "samples": 9, "test_points": 4},
    "model": {"name": "linear"},
    "population": {"k": 2, "mix": "predictions"},
    "algorithm": {"name": "ppfl", "lr": 0.3, "batch_size": 4},
    "watch": {"every": 2},
}


def small_experiment(**changes: Any) -> Experiment:
    return Experiment.model_validate(SMALL | changes)


def file_bytes(folder: Path) -> dict[str, bytes]:
    """Every file in a folder, by its path there."""
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}
