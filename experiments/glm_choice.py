"""Choices among electricity contracts: a population of logits, a mixed logit (xlogit) and latent classes (flexmix).

    OMP_NUM_THREADS=1 python experiments/glm_choice.py [--splits 3] [--out results/glm-choice.md]

Needs xlogit, R with flexmix and survival, and choicelearn_electricity.csv.gz in --data.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import scipy.stats
from glm_page import ROOT, heading, markdown
from scipy.special import log_softmax, logsumexp

from ppfl.glm import PopulationChoice

Array = np.ndarray[Any, Any]
DATA = Path(os.environ.get("PPFL_DATA") or ROOT.parent / "shared" / "data") / "tabular"
COLUMNS = ["pf", "cl", "loc", "wk", "tod", "seas"]
ALTERNATIVES, MOST_CLASSES, DRAWS = 4, 6, 1000


class Result(NamedTuple):
    mean: Array  # probabilities of the test rows
    seconds: float
    clients: str = "–"


def split(data: pd.DataFrame, seed: int) -> tuple[pd.DataFrame, pd.DataFrame]:
    """A quarter of every person's choices is held out. Columns are standardised by the others."""
    random = np.random.default_rng(seed)
    choices = data.groupby("id").chid.unique()
    held = np.concatenate([random.permutation(own)[: round(len(own) / 4)] for own in choices])
    test = data.chid.isin(held)
    mean, scale = data.loc[~test, COLUMNS].mean(), data.loc[~test, COLUMNS].std(ddof=0)
    data = data.assign(**((data[COLUMNS] - mean) / scale))
    return data[~test], data[test]


def choice_logs(table: pd.DataFrame, coefficients: Array) -> Array:
    """Log probabilities (rows, S) of alternatives for coefficients (S, q). Rows are sorted by situation."""
    predictors = (table[COLUMNS].to_numpy() @ coefficients.T).reshape(-1, ALTERNATIVES, len(coefficients))
    return log_softmax(predictors, axis=1).reshape(len(table), -1)


def posterior_prediction(train: pd.DataFrame, test: pd.DataFrame, coefficients: Array, log_weight: Array) -> Array:
    """Probabilities if people have one of these coefficients (S, q), weighted by each person's training choices."""
    is_chosen = train.choice.to_numpy() == 1
    people, code = np.unique(train.id.to_numpy()[is_chosen], return_inverse=True)
    logs = np.tile(log_weight, (len(people), 1))
    np.add.at(logs, code, choice_logs(train, coefficients)[is_chosen])
    weight = np.exp(logs - logsumexp(logs, axis=1, keepdims=True))
    return (np.exp(choice_logs(test, coefficients)) * weight[np.searchsorted(people, test.id)]).sum(1)


def mixed_logit(train: pd.DataFrame, test: pd.DataFrame) -> Result:
    """Normal coefficients, independent of each other, by simulated likelihood."""
    from xlogit import MixedLogit

    model, start = MixedLogit(), time.process_time()
    model.fit(
        train[COLUMNS].to_numpy(), train.choice.to_numpy(), varnames=COLUMNS, alts=np.arange(len(train)) % ALTERNATIVES,
        ids=train.chid.to_numpy(), panels=train.id.to_numpy(), randvars=dict.fromkeys(COLUMNS, "n"), n_draws=DRAWS,
        verbose=0, skip_std_errs=True,
    )  # fmt: skip
    seconds = time.process_time() - start
    found = dict(zip(model.coeff_names, model.coeff_, strict=True))
    mean, deviation = (np.array([found[prefix + name] for name in COLUMNS]) for prefix in ("", "sd."))
    normal = scipy.stats.norm.ppf(scipy.stats.qmc.Halton(len(COLUMNS), rng=0).random(4 * DRAWS))
    drawn = mean + np.abs(deviation) * normal
    shown = ", ".join(f"{name} {abs(value):.2g}" for name, value in zip(COLUMNS, deviation, strict=True))
    return Result(posterior_prediction(train, test, drawn, np.zeros(len(drawn))), seconds, f"sd {shown}")


