"""Small tables with a client column, and quick estimators to fit them."""

from typing import NamedTuple

import numpy as np

from ppfl.glm import PopulationChoice, PopulationClassifier, PopulationRegressor

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
