"""The bridge to mixed models, Theorem 1: canonical models are a factor of the random effects' covariance.

A mixed model minimises  sum_i p_i f_i(b_i) + sum_i (b_i - b_f)' G^+ (b_i - b_f).
With b_i = theta c_i, G = theta theta', all affinities 1 and lambda = 1 / M this is the objective of Eq. (4): the second
sum is lambda <C, L C>.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ..core.errors import SettingError
from .columns import Array
from .population import PopulationEstimator, labelled


class MixedModel(NamedTuple):
    """Coefficients as a mixed model has them."""

    fixed: Array  # (d,), b_f: the mean client
    effects: Array  # (M, d), b_i - b_f
    factor: Array  # (d, d), G = theta theta' of Theorem 1

    def penalty(self) -> float:
        """sum_i (b_i - b_f)' G^+ (b_i - b_f), minus the log prior of the random effects but for constants."""
        return float(np.einsum("md,de,me->", self.effects, np.linalg.pinv(self.factor, hermitian=True), self.effects))

    @property
    def covariance(self) -> Array:
        """Of the clients' coefficients, to be laid beside the one another program estimates."""
        return np.asarray(self.effects.T @ self.effects / len(self.effects))


def mixed_model(theta: Array, memberships: Array) -> MixedModel:
    """The mixed model that a population is: theta (d, K), whose columns are canonical models, and memberships (M, K).

    Theorem 1 needs canonical models that are linearly independent, so K <= d; a membership is then known from b_i.

    >>> theta, c = np.array([[1.0, 0.0], [0.0, 2.0], [1.0, 1.0]]), np.array([[1.0, 0.0], [0.5, 0.5], [0.0, 1.0]])
    >>> pairs = sum(((a - b) ** 2).sum() for a in c for b in c)
    >>> bool(np.isclose(mixed_model(theta, c).penalty(), pairs / 2 / len(c)))
    True
    """
    coefficients = memberships @ theta.T
    fixed = coefficients.mean(0)
    return MixedModel(fixed, coefficients - fixed, theta @ theta.T)


def as_mixed_model(model: PopulationEstimator) -> tuple[Any, Any, Any]:
    """Of a fitted regression with one predictor: fixed effects, random effects by client, and their covariance.

    The intercept comes first. With pandas they are labelled, as other programs' are.
    """
    if model.canonical_coef_.ndim != 2:
        raise SettingError("a model of three classes or more has no one predictor; look at canonical_coef_")
    theta = np.vstack([model.canonical_intercept_, model.canonical_coef_.T])
    found = mixed_model(theta, np.asarray(model.memberships_))
    names = ["intercept", *model._columns.names]
    effects = labelled(found.effects, model.clients_)
    if effects is found.effects:
        return found.fixed, effects, found.covariance
    import pandas as pd

    effects.columns = names
    return pd.Series(found.fixed, names), effects, pd.DataFrame(found.covariance, names, names)
