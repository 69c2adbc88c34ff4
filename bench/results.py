"""The results of a run of the bench."""

import os
import platform
from typing import Any, NamedTuple

import torch
from cases import Comparison
from growth import Grown
from turns import Measured, measure_in_turns


class Compared(NamedTuple):
    part: str
    title: str
    found: dict[str, Measured]  # by label
    limit: float  # flop/s

    def times_faster(self, label: str) -> float | None:
        """How many times as fast it is as the plain loop that does the same work."""
        one = self.found[label]
        plain = self.found.get(one.case.against or "")
        return None if plain is None or plain.failed or one.failed else plain.seconds / one.seconds

    def of_limit(self, label: str) -> float:
        one = self.found[label]
        return one.flops / self.limit / one.seconds

    def as_json(self) -> dict[str, Any]:
        return {
            "part": self.part,
            "title": self.title,
            "limit_flops_per_second": self.limit,
            "methods": {label: one.as_json() for label, one in self.found.items()},
        }


class Results(NamedTuple):
    compared: dict[str, Compared]  # by part
    grown: list[Grown]
    ranks: dict[int, float]  # seconds per round, by the number of processes

    def as_json(self) -> dict[str, Any]:
        return {
            "machine": machine(),
            "compared": [one.as_json() for one in self.compared.values()],
            "grown": [one.as_json() for one in self.grown],
            "ranks": self.ranks,
        }


def compare(comparison: Comparison, turns: int) -> Compared:
    found, limit = measure_in_turns(comparison.cases, turns)
    return Compared(comparison.part, comparison.title, {one.case.label: one for one in found}, limit)


def machine() -> dict[str, Any]:
    return {
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
