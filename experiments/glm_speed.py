"""Processor seconds of one fit and of choosing K, beside lme4 and glmmTMB on the same data in the same run.

    OMP_NUM_THREADS=1 python experiments/glm_speed.py [--only InstEval small] [--limit 300] [--out FILE]

Needs pandas, and R with lme4 and glmmTMB (see glm_r.py).
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from glm_comparison import DATA
from glm_data import Table, standardise
from glm_methods import fit, fit_auto
from glm_page import heading, markdown
from glm_r import r_names, run_r
from glm_simulate import draw, spread_corners
from glm_tables import load_table

SMALL = ("sleepstudy", "Orthodont", "Oxboys", "Machines", "ChickWeight", "Milk", "bacteria", "epilepsy")


class Case(NamedTuple):
    name: str
    table: Table
    slopes: list[int]  # columns with a random slope, and with a coefficient for each canonical model
    ks: tuple[int, ...]
    auto: bool  # whether K is chosen as well


def cases(only: list[str], data: Path, cache: Path, rows: int) -> Iterator[Case]:
    if "small" in only:
        for name in SMALL:
            table = load_table(name, data, cache)
            yield Case(name, table, table.slopes, (3,), auto=True)
    if "InstEval" in only:
        table = load_table("InstEval", data, cache)
        yield Case("InstEval, intercept", table, [], (3,), auto=False)
        yield Case("InstEval, two slopes", table, [0, 1], (3,), auto=False)
    for family, ks in (("gaussian", (2, 3, 4, 8)), ("binomial", (3,))):
        if family in only:
            table = simulated(family, rows)
            yield Case(f"{family}, {rows} rows, {rows // 10} clients", table, [0, 1, 2], ks, auto=False)


def simulated(family: str, rows: int) -> Table:
    """Clients with ten rows of three columns each, from three canonical models."""
    random = np.random.default_rng(0)
    theta = spread_corners(3, 3, 1.5 if family == "gaussian" else 2.7, random)
    drawn = draw(family, theta, rows // 10, 10, 0.4, random)
    kind = "bernoulli" if family == "binomial" else family
    y = drawn.y.astype(int) if family == "binomial" else drawn.y
    return Table(kind, pd.DataFrame(drawn.x).add_prefix("x"), y, drawn.clients)


def ours(case: Case, k: Any) -> float:
    shared = [i for i in range(case.table.x.shape[1]) if i not in case.slopes]
    start = time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if k == "auto":
            fit_auto(case.table, shared=shared or None)
        else:
            fit(case.table, k, shared=shared or None)
    return time.process_time() - start


def mixed_models(case: Case, limit: float, file: Path) -> list[str]:
    """Seconds of lme4 and glmmTMB, as text; kept in a file, because they do not depend on ppfl."""
    if not file.exists():
        names = r_names(case.table)
        random = " + ".join(["1", *(names[i] for i in case.slopes)])
        with tempfile.TemporaryDirectory() as folder:
            data = Path(folder) / "table.csv"
            case.table.x.set_axis(names, axis=1).assign(y=case.table.y, client=case.table.clients).to_csv(data)
            formula = f"y ~ {' + '.join(names)} + ({random} | client)"
            script = str(Path(__file__).with_name("glm_speed.R"))
            found = run_r(script, str(data), case.table.family, formula, str(limit))
        file.write_text(json.dumps(found.splitlines()))
    return [str(line).strip() for line in json.loads(file.read_text())]


HEAD = ["data", "clients", "rows", "varying", "K", "ours, one fit", "ours, choosing K", "lme4", "glmmTMB"]
NOTES = """\
Processor seconds on one thread. All methods have the same columns, and a random slope in lme4 and glmmTMB where ours
has one coefficient for each canonical model; the intercept always varies. A first fit that loads libraries or compiles
is not counted, neither in Python nor in R. The simulated tables have ten rows of three columns for each client, from
three canonical models. "> {limit:g}" means stopped after {limit:g} s."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    groups = ["small", "InstEval", "gaussian", "binomial"]
    parser.add_argument("--only", nargs="+", choices=groups, default=groups, metavar="GROUP")
    parser.add_argument("--rows", type=int, default=100_000, help="of the simulated tables")
    parser.add_argument("--data", type=Path, default=DATA, help="the folder with the tables")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for one fit of lme4 or glmmTMB")
    parser.add_argument("--r-only", action="store_true", help="measure and save lme4 and glmmTMB only")
    parser.add_argument("--work", type=Path, default=Path("runs/glm-speed"), help="saved seconds of lme4 and glmmTMB")
    parser.add_argument("--out", type=Path, default=Path("results/glm-speed.md"))
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    rows = []
    fit(simulated("gaussian", 500), 2)
    for case in cases(args.only, args.data, args.work / "tables", args.rows):
        case = case._replace(table=standardise(case.table, case.table)[0])
        others = mixed_models(case, args.limit, args.work / f"{case.name}.json")
        print(case.name, others, flush=True)
        for k in () if args.r_only else case.ks:
            alone = ours(case, k)
            choosing = f"{ours(case, 'auto'):.2g}" if case.auto else "–"
            sizes = [case.table.n_clients, len(case.table.y), 1 + len(case.slopes), k]
            rows.append([case.name, *map(str, sizes), f"{alone:.2g}", choosing, *others])
            print(" | ".join(rows[-1]), flush=True)
    if rows:
        top = heading("Seconds beside lme4 and glmmTMB", "python experiments/glm_speed.py")
        args.out.write_text("\n".join([top, "", NOTES.format(limit=args.limit), "", *markdown(HEAD, rows), ""]))


if __name__ == "__main__":
    main()
