"""One canonical model with a residual effect beside lme4, and intervals of an effect between few clients.

    OMP_NUM_THREADS=1 python experiments/glm_lme4.py same [--cache runs/glm-tables]
    OMP_NUM_THREADS=1 python experiments/glm_lme4.py coverage [--repeats 100]

`same`: the same model by maximum likelihood, without a ridge. `coverage`: how often 95 % intervals of a treatment that
differs between 24 clients of 8 rows contain its effect. Needs R with lme4 (glm_comparison.py).
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import scipy.stats
from glm_comparison import HERE, load_table
from glm_page import heading, markdown
from glm_simulate import estimator, quietly
from glm_tables import TABLES

from ppfl.glm import NEW, as_mixed_model

SAME = ("sleepstudy", "Orthodont", "Machines", "dietox", "Oxboys", "bacteria", "respiratory")
CLIENTS, ROWS, EFFECT = 24, 8, 0.5
FORMULA = "y ~ x + treated + (x | client)"


def lme4(data: pd.DataFrame, family: str, formula: str, *, reml: bool) -> pd.DataFrame:
    """Estimates of every data set, by `number`, `what` and `name`."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "data.csv"
        data.to_csv(file, index=False)
        command = ["Rscript", str(HERE / "glm_lme4.R"), str(file), family, formula, str(reml).upper()]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return pd.read_csv(StringIO(text), sep="\t", names=["number", "what", "name", "value", "error"], na_values=[""])


def fit(data: pd.DataFrame, family: str, formula: str, **settings: Any) -> Any:
    return quietly(type(estimator(family)).from_formula, formula, data, random_state=0, **settings)


# ---------------------------------------------------------------------- the same model


def same_row(name: str, cache: Path) -> list[str]:
    """The differences of log-likelihoods, and of estimates in standard errors and standard deviations."""
    entry, data = TABLES[name], load_table(name, cache)[1]
    theirs = lme4(data.assign(number=0), entry.family, entry.formula, reml=False).groupby("what")
    slopes = "(1 |" not in entry.formula
    ours = fit(data, entry.family, entry.formula, k=1, residual="full" if slopes else "intercept", ridge=0.0)
    fixed, _, covariance = as_mixed_model(ours)
    log = float(theirs.get_group("log_likelihood").value.iloc[0])
    found = theirs.get_group("fixed")
    names = [_our_name(text, list(fixed.index)) for text in found.name]
    apart = np.abs(fixed[names].to_numpy() - found.value.to_numpy()) / found.error.to_numpy(float)
    q = round(len(theirs.get_group("covariance")) ** 0.5)
    sigma = theirs.get_group("covariance").value.to_numpy().reshape(q, q)
    effects = [_our_name(text, names) for text in theirs.get_group("covariance").name[:q]]
    size = np.sqrt(np.outer(np.diag(sigma), np.diag(sigma)))
    wide = np.abs(covariance.loc[effects, effects].to_numpy() - sigma) / size
    noise = "–"
    if entry.family == "gaussian":
        noise = f"{ours.dispersion_ / theirs.get_group('residual').value.iloc[0] - 1:+.1e}"
    return [
        name, entry.family, f"{log:.4f}", f"{ours.log_likelihood_ - log:+.1e}", f"{apart.max():.1e}",
        f"{wide.max():.1e}", noise,
    ]  # fmt: skip


def _our_name(text: str, names: list[str]) -> str:
    """The name of a coefficient here: `SexMale` is `Sex[Male]`, and columns of products may be in another order."""
    wanted = sorted(text.replace("(Intercept)", "intercept").split(":"))
    plain = {name: sorted(name.replace("T.", "").replace("[", "").replace("]", "").split(":")) for name in names}
    return next(name for name, parts in plain.items() if parts == wanted)


def same(args: argparse.Namespace) -> str:
    head = ["table", "family", "lme4's log-likelihood", "ours - lme4's", "fixed effects", "covariance", "residual"]
    rows = [same_row(name, args.cache) for name in SAME]
    notes = (
        "`k=1, ridge=0` with the residual effect of the formula, and `REML = FALSE` or `nAGQ = 25`. The largest\n"
        "differences of fixed effects in standard errors, of covariances of random effects in products of standard\n"
        "deviations, and of the residual variance relative to itself."
    )
    return "\n\n".join([heading("The same model as lme4", _command(args)), notes, "\n".join(markdown(head, rows, 2))])


