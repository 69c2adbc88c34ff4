"""A run of very many rounds: memory, open files and the number of files stay as they are, and the disk takes the same
number of bytes for each round."""

import gc
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any, NamedTuple

from trial import Trial
from victim import victim

from ppfl.runs import run

SAMPLES = 20
MOST_MEMORY = 8.0  # MB that a run may grow by after its first tenth
PAGE = 4096


class Usage(NamedTuple):
    round: int
    memory: float  # MB
    handles: int
    files: int
    disk: int  # bytes


def attack(count: int, random: Random, folder: Path) -> Iterator[Trial]:
    """One run of `count` rounds."""
    seen: list[Usage] = []

    def look(_seed: int, end: Any) -> None:
        if end.state.round % max(1, count // SAMPLES) == 0:
            seen.append(_usage(end.state.round, folder / "out"))

    (record,) = run(victim(rounds=count), folder / "out", checkpoint_every=10, on_round_end=look)
    first, last = seen[1], seen[-1]  # the first sample is still warming up
    growth = last.memory - first.memory
    per_round = [(b.disk - a.disk) / (b.round - a.round) for a, b in pairwise(seen)]
    figures = {"MB grown": growth, "handles grown": last.handles - first.handles, "bytes per round": max(per_round)}
    half = len(per_round) // 2
    early, late = fmean(per_round[:half]), fmean(per_round[half:])
    faults = [
        f"memory grew by {growth:.1f} MB" if growth > MOST_MEMORY else "",
        f"{last.handles - first.handles} more open files" if last.handles > first.handles else "",
        f"{last.files - first.files} more files" if last.files > first.files else "",
        f"bytes per round went from {early:.0f} to {late:.0f}" if late > 1.2 * early else "",
        "" if record.finished and record.rounds_done == count else "it did not finish",
    ]
    yield Trial(f"a run of {count:,} rounds", "; ".join(filter(None, faults)) or None, figures)


def _usage(round: int, folder: Path) -> Usage:
    gc.collect()
    memory = int(Path("/proc/self/statm").read_text().split()[1]) * PAGE / 1e6
    files = [file for file in folder.rglob("*") if file.is_file()]
    handles = len(list(Path("/proc/self/fd").iterdir()))
    return Usage(round, memory, handles, len(files), sum(file.stat().st_size for file in files))
