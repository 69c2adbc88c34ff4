"""The relation to mixed models, Theorem 1: canonical models are a factor of the covariance of the random effects.

A mixed model minimises  sum_i p_i f_i(b_i) + sum_i (b_i - b_f)' G^+ (b_i - b_f).
With b_i = theta c_i, G = theta theta', all affinities 1 and lambda = 1 / M this is the objective of Eq. (4): the second
sum is lambda <C, L C>.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ..core.errors import SettingError
from .client_ids import Array
from .estimator import PopulationEstimator, label_rows


class MixedModel(NamedTuple):
    """Coefficients in the form of a mixed model.

    >>> found = mixed_model(theta=np.eye(2), memberships=np.array([[1.0, 0.0], [0.0, 1.0]]))
    >>> found.fixed.tolist(), found.effects.tolist()
    ([0.5, 0.5], [[0.5, -0.5], [-0.5, 0.5]])
    """

    fixed: Array  # (d,), b_f: the mean client
    effects: Array  # (M, d), b_i - b_f
    factor: Array  # (d, d), G = theta theta' of Theorem 1

    def penalty(self) -> float:
        """sum_i (b_i - b_f)' G^+ (b_i - b_f): the negative log prior of the random effects, up to constants."""
        return float(np.einsum("md,de,me->", self.effects, np.linalg.pinv(self.factor, hermitian=True), self.effects))

    @property
    def covariance(self) -> Array:
        """The covariance of the clients' coefficients, comparable to the estimate of a mixed model."""
        return np.asarray(self.effects.T @ self.effects / len(self.effects))


def mixed_model(theta: Array, memberships: Array) -> MixedModel:
    """The mixed model of a population with canonical models theta (d, K), one per column, and memberships (M, K).

    Theorem 1 needs linearly independent canonical models, so K <= d; then b_i determines the membership.

    >>> theta, c = np.array([[1.0, 0.0], [0.0, 2.0], [1.0, 1.0]]), np.array([[1.0, 0.0], [0.5, 0.5], [0.0, 1.0]])
    >>> pairs = sum(((a - b) ** 2).sum() for a in c for b in c)
    >>> bool(np.isclose(mixed_model(theta, c).penalty(), pairs / 2 / len(c)))
    True
    """
    coefficients = memberships @ theta.T
    fixed = coefficients.mean(0)
    return MixedModel(fixed, coefficients - fixed, theta @ theta.T)


def as_mixed_model(model: PopulationEstimator) -> tuple[Any, Any, Any]:
    """Fixed effects, random effects by client and their covariance, for a fitted model with one predictor.

    The intercept comes first. With pandas the results are labelled.

    >>> from ppfl.glm import PopulationRegressor
    >>> random = np.random.default_rng(0)
    >>> clients, x = np.repeat(np.arange(12), 20), random.normal(size=(240, 1))
    >>> y = (1 + clients % 2) * x[:, 0] + random.normal(size=240)
    >>> model = PopulationRegressor(k=2, random_state=0).fit(x, y, clients=clients)
    >>> fixed, effects, covariance = as_mixed_model(model)
    >>> np.shape(fixed), np.shape(effects), np.shape(covariance)
    ((2,), (12, 2), (2, 2))
    """
    if model.canonical_coef_.ndim != 2:
        raise SettingError("a model of three or more classes has several predictors; look at canonical_coef_")
    theta = np.vstack([model.canonical_intercept_, model.canonical_coef_.T])
    found = mixed_model(theta, np.asarray(model.memberships_))
    names = ["intercept", *model._scaling.names]
    effects = label_rows(found.effects, model.clients_)
    if effects is found.effects:
        return found.fixed, effects, found.covariance
    import pandas as pd

    effects.columns = names
    return pd.Series(found.fixed, names), effects, pd.DataFrame(found.covariance, names, names)
