"""How well are memberships and canonical coefficients recovered from data drawn from the model?

Three canonical models, 200 clients with memberships from Dirichlet(0.3), 40 rows of 5 columns each; half the variance
of y is noise. Each data set is fitted from ten starts. The errors are compared with the best possible ones: those of
memberships with known coefficients and distribution of memberships, and of coefficients with known memberships.

    OMP_NUM_THREADS=1 python experiments/glm_recovery.py [--out results/glm-recovery.md]
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from glm_page import heading
from scipy.optimize import brentq

from ppfl.core import simplex
from ppfl.glm import PopulationClassifier, PopulationRegressor

Array = np.ndarray[Any, Any]
CLIENTS, ROWS, COLUMNS, ALPHA, STARTS = 200, 40, 5, 0.3, 10


class DrawnPopulation(NamedTuple):
    x: Array
    y: Array
    clients: Array
    memberships: Array
    theta: Array
    noise: float  # standard deviation, of the gaussian family


def corners(shape: str, random: np.random.Generator) -> Array:
    """Canonical models (3, d): a regular triangle around 0 if "far apart", three normal vectors if "at random"."""
    if shape == "at random":
        return random.normal(size=(3, COLUMNS)) / np.sqrt(COLUMNS)
    plane, _ = np.linalg.qr(random.normal(size=(COLUMNS, 2)))
    angle = 2 * np.pi * np.arange(3) / 3
    return np.stack([np.cos(angle), np.sin(angle)], 1) @ plane.T


def draw(family: str, shape: str, seed: int) -> DrawnPopulation:
    random = np.random.default_rng(seed)
    theta, c = corners(shape, random), random.dirichlet([ALPHA] * 3, CLIENTS)
    client = np.repeat(np.arange(CLIENTS), ROWS)
    x = random.normal(size=(len(client), COLUMNS))
    eta = (x * (c @ theta)[client]).sum(1)
    if family == "gaussian":
        noise = float(eta.std())
        return DrawnPopulation(x, eta + noise * random.normal(size=len(eta)), client, c, theta, noise)
    if family == "binomial":  # the variance of the probabilities is half the variance of a fair coin
        size = brentq(lambda size: (1 / (1 + np.exp(-size * eta))).var() - 0.125, 0.1, 100)
        y = (random.random(len(eta)) < 1 / (1 + np.exp(-size * eta))).astype(float)
    else:  # the variance of the rates is the variance of the counts given the rates
        size = brentq(lambda size: np.exp(size * eta).var() - np.exp(size * eta).mean(), 0.05, 3 / eta.std())
        y = random.poisson(np.exp(size * eta)).astype(float)
    return DrawnPopulation(x, y, client, c, size * theta, 1.0)


def memberships_with_known_models(family: str, drawn: DrawnPopulation) -> Array:
    """Posterior means of the memberships with everything else known."""
    grid = np.random.default_rng(1).dirichlet([ALPHA] * 3, 4000)
    found = []
    for client in range(CLIENTS):
        own_rows = drawn.clients == client
        eta, y = drawn.x[own_rows] @ drawn.theta.T @ grid.T, drawn.y[own_rows][:, None]
        logs = {
            "gaussian": lambda eta, y: -0.5 * ((y - eta) / drawn.noise) ** 2,
            "binomial": lambda eta, y: y * eta - np.logaddexp(0, eta),
            "poisson": lambda eta, y: y * eta - np.exp(eta),
        }[family](eta, y).sum(0)
        weight = np.exp(logs - logs.max())
        found.append(weight @ grid / weight.sum())
    return np.array(found)


def make_estimator(family: str, **settings: Any) -> Any:
    return PopulationClassifier(**settings) if family == "binomial" else PopulationRegressor(family=family, **settings)


def coefficients_with_known_memberships(family: str, drawn: DrawnPopulation) -> Array:
    """Coefficients of a GLM whose columns are the products of features and memberships."""
    products = np.hstack([drawn.x * drawn.memberships[drawn.clients][:, [k]] for k in range(3)])
    model = make_estimator(family, k=1, ridge=0.0, fit_intercept=False).fit(products, drawn.y)
    return np.asarray(model.canonical_coef_[0].reshape(3, COLUMNS))


def membership_error(a: Array, b: Array) -> float:
    """Mean total variation."""
    return float(np.abs(a - b).sum(1).mean() / 2)


def relative_error(theta: Array, truth: Array) -> float:
    return float(np.linalg.norm(theta - truth) / np.linalg.norm(truth))


def table_row(family: str, shape: str, seed: int) -> str:
    drawn = draw(family, shape, seed)
    membership_errors, coefficient_errors, seconds = [], [], []
    for start in range(STARTS):
        begun = time.process_time()
        model = make_estimator(family, k=3, random_state=start).fit(drawn.x, drawn.y, clients=drawn.clients)
        seconds.append(time.process_time() - begun)
        found = np.array(model.memberships_)
        order = simplex.match(torch.from_numpy(drawn.memberships), torch.from_numpy(found)).numpy()
        membership_errors.append(membership_error(found[:, order], drawn.memberships))
        coefficient_errors.append(relative_error(model.canonical_coef_[order], drawn.theta))
    membership_limit = membership_error(memberships_with_known_models(family, drawn), drawn.memberships)
    coefficient_limit = relative_error(coefficients_with_known_memberships(family, drawn), drawn.theta)
    memberships = f"{np.median(membership_errors):.3f} | {np.sort(membership_errors)[8]:.3f} | {membership_limit:.3f}"
    coefficients = (
        f"{np.median(coefficient_errors):.1%} | {np.sort(coefficient_errors)[8]:.1%} | {coefficient_limit:.1%}"
    )
    return f"| {family} | {shape} | {seed} | {memberships} | {coefficients} | {np.mean(seconds):.1f} |"


HEAD = """\
| family | corners | seed | memberships | 9th of 10 | limit | coefficients | 9th of 10 | limit | s per fit |
|---|---|---|---|---|---|---|---|---|---|"""

NOTES = """\
Three canonical models, 200 clients with memberships from Dirichlet(0.3), 40 rows of 5 columns each; noise has half of
the variance of y. The canonical models (corners) are a regular triangle if far apart, and normal vectors if at random,
some of which are hard to distinguish. Each data set is fitted from ten starts.

- Memberships: mean total variation between the estimated and the true memberships, with canonical models matched: the
  median over the starts, and the ninth of ten. The limit is the error of the posterior mean with known coefficients,
  noise and distribution of memberships, which has the smallest possible mean squared error.
- Coefficients: relative error of all canonical coefficients. The limit is the error of a GLM that knows all
  memberships."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="the page to write")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    args = parser.parse_args()
    lines = [HEAD]
    print(HEAD)
    for family in ("gaussian", "binomial", "poisson"):
        for shape in ("far apart", "at random"):
            for seed in args.seeds:
                lines.append(table_row(family, shape, seed))
                print(lines[-1], flush=True)
    if args.out:
        top = heading("Recovery of memberships and coefficients", "python experiments/glm_recovery.py")
        args.out.write_text("\n".join([top, "", NOTES, "", *lines, ""]))


if __name__ == "__main__":
    main()
