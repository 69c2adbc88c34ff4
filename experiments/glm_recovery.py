"""How well are memberships and canonical coefficients recovered from data drawn from the model?

OMP_NUM_THREADS=1 python experiments/glm_recovery.py [--out results/glm-recovery.md]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from glm_page import heading, markdown
from glm_simulate import FAMILIES, Array, Drawn, draw, estimator, quietly, spread_corners
from scipy.optimize import brentq

from ppfl.core import simplex

CLIENTS, ROWS, COLUMNS, ALPHA, STARTS = 200, 40, 5, 0.3, 10
HEAD = ["family", "corners", "seed", "memberships", "9th of 10", "limit", "coefficients", "9th of 10", "limit", "s"]
NOTES = """\
Three canonical models, 200 clients with memberships from Dirichlet(0.3), 40 rows of 5 columns each; noise has half of
the variance of y. The canonical models (corners) are a regular triangle if far apart, and normal vectors if at random,
some of which are hard to distinguish. Each data set is fitted from ten starts; seconds are of one fit.

- Memberships: mean total variation between the estimated and the true memberships, with canonical models matched: the
  median over the starts, and the ninth of ten. The limit is the error of the posterior mean with known coefficients,
  noise and distribution of memberships, which has the smallest possible mean squared error.
- Coefficients: relative error of all canonical coefficients. The limit is the error of a GLM that knows all
  memberships."""
NOISE_OF_HALF: dict[str, Callable[[Array], float]] = {  # 0 where noise has half of the variance of y
    "gaussian": lambda eta: eta.var() - 1,
    "binomial": lambda eta: (1 / (1 + np.exp(-eta))).var() - 0.125,
    "poisson": lambda eta: np.exp(eta).var() - np.exp(eta).mean(),
}


def drawn_with_half_noise(family: str, shape: str, seed: int) -> Drawn:
    at_random = np.random.default_rng(seed).normal(size=(3, COLUMNS)) / np.sqrt(COLUMNS)
    theta = at_random if shape == "at random" else spread_corners(3, COLUMNS, 3**0.5, np.random.default_rng(seed))

    def with_size(size: float) -> Drawn:
        return draw(family, size * theta, CLIENTS, ROWS, ALPHA, np.random.default_rng([seed, 1]))

    high = 3 / float(with_size(1.0).eta.std())
    return with_size(brentq(lambda size: NOISE_OF_HALF[family](with_size(size).eta), 0.05, high, xtol=1e-4))


def memberships_with_known_models(drawn: Drawn) -> Array:
    """Posterior means of the memberships with everything else known."""
    grid = np.random.default_rng(1).dirichlet([ALPHA] * 3, 4000)
    found = []
    for client in range(CLIENTS):
        own = drawn.clients == client
        eta, y = drawn.x[own] @ drawn.theta.T @ grid.T, drawn.y[own][:, None]
        logs = {
            "gaussian": lambda eta, y: -0.5 * (y - eta) ** 2,
            "binomial": lambda eta, y: y * eta - np.logaddexp(0, eta),
            "poisson": lambda eta, y: y * eta - np.exp(eta),
        }[drawn.family](eta, y).sum(0)
        weight = np.exp(logs - logs.max())
        found.append(weight @ grid / weight.sum())
    return np.array(found)


def coefficients_with_known_memberships(drawn: Drawn) -> Array:
    """Coefficients of a GLM whose columns are the products of features and memberships."""
    products = np.hstack([drawn.x * drawn.memberships[drawn.clients][:, [k]] for k in range(3)])
    model = estimator(drawn.family, k=1, ridge=0.0, fit_intercept=False).fit(products, drawn.y)
    return np.asarray(model.canonical_coef_[0].reshape(3, COLUMNS))


def errors(drawn: Drawn, memberships: Array, theta: Array) -> tuple[float, float]:
    """The mean total variation of memberships, and the relative error of coefficients."""
    total = float(np.abs(memberships - drawn.memberships).sum(1).mean() / 2)
    return total, float(np.linalg.norm(theta - drawn.theta) / np.linalg.norm(drawn.theta))


def table_row(family: str, shape: str, seed: int) -> list[str]:
    drawn, found = drawn_with_half_noise(family, shape, seed), []
    start = time.process_time()
    for number in range(STARTS):
        model = estimator(family, k=3, random_state=number)
        quietly(model.fit, drawn.x, drawn.y, clients=drawn.clients)
        memberships = np.array(model.memberships_)
        order = simplex.match(torch.from_numpy(drawn.memberships), torch.from_numpy(memberships)).numpy()
        found.append(errors(drawn, memberships[:, order], model.canonical_coef_[order]))
    seconds = (time.process_time() - start) / STARTS
    limits = errors(drawn, memberships_with_known_models(drawn), coefficients_with_known_memberships(drawn))
    of_memberships, of_coefficients = np.array([np.median(found, 0), np.sort(found, 0)[8], limits]).T
    cells = [*(f"{value:.3f}" for value in of_memberships), *(f"{value:.1%}" for value in of_coefficients)]
    return [family, shape, str(seed), *cells, f"{seconds:.1f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="the page to write")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    args = parser.parse_args()
    rows = []
    for family in FAMILIES:
        for shape in ("far apart", "at random"):
            for seed in args.seeds:
                rows.append(table_row(family, shape, seed))
                print(" | ".join(rows[-1]), flush=True)
    if args.out:
        top = heading("Recovery of memberships and coefficients", "python experiments/glm_recovery.py")
        args.out.write_text("\n".join([top, "", NOTES, "", *markdown(HEAD, rows, 2), ""]))


if __name__ == "__main__":
    main()
