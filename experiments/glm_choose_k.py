"""How often is the right number of canonical models chosen, and no residual effect?

    OMP_NUM_THREADS=1 python experiments/glm_choose_k.py [--sims 20] [--cells 0 1] [--truth 1 2] [--out FILE]

What is found is saved in --work, so an interrupted run continues.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
from glm_page import heading, markdown
from glm_simulate import draw, estimator, quietly, spread_corners

CLIENTS, ROWS, COLUMNS, ALPHA = 100, 40, 4, 0.4
NOISE = {"gaussian": 1.0, "binomial": np.pi / np.sqrt(3), "poisson": 1.0}  # standard deviations
CELLS = [  # the family and the noise that are drawn, and the family that is fitted
    ("gaussian", "as assumed", "gaussian"),
    ("gaussian", "unequal", "gaussian"),
    ("binomial", "as assumed", "binomial"),
    ("binomial", "overdispersed", "binomial"),
    ("poisson", "as assumed", "poisson"),
    ("poisson", "overdispersed", "poisson"),
    ("poisson", "overdispersed", "negative binomial"),
]
HEAD = ["drawn, noise, fitted family", "truth", "right", "too large", "too small", "chosen", "s each"]
NOTES = """\
100 clients with 40 rows of 4 columns, memberships from Dirichlet(0.4), canonical models 1 to 2 noise standard
deviations apart (uniform; for binomial targets the noise is the logistic one, 1.8) around a common centre. {sims}
simulations each, fitted with `k="auto"`. Seconds are processor time of the whole choice.

- unequal: gaussian noise with a standard deviation per client, log-normal with 0.5. overdispersed: counts from a
  negative binomial with variance mean + mean^2 / 2, and binary targets with standard normal noise in the predictor.
- "2 + full" is two canonical models with a residual effect; right, too large and too small are about K alone."""


def choose(drawn_family: str, noise: str, fitted: str, truth: int, seed: int) -> tuple[str, float]:
    """What is chosen and the seconds that it took, for canonical models 1 to 2 standard deviations apart."""
    random = np.random.default_rng([seed, truth, *map(ord, drawn_family + noise)])
    theta = spread_corners(truth, COLUMNS, NOISE[drawn_family] * random.uniform(1, 2), random)
    centre = 0.3 * random.normal(size=COLUMNS)
    drawn = draw(drawn_family, theta, CLIENTS, ROWS, ALPHA, random, centre=centre, noise=noise)
    start = time.process_time()
    model = quietly(estimator(fitted, k="auto").fit, drawn.x, drawn.y, clients=drawn.clients)
    residual = getattr(model, "residual_", "none")
    k = str(np.shape(model.memberships_)[1])
    return k if residual == "none" else f"{k} + {residual}", time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sims", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cells", type=int, nargs="+", default=range(len(CELLS)), metavar="NUMBER")
    parser.add_argument("--truth", type=int, nargs="+", default=[1, 2, 3, 4])
    parser.add_argument("--work", type=Path, default=Path("runs/glm-choose-k"))
    parser.add_argument("--out", type=Path, help="the page to write")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    rows = []
    for cell in (CELLS[number] for number in args.cells):
        for truth in args.truth:
            found = []
            for seed in range(args.seed, args.seed + args.sims):
                file = args.work / f"{' '.join(cell)} {truth} {seed}.json"
                if not file.exists():
                    file.write_text(json.dumps(choose(*cell, truth, seed)))
                found.append(json.loads(file.read_text()))
            ks = np.array([int(chosen.split()[0]) for chosen, _ in found])
            each = ", ".join(f"{chosen}: {count}" for chosen, count in sorted(Counter(c for c, _ in found).items()))
            counts = [str(np.sum(is_so)) for is_so in (ks == truth, ks > truth, ks < truth)]
            rows.append([", ".join(cell), str(truth), *counts, each, f"{np.mean([s for _, s in found]):.2g}"])
            print(" | ".join(rows[-1]), flush=True)
    if args.out:
        command = shlex.join(["python", "experiments/glm_choose_k.py", *sys.argv[1:]])
        top = heading("Choosing the number of canonical models", command)
        args.out.write_text("\n".join([top, "", NOTES.format(sims=args.sims), "", *markdown(HEAD, rows), ""]))


if __name__ == "__main__":
    main()
