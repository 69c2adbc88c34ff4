"""Choices among electricity contracts: our population of logits, a mixed logit (xlogit) and latent classes (flexmix).

    OMP_NUM_THREADS=1 python experiments/glm_choice.py [--splits 3] [--out results/glm-choice.md]

Needs pandas and xlogit, and R with flexmix and survival (see glm_r.py).
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import scipy.stats
from glm_comparison import DATA
from glm_data import Array, Table, held_out, standardise
from glm_methods import describe_clients, fit, fit_auto, own, pooled, predict, score
from glm_page import heading, markdown, show_seconds
from glm_r import run_r
from glm_tables import electricity
from scipy.special import log_softmax, logsumexp

MOST_CLASSES = 6
DRAWS = 1000


class Result(NamedTuple):
    score: float
    seconds: float  # of one fit
    all_seconds: float  # with the choice of K
    clients: str = "–"


def choice_logs(table: Table, coefficients: Array) -> Array:
    """Log probabilities of all alternatives (situations, alternatives, S) for coefficients (S, q)."""
    situations = len(np.unique(table.situations))
    return log_softmax((table.x.to_numpy() @ coefficients.T).reshape(situations, -1, len(coefficients)), axis=1)


def posterior_prediction(train: Table, test: Table, coefficients: Array, log_weight: Array) -> Array:
    """Probabilities for known clients, if clients have one of these coefficients (S, q) with these weights.

    Each client's weights are updated by its own training choices. Rows are sorted by situation.
    """
    chosen = choice_logs(train, coefficients).reshape(len(train.y), -1)[train.y == 1]  # (situations, S)
    of_choice = train.clients[train.y == 1]
    clients, code = np.unique(of_choice, return_inverse=True)
    logs = np.tile(log_weight, (len(clients), 1))
    np.add.at(logs, code, chosen)
    weight = np.exp(logs - logsumexp(logs, axis=1, keepdims=True))
    each = np.exp(choice_logs(test, coefficients)).reshape(len(test.y), -1)
    return (each * weight[np.searchsorted(clients, test.clients)]).sum(1)


def mixed_logit(train: Table, test: Table) -> Result:
    """Normal coefficients, independent of each other, by simulated likelihood."""
    from xlogit import MixedLogit

    names, alternatives = list(train.x), len(train.y) // len(np.unique(train.situations))
    model = MixedLogit()
    start = time.process_time()
    model.fit(
        train.x.to_numpy(), train.y, varnames=names, alts=np.arange(len(train.y)) % alternatives,
        ids=train.situations, panels=train.clients, randvars=dict.fromkeys(names, "n"), n_draws=DRAWS, verbose=0,
        skip_std_errs=True,
    )  # fmt: skip
    seconds = time.process_time() - start
    found = dict(zip(model.coeff_names, model.coeff_, strict=True))
    mean, deviation = (np.array([found[prefix + name] for name in names]) for prefix in ("", "sd."))
    normal = scipy.stats.norm.ppf(scipy.stats.qmc.Halton(len(names), rng=0).random(4 * DRAWS))
    drawn = mean + np.abs(deviation) * normal
    predicted = posterior_prediction(train, test, drawn, np.zeros(len(drawn)))
    shown = "sd " + ", ".join(f"{name} {abs(value):.2g}" for name, value in zip(names, deviation, strict=True))
    return Result(score(test, predicted), seconds, seconds, shown)


def latent_classes(train: Table, test: Table) -> Result:
    with tempfile.TemporaryDirectory() as folder:
        number = np.unique(train.situations, return_inverse=True)[1] + 1  # flexmix counts situations from 1
        data = train.x.assign(choice=train.y, situation=number, client=train.clients)
        data.to_csv(Path(folder) / "train.csv", index=False)
        script = str(Path(__file__).with_name("glm_choice.R"))
        run_r(script, folder, ",".join(train.x), str(MOST_CLASSES))
        found = pd.read_csv(Path(folder) / "classes.csv")
    predicted = posterior_prediction(train, test, found[list(train.x)].to_numpy(), np.log(found["size"].to_numpy()))
    sizes = ", ".join(f"{size:.0%}" for size in sorted(found["size"], reverse=True))
    return Result(score(test, predicted), found.alone[0], found.seconds[0], f"{len(found)} classes: {sizes}")


def population(train: Table, test: Table) -> Result:
    start = time.process_time()
    model, _ = fit_auto(train, choose="prediction")
    all_seconds = time.process_time() - start
    start = time.process_time()
    fit(train, np.asarray(model.memberships_).shape[1])
    alone = time.process_time() - start
    return Result(score(test, predict(model, test)), alone, all_seconds, describe_clients(model))


def _simple(method: Callable[[Table, Table], Any]) -> Callable[[Table, Table], Result]:
    def run(train: Table, test: Table) -> Result:
        found = method(train, test)
        return Result(score(test, found.mean), found.seconds, found.seconds)

    return run


METHODS: dict[str, Callable[[Table, Table], Result]] = {
    "one conditional logit for all": _simple(pooled),
    "one per client, with a ridge": _simple(own),
    "mixed logit (xlogit)": mixed_logit,
    "latent classes (flexmix)": latent_classes,
    "ours": population,
}

NOTES = """\
361 people chose 8 to 12 times each among four electricity contracts with six attributes. A quarter of each person's
choices is held out; the deviance is minus twice the mean log probability of what the person chose, smaller is better.
Means over {splits} splits. Seconds are processor time, of one fit and with the choice of K.

- The mixed logit has independent normal coefficients for all attributes ({draws} Halton draws). Its predictions, and
  those of the latent classes, are weighted by each person's posterior, given the person's training choices.
- Latent classes: K from 1 to {most} with the smallest BIC, three starts each.
- Ours: `k="auto", choose="prediction"`. What is said about people is from the first split."""


def _split(table: Table, seed: int) -> tuple[Table, Table]:
    test = held_out(table, 0.25, seed)
    return standardise(table.take(~test), table.take(test))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=DATA, help="the folder with the table")
    parser.add_argument("--splits", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=list(METHODS), default=list(METHODS), metavar="METHOD")
    parser.add_argument("--again", nargs="+", choices=list(METHODS), default=[], help="measure these methods again")
    parser.add_argument("--work", type=Path, default=Path("runs/glm-choice"), help="the folder of saved measurements")
    parser.add_argument("--out", type=Path, default=Path("results/glm-choice.md"))
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    rows = []
    for method in args.only:
        found = []
        for seed in range(args.splits):
            file = args.work / f"{method}-{seed}.json"
            if method in args.again or not file.exists():
                file.write_text(json.dumps(METHODS[method](*_split(electricity(args.data), seed))))
            found.append(Result(*json.loads(file.read_text())))
            print(method, found[-1], flush=True)
        deviance, alone, everything = np.mean([one[:3] for one in found], 0)
        rows.append([method, f"{deviance:.4g}", show_seconds(alone), show_seconds(everything), found[0].clients])
    head = ["method", "held-out deviance", "s, one fit", "s, all", "who the people are"]
    command = f"python experiments/glm_choice.py --splits {args.splits}"
    notes = NOTES.format(splits=args.splits, draws=DRAWS, most=MOST_CLASSES)
    top = heading("Choice models compared with a mixed logit and latent classes", command, "xlogit")
    args.out.write_text("\n".join([top, "", notes, "", *markdown(head, rows), ""]))
    print(args.out.read_text())


if __name__ == "__main__":
    main()
