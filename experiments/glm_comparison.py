"""Compare held-out predictions of population GLMs, one model for all, one model per client, and mixed models.

OMP_NUM_THREADS=1 python experiments/glm_comparison.py [--only sleepstudy Exam] [--splits 3] [--out results/glm.md]

Needs pandas and statsmodels. Measurements are saved in --work, so an interrupted run continues where it stopped.
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
from glm_data import TABLES, Table, held_out, standardise
from glm_methods import MethodPredictions, own, pooled, population, score
from glm_mixed import mixed_model
from glm_page import METHODS, ROOT, Summary, page

DATA = Path(os.environ.get("PPFL_DATA") or ROOT.parent / "shared" / "data") / "tabular"


class Measurements:
    """The results for one table: a file with one dictionary of methods per split."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {"splits": []}

    def forget(self, method: str) -> None:
        for split in self.found["splits"]:
            split.pop(method, None)
        self.save()

    def save(self) -> None:
        self.file.write_text(json.dumps(self.found, indent=1))

    def measure(self, table: Table, splits: int, limit: float) -> None:
        """Run all missing methods, on the same splits."""
        rows = len(table.y) if table.situations is None else len(np.unique(table.situations))
        self.found.update(family=table.family, clients=table.n_clients, rows=rows)
        done = self.found["splits"]
        done += [{} for _ in range(splits - len(done))]
        for seed, row in enumerate(done):
            test = held_out(table, 0.25, seed)
            train, test = standardise(table.take(~test), table.take(test))
            # random slopes that failed on one split are not tried on the next
            slopes = all(before["mixed"]["effects"] == "slopes" for before in done[:seed] if before.get("mixed"))
            methods: dict[str, Callable[[], dict[str, Any] | None]] = {
                "pooled": lambda: _add_score(pooled(train, test), test),  # noqa: B023  called immediately
                "own": lambda: _add_score(own(train, test), test),  # noqa: B023
                "mixed": lambda: _mixed(train, test, limit, slopes=slopes),  # noqa: B023
                "ours": lambda: _ours(train, test),  # noqa: B023
            }
            for method in METHODS:
                if method not in row:
                    row[method] = methods[method]()
                    print(f"  split {seed}, {method}: {row[method]}", flush=True)
                    self.save()


def _add_score(predictions: MethodPredictions, test: Table) -> dict[str, Any]:
    return {"score": score(test, predictions.mean), "seconds": predictions.seconds}


def _mixed(train: Table, test: Table, limit: float, *, slopes: bool) -> dict[str, Any] | None:
    if train.family == "choice":
        return None
    found = mixed_model(train, test, limit, slopes=slopes)
    value = None if found.mean is None else score(test, found.mean)
    return {"score": value, **found._replace(mean=None)._asdict()}


def _ours(train: Table, test: Table) -> dict[str, Any]:
    found = population(train, test)
    candidates = [candidate._asdict() for candidate in found.candidates]
    return {**found.best._asdict(), **found._asdict(), "best": None, "candidates": candidates}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=DATA, help="the folder with the tables")
    parser.add_argument("--only", nargs="+", choices=list(TABLES), default=list(TABLES), metavar="NAME")
    parser.add_argument("--splits", type=int, default=3)
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for a fit of statsmodels")
    parser.add_argument("--again", choices=METHODS, help="measure this method again")
    parser.add_argument("--out", type=Path, default=Path("results/glm.md"))
    parser.add_argument("--work", type=Path, default=Path("runs/glm"), help="the folder of saved measurements")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    records = {name: Measurements(args.work / f"{name}.json") for name in args.only}
    if args.again:
        for record in records.values():
            record.forget(args.again)
    for name, record in records.items():
        print(name, flush=True)
        record.measure(TABLES[name](args.data), args.splits, args.limit)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    only = ["--only", *args.only] if len(args.only) < len(TABLES) else []
    settings = ["--splits", str(args.splits), "--limit", f"{args.limit:g}"]
    command = shlex.join(["python", "experiments/glm_comparison.py", *only, *settings])
    summaries = [Summary(name, record.found) for name, record in records.items()]
    args.out.write_text(page(summaries, args.splits, args.limit, command))
    print(args.out.read_text())


if __name__ == "__main__":
    main()
