"""Population GLMs beside one model for all, one for each client, and mixed models: predictions of rows held out.

OMP_NUM_THREADS=1 python experiments/glm_comparison.py [--only sleepstudy Exam] [--splits 3] [--out results/glm.md]

Needs pandas and statsmodels. What is measured already is kept in --work, so a run that was stopped goes on.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from glm_data import TABLES, Table, held_out, standardised
from glm_methods import Answer, own, pooled, population, score
from glm_mixed import mixed_model
from glm_page import METHODS, ROOT, Summary, page

DATA = Path(os.environ.get("PPFL_DATA") or ROOT.parent / "shared" / "data") / "tabular"


class Record:
    """What is known of a table: a dictionary of methods a split, in a file."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {"splits": []}

    def forget(self, method: str) -> None:
        for split in self.found["splits"]:
            split.pop(method, None)
        self.save()

    def save(self) -> None:
        self.file.write_text(json.dumps(self.found, indent=1))

    def fill(self, table: Table, splits: int, limit: float) -> None:
        """All methods on the same splits."""
        rows = len(table.y) if table.situations is None else len(np.unique(table.situations))
        self.found.update(family=table.family, clients=table.n_clients, rows=rows)
        done = self.found["splits"]
        done += [{} for _ in range(splits - len(done))]
        for seed, row in enumerate(done):
            test = held_out(table, 0.25, seed)
            train, test = standardised(table.take(~test), table.take(test))
            # what failed once is not waited for again
            slopes = all(before["mixed"]["effects"] == "slopes" for before in done[:seed] if before.get("mixed"))
            ways: dict[str, Callable[[], dict[str, Any] | None]] = {
                "pooled": lambda: _scored(pooled(train, test), test),  # noqa: B023  called at once
                "own": lambda: _scored(own(train, test), test),  # noqa: B023
                "mixed": lambda: _mixed(train, test, limit, slopes=slopes),  # noqa: B023
                "ours": lambda: _ours(train, test),  # noqa: B023
            }
            for method in METHODS:
                if method not in row:
                    row[method] = ways[method]()
                    print(f"  split {seed}, {method}: {row[method]}", flush=True)
                    self.save()


def _scored(answer: Answer, test: Table) -> dict[str, Any]:
    return {"score": score(test, answer.mean), "seconds": answer.seconds}


def _mixed(train: Table, test: Table, limit: float, *, slopes: bool) -> dict[str, Any] | None:
    if train.family == "choice":
        return None
    found = mixed_model(train, test, limit, slopes=slopes)
    worth = None if found.mean is None else score(test, found.mean)
    return {"score": worth, **found._replace(mean=None)._asdict()}


def _ours(train: Table, test: Table) -> dict[str, Any]:
    found = population(train, test)
    tried = [candidate._asdict() for candidate in found.candidates]
    return {**found.best._asdict(), **found._asdict(), "best": None, "candidates": tried}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=DATA, help="the folder of the tables")
    parser.add_argument("--only", nargs="+", choices=list(TABLES), default=list(TABLES), metavar="NAME")
    parser.add_argument("--splits", type=int, default=3)
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for a fit of statsmodels")
    parser.add_argument("--again", choices=METHODS, help="measure this method anew")
    parser.add_argument("--out", type=Path, default=Path("results/glm.md"))
    parser.add_argument("--work", type=Path, default=Path("runs/glm"), help="what is measured already")
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    records = {name: Record(given.work / f"{name}.json") for name in given.only}
    if given.again:
        for record in records.values():
            record.forget(given.again)
    for name, record in records.items():
        print(name, flush=True)
        record.fill(TABLES[name](given.data), given.splits, given.limit)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    only = ["--only", *given.only] if len(given.only) < len(TABLES) else []
    settings = ["--splits", str(given.splits), "--limit", f"{given.limit:g}"]
    command = shlex.join(["python", "experiments/glm_comparison.py", *only, *settings])
    summaries = [Summary(name, record.found) for name, record in records.items()]
    given.out.write_text(page(summaries, given.splits, given.limit, command))
    print(given.out.read_text())


if __name__ == "__main__":
    main()
