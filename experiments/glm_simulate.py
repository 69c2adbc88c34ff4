"""Data drawn from a population GLM, for the simulation experiments."""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import numpy as np

from ppfl.glm import PopulationClassifier, PopulationRegressor

Array = np.ndarray[Any, Any]
FAMILIES = ("gaussian", "binomial", "poisson")


def estimator(family: str, **settings: Any) -> Any:
    """Not fitted yet."""
    settings = {"random_state": 0, **settings}
    return PopulationClassifier(**settings) if family == "binomial" else PopulationRegressor(family=family, **settings)


def quietly(fit: Any, *arguments: Any, **more: Any) -> Any:
    """Call a fit; whether it converged is in its results."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return fit(*arguments, **more)


class Drawn(NamedTuple):
    family: str
    x: Array  # (n, d), without an intercept
    y: Array
    clients: Array
    memberships: Array  # (M, K)
    theta: Array  # (K, d)
    eta: Array  # (n,), the true linear predictor of each row
    dispersion: float


def spread_corners(k: int, columns: int, distance: float, random: np.random.Generator) -> Array:
    """Canonical models (K, d) around 0, any two of them at this distance if the columns are enough for a simplex."""
    directions = np.linalg.qr(random.normal(size=(columns, columns)))[0]
    if k - 1 <= columns:
        simplex = np.linalg.svd(np.eye(k) - 1 / k)[0][:, : k - 1] if k > 1 else np.zeros((1, 0))
        return simplex @ directions[: k - 1] * distance / np.sqrt(2)
    corners = random.normal(size=(k, columns))
    gaps = np.linalg.norm(corners[:, None] - corners[None], axis=2)[np.triu_indices(k, 1)]
    return corners * distance / gaps.mean()


def draw(
    family: str,
    theta: Array,
    clients: int,
    rows: int,
    alpha: float | Array,
    random: np.random.Generator,
    *,
    centre: Array | None = None,
    noise: str = "as assumed",
) -> Drawn:
    """`noise` is "as assumed", "unequal" (a standard deviation per client) or "overdispersed".

    `centre` (d,) is added to all canonical models. The dispersion of the gaussian family is 1.
    """
    k, columns = theta.shape
    theta = theta if centre is None else theta + centre
    memberships = random.dirichlet(np.broadcast_to(alpha, k), clients) if k > 1 else np.ones((clients, 1))
    client = np.repeat(np.arange(clients), rows)
    x = random.normal(size=(len(client), columns))
    eta = (x * (memberships @ theta)[client]).sum(1)
    y = _targets(family, eta, client, noise, random)
    return Drawn(family, x, y, client, memberships, theta, eta, 1.0)


def _targets(family: str, eta: Array, client: Array, noise: str, random: np.random.Generator) -> Array:
    if family == "gaussian":
        size = np.ones(client.max() + 1)
        if noise == "unequal":  # standard deviations between about 0.4 and 2.3, with mean square 1
            size = np.exp(0.5 * random.normal(size=len(size)))
            size /= np.sqrt((size**2).mean())
        return eta + size[client] * random.normal(size=len(eta))
    if family == "binomial":
        extra = random.normal(size=len(eta)) if noise == "overdispersed" else 0.0
        return (random.random(len(eta)) < 1 / (1 + np.exp(-eta - extra))).astype(float)
    rate = np.exp(eta)
    if noise == "overdispersed":  # a negative binomial with variance mean + mean^2 / 2
        rate = rate * random.gamma(2.0, 0.5, size=len(eta))
    return random.poisson(rate).astype(float)
