"""Compare held-out predictions of population GLMs with pooled and own models, mixed models and latent classes.

OMP_NUM_THREADS=1 python experiments/glm_comparison.py [--only sleepstudy Exam] [--splits 3] [--out results/glm.md]

Needs pandas, statsmodels, and R with lme4, glmmTMB and flexmix (see glm_r.py). Measurements are saved in --work, so an
interrupted run continues where it stopped, and `--again ours` measures one method again.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

from glm_data import Table, held_out, standardise
from glm_methods import MethodPredictions, ours, own, pooled, score
from glm_mixed import mixed_model
from glm_page import METHODS, ROOT, Summary, page
from glm_r import METHODS as R_METHODS
from glm_r import r_methods
from glm_tables import NAMES, load_table

DATA = Path(os.environ.get("PPFL_DATA") or ROOT.parent / "shared" / "data") / "tabular"
FEW_ROWS = 1000  # tables with fewer rows have twice as many splits, because one split says little about them
Measure = Callable[[Table, Table], dict[str, Any]]


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

    def measure(self, table: Table, splits: int, limit: float, methods: list[str]) -> None:
        """Run all missing methods, on the same splits."""
        self.found.update(family=table.family, clients=table.n_clients, rows=len(table.y), columns=table.x.shape[1])
        done = self.found["splits"]
        splits *= 1 + (len(table.y) < FEW_ROWS)
        done += [{} for _ in range(splits - len(done))]
        tables = []
        for seed in range(splits):
            test = held_out(table, 0.25, seed)
            tables.append(standardise(table.take(~test), table.take(test)))
        if any(method not in row for row in done for method in R_METHODS if method in methods):
            self._measure_r(tables, limit)
        for seed, (train, test) in enumerate(tables):
            row = done[seed]
            # random slopes that failed on one split are not tried on the next
            slopes = all(
                before["statsmodels"]["effects"] == "slopes" for before in done[:seed] if "statsmodels" in before
            )
            python: dict[str, Measure] = {
                "pooled": lambda train, test: _with_score(pooled(train, test), test),
                "own": lambda train, test: _with_score(own(train, test), test),
                "statsmodels": lambda train, test: _mixed(train, test, limit, slopes=slopes),  # noqa: B023
                "ours": ours,
            }
            for method in python:
                if method in methods and method not in row:
                    row[method] = python[method](train, test)
                    print(f"  split {seed}, {method}: {row[method]}", flush=True)
                    self.save()

    def _measure_r(self, tables: list[tuple[Table, Table]], limit: float) -> None:
        for method, results in r_methods(tables, limit).items():
            for row, (_, test), result in zip(self.found["splits"], tables, results, strict=True):
                mean = result.pop("mean")
                row[method] = {"score": None if mean is None else score(test, mean), **result}
                print(f"  {method}: {row[method]}", flush=True)
        self.save()


def _with_score(predictions: MethodPredictions, test: Table) -> dict[str, Any]:
    return {"score": score(test, predictions.mean), "seconds": predictions.seconds}


def _mixed(train: Table, test: Table, limit: float, *, slopes: bool) -> dict[str, Any]:
    found = mixed_model(train, test, limit, slopes=slopes)
    value = None if found.mean is None else score(test, found.mean)
    return {"score": value, **found._replace(mean=None)._asdict()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=DATA, help="the folder with the tables")
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES, metavar="NAME")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS), metavar="METHOD")
    parser.add_argument("--splits", type=int, default=3)
    parser.add_argument("--limit", type=float, default=120.0, help="seconds for one fit of statsmodels or R")
    parser.add_argument("--again", nargs="+", choices=METHODS, default=[], help="measure these methods again")
    parser.add_argument("--out", type=Path, default=Path("results/glm.md"))
    parser.add_argument("--work", type=Path, default=Path("runs/glm"), help="the folder of saved measurements")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    records = {name: Measurements(args.work / f"{name}.json") for name in args.only}
    for record in records.values():
        for method in args.again:
            record.forget(method)
    for name, record in records.items():
        print(name, flush=True)
        record.measure(load_table(name, args.data, args.work / "tables"), args.splits, args.limit, args.methods)
    summaries = [Summary(name, record.found) for name, record in records.items()]
    if not all(summary.complete for summary in summaries):
        print("Some methods are not measured yet; the page is written when all are.")
        return
    only = ["--only", *args.only] if len(args.only) < len(NAMES) else []
    settings = ["--splits", str(args.splits), "--limit", f"{args.limit:g}"]
    command = shlex.join(["python", "experiments/glm_comparison.py", *only, *settings])
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(page(summaries, args.splits, args.limit, command))
    print(args.out.read_text())


if __name__ == "__main__":
    main()
