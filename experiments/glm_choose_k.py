"""How often is the right number of canonical models chosen?

    OMP_NUM_THREADS=1 python experiments/glm_choose_k.py [--sims 20] [--only gaussian] [--truth 1 2] [--out FILE]

100 clients with 40 rows of 4 columns. Chosen numbers are saved in --work, so an interrupted run continues.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from glm_page import heading, markdown
from glm_simulate import Array, Drawn, draw, spread_corners

from ppfl.glm import PopulationClassifier, PopulationRegressor

CLIENTS, ROWS, COLUMNS, ALPHA = 100, 40, 4, 0.4
NOISE = {"gaussian": 1.0, "binomial": np.pi / np.sqrt(3), "poisson": 1.0}  # standard deviations


class Cell(NamedTuple):
    """How data are drawn, and the settings of the estimator that is fitted to them."""

    family: str
    noise: str
    settings: dict[str, Any]

    @property
    def name(self) -> str:
        fitted = ", ".join(f"{key} = {value}" for key, value in self.settings.items()) or "defaults"
        return f"{self.family}, {self.noise}, {fitted}"


CELLS = [
    Cell("gaussian", "as assumed", {}),
    Cell("gaussian", "unequal", {}),
    Cell("binomial", "as assumed", {}),
    Cell("binomial", "overdispersed", {}),
    Cell("poisson", "as assumed", {"family": "poisson"}),
    Cell("poisson", "overdispersed", {"family": "poisson"}),
    Cell("poisson", "overdispersed", {"family": "negative binomial"}),
]


def simulate(cell: Cell, truth: int, seed: int) -> Drawn:
    """Canonical models 1 to 2 noise standard deviations apart, around a common centre."""
    random = np.random.default_rng([seed, truth, *map(ord, cell.family + cell.noise)])
    distance = NOISE[cell.family] * random.uniform(1, 2)
    theta = spread_corners(truth, COLUMNS, distance, random)
    centre = 0.3 * random.normal(size=COLUMNS)
    return draw(cell.family, theta, CLIENTS, ROWS, ALPHA, random, centre=centre, noise=cell.noise)


def choose(cell: Cell, drawn: Drawn) -> tuple[int, float]:
    """The chosen K and the seconds that it took, with the one call that a user would type."""
    kind = PopulationClassifier if cell.family == "binomial" else PopulationRegressor
    y: Array = drawn.y.astype(int) if cell.family == "binomial" else drawn.y
    start = time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a fit at the edge of the range is counted like any other
        model = kind(k="auto", random_state=0, **cell.settings).fit(drawn.x, y, clients=drawn.clients)
    return int(np.asarray(model.memberships_).shape[1]), time.process_time() - start


HEAD = ["drawn, noise, fitted with", "truth", "right", "too large", "too small", "chosen", "s each"]
NOTES = """\
100 clients with 40 rows of 4 columns, memberships from Dirichlet(0.4), canonical models 1 to 2 noise standard
deviations apart (uniform; for binomial targets the noise is the logistic one, 1.8) around a common centre. {sims}
simulations each.

- unequal: gaussian noise with a standard deviation per client, log-normal with 0.5. overdispersed: counts from a
  negative binomial with variance mean + mean^2 / 2, and binary targets with standard normal noise in the predictor.
- Fitted with `k="auto"` and the settings named. Seconds are processor time of the whole choice."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sims", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", default=[""], metavar="TEXT", help="cells whose name contains this")
    parser.add_argument("--truth", type=int, nargs="+", default=[1, 2, 3, 4])
    parser.add_argument("--work", type=Path, default=Path("runs/glm-choose-k"))
    parser.add_argument("--out", type=Path, default=Path("results/glm-choose-k.md"))
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    file = args.work / "chosen.json"
    found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    rows, counts = [], []
    for cell in (cell for cell in CELLS if any(text in cell.name for text in args.only)):
        for truth in args.truth:
            results = []
            for seed in range(args.seed, args.seed + args.sims):
                key = f"{cell.name}, {truth}, {seed}"
                if key not in found:
                    found[key] = choose(cell, simulate(cell, truth, seed))
                    file.write_text(json.dumps(found, indent=0))
                results.append(found[key])
            chosen, seconds = np.array(results).T
            counts.append([(chosen == truth).mean(), (chosen > truth).mean()])
            each = ", ".join(f"{k:.0f}: {(chosen == k).sum()}" for k in np.unique(chosen))
            numbers = [(chosen == truth).sum(), (chosen > truth).sum(), (chosen < truth).sum()]
            rows.append([cell.name, str(truth), *map(str, numbers), each, f"{seconds.mean():.2g}"])
            print(" | ".join(rows[-1]), flush=True)
    right, large = np.mean(counts, 0)
    enough = sum(a >= 0.85 and b <= 0.05 for a, b in counts)
    line = (
        f"- Right in {right:.0%} and too large in {large:.0%} of all; {enough} of {len(counts)} rows are right in at "
    )
    line += "least 85 % and too large in at most 5 %."
    top = heading(
        "Choosing the number of canonical models", shlex.join(["python", "experiments/glm_choose_k.py", *sys.argv[1:]])
    )
    args.out.write_text("\n".join([top, "", NOTES.format(sims=args.sims), "", *markdown(HEAD, rows), "", line, ""]))
    print(line)


if __name__ == "__main__":
    main()
