"""Processor seconds of fits to many clients, beside lme4 and glmmTMB on the same data in the same run.

    OMP_NUM_THREADS=1 python experiments/glm_speed.py [--families gaussian] [--clients 10000] [--out FILE]

Clients have ten rows of three columns each, drawn from three canonical models. Needs R with lme4 and glmmTMB.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pandas as pd
from glm_comparison import HERE
from glm_page import heading, markdown
from glm_simulate import draw, estimator, quietly, spread_corners

ROWS, COLUMNS = 10, 3
KS = {"gaussian": [2, 3, 4, "auto"], "binomial": [3]}
FORMULA = "y ~ x0 + x1 + x2 + (x0 + x1 + x2 | client)"


def simulated(family: str, clients: int) -> pd.DataFrame:
    random = np.random.default_rng(0)
    theta = spread_corners(3, COLUMNS, 1.5 if family == "gaussian" else 2.7, random)
    drawn = draw(family, theta, clients, ROWS, 0.4, random)
    data = pd.DataFrame(drawn.x).add_prefix("x").assign(client=drawn.clients)
    data.insert(0, "y", drawn.y)
    return data


def ours(data: pd.DataFrame, family: str, k: int | str) -> str:
    start = time.thread_time()
    model = quietly(type(estimator(family)).from_formula, FORMULA, data, k=k, random_state=0)
    seconds = f"{time.thread_time() - start:.2g}"
    return seconds if k != "auto" else f"{seconds} (K = {np.shape(model.memberships_)[1]})"


def theirs(data: pd.DataFrame, family: str, tool: str, limit: float) -> str:
    """Of the fit to the rows that the first split keeps, which are nearly all."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "data.csv"
        data.assign(row_split=np.arange(len(data)) < 100).to_csv(file, index=False)
        command = ["Rscript", str(HERE / "glm_comparison.R"), tool, str(file), family, FORMULA, "rows 1"]
        try:
            found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=limit).stdout
        except subprocess.TimeoutExpired:
            return f"> {limit:g}"
    return f"{float(found.split(chr(9))[1]):.3g}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", choices=list(KS), default=list(KS), metavar="FAMILY")
    parser.add_argument("--clients", type=int, default=10_000)
    parser.add_argument("--tools", nargs="*", default=["lme4", "glmmTMB"], metavar="TOOL")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for one fit of lme4 or glmmTMB")
    parser.add_argument("--out", type=Path, help="the page to write")
    args = parser.parse_args()
    ours(simulated("gaussian", 50), "gaussian", 2)  # what is loaded with the first fit does not count
    rows = []
    for family in args.families:
        data = simulated(family, args.clients)
        rows += [[family, f"ppfl, K = {k}", ours(data, family, k)] for k in KS[family]]
        rows += [[family, tool, theirs(data, family, tool, args.limit)] for tool in args.tools]
    top = heading("Seconds of fits to many clients", shlex.join(["python", "experiments/glm_speed.py", *sys.argv[1:]]))
    notes = (
        f"Processor seconds for {args.clients} clients of {ROWS} rows, `{FORMULA}`, drawn from three canonical models."
    )
    text = "\n\n".join([top, notes, "\n".join(markdown(["family", "fit", "seconds"], rows, 2))]) + "\n"
    print(text)
    if args.out:
        args.out.write_text(text)


if __name__ == "__main__":
    main()