def latent_classes(train: pd.DataFrame, test: pd.DataFrame) -> Result:
    with tempfile.TemporaryDirectory() as folder:
        number = np.unique(train.chid, return_inverse=True)[1] + 1  # flexmix counts situations from 1
        data = train[[*COLUMNS, "choice"]].assign(situation=number, client=train.id)
        data.to_csv(Path(folder) / "train.csv", index=False)
        script = str(Path(__file__).with_name("glm_choice.R"))
        subprocess.run(["Rscript", script, folder, ",".join(COLUMNS), str(MOST_CLASSES)], check=True)
        found = pd.read_csv(Path(folder) / "classes.csv")
    predicted = posterior_prediction(train, test, found[COLUMNS].to_numpy(), np.log(found["size"].to_numpy()))
    sizes = ", ".join(f"{size:.0%}" for size in sorted(found["size"], reverse=True))
    return Result(predicted, found.seconds[0], f"{len(found)} classes: {sizes}")


def population(train: pd.DataFrame, test: pd.DataFrame, k: Any = "auto") -> Result:
    start = time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = PopulationChoice(k, random_state=0)
        model.fit(train[COLUMNS], train.choice, situations=train.chid, clients=train.id)
    seconds = time.process_time() - start
    shares = ", ".join(f"{share:.0%}" for share in np.asarray(model.memberships_).mean(0))
    return Result(model.predict_proba(test[COLUMNS], test.chid, clients=test.id), seconds, f"shares {shares}")


def own(train: pd.DataFrame, test: pd.DataFrame) -> Result:
    start, mean = time.process_time(), np.zeros(len(test))
    for person, rows in test.groupby("id").indices.items():
        some = train[train.id == person]
        alone = PopulationChoice(1, ridge=1.0).fit(some[COLUMNS], some.choice, some.chid)
        mean[rows] = alone.predict_proba(test.iloc[rows][COLUMNS], test.iloc[rows].chid)
    return Result(mean, time.process_time() - start)


METHODS: dict[str, Callable[[pd.DataFrame, pd.DataFrame], Result]] = {
    "one conditional logit for all": lambda train, test: population(train, test, 1),
    "one per person, with a ridge of 1": own,
    "mixed logit (xlogit)": mixed_logit,
    "latent classes (flexmix)": latent_classes,
    "ours": population,
}

NOTES = """\
361 people chose 8 to 12 times each among four electricity contracts with six attributes. A quarter of each person's
choices is held out; the deviance is minus twice the mean log probability of what the person chose, smaller is better.
Means over {splits} splits. Seconds are processor time.

- The mixed logit has independent normal coefficients for all attributes ({draws} Halton draws). Its predictions, and
  those of the latent classes, are weighted by each person's posterior, given the person's training choices.
- Latent classes: K from 1 to {most} with the smallest BIC, three starts each.
- Ours: `k="auto"`. What is said about people is from the first split."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=DATA, help="the folder with the table")
    parser.add_argument("--splits", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=list(METHODS), default=list(METHODS), metavar="METHOD")
    parser.add_argument("--out", type=Path, help="the page to write")
    args = parser.parse_args()
    data = pd.read_csv(args.data / "choicelearn_electricity.csv.gz").astype({"choice": int})
    splits = [split(data, seed) for seed in range(args.splits)]
    rows = []
    for method in args.only:
        found = [METHODS[method](train, test) for train, test in splits]
        chosen = [one.mean[test.choice.to_numpy() == 1] for one, (_, test) in zip(found, splits, strict=True)]
        deviance = np.mean([-2 * np.log(np.maximum(mean, 1e-12)).mean() for mean in chosen])
        rows.append([method, f"{deviance:.4g}", f"{np.mean([one.seconds for one in found]):.2g}", found[0].clients])
        print(" | ".join(rows[-1]), flush=True)
    if args.out:
        top = heading(
            "Choice models compared with a mixed logit and latent classes",
            f"python experiments/glm_choice.py --splits {args.splits}", "xlogit",
        )  # fmt: skip
        notes = NOTES.format(splits=args.splits, draws=DRAWS, most=MOST_CLASSES)
        head = ["method", "held-out deviance", "s", "who the people are"]
        args.out.write_text("\n".join([top, "", notes, "", *markdown(head, rows), ""]))


if __name__ == "__main__":
    main()
