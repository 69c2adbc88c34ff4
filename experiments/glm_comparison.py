"""Population GLMs beside lme4, glmmTMB, GPBoost, flexmix, one model for all and a model per client, on public tables.

    OMP_NUM_THREADS=1 python experiments/glm_comparison.py [--tools lme4 ppfl] [--tables cake] [--splits "rows 1"]
    python experiments/glm_comparison.py --tools --page results/glm.md

The first command measures what is missing in --out, a file of JSON lines for each tool, and the second writes the page.
`results/glm-measured` has what was measured of the other tools. `glm_tables.py` says which tables there are and which
formula every tool is given. R writes them to --cache. On Debian: apt-get install r-base-core r-cran-lme4 r-cran-glmmtmb
r-cran-flexmix r-cran-mlmrev r-cran-hsaur3 r-cran-geepack r-cran-lmertest r-cran-plm r-cran-cardata. GPBoost is fitted
by --gpboost, a Python that has gpboost and formulaic.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from glm_tables import TABLES, Table

Array = np.ndarray[Any, Any]
HERE = Path(__file__).parent
R_TOOLS, PYTHON_TOOLS = ("pooled", "own", "flexmix", "lme4", "glmmTMB"), ("gpboost", "ppfl")
TOOLS = (*R_TOOLS, *PYTHON_TOOLS)
SPLITS = [f"{kind} {number}" for kind in ("rows", "clients") for number in range(1, 6)]


def load_table(name: str, cache: Path) -> tuple[Path, pd.DataFrame]:
    """A table from the cache, which R fills, and its file."""
    entry, file = TABLES[name], cache / f"{name}.csv"
    if not file.exists():
        cache.mkdir(parents=True, exist_ok=True)
        run_r("table", file, entry.package, name, entry.prepare, entry.formula)
    digest = hashlib.sha256(file.read_bytes()).hexdigest()[:12]
    if digest != entry.digest:
        raise SystemExit(f"{file} has the digest {digest}, expected {entry.digest}; is R another version?")
    return file, pd.read_csv(file, keep_default_na=False)


def run_r(*arguments: Any) -> str:
    command = ["Rscript", str(HERE / "glm_comparison.R"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


# ---------------------------------------------------------------------- fits in Python, in a process of their own


def fit_ppfl(entry: Table, train: pd.DataFrame, test: pd.DataFrame) -> tuple[float, Any, str, Array]:
    from ppfl.glm import PopulationClassifier, PopulationRegressor

    family = entry.family
    start = time.process_time()
    if family == "binomial":
        model = PopulationClassifier.from_formula(entry.formula, train, k="auto", random_state=0)
        seconds, mean = time.process_time() - start, model.predict_proba(test)[:, 1]
    else:
        model = PopulationRegressor.from_formula(entry.formula, train, k="auto", family=family, random_state=0)
        seconds, mean = time.process_time() - start, model.predict(test)
    chosen = [
        f"K = {np.shape(model.memberships_)[1]}",
        getattr(model, "residual_", ""),
        "" if model.converged_ else "!",
    ]
    dispersion = model.dispersion_**0.5 if family == "gaussian" else ""
    return seconds, dispersion, " ".join(filter(None, map(str, chosen))), np.asarray(mean)


def fit_gpboost(entry: Table, train: pd.DataFrame, test: pd.DataFrame) -> tuple[float, Any, str, Array]:
    import formulaic
    import gpboost

    fixed, bar = entry.formula.partition("~")[2].split("+ (")
    varying, client = (part.strip(" )") for part in bar.split("|"))
    found = [formulaic.Formula(text).get_model_matrix(train) for text in (fixed, varying)]
    x, z = found[0].to_numpy(), found[1].to_numpy()[:, 1:]
    family = entry.family.replace(" ", "_").replace("binomial", "bernoulli_logit")
    family = family.replace("negative_bernoulli_logit", "negative_binomial")
    slopes = {"group_rand_coef_data": z, "ind_effect_group_rand_coef": [1] * z.shape[1]} if z.shape[1] else {}
    start = time.process_time()
    model = gpboost.GPModel(likelihood=family, group_data=train[client].to_numpy(), num_parallel_threads=1, **slopes)
    model.fit(y=train[entry.formula.split()[0]].to_numpy(float), X=x)
    seconds = time.process_time() - start
    x, z = (found[i].model_spec.get_model_matrix(test).to_numpy() for i in (0, 1))
    slopes = {"group_rand_coef_data_pred": z[:, 1:]} if slopes else {}
    mean = model.predict(X_pred=x, group_data_pred=test[client].to_numpy(), predict_response=True, **slopes)["mu"]
    dispersion = float(np.ravel(model.get_cov_pars())[0]) ** 0.5 if family == "gaussian" else ""
    return seconds, dispersion, "", mean


def work(tool: str, name: str, file: Path, splits: list[str]) -> None:
    """Fit these splits, and print a line of each as glm_comparison.R does."""
    data, entry = pd.read_csv(file, keep_default_na=False), TABLES[name]
    warnings.simplefilter("ignore")
    for split in splits:
        held = held_out(data, split)
        try:
            fit = {"ppfl": fit_ppfl, "gpboost": fit_gpboost}[tool]
            seconds, dispersion, note, mean = fit(entry, data[~held], data[held])
            cells = [f"{seconds:.6g}", str(dispersion), note, " ".join(f"{value:.10g}" for value in mean)]
        except Exception as error:  # an error is a result, as a user would see it
            cells = ["", "", f"error: {' '.join(f'{type(error).__name__}: {error}'.split())[:300]}", ""]
        print("\t".join([split, *cells]), flush=True)


def held_out(data: pd.DataFrame, split: str) -> Array:
    kind, number = split.split()
    return data["row_split" if kind == "rows" else "client_split"].to_numpy() == int(number)


# ---------------------------------------------------------------------- measurements


def measure(tool: str, name: str, args: argparse.Namespace, stop: float) -> None:
    """Measure the splits that are missing, until this time."""
    table_file, data = load_table(name, args.cache)
    file = args.out / f"{tool}.jsonl"
    missing = [split for split in args.splits if split not in {one["split"] for one in read_lines(file, name)}]
    if not missing:
        return
    entry = TABLES[name]
    if tool in R_TOOLS:
        family = entry.family
        command = ["Rscript", HERE / "glm_comparison.R", tool, table_file, family, entry.formula, *missing]
    else:
        command = [args.gpboost if tool == "gpboost" else sys.executable, __file__, "--work", tool, name, table_file]
        command += missing
    for cells in lines_of([str(word) for word in command], args.limit, stop):
        if cells is None and time.monotonic() >= stop:
            return
        late = [missing[0], "", "", f"error: no result in {args.limit:g} s, or the process ended", ""]
        record = {"table": name} | score(entry, data, *(late if cells is None else cells))
        append(file, record)
        missing.remove(record["split"])
        print(tool, name, *(f"{key} {value}" for key, value in record.items()), flush=True)
    if missing:
        for split in missing:  # a tool that is too slow is not tried on the other splits
            append(file, {"table": name, "split": split, "note": "error: not tried after the one before"})


def lines_of(command: list[str], limit: float, stop: float) -> Iterator[list[str] | None]:
    """The cells of every line that a command prints, and None if it took too long for one, which ends it."""
    count = len([word for word in command if word in SPLITS])
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        for _ in range(count):
            timer = threading.Timer(max(min(limit, stop - time.monotonic()), 0.1), process.kill)
            timer.start()
            # some tools print warnings among the results
            line = next((line for line in process.stdout or () if line.startswith(("rows ", "clients "))), "")
            timer.cancel()
            yield line.rstrip("\n").split("\t") if line.endswith("\n") else None
            if not line.endswith("\n"):
                return


def score(
    entry: Table, data: pd.DataFrame, split: str, seconds: str, dispersion: str, note: str, means: str
) -> dict[str, Any]:
    """The mean squared error or mean deviance of the held-out rows; for known clients the log density as well."""
    record: dict[str, Any] = {"split": split, "note": note}
    if note.startswith("error"):
        return record
    y = data[held_out(data, split)].iloc[:, 0].to_numpy(float)
    mean, family = np.array(means.split(), float), entry.family
    record |= {"seconds": float(seconds), "rows": len(y), "loss": float(loss(family, y, mean).mean())}
    if family == "gaussian" and dispersion and split.startswith("rows"):
        variance = float(dispersion) ** 2
        record["log_density"] = -0.5 * (record["loss"] / variance + float(np.log(2 * np.pi * variance)))
    return record


def loss(family: str, y: Array, mean: Array) -> Array:
    """Squared errors for gaussian targets, deviances for others; for all counts those of Poisson means."""
    if family == "gaussian":
        return (y - mean) ** 2
    mean = np.maximum(mean, 1e-12)
    if family == "binomial":
        return -2 * np.log(np.maximum(np.where(y == 1, mean, 1 - mean), 1e-12))
    if family == "gamma":
        return 2 * (y / mean - 1 - np.log(y / mean))
    return 2 * (np.where(y > 0, y * np.log(np.maximum(y, 1) / mean), 0.0) - (y - mean))


def read_lines(file: Path, name: str) -> list[dict[str, Any]]:
    """What was measured on a table."""
    lines = file.read_text().splitlines() if file.exists() else []
    return [found for found in map(json.loads, lines) if found["table"] == name]


def append(file: Path, record: dict[str, Any]) -> None:
    """One write at the end of the file, so that several processes can write and a stopped one leaves whole lines."""
    with file.open("a") as stream:
        stream.write(json.dumps(record) + "\n")


def main() -> None:
    if sys.argv[1:2] == ["--work"]:
        work(sys.argv[2], sys.argv[3], Path(sys.argv[4]), sys.argv[5:])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tools", nargs="*", choices=TOOLS, default=TOOLS, metavar="TOOL")
    parser.add_argument("--tables", nargs="+", choices=list(TABLES), default=list(TABLES), metavar="TABLE")
    parser.add_argument("--splits", nargs="+", choices=SPLITS, default=SPLITS, metavar="SPLIT")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds for one fit")
    parser.add_argument("--minutes", type=float, default=1e6, help="stop then; the same command goes on later")
    parser.add_argument("--gpboost", default=sys.executable, help="a Python that has gpboost and formulaic")
    parser.add_argument("--cache", type=Path, default=Path("runs/glm-tables"), help="the folder of the tables")
    parser.add_argument(
        "--out", type=Path, default=HERE.parent / "results" / "glm-measured", help="the folder of measurements"
    )
    parser.add_argument("--page", type=Path, help="write the page of all measurements to this file")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    stop = time.monotonic() + 60 * args.minutes
    for name in args.tables:
        for tool in args.tools:
            if time.monotonic() < stop:
                measure(tool, name, args, stop)
    if args.page:
        from glm_page import page

        found = {(tool, name): read_lines(args.out / f"{tool}.jsonl", name) for tool in TOOLS for name in TABLES}
        sizes = {name: load_table(name, args.cache)[1] for name in TABLES}
        args.page.write_text(page(TABLES, sizes, found, TOOLS))


if __name__ == "__main__":
    main()
