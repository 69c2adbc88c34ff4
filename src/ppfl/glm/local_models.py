"""One GLM per client, fitted to its own rows and regularized so that it also exists for a client with few rows.

The coefficients of standardised columns have a normal prior of unit variance. Every client also gets a fraction of an
artificial row: the average row with the average target, or with each class in proportion to its frequency. So a client
with one row, one class or only zeros has a finite model as well.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from sklearn.linear_model import GammaRegressor, LogisticRegression, PoissonRegressor, Ridge

from .columns import Array
from .families import REGRESSIONS
from .table_data import CLASSES

_ARTIFICIAL_WEIGHT = 0.3  # a whole row would bias clients with much data, no row would leave some without a model
_MAX_ITER = 1000


class PriorStrength(NamedTuple):
    """What the strength of a client's prior depends on."""

    weight: float  # of all its rows
    noise: float  # the dispersion, which the rows of one client do not determine well
    spread: float  # the standard deviation of the target over all rows


MODELS: dict[str, Callable[[PriorStrength], Any]] = {
    "gaussian": lambda prior: Ridge(alpha=max(prior.noise / prior.spread**2, 1e-9)),
    "poisson": lambda prior: PoissonRegressor(alpha=1 / prior.weight, solver="newton-cholesky", max_iter=_MAX_ITER),
    "gamma": lambda prior: GammaRegressor(
        alpha=prior.noise / prior.weight, solver="newton-cholesky", max_iter=_MAX_ITER
    ),
    "bernoulli": lambda prior: LogisticRegression(C=1.0, max_iter=_MAX_ITER),
    "multinomial": lambda prior: LogisticRegression(C=1.0, max_iter=_MAX_ITER),
}
# one client's rows do not determine a size or a share of extra zeros
MODELS |= {name: MODELS["poisson"] for name in REGRESSIONS if name not in MODELS}


class LocalModels:
    """One model per client."""

    def __init__(self, family: str, x: Array, y: Array, clients: Array, noise: float) -> None:
        """`noise` is the mean deviance of one model for all."""
        x = _with_columns(x)
        scale = x.std(0)
        self._mean, self._scale = x.mean(0), np.where(scale > 0, scale, 1.0)
        self._family, self._noise, self._spread = family, noise, float(y.std()) or 1.0
        self._classes = int(y.max()) + 1 if family in CLASSES else 0
        added = (np.arange(self._classes), np.bincount(y) / len(y)) if self._classes else ([y.mean()], np.ones(1))
        self._added_y, self._added_weight = np.array(added[0]), _ARTIFICIAL_WEIGHT * added[1]
        standard = (x - self._mean) / self._scale
        self._models = {client: self._fit(standard[rows], y[rows]) for client, rows in _rows_by_client(clients)}

    def predict(self, x: Array, clients: Array) -> Array:
        """Means (n,) or class probabilities (n, classes), for clients that have a model."""
        standard = (_with_columns(x) - self._mean) / self._scale
        found = np.empty((len(x), self._classes) if self._classes else len(x))
        for client, rows in _rows_by_client(clients):
            model = self._models[client]
            found[rows] = (model.predict_proba if self._classes else model.predict)(standard[rows])
        return found

    def _fit(self, x: Array, y: Array) -> Any:
        weight = np.concatenate([np.ones(len(x)), self._added_weight])
        x = np.vstack([x, np.zeros((len(self._added_y), x.shape[1]))])
        model = MODELS[self._family](PriorStrength(float(weight.sum()), self._noise, self._spread))
        return model.fit(x, np.concatenate([y, self._added_y]), sample_weight=weight)


def _with_columns(x: Array) -> Array:
    """A table without columns gets one of zeros, because scikit-learn takes none without."""
    return x if x.shape[1] else np.zeros((len(x), 1))


def _rows_by_client(clients: Array) -> list[tuple[Any, Array]]:
    order = np.argsort(clients, kind="stable")
    names, first = np.unique(clients[order], return_index=True)
    return list(zip(names.tolist(), np.split(order, first[1:]), strict=True))
