"""Mixed models and latent classes of R: lme4, glmmTMB and flexmix, for comparisons only.

R is not needed by ppfl. On Debian: apt-get install r-base-core r-cran-lme4 r-cran-glmmtmb r-cran-flexmix r-cran-mlmrev
r-cran-hsaur3.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from glm_data import Table

METHODS = ("lme4", "glmmTMB", "flexmix")
SCRIPT = Path(__file__).with_name("glm_baselines.R")
INSTALL = "apt-get install r-base-core r-cran-lme4 r-cran-glmmtmb r-cran-flexmix r-cran-mlmrev r-cran-hsaur3"


def run_r(*arguments: str) -> str:
    """Run Rscript and return what it printed, with an error that says what is missing."""
    program = shutil.which("Rscript")
    if program is None:
        raise SystemExit(f"Rscript is not installed, and this comparison needs it. On Debian: {INSTALL}")
    done = subprocess.run([program, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"Rscript {' '.join(arguments)[:200]} failed:\n{done.stderr[-2000:]}\nPackages: {INSTALL}")
    return done.stdout


def r_methods(splits: list[tuple[Table, Table]], limit: float) -> dict[str, list[dict[str, Any]]]:
    """All methods of R on all splits of one table, with predictions of the held-out rows, in one call of Rscript.

    A prediction is None if the method failed. Seconds are processor time of the chosen fit, measured inside R.
    """
    first = splits[0][0]
    with tempfile.TemporaryDirectory() as folder:
        for i, pair in enumerate(splits):
            for part, table in zip(("train", "test"), pair, strict=True):
                _write(table, Path(folder) / f"{part}{i}.csv")
        slopes = ",".join(np.array(r_names(first))[first.slopes])
        run_r(str(SCRIPT), folder, first.family, slopes, str(len(splits)), str(limit))
        found = pd.read_csv(Path(folder) / "fits.csv", keep_default_na=False)
        return {method: [_read(Path(folder), found, method, i) for i in range(len(splits))] for method in METHODS}


def _write(table: Table, file: Path) -> None:
    x = table.x.set_axis(r_names(table), axis=1)
    x.assign(y=table.y, client=table.clients).to_csv(file, index=False)


def r_names(table: Table) -> list[str]:
    """Column names that a formula of R can have."""
    return [re.sub(r"\W", ".", name) for name in table.x]


def _read(folder: Path, found: pd.DataFrame, method: str, split: int) -> dict[str, Any]:
    fits = found[(found.method == method) & (found.split == split)]
    chosen = fits[fits.chosen]
    tried = {row.effects: float(row.seconds) for row in fits.itertuples()}
    notes = "; ".join(f"{row.effects}: {row.note}" for row in fits.itertuples() if row.note)
    if chosen.empty:
        return {"mean": None, "seconds": None, "effects": "", "clients": "", "note": notes, "tried": tried}
    row = chosen.iloc[0]
    mean = np.loadtxt(folder / f"{method}{split}.csv")
    return {
        "mean": mean, "seconds": float(row.seconds), "effects": row.effects, "clients": row.clients, "note": notes,
        "tried": tried,
    }  # fmt: skip
