"""Tables with a client column, populations drawn from the model, and fits that tests share.

Shared fits are cached and never changed: a test that adds clients to one does so to a copy (`copy.deepcopy`).
"""

import warnings
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from sklearn.exceptions import ConvergenceWarning

from kit.oracles import objective
from ppfl.core import affinity
from ppfl.glm import PopulationChoice, PopulationClassifier, PopulationRegressor
from ppfl.glm.columns import ColumnScaling
from ppfl.glm.families import BernoulliFamily, MultinomialFamily, regression_family
from ppfl.glm.family import Family
from ppfl.glm.problem import Problem
from ppfl.glm.rows import DenseDesign, RowLikelihood

Array = np.ndarray[Any, Any]
SMALL = {"k": 2, "n_init": 2, "random_state": 0}
FAMILIES = ("gaussian", "poisson", "gamma", "bernoulli", "multinomial")


def make_estimator(family: str = "gaussian", **settings: Any) -> Any:
    if family in ("bernoulli", "multinomial"):
        return classifier(**settings)
    return regressor(family=family, **settings)


def regressor(**settings: Any) -> PopulationRegressor:
    return PopulationRegressor(**{**SMALL, **settings})


def classifier(**settings: Any) -> PopulationClassifier:
    return PopulationClassifier(**{**SMALL, **settings})


def choice(**settings: Any) -> PopulationChoice:
    return PopulationChoice(**{**SMALL, **settings})


# ---------------------------------------------------------------------- tables of clients of two kinds


class ClientTable(NamedTuple):
    """Targets for every family. The sign of the first slope depends on the group of the client."""

    x: Array  # (n, 2)
    clients: Array  # (n,), 0, 0, ..., 1, ...
    y: Array
    labels: Array  # 0 or 1
    counts: Array
    amounts: Array  # above 0

    def target(self, family: str) -> Array:
        if family == "multinomial":
            return self.counts.clip(max=2)
        return {"poisson": self.counts, "gamma": self.amounts, "bernoulli": self.labels}.get(family, self.y)


class ChoiceTable(NamedTuple):
    x: Array  # (3 n, 2)
    y: Array  # 1 for the alternative that was taken
    situations: Array
    clients: Array


def make_client_table(clients: int = 12, rows: int = 10) -> ClientTable:
    random = np.random.default_rng(0)
    client = np.repeat(np.arange(clients), rows)
    x = random.normal(size=(len(client), 2)) * [1.0, 3.0] + [0.5, -2.0]
    eta = np.where(client % 2, 1.5, -1.5) * x[:, 0] + 0.2 * x[:, 1]
    labels = (eta + random.logistic(size=len(client)) > 0).astype(int)
    counts, amounts = random.poisson(np.exp(0.5 * eta)), np.exp(0.5 * eta) * random.gamma(3.0, 1 / 3, size=len(client))
    return ClientTable(x, client, eta + 1.5 * random.normal(size=len(client)), labels, counts, amounts)


@cache
def fitted(family: str = "gaussian", clients: int = 12, rows: int = 10, **settings: Any) -> Any:
    """The shared fit of a family to its target in the table of this size."""
    table = make_client_table(clients, rows)
    return make_estimator(family, **settings).fit(table.x, table.target(family), clients=table.clients)


@cache
def penalized(**settings: Any) -> Any:
    """The shared fit with one membership per client, after a few rounds of the paper's algorithm."""
    table = make_client_table()
    with warnings.catch_warnings(action="ignore", category=ConvergenceWarning):
        return regressor(penalty=0.001, max_iter=30, **settings).fit(table.x, table.y, clients=table.clients)


def make_choice_table(clients: int = 12, situations: int = 8) -> ChoiceTable:
    random = np.random.default_rng(0)
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


@cache
def fitted_choice() -> PopulationChoice:
    return choice().fit(*make_choice_table())


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
    family: str, clients: int = 30, rows: int = 20, d: int = 3, radius: float = 1.0, alpha: float = 0.3
) -> DrawnPopulation:
    """Draw memberships, features and targets. For gaussian families, half of the variance of y is noise."""
    random = np.random.default_rng(0)
    theta = triangle(d, radius, random)
    c = random.dirichlet([alpha] * 3, clients)
    client = np.repeat(np.arange(clients), rows)
    x = random.normal(size=(len(client), d))
    eta = (x * (c @ theta)[client]).sum(1)
    if family == "gaussian":
        y = eta + random.normal(size=len(eta)) * eta.std()
    elif family == "gamma":
        y = random.gamma(2.0, np.exp(eta) / 2) + 1e-9
    elif family == "bernoulli":
        y = (random.random(len(eta)) < 1 / (1 + np.exp(-eta))).astype(float)
    elif family == "multinomial":
        y = np.digitize(eta + random.logistic(size=len(eta)), [-1.0, 1.0]).astype(float)
    else:
        y = random.poisson(np.exp(eta)).astype(float)
    return DrawnPopulation(x, y, client, c, theta, eta)


@cache
def fitted_population(family: str = "gaussian", clients: int = 20, rows: int = 20, **settings: Any) -> Any:
    """The shared fit, with three canonical models, to `draw_population` of this size."""
    drawn = draw_population(family, clients, rows)
    return make_estimator(family, **{"k": 3, **settings}).fit(drawn.x, drawn.y, clients=drawn.clients)


# ---------------------------------------------------------------------- below the estimators


def make_family(name: str) -> Family:
    if name == "bernoulli":
        return BernoulliFamily()
    return MultinomialFamily(3) if name == "multinomial" else regression_family(name)


def make_rows(
    drawn: DrawnPopulation, family: Family, mix: str, shared: Any = None, weight: Any = None
) -> RowLikelihood:
    """Standardised rows, sorted by client."""
    weight = np.ones(len(drawn.y)) if weight is None else weight
    names = [f"x{i}" for i in range(drawn.x.shape[1])]
    scaling = ColumnScaling.fit(drawn.x, weight, names, shared, intercept=True)
    order = np.argsort(drawn.clients, kind="stable")
    varying, fixed = (DenseDesign(part) for part in scaling.split(drawn.x[order]))
    y, weights, client = (torch.from_numpy(np.array(part)[order]) for part in (drawn.y, weight, drawn.clients))
    return RowLikelihood(varying, fixed, y.double(), weights.double(), client, int(client.max()) + 1, family, mix)


def make_problem(rows: RowLikelihood, ridge: float = 0.1) -> Problem:
    """With the same ridge for intercepts, so that every coefficient is regularized."""
    ones = [torch.ones(design.columns, dtype=torch.float64) for design in (rows.varying, rows.shared)]
    return Problem.of(rows, ridge, *ones)


def to_double(values: Any) -> torch.Tensor:
    return torch.tensor(np.asarray(values), dtype=torch.float64)


def papers_objective(losses: torch.Tensor, memberships: torch.Tensor, penalty: float) -> float:
    """sum_i f_i / M + penalty <C, L C>, where all clients are equally near."""
    p = torch.full((len(losses),), 1 / len(losses), dtype=torch.float64)
    uniform = affinity.uniform([str(i) for i in range(len(losses))])
    return float(objective(losses, memberships, p, uniform, penalty=penalty))
