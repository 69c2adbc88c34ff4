"""What clients get who learn alone: a GLM each, kept finite where a client has few rows.

A normal prior of unit variance holds the coefficients of standardised columns, and every client has a part of a row
that is not its own: the average row with the average target, or with all classes by their shares. So a client with
one row, with one class or with nothing but zeros has a model as well.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from sklearn.linear_model import GammaRegressor, LogisticRegression, PoissonRegressor, Ridge

from .columns import Array
from .table_target import CLASSES

_LENT = 0.3  # of a row; one row pulls clients who know their level well too far, none leaves others without a model
_STEPS = 1000


class Held(NamedTuple):
    """How firmly a client's coefficients are held."""

    weight: float  # of all its rows
    noise: float  # dispersion, which a client's own rows cannot tell
    spread: float  # of the target, over all rows


MODELS: dict[str, Callable[[Held], Any]] = {
    "gaussian": lambda held: Ridge(alpha=max(held.noise / held.spread**2, 1e-9)),
    "poisson": lambda held: PoissonRegressor(alpha=1 / held.weight, solver="newton-cholesky", max_iter=_STEPS),
    "gamma": lambda held: GammaRegressor(alpha=held.noise / held.weight, solver="newton-cholesky", max_iter=_STEPS),
    "bernoulli": lambda held: LogisticRegression(C=1.0, max_iter=_STEPS),
    "multinomial": lambda held: LogisticRegression(C=1.0, max_iter=_STEPS),
}


class OwnModels:
    """A model for each client."""

    def __init__(self, family: str, x: Array, y: Array, clients: Array, noise: float) -> None:
        """The noise is what one model for all leaves: its mean deviance."""
        scale = x.std(0)
        self._mean, self._scale = x.mean(0), np.where(scale > 0, scale, 1.0)
        self._family, self._noise, self._spread = family, noise, float(y.std()) or 1.0
        self._classes = int(y.max()) + 1 if family in CLASSES else 0
        lent = (np.arange(self._classes), np.bincount(y) / len(y)) if self._classes else ([y.mean()], np.ones(1))
        self._lent_y, self._lent_weight = np.array(lent[0]), _LENT * lent[1]
        standard = (x - self._mean) / self._scale
        self._models = {client: self._fit(standard[rows], y[rows]) for client, rows in _rows_by_client(clients)}

    def predict(self, x: Array, clients: Array) -> Array:
        """Means (n,), or class probabilities (n, classes), of clients that were there."""
        standard = (x - self._mean) / self._scale
        found = np.empty((len(x), self._classes) if self._classes else len(x))
        for client, rows in _rows_by_client(clients):
            model = self._models[client]
            found[rows] = (model.predict_proba if self._classes else model.predict)(standard[rows])
        return found

    def _fit(self, x: Array, y: Array) -> Any:
        weight = np.concatenate([np.ones(len(x)), self._lent_weight])
        x = np.vstack([x, np.zeros((len(self._lent_y), x.shape[1]))])
        model = MODELS[self._family](Held(float(weight.sum()), self._noise, self._spread))
        return model.fit(x, np.concatenate([y, self._lent_y]), sample_weight=weight)


def _rows_by_client(clients: Array) -> list[tuple[Any, Array]]:
    order = np.argsort(clients, kind="stable")
    names, first = np.unique(clients[order], return_index=True)
    return list(zip(names.tolist(), np.split(order, first[1:]), strict=True))
