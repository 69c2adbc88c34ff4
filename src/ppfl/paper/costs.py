"""The rounds, time and bytes a run needs to reach a given accuracy."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

from ..runs.record import RunRecord


class Cost(NamedTuple):
    """The cost of all rounds up to a certain round; bytes are per client of the federation."""

    rounds: float
    seconds: float
    bytes_up: float
    bytes_down: float


def cost_to_reach(run: RunRecord, accuracy: float) -> Cost | None:
    """The cost up to the first evaluated round with at least this accuracy; None if no round has it."""
    reached = next((row["round"] for row in run.metrics if (row.get("accuracy") or 0.0) >= accuracy), None)
    if reached is None:
        return None
    seconds, up, down = (
        sum(row.get(key) or 0 for row in run.metrics if row["round"] <= reached)
        for key in ("seconds", "bytes_up", "bytes_down")
    )
    return Cost(reached, seconds, up / len(run.ids), down / len(run.ids))


def mean_cost(runs: Sequence[RunRecord], accuracy: float) -> Cost | None:
    """The mean cost over seeds; None if a seed does not reach the accuracy."""
    costs = [cost_to_reach(run, accuracy) for run in runs]
    known = [cost for cost in costs if cost is not None]
    return Cost(*map(fmean, zip(*known, strict=True))) if len(known) == len(costs) else None
