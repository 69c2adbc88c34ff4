"""A fit in the words of a mixed model: the population's mean and covariance, and random effects by client."""

import numpy as np
import pytest
from sklearn.exceptions import NotFittedError

from kit.tables import classifier, draw_population, make_client_table, regressor
from ppfl.core.errors import SettingError
from ppfl.glm import PopulationRegressor, as_mixed_model

TABLE = make_client_table()


def coefficients(model):
    """(d + 1, K), the intercept first."""
    return np.vstack([model.canonical_intercept_, model.canonical_coef_.T])


def test_the_covariance_is_that_of_a_client_drawn_from_the_fitted_dirichlet():
    model = regressor().fit(TABLE.x, TABLE.y, clients=TABLE.clients)
    fixed, effects, covariance = as_mixed_model(model)
    drawn = np.random.default_rng(0).dirichlet(model.concentration_, 400_000) @ coefficients(model).T
    scale = np.abs(coefficients(model)).max()
    np.testing.assert_allclose(fixed, drawn.mean(0), atol=0.01 * scale)
    np.testing.assert_allclose(covariance, np.cov(drawn.T), atol=0.02 * scale**2)
    slope, intercept = model.client_coef(3)
    np.testing.assert_allclose(fixed + effects.loc[3], [intercept, *slope])
    assert list(covariance.columns) == list(effects.columns) == ["intercept", "x0", "x1"]


def test_the_covariance_of_the_population_is_recovered_and_that_of_posterior_means_is_smaller():
    """Clients with four rows each, so that posterior means are shrunken."""
    random = np.random.default_rng(0)
    clients = np.repeat(np.arange(600), 4)
    c = random.dirichlet([0.5, 0.5], 600)
    theta = np.array([[0.0, 2.0], [2.0, 0.0]])  # intercept and slope
    x = random.normal(size=(2400, 1))
    own = (c @ theta)[clients]
    y = own[:, 0] + own[:, 1] * x[:, 0] + 0.8 * random.normal(size=2400)
    fixed, effects, covariance = as_mixed_model(PopulationRegressor(2, random_state=0).fit(x, y, clients=clients))
    truth = 0.125 * np.array([[4.0, -4.0], [-4.0, 4.0]])  # the variance of c is 1 / 8
    np.testing.assert_allclose(covariance, truth, atol=0.08)
    np.testing.assert_allclose(fixed, [1.0, 1.0], atol=0.1)
    of_means = np.cov(np.asarray(effects).T)
    assert of_means[0, 0] < 0.85 * np.asarray(covariance)[0, 0]
    assert abs(np.asarray(covariance)[0, 0] - 0.5) < abs(of_means[0, 0] - 0.5)


def test_without_a_dirichlet_the_moments_are_those_of_the_points():
    drawn = draw_population("gaussian", clients=12, rows=10)
    model = PopulationRegressor(3, solver="profile", n_init=2, random_state=0)
    fixed, effects, covariance = as_mixed_model(model.fit(drawn.x, drawn.y, clients=drawn.clients))
    np.testing.assert_allclose(np.asarray(effects).mean(0), 0, atol=1e-12)
    np.testing.assert_allclose(covariance, np.cov(np.asarray(effects).T, bias=True))
    assert fixed.shape == (4,)


def test_one_canonical_model_has_no_random_effects():
    _, effects, covariance = as_mixed_model(regressor(k=1).fit(TABLE.x, TABLE.y, clients=TABLE.clients))
    np.testing.assert_array_equal(effects, 0)
    np.testing.assert_array_equal(covariance, 0)


def test_models_without_one_coefficient_per_client_are_refused():
    with pytest.raises(NotFittedError):
        as_mixed_model(regressor())
    mixture = classifier(mix="predictions").fit(TABLE.x, TABLE.labels, clients=TABLE.clients)
    with pytest.raises(SettingError, match="mix = 'predictions'"):
        as_mixed_model(mixture)
    three = classifier().fit(TABLE.x, TABLE.counts.clip(max=2), clients=TABLE.clients)
    with pytest.raises(SettingError, match="three or more classes"):
        as_mixed_model(three)
