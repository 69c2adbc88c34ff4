"""Timing in turns: every case waits in a process of its own, and all have had a turn before any has the next, so that
other load on the machine affects all of them alike."""

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from cases import Case

WORKER = Path(__file__).with_name("worker.py")
TURN = 0.6  # seconds that a turn lasts at least: many fast rounds make one turn
PAUSE = 0.02  # until the threads of the one before are asleep


@dataclass
class Measured:
    """A case and its measurements; `failed` gives the reason where it could not be measured."""

    case: Case
    prepared: dict[str, Any] = field(default_factory=dict)
    first_seconds: float = 0.0
    turns: list[float] = field(default_factory=list)  # seconds per round, one mean for each turn
    last: dict[str, Any] = field(default_factory=dict)
    failed: str = ""

    @property
    def seconds(self) -> float:
        return statistics.median(self.turns)

    @property
    def flops(self) -> float:
        return float(self.prepared["flops"])

    @property
    def peak(self) -> int:
        """Bytes, with building the data."""
        return int(max(self.last["peak_bytes"], self.prepared["building_bytes"]))

    @property
    def above_data(self) -> int:
        """Bytes that training needed besides Python, PyTorch and the data."""
        return int(self.last["peak_bytes"] - self.prepared["data_bytes"])

    @property
    def up(self) -> float | None:
        """Bytes per client and round; None for a loop that sends nothing."""
        return self.last.get("up")

    @property
    def down(self) -> float | None:
        return self.last.get("down")

    def as_json(self) -> dict[str, Any]:
        found = asdict(self) | {"case": self.case._asdict()}
        if self.failed:
            return found
        return found | {"seconds": self.seconds, "peak": self.peak, "above_data": self.above_data}


class Worker:
    """A process that waits until it is asked for a turn."""

    def __init__(self, what: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(WORKER), what], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def read_answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"its process ended with code {self.process.wait()}")
        return dict(json.loads(line))

    def ask(self, at_least: float) -> dict[str, Any]:
        assert self.process.stdin is not None
        time.sleep(PAUSE)
        try:
            self.process.stdin.write(f"{at_least}\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # the answer is missing then, and says why
        return self.read_answer()

    def stop(self) -> None:
        self.process.communicate()


def measure_in_turns(cases: Sequence[Case], turns: int) -> tuple[list[Measured], float]:
    """Every case, its first round apart, and the matmul limit in flop/s, which is measured in the same turns."""
    found = [Measured(case) for case in cases]
    limit = Worker("matmul")
    workers = [Worker(json.dumps(case._asdict())) for case in cases]
    limit.read_answer()
    for one, worker in zip(found, workers, strict=True):
        _guarded(one, worker, _prepare)
    reached = []
    for turn in range(turns + 1):
        reached.append(float(limit.ask(0)["flops_per_second"]))
        for one, worker in zip(found, workers, strict=True):
            _guarded(one, worker, _first_turn if turn == 0 else _later_turn)
    for worker in (limit, *workers):
        worker.stop()
    return found, statistics.median(reached)


def _guarded(one: Measured, worker: Worker, action: Any) -> None:
    """A case that fails is left out; the others go on."""
    if not one.failed:
        try:
            action(one, worker)
        except RuntimeError as error:
            one.failed = str(error)


def _prepare(one: Measured, worker: Worker) -> None:
    one.prepared = worker.read_answer()


def _first_turn(one: Measured, worker: Worker) -> None:
    one.last = worker.ask(0)
    (one.first_seconds,) = one.last.pop("seconds")


def _later_turn(one: Measured, worker: Worker) -> None:
    one.last = worker.ask(TURN)
    one.turns.append(statistics.mean(one.last.pop("seconds")))