# ---------------------------------------------------------------------- few clients


def draw(kind: str, number: int) -> pd.DataFrame:
    """Clients that differ by normal effects, by memberships in three canonical models, or by both, and two new ones."""
    random = np.random.default_rng([number, len(kind)])
    client = np.repeat(np.arange(CLIENTS + 2), ROWS)
    x = random.normal(size=len(client))
    own = random.normal(size=(CLIENTS + 2, 2)) * [1.0, 0.5]
    if kind != "normal":
        mixed = random.dirichlet([0.4] * 3, CLIENTS + 2) @ np.array([[1.5, 0.5], [-1.5, 0.5], [0.0, -1.0]])
        own = mixed if kind == "patterns" else mixed + 0.5 * own
    y = own[client, 0] + (1 + own[client, 1]) * x + EFFECT * (client % 2) + random.normal(size=len(client))
    return pd.DataFrame({"y": y, "x": x, "treated": client % 2, "client": client, "number": number})


def coverage_row(kind: str, repeats: int) -> list[str]:
    tables = [draw(kind, number) for number in range(repeats)]
    known = [table[table.client < CLIENTS] for table in tables]
    theirs = lme4(pd.concat(known), "gaussian", FORMULA, reml=True)
    theirs = theirs[(theirs.what == "fixed") & (theirs.name == "treated")]
    half = scipy.stats.t.ppf(0.975, CLIENTS - 2) * theirs.error.to_numpy(float)
    hits, widths, news = [], [], []
    for table, rows in zip(tables, known, strict=True):
        model, other = fit(rows, "gaussian", FORMULA, k="auto"), table[table.client >= CLIENTS]
        found = model.conf_int(0.95).xs("treated", level="term").iloc[0]
        hits.append(found.lower <= EFFECT <= found.upper)
        widths.append(found.upper - found.lower)
        interval = model.predict(other, clients=NEW, interval=0.95)
        news.append(((interval.new_lower <= other.y) & (other.y <= interval.new_upper)).mean())
    lme4_hits = np.abs(theirs.value.to_numpy() - EFFECT) <= half
    shares = [f"{np.mean(each):.1%}" for each in (hits, lme4_hits)]
    sizes = [f"{np.median(each):.2f}" for each in (widths, 2 * half)]
    return [kind, str(repeats), *shares, *sizes, f"{np.mean(news):.1%}"]


def coverage(args: argparse.Namespace) -> str:
    head = ["clients differ by", "tables", "ours", "lme4", "our width", "lme4's width", "new clients' rows"]
    rows = [coverage_row(kind, args.repeats) for kind in args.kinds]
    notes = (
        f"The share of 95 % intervals that contain the effect ({EFFECT}) of a treatment that half of the {CLIENTS}\n"
        f'clients of {ROWS} rows have. Ours is `k="auto"`; lme4\'s are by REML and t with {CLIENTS - 2} degrees of\n'
        "freedom. The last column is the share of rows of two more clients inside our 95 % intervals for new ones."
    )
    return "\n\n".join([heading("Few clients", _command(args)), notes, "\n".join(markdown(head, rows))])


def _command(args: argparse.Namespace) -> str:
    repeats = f" --repeats {args.repeats}" if args.what == "coverage" else ""
    return f"python experiments/glm_lme4.py {args.what}{repeats}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["same", "coverage"])
    parser.add_argument("--repeats", type=int, default=100, help="tables of each kind")
    parser.add_argument("--kinds", nargs="+", default=["normal", "patterns", "both"], metavar="KIND")
    parser.add_argument("--cache", type=Path, default=Path("runs/glm-tables"), help="the folder of the tables")
    parser.add_argument("--out", type=Path, help="the page to write")
    args = parser.parse_args()
    text = {"same": same, "coverage": coverage}[args.what](args)
    print(text)
    if args.out:
        args.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
