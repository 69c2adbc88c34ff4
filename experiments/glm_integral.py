"""The log-likelihood of fitted population GLMs, compared with independent integration (glm_oracle.py).

OMP_NUM_THREADS=1 python experiments/glm_integral.py [--clients 30] [--families gaussian] [--k 2 3] [--out FILE]
"""

from __future__ import annotations

import argparse
import shlex
import sys
from itertools import product
from pathlib import Path

import numpy as np
from glm_oracle import marginal_log_likelihood
from glm_page import heading, markdown
from glm_simulate import FAMILIES, draw, estimator, quietly, spread_corners

HEAD = ["family", "K", "rows per client", "columns", "ours - oracle", "own error", "oracle's error"]
NOTES = """\
Log-likelihoods with memberships integrated out, at the fitted parameters, for {clients} clients with memberships from
Dirichlet(0.4) and canonical models at distance 1.5. Differences and errors are in nats, scaled to 100 clients.

- oracle: `scipy.integrate.quad` for K = 2 and importance sampling around each client's mode for the others
  (`experiments/glm_oracle.py`, which shares no code with ppfl), with its own error.
- own error: `log_likelihood_error_`."""


def numbers(family: str, k: int, rows: int, columns: int, clients: int, seed: int) -> list[float]:
    """The difference of log-likelihoods and both errors, for 100 clients."""
    random = np.random.default_rng([seed, FAMILIES.index(family), k, rows, columns])
    drawn = draw(family, spread_corners(k, columns, 1.5, random), clients, rows, 0.4, random)
    model = quietly(estimator(family, k=k, fit_intercept=False).fit, drawn.x, drawn.y, clients=drawn.clients)
    dispersion = model.dispersion_ if family == "gaussian" else 1.0
    theta, alpha = np.asarray(model.canonical_coef_), np.asarray(model.concentration_)
    truth = marginal_log_likelihood(family, drawn.x, drawn.y, drawn.clients, theta, alpha, dispersion)
    found = np.array([model.log_likelihood_ - truth.value, model.log_likelihood_error_, truth.error])
    return (found * 100 / clients).tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES), metavar="FAMILY")
    parser.add_argument("--k", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--rows", type=int, nargs="+", default=[5, 30, 200])
    parser.add_argument("--out", type=Path, help="the page to write")
    args = parser.parse_args()
    rows, found = [], []
    for case in product(args.families, args.k, args.rows, (2, 5, 20)):
        found.append(numbers(*case, args.clients, args.seed))
        rows.append([*map(str, case), *(f"{value:+.3f}" for value in found[-1])])
        print(" | ".join(rows[-1]), flush=True)
    difference, own, oracle = np.abs(found).T
    line = (
        f"Within 0.1 nats per 100 clients: {(difference <= 0.1).sum()} of {len(rows)} cases; within the reported error "
        f"plus three errors of the oracle: {(difference <= own + 3 * oracle).sum()}."
    )
    print(line)
    if args.out:
        command = shlex.join(["python", "experiments/glm_integral.py", *sys.argv[1:]])
        top = heading("The likelihood compared with independent integration", command)
        notes = NOTES.format(clients=args.clients)
        args.out.write_text("\n".join([top, "", notes, "", *markdown(HEAD, rows, 2), "", line, ""]))


if __name__ == "__main__":
    main()
