"""The run that is attacked, and whether two runs came to the same end."""

from pathlib import Path
from typing import Any

import torch

from ppfl.core.trees import named_leaves
from ppfl.io.codec import load
from ppfl.runs import Experiment, RunFolder, load_run, run

SETTINGS: dict[str, Any] = {
    "name": "victim",
    "rounds": 8,
    "data": {"name": "synthetic_groups", "n_clients": 8, "groups": 2, "dim": 3, "samples": 9, "test_points": 4},
    "model": {"name": "linear"},
    "population": {"k": 2, "mix": "predictions"},
    "method": {"name": "ppfl", "lr": 0.3, "batch_size": 4, "order": "random", "participation": 0.5},
    "watch": {"every": 2, "output": "best"},
}


def victim(**changes: Any) -> Experiment:
    return Experiment.model_validate(SETTINGS | changes)


class StopError(Exception):
    """Ends a run in the middle, without a chance to save anything."""


def run_until(out: Path, round: int, checkpoint_every: int, **changes: Any) -> Path:
    """The folder of a run that ended after that round, as if its process had been killed."""

    def stop(_seed: int, end: Any) -> None:
        if end.state.round == round:
            raise StopError

    experiment = victim(**changes)
    try:
        run(experiment, out, checkpoint_every=checkpoint_every, on_round_end=stop)
    except StopError:
        return out / f"seed-{experiment.seeds[0]}"
    raise AssertionError(f"the run was to end after round {round}")


def difference(folder: Path, whole: Path) -> str | None:
    """Between the run in `folder` and one never stopped: every bit of the result, and all records but the seconds."""
    here, there = load_run(folder), load_run(whole)
    if not here.finished:
        return "it is not finished"
    a, b = (named_leaves(load(RunFolder(path).result_file, "result")) for path in (folder, whole))
    same = (torch.equal(a[name], b[name]) if isinstance(a[name], torch.Tensor) else a[name] == b[name] for name in a)
    if a.keys() != b.keys() or not all(same):
        return "the result differs"
    if [row | {"seconds": 0} for row in here.metrics] != [row | {"seconds": 0} for row in there.metrics]:
        return "the metrics differ"
    ours, theirs = here.memberships_by_round, there.memberships_by_round
    if ours.keys() != theirs.keys() or not all(torch.equal(ours[at], theirs[at]) for at in ours):
        return "the memberships of some round differ"
    return None if here.ids == there.ids and here.scores == there.scores else "ids or scores differ"


def contents(folder: Path) -> dict[str, bytes]:
    """Every file in a folder, by its path there."""
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}
