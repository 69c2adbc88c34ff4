"""Residuals: definitions by hand, and quantile residuals that are standard normal under the model."""

import numpy as np
import pytest
from scipy import stats

from kit.tables import classifier, make_client_table, regressor
from ppfl.core.errors import SettingError
from ppfl.glm import PopulationClassifier, PopulationRegressor

TABLE = make_client_table()
TARGETS = {
    "gaussian": (regressor(), TABLE.y),
    "heteroscedastic gaussian": (regressor(family="heteroscedastic gaussian"), TABLE.y),
    "poisson": (regressor(family="poisson"), TABLE.counts),
    "gamma": (regressor(family="gamma"), TABLE.amounts),
    "bernoulli": (classifier(), TABLE.labels),
}


@pytest.mark.parametrize("name", TARGETS)
def test_squared_deviance_residuals_sum_to_the_deviance(name):
    estimator, y = TARGETS[name]
    model = estimator.fit(TABLE.x, y, clients=TABLE.clients)
    found = model.residuals(TABLE.x, y, TABLE.clients)
    assert (found**2).mean() == pytest.approx(model.deviance(TABLE.x, y, TABLE.clients))
    mean = (
        model.predict_proba(TABLE.x, TABLE.clients)[:, 1]
        if name == "bernoulli"
        else model.predict(TABLE.x, TABLE.clients)
    )
    np.testing.assert_array_equal(np.sign(found), np.sign(y - mean))
    of_mean = {
        "gaussian": 1.0,
        "heteroscedastic gaussian": 1.0,
        "poisson": mean,
        "gamma": mean**2,
        "bernoulli": mean * (1 - mean),
    }[name]
    dispersion = model.client_dispersion_.loc[TABLE.clients].to_numpy()
    assert (dispersion == model.dispersion_).all() == (name != "heteroscedastic gaussian")
    pearson = model.residuals(TABLE.x, y, TABLE.clients, kind="pearson")
    np.testing.assert_allclose(pearson, (y - mean) / np.sqrt(dispersion * of_mean), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", TARGETS)
def test_quantile_residuals_of_new_rows_are_standard_normal(name):
    """Half of the rows of every client are fitted, the others are judged."""
    random = np.random.default_rng(0)
    clients = np.repeat(np.arange(60), 60)
    slope = (random.dirichlet([0.5, 0.5], 60) @ [-1.0, 1.0])[clients]
    x = random.normal(size=(len(clients), 1))
    eta = slope * x[:, 0]
    noise = np.exp(0.7 * random.normal(size=60))[clients]
    y = {
        "gaussian": lambda: eta + random.normal(size=len(eta)),
        "heteroscedastic gaussian": lambda: eta + noise * random.normal(size=len(eta)),
        "poisson": lambda: random.poisson(np.exp(eta)).astype(float),
        "gamma": lambda: random.gamma(2.0, np.exp(eta) / 2),
        "bernoulli": lambda: (random.random(len(eta)) < 1 / (1 + np.exp(-eta))).astype(float),
    }[name]()
    fitted = np.arange(len(y)) % 2 == 0
    settings = {"k": 2, "n_init": 2, "random_state": 0}
    estimator = (
        PopulationClassifier(**settings) if name == "bernoulli" else PopulationRegressor(family=name, **settings)
    )
    model = estimator.fit(x[fitted], y[fitted], clients=clients[fitted])
    given = x[~fitted], y[~fitted]
    found = model.residuals(*given, clients[~fitted], kind="quantile")
    assert stats.kstest(found, "norm").pvalue > 0.01
    if name in (
        "gaussian",
        "heteroscedastic gaussian",
        "gamma",
    ):  # with other clients' memberships they are not; counts and bits say less
        wrong = model.residuals(*given, clients[~fitted][::-1], kind="quantile")
        assert stats.kstest(wrong, "norm").pvalue < 1e-3


def test_the_seed_decides_on_the_random_part_of_discrete_residuals():
    model = regressor(family="poisson").fit(TABLE.x, TABLE.counts, clients=TABLE.clients)
    first, same, other = (
        model.residuals(TABLE.x, TABLE.counts, TABLE.clients, kind="quantile", seed=seed) for seed in (0, 0, 1)
    )
    np.testing.assert_array_equal(first, same)
    assert (first != other).all()


def test_bad_kinds_and_several_classes():
    model = regressor().fit(TABLE.x, TABLE.y, clients=TABLE.clients)
    with pytest.raises(SettingError, match="'raw'.*deviance, pearson, quantile"):
        model.residuals(TABLE.x, TABLE.y, TABLE.clients, kind="raw")
    three = classifier().fit(TABLE.x, TABLE.counts.clip(max=2), clients=TABLE.clients)
    with pytest.raises(SettingError, match="three or more classes"):
        three.residuals(TABLE.x, TABLE.counts.clip(max=2), TABLE.clients)
