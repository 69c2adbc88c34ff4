"""How often do 90 % intervals contain the truth, in data drawn from the model?

100 clients with memberships from Dirichlet(0.4), and 40 rows each with 4 columns, an intercept and K canonical models
that lie far apart. Every data set is fitted, and all its intervals are compared with what the data were drawn from.

    OMP_NUM_THREADS=1 python experiments/glm_coverage.py [--repeats 40] [--out results/glm-coverage.md]
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from glm_page import heading, markdown
from glm_simulate import Array, estimator

from ppfl.core import simplex
from ppfl.glm import NEW

CLIENTS, ROWS, COLUMNS, ALPHA, LEVEL = 100, 40, 4, 0.4, 0.9
KINDS = ("coefficients", "dispersion", "concentration", "memberships", "client coefficients", "mean", "new observation",
         "new client")  # fmt: skip
SETTINGS = [(family, k) for family in ("gaussian", "binomial", "poisson") for k in (2, 3)]


class Truth(NamedTuple):
    """What the data of one table are drawn from."""

    theta: Array  # (K, columns + 1), with the intercept first
    memberships: Array  # (M, K)
    family: str

    def draw_y(self, x: Array, memberships: Array, random: np.random.Generator) -> tuple[Array, Array]:
        """Means and observations of rows with these memberships."""
        eta = (np.c_[np.ones(len(x)), x] * (memberships @ self.theta)).sum(1)
        if self.family == "gaussian":
            return eta, eta + random.normal(size=len(eta))
        if self.family == "poisson":
            return np.exp(eta), random.poisson(np.exp(eta)).astype(float)
        mean = 1 / (1 + np.exp(-eta))
        return mean, (random.random(len(eta)) < mean).astype(float)


def draw_truth(family: str, k: int, random: np.random.Generator) -> Truth:
    """Canonical models on a sphere around 0, about as far apart as the standard deviation of the noise or more."""
    size = {"gaussian": 1.2, "binomial": 2.0, "poisson": 0.6}[family]
    directions = np.linalg.qr(random.normal(size=(COLUMNS + 1, COLUMNS + 1)))[0][:k]
    return Truth(size * (directions - directions.mean(0)), random.dirichlet([ALPHA] * k, CLIENTS), family)


def coverage(family: str, k: int, seed: int) -> dict[str, float]:
    """The share of intervals of each kind that contain the truth."""
    random = np.random.default_rng(seed)
    truth = draw_truth(family, k, random)
    clients = np.repeat(np.arange(CLIENTS), ROWS)
    x = random.normal(size=(len(clients), COLUMNS))
    _, y = truth.draw_y(x, truth.memberships[clients], random)
    model = estimator(family, k=k).fit(x, y, clients=clients)
    order = simplex.match(torch.from_numpy(truth.memberships), torch.from_numpy(np.array(model.memberships_))).numpy()
    table = model.conf_int(LEVEL)
    terms = ["intercept", *(f"x{i}" for i in range(COLUMNS))]
    hits: dict[str, list[Array]] = defaultdict(list)

    def compare(kind: str, found: Any, value: Any, slack: float = 0.0) -> None:
        lower, upper = (np.asarray(found[name]) for name in ("lower", "upper"))
        hits[kind].append(np.atleast_1d((lower - slack <= value) & (value <= upper + slack)))

    memberships = model.membership_intervals(LEVEL)
    for at, found in enumerate(order):
        compare("coefficients", table.loc[[(str(found), term) for term in terms]], truth.theta[at])
        compare("concentration", table.loc[(str(found), "concentration")], ALPHA)
        compare("memberships", memberships[found], truth.memberships[:, at], 1e-3)  # a membership of 0 counts
    if family == "gaussian":
        compare("dispersion", table.loc[("", "dispersion")], 1.0)
    for client in range(0, CLIENTS, 10):
        compare(
            "client coefficients", model.client_coef(client, interval=LEVEL), truth.memberships[client] @ truth.theta
        )
    some = random.choice(len(clients), 300, replace=False)
    mean, new = truth.draw_y(x[some], truth.memberships[clients[some]], random)
    if family == "binomial":
        compare("mean", model.predict_proba(x[some], clients[some], interval=LEVEL)[1.0], mean)
    else:
        found = model.predict(x[some], clients[some], interval=LEVEL)
        compare("mean", found, mean)
        wide = {"new_lower": "lower", "new_upper": "upper"}
        compare("new observation", found[[*wide]].rename(columns=wide), new)
        _, unknown = truth.draw_y(x[some], random.dirichlet([ALPHA] * k, len(some)), random)
        compare("new client", model.predict(x[some], NEW, interval=LEVEL)[[*wide]].rename(columns=wide), unknown)
    return {kind: float(np.concatenate(found).mean()) for kind, found in hits.items()}


NOTES = f"""\
{CLIENTS} clients with memberships from Dirichlet({ALPHA}), {ROWS} rows each with {COLUMNS} columns, and canonical
models on a sphere around 0 (radius 1.2 for gaussian targets with noise of variance 1, 2.0 for logits, 0.6 for log
rates). The share of 90 % intervals that contain the truth, over all tables. New observations of counts are covered more
often, because counts are whole numbers."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="the page to write")
    parser.add_argument("--repeats", type=int, default=40)
    args = parser.parse_args()
    rows = []
    for family, k in SETTINGS:
        begun = time.process_time()
        found = [coverage(family, k, seed) for seed in range(args.repeats)]
        seconds = (time.process_time() - begun) / args.repeats
        shares = [f"{np.mean([each[kind] for each in found]):.1%}" if kind in found[0] else "" for kind in KINDS]
        rows.append([family, str(k), str(args.repeats), *shares, f"{seconds:.1f}"])
        print(" | ".join(rows[-1]), flush=True)
    if args.out:
        command = f"python experiments/glm_coverage.py --repeats {args.repeats} --out {args.out}"
        head = ["family", "K", "tables", *KINDS, "s per table"]
        args.out.write_text(
            "\n".join([heading("Coverage of intervals", command), "", NOTES, "", *markdown(head, rows), ""])
        )


if __name__ == "__main__":
    main()
