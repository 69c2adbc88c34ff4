"""Attack ppfl: kills, damaged files, full disks, hostile input; then one table: tried, survived, failed.

    make trust
    .venv/bin/python trust/trust.py --only corruption,soak --share 0.1

Writes the table to results/trust.md where all parts ran at full size.
"""

import argparse
import importlib
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Iterable
from pathlib import Path
from random import Random
from typing import NamedTuple

import torch
from trial import Trial

from ppfl.io.files import write_text
from ppfl.runs.provenance import describe_environment, made_with

PAGE = Path(__file__).parents[1] / "results" / "trust.md"
PARTS = {  # how many trials
    "kills": 240,
    "two_at_once": 20,
    "corruption": 1200,
    "disk": 60,
    "fuzz": 10_000,
    "hostile_text": 400,
    "extreme_numbers": 120,
    "soak": 10_000,  # rounds of one trial
}


class Row(NamedTuple):
    """All trials of one kind."""

    part: str
    attack: str
    trials: list[Trial]

    @property
    def failures(self) -> list[str]:
        return [trial.failure for trial in self.trials if trial.failure]

    @property
    def figures(self) -> str:
        largest: dict[str, float] = {}
        for trial in self.trials:
            for name, value in trial.figures.items():
                largest[name] = max(value, largest.get(name, value))
        return ", ".join(f"{name} {value:.4g}" for name, value in largest.items())


def main() -> None:
    asked = arguments()
    torch.set_num_threads(1)  # runs are small, and some are forked
    warnings.simplefilter("ignore")  # of ours, about refused updates: the trials look at what they are told
    rows: list[Row] = []
    began = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="ppfl-trust-"))
    for part in asked.only:
        count = max(1, round(PARTS[part] * asked.share))
        found = attack(part, count, asked.seed, folder / part)
        rows += found
        print(table(found), flush=True)
    failures = [failure for row in rows for failure in row.failures]
    minutes = (time.monotonic() - began) / 60
    print(f"\n{sum(len(row.trials) for row in rows)} attacks in {minutes:.0f} minutes, {len(failures)} failures")
    if set(asked.only) == set(PARTS) and asked.share >= 1:
        write_text(PAGE, page(rows, minutes, asked.seed))
        print(f"written to {PAGE}")
    if failures:
        sys.exit(f"what failed is in {folder}")
    shutil.rmtree(folder)


def attack(part: str, count: int, seed: int, folder: Path) -> list[Row]:
    """All trials of a part, by what was done; failures are printed as they come."""
    folder.mkdir(parents=True)
    print(f"{part}: {count} of them", file=sys.stderr, flush=True)
    rows: dict[str, Row] = {}
    for trial in importlib.import_module(part).attack(count, Random(f"{part} {seed}"), folder):
        rows.setdefault(trial.attack, Row(part, trial.attack, [])).trials.append(trial)
        if trial.failure:
            print(f"FAILED: {trial.attack}: {trial.failure}", file=sys.stderr, flush=True)
    return sorted(rows.values(), key=lambda row: row.attack)


def table(rows: Iterable[Row]) -> str:
    lines = [f"{'part':16} {'attack':44} {'tried':>6} {'survived':>8} {'failed':>6}  largest"]
    for part, name, trials in (row[:3] for row in rows):
        row = Row(part, name, trials)
        good = len(trials) - len(row.failures)
        lines.append(f"{part:16} {name:44} {len(trials):6} {good:8} {len(row.failures):6}  {row.figures}")
    return "\n".join(lines)


def page(rows: Iterable[Row], minutes: float, seed: int) -> str:
    """As Markdown."""
    lines = [
        "# Attacks on runs, readers and pages",
        f"```\nmake trust\n```\n\nseed {seed}, {minutes:.0f} minutes. {made_with([describe_environment()])}",
        "An attack is survived if nothing is lost or silently different, every error is one line of ours, and no "
        "process is left behind; docs/trust.md says what is tried and what is checked. The last column has the largest "
        "figures of all trials.",
    ]
    cells = ["| part | attack | tried | survived | failed | largest |", "|---|---|---:|---:|---:|---|"]
    failed = []
    for row in rows:
        tried, bad = len(row.trials), len(row.failures)
        cells.append(f"| {row.part} | {row.attack} | {tried:,} | {tried - bad:,} | {bad:,} | {row.figures} |")
        failed += row.failures
    lines.append("\n".join(cells))
    if failed:
        lines.append("## What failed\n\n" + "\n".join(f"- {' '.join(failure.split())[:500]}" for failure in failed))
    return "\n\n".join(lines) + "\n"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Attack ppfl on this machine.")
    names = ",".join(PARTS)
    parser.add_argument("--only", type=_parts, default=list(PARTS), metavar="PART,...", help=f"parts of {names}")
    parser.add_argument("--share", type=float, default=1.0, help="of the usual number of trials")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def _parts(text: str) -> list[str]:
    if odd := [part for part in text.split(",") if part not in PARTS]:
        raise argparse.ArgumentTypeError(f"unknown part {odd[0]!r}; use some of {', '.join(PARTS)}")
    return text.split(",")


if __name__ == "__main__":
    main()
