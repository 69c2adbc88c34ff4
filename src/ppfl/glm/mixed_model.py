"""The relation to mixed models, Theorem 1: canonical models are a factor of the covariance of the random effects.

A mixed model minimises  sum_i p_i f_i(b_i) + sum_i (b_i - b_f)' G^+ (b_i - b_f).
With b_i = theta c_i, G = theta theta', all affinities 1 and lambda = 1 / M this is the objective of Eq. (4): the second
sum is lambda <C, L C>.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from sklearn.utils.validation import check_is_fitted

from ..errors import SettingError
from .client_ids import Array, label_rows
from .client_memberships import PointMemberships
from .estimator import PopulationEstimator


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
    """Fixed effects, random effects by client and the covariance of random effects, as a mixed model reports them.

    The covariance is the population's: that of theta c for a client drawn at random, c ~ Dirichlet(alpha), and the
    fixed effects are its mean, theta E[c]. The random effects are posterior means, which are shrunken, so that their
    own covariance is smaller. Solvers without a Dirichlet distribution (profile, federated) have one membership per
    client, and the mean and covariance are those of these memberships.

    For a fitted model with one predictor. The intercept comes first. The results are labelled pandas objects.

    >>> from ppfl.glm import PopulationRegressor
    >>> random = np.random.default_rng(0)
    >>> clients, x = np.repeat(np.arange(12), 20), random.normal(size=(240, 1))
    >>> y = (1 + clients % 2) * x[:, 0] + random.normal(size=240)
    >>> model = PopulationRegressor(k=2, random_state=0).fit(x, y, clients=clients)
    >>> fixed, effects, covariance = as_mixed_model(model)
    >>> np.shape(fixed), np.shape(effects), np.shape(covariance)
    ((2,), (12, 2), (2, 2))
    """
    check_is_fitted(model, "_result")
    if model.canonical_coef_.ndim != 2:
        raise SettingError("a model of three or more classes has several predictors; look at canonical_coef_")
    model._check_has_coefficients()
    theta = np.vstack([model.canonical_intercept_, model.canonical_coef_.T])
    mean, spread = membership_moments(model)
    # centred first: coefficients that all clients share then vary by exactly 0
    centred = theta - (theta @ mean)[:, None]
    fixed, covariance = theta @ mean, centred @ spread @ centred.T
    covariance[np.diag_indices_from(covariance)] = np.maximum(np.diag(covariance), 0.0)
    effects = np.asarray(model.memberships_) @ theta.T - fixed
    labelled = label_rows(effects, model.clients_)
    names = ["intercept", *model._scaling.names]
    labelled.columns = names
    return pd.Series(fixed, names), labelled, pd.DataFrame(covariance, names, names)


def membership_moments(model: PopulationEstimator) -> tuple[Array, Array]:
    """Mean (K,) and covariance (K, K) of memberships in the population."""
    if isinstance(model._result.memberships, PointMemberships):
        points = model._result.memberships.mean.numpy()
        return points.mean(0), np.cov(points.T, bias=True).reshape(2 * points.shape[1:])
    return dirichlet_moments(model.concentration_)


def dirichlet_moments(alpha: Array) -> tuple[Array, Array]:
    """Mean (K,) and covariance (K, K) of Dirichlet(alpha).

    >>> mean, covariance = dirichlet_moments(np.array([1.0, 1.0]))  # the first share is uniform between 0 and 1
    >>> mean.tolist(), (12 * covariance).round(6).tolist()
    ([0.5, 0.5], [[1.0, -1.0], [-1.0, 1.0]])
    """
    mean = alpha / alpha.sum()
    return mean, (np.diag(mean) - np.outer(mean, mean)) / (alpha.sum() + 1)
