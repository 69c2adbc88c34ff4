"""Small tables with a client column, quick estimators to fit them, and random populations that follow the model."""

from typing import Any, NamedTuple

import numpy as np
import torch

from ppfl.glm import PopulationChoice, PopulationClassifier, PopulationRegressor
from ppfl.glm.client_ids import ClientCodes
from ppfl.glm.families import BernoulliFamily, Family, MultinomialFamily, regression_family
from ppfl.glm.sample_rows import ClientRows
from ppfl.glm.standardize import ColumnScaling, sort_by_client

SMALL = {"k": 2, "n_init": 2, "random_state": 0}


class ClientTable(NamedTuple):
    """Targets for every family. The sign of the first slope depends on the group of the client."""

    x: np.ndarray  # (n, 2)
    clients: np.ndarray  # (n,), 0, 0, ..., 1, ...
    y: np.ndarray
    labels: np.ndarray  # 0 or 1
    counts: np.ndarray
    amounts: np.ndarray  # above 0


class ChoiceTable(NamedTuple):
    x: np.ndarray  # (3 n, 2)
    y: np.ndarray  # 1 for the alternative that was taken
    situations: np.ndarray
    clients: np.ndarray


def make_client_table(clients: int = 12, rows: int = 10, seed: int = 0) -> ClientTable:
    random = np.random.default_rng(seed)
    client = np.repeat(np.arange(clients), rows)
    x = random.normal(size=(len(client), 2)) * [1.0, 3.0] + [0.5, -2.0]
    eta = np.where(client % 2, 1.5, -1.5) * x[:, 0] + 0.2 * x[:, 1]
    labels = (eta + random.logistic(size=len(client)) > 0).astype(int)
    counts, amounts = random.poisson(np.exp(0.5 * eta)), np.exp(0.5 * eta) * random.gamma(3.0, 1 / 3, size=len(client))
    return ClientTable(x, client, eta + 1.5 * random.normal(size=len(client)), labels, counts, amounts)


def make_choice_table(clients: int = 12, situations: int = 8, seed: int = 0) -> ChoiceTable:
    random = np.random.default_rng(seed)
    x = random.normal(size=(clients * situations, 3, 2))
    slope = np.where(np.arange(clients * situations) // situations % 2, 2.0, -2.0)
    utility = slope[:, None] * x[..., 0] + 0.5 * x[..., 1]
    taken = (utility + random.gumbel(size=utility.shape)).argmax(1)
    return ChoiceTable(
        x.reshape(-1, 2),
        (np.arange(3) == taken[:, None]).ravel().astype(int),
        np.repeat(np.arange(clients * situations), 3),
        np.repeat(np.arange(clients), 3 * situations),
    )


def regressor(**settings) -> PopulationRegressor:
    return PopulationRegressor(**{**SMALL, **settings})


def classifier(**settings) -> PopulationClassifier:
    return PopulationClassifier(**{**SMALL, **settings})


def choice(**settings) -> PopulationChoice:
    return PopulationChoice(**{**SMALL, **settings})


# ---------------------------------------------------------------------- drawn populations

Array = np.ndarray[Any, Any]
FAMILIES = ("gaussian", "poisson", "gamma", "bernoulli", "multinomial")


class DrawnPopulation(NamedTuple):
    x: Array  # (n, d)
    y: Array  # (n,)
    clients: Array  # (n,)
    memberships: Array  # (M, K)
    theta: Array  # (K, d)
    eta: Array  # (n,)


def triangle(d: int, radius: float, random: np.random.Generator) -> Array:
    """Three canonical models at the corners of a regular triangle around 0, (3, d)."""
    plane, _ = np.linalg.qr(random.normal(size=(d, 2)))
    angle = 2 * np.pi * np.arange(3) / 3
    return radius * np.stack([np.cos(angle), np.sin(angle)], 1) @ plane.T


def draw_population(
    family: str,
    seed: int = 0,
    *,
    clients: int = 30,
    rows: int = 20,
    d: int = 3,
    radius: float = 1.0,
    alpha: float = 0.3,
) -> DrawnPopulation:
    """Draw memberships, features and targets. For gaussian families, half of the variance of y is noise."""
    random = np.random.default_rng(seed)
    theta = triangle(d, radius, random)
    c = random.dirichlet([alpha] * 3, clients)
    client = np.repeat(np.arange(clients), rows)
    x = random.normal(size=(len(client), d))
    eta = (x * (c @ theta)[client]).sum(1)
    if family == "gaussian":
        y = eta + random.normal(size=len(eta)) * eta.std()
    elif family == "heteroscedastic gaussian":
        shares = random.gamma(3.0, size=clients)[client] / 2  # inverse variances, so that the mean variance is 1
        y = eta + random.normal(size=len(eta)) * eta.std() / np.sqrt(shares)
    elif family == "poisson":
        y = random.poisson(np.exp(eta)).astype(float)
    elif family == "gamma":
        y = random.gamma(2.0, np.exp(eta) / 2) + 1e-9
    elif family == "bernoulli":
        y = (random.random(len(eta)) < 1 / (1 + np.exp(-eta))).astype(float)
    else:
        y = np.digitize(eta + random.logistic(size=len(eta)), [-1.0, 1.0]).astype(float)
    return DrawnPopulation(x, y, client, c, theta, eta)


def make_family(name: str) -> Family:
    if name == "bernoulli":
        return BernoulliFamily()
    return MultinomialFamily(3) if name == "multinomial" else regression_family(name, None)


def make_rows(
    drawn: DrawnPopulation, family: Family, mix: str, shared: Any = None, x: Any = None, weight: Any = None
) -> ClientRows:
    table = drawn.x if x is None else x
    weight = np.ones(len(drawn.y)) if weight is None else weight
    names = [f"x{i}" for i in range(table.shape[1])]
    scaling = ColumnScaling.of(table, weight, names, shared, intercept=True)
    codes = ClientCodes.of(drawn.clients, len(drawn.y))
    return sort_by_client(scaling, table, drawn.y, weight, codes, family, mix)


def to_double(array: Array) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array, dtype=np.float64))
