"""Populations drawn from the model itself."""

from typing import Any, NamedTuple

import numpy as np
import torch

from ppfl.glm.client_ids import ClientCodes
from ppfl.glm.estimator import sort_by_client
from ppfl.glm.families import BernoulliFamily, Family, MultinomialFamily, regression_family
from ppfl.glm.likelihoods import ClientRows
from ppfl.glm.standardize import ColumnScaling

Array = np.ndarray[Any, Any]
FAMILIES = ("gaussian", "poisson", "gamma", "bernoulli", "multinomial")


class Drawn(NamedTuple):
    x: Array  # (n, d)
    y: Array  # (n,)
    clients: Array  # (n,)
    memberships: Array  # (M, K)
    theta: Array  # (K, d)
    eta: Array  # (n,)


def triangle(d: int, radius: float, random: np.random.Generator) -> Array:
    """Three canonical models as far apart as they can be: the corners of a regular triangle about 0, (3, d)."""
    plane, _ = np.linalg.qr(random.normal(size=(d, 2)))
    angle = 2 * np.pi * np.arange(3) / 3
    return radius * np.stack([np.cos(angle), np.sin(angle)], 1) @ plane.T


def draw(
    family: str,
    seed: int = 0,
    *,
    clients: int = 30,
    rows: int = 20,
    d: int = 3,
    radius: float = 1.0,
    alpha: float = 0.3,
) -> Drawn:
    """Half of the variance is noise for the gaussian family."""
    random = np.random.default_rng(seed)
    theta = triangle(d, radius, random)
    c = random.dirichlet([alpha] * 3, clients)
    codes = np.repeat(np.arange(clients), rows)
    x = random.normal(size=(len(codes), d))
    eta = (x * (c @ theta)[codes]).sum(1)
    if family == "gaussian":
        y = eta + random.normal(size=len(eta)) * eta.std()
    elif family == "poisson":
        y = random.poisson(np.exp(eta)).astype(float)
    elif family == "gamma":
        y = random.gamma(2.0, np.exp(eta) / 2) + 1e-9
    elif family == "bernoulli":
        y = (random.random(len(eta)) < 1 / (1 + np.exp(-eta))).astype(float)
    else:
        y = np.digitize(eta + random.logistic(size=len(eta)), [-1.0, 1.0]).astype(float)
    return Drawn(x, y, codes, c, theta, eta)


def family_of(name: str) -> Family:
    if name == "bernoulli":
        return BernoulliFamily()
    return MultinomialFamily(3) if name == "multinomial" else regression_family(name, None)


def rows_of(
    drawn: Drawn, family: Family, mix: str, shared: Any = None, x: Any = None, weight: Any = None
) -> ClientRows:
    table = drawn.x if x is None else x
    weight = np.ones(len(drawn.y)) if weight is None else weight
    names = [f"x{at}" for at in range(table.shape[1])]
    columns = ColumnScaling.of(table, weight, names, shared, intercept=True)
    codes = ClientCodes.of(drawn.clients, len(drawn.y))
    return sort_by_client(columns, table, drawn.y, weight, codes, family, mix)


def double(array: Array) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array, dtype=np.float64))
