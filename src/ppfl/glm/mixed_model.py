"""The relation to mixed models, Theorem 1: canonical models are a factor of the covariance of the random effects.

A mixed model minimises  sum_i p_i f_i(b_i) + sum_i (b_i - b_f)' G^+ (b_i - b_f).
With b_i = theta c_i, G = theta theta', all affinities 1 and lambda = 1 / M this is the objective of Eq. (4): the second
sum is lambda <C, L C>.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pandas as pd
from sklearn.utils.validation import check_is_fitted

from ..errors import SettingError
from .columns import Array, label_rows

if TYPE_CHECKING:
    from .base import PopulationGLM


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


def as_mixed_model(model: PopulationGLM) -> tuple[pd.Series, pd.DataFrame, pd.DataFrame]:
    """A fit in the words of a mixed model.

    The fixed effects are the mean of the clients' own coefficients in the population. The covariance is the
    population's: that of B c for c ~ Dirichlet(alpha), plus that of the residual effects. The random effects are
    posterior means, which are shrunken, so that their own covariance is smaller. With one membership per client
    (penalty > 0), mean and covariance are those of the clients.

    Args:
        model: A fitted model with one predictor.

    Returns:
        Fixed effects, random effects by client, and the covariance of random effects. The intercept comes first.

    Example:
        >>> from ppfl.glm import PopulationRegressor
        >>> random = np.random.default_rng(0)
        >>> clients, x = np.repeat(np.arange(12), 20), random.normal(size=(240, 1))
        >>> y = (1 + clients % 2) * x[:, 0] + random.normal(size=240)
        >>> model = PopulationRegressor(k=2, random_state=0).fit(x, y, clients=clients)
        >>> fixed, effects, covariance = as_mixed_model(model)
        >>> fixed.shape, effects.shape, covariance.shape
        ((2,), (12, 2), (2, 2))
    """
    from .inference import between_clients, client_coefficients, population_mean  # they use the moments below

    check_is_fitted(model, "fit_")
    if model.canonical_coef_.ndim != 2:
        raise SettingError("a model of three or more classes has several predictors; look at canonical_coef_")
    model._check_has_coefficients()
    names, order = ["intercept", *model._scaling.names], np.r_[-1, : len(model._scaling.names)]
    fixed = population_mean(model, model.fit_.parameters)[:, 0].numpy()
    covariance = sum(between_clients(model))
    effects = label_rows((client_coefficients(model)[..., 0] - fixed)[:, order], model.clients_)
    effects.columns = names
    table = pd.DataFrame(np.asarray(covariance)[np.ix_(order, order)], names, names)
    return pd.Series(fixed[order], names), effects, table


def dirichlet_moments(alpha: Array) -> tuple[Array, Array]:
    """Mean (K,) and covariance (K, K) of Dirichlet(alpha).

    >>> mean, covariance = dirichlet_moments(np.array([1.0, 1.0]))  # the first share is uniform between 0 and 1
    >>> mean.tolist(), (12 * covariance).round(6).tolist()
    ([0.5, 0.5], [[1.0, -1.0], [-1.0, 1.0]])
    """
    mean = alpha / alpha.sum()
    return mean, (np.diag(mean) - np.outer(mean, mean)) / (alpha.sum() + 1)
