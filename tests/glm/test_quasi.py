"""Counts that vary more than Poisson counts: families that say so, and quasi-likelihoods."""

import numpy as np
import pytest
import torch

from kit.tables import Array, DrawnPopulation, triangle
from ppfl.core.errors import SettingError
from ppfl.glm import PopulationClassifier, PopulationRegressor
from ppfl.glm.families import QuasiPoissonFamily
from ppfl.glm.quasi import fit_quasi, pearson_dispersion


def draw_counts(dispersion: float, seed: int = 0, clients: int = 50, rows: int = 20) -> DrawnPopulation:
    """Counts with a variance of `dispersion` times the mean, from two canonical models."""
    random = np.random.default_rng(seed)
    theta = triangle(2, 0.8, random)[:2]
    c = random.dirichlet([0.4, 0.4], clients)
    client = np.repeat(np.arange(clients), rows)
    x = random.normal(size=(len(client), 2))
    eta = 1 + (x * (c @ theta)[client]).sum(1)
    mean = np.exp(eta)
    rate = mean if dispersion == 1 else random.gamma(mean / (dispersion - 1), dispersion - 1)
    return DrawnPopulation(x, random.poisson(rate).astype(float), client, c, theta, eta)


def fit(family: str, drawn: DrawnPopulation, k: int = 2, y: Array | None = None) -> PopulationRegressor:
    model = PopulationRegressor(k, family=family, n_init=3, random_state=0)
    return model.fit(drawn.x, drawn.y if y is None else y, clients=drawn.clients)


def dispersion_of(model: PopulationRegressor) -> float:
    assert isinstance(model._family, QuasiPoissonFamily)
    return model._family.dispersion


def test_without_clients_the_dispersion_is_pearsons() -> None:
    drawn = draw_counts(2.5)
    plain = PopulationRegressor(1, family="poisson", ridge=0.0, tol=1e-7).fit(drawn.x, drawn.y)
    quasi = PopulationRegressor(1, family="quasipoisson", ridge=0.0, tol=1e-7).fit(drawn.x, drawn.y)
    mean = plain.predict(drawn.x)
    np.testing.assert_allclose(quasi.predict(drawn.x), mean, rtol=1e-4)
    expected = ((drawn.y - mean) ** 2 / mean).sum() / (len(mean) - 3)
    assert dispersion_of(quasi) == pytest.approx(expected, rel=1e-4)
    assert quasi.log_likelihood_ == pytest.approx(plain.log_likelihood_ / expected, rel=1e-4)
    weights = np.full(len(mean), 2.0)  # a dispersion does not depend on the unit of the weights
    assert pearson_dispersion(quasi, drawn.x, drawn.y, None, weights, None) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("truth", [1.0, 3.0])
def test_the_dispersion_of_a_population_is_that_of_residuals_around_the_true_means(truth: float) -> None:
    """Residuals around fitted memberships alone would be too small by one degree of freedom for each client."""
    drawn = draw_counts(truth, clients=60, rows=10)
    model = fit("quasipoisson", drawn)
    mean = np.exp(drawn.eta)
    assert dispersion_of(model) == pytest.approx(((drawn.y - mean) ** 2 / mean).mean(), rel=0.06)


def test_the_larger_the_dispersion_the_less_do_counts_say_about_memberships() -> None:
    drawn = draw_counts(1.0)
    model = fit("quasipoisson", drawn)
    prior = model._result.prior.mean.numpy()
    distances = []
    for number, dispersion in enumerate((1.0, 10.0, 1e6)):
        model._family = QuasiPoissonFamily(None, dispersion)
        found = model.onboard(drawn.x, drawn.y, clients=drawn.clients + 1000 * (number + 1))
        distances.append(float(np.abs(found.to_numpy() - prior).mean()))
    assert distances[0] > distances[1] > distances[2]
    assert distances[2] < 1e-3


def test_new_clients_are_found_with_the_dispersion_of_the_fit() -> None:
    drawn = draw_counts(4.0)
    model = fit("quasipoisson", drawn)
    again = model.onboard(drawn.x[:20], drawn.y[:20], clients=drawn.clients[:20] + 1000)
    np.testing.assert_allclose(again.to_numpy()[0], model.memberships_.to_numpy()[0], atol=0.02)


def test_a_given_dispersion_is_kept() -> None:
    drawn = draw_counts(1.0)
    model = PopulationRegressor(1, family="quasipoisson").fit(drawn.x, drawn.y, clients=drawn.clients)
    assert fit_quasi(model, drawn.x, drawn.y, drawn.clients, None, None, dispersion=7.0) == 7.0
    assert dispersion_of(model) == 7.0
    poisson = PopulationRegressor(1, family="poisson").fit(drawn.x, drawn.y, clients=drawn.clients)
    with pytest.raises(SettingError, match="quasipoisson"):
        fit_quasi(poisson, drawn.x, drawn.y, drawn.clients, None, None)


def test_families_find_their_own_nuisance_parameters() -> None:
    drawn = draw_counts(1.0, clients=60)
    random = np.random.default_rng(1)
    mean = np.exp(drawn.eta)
    inflated = random.poisson(mean) * (random.random(len(mean)) > 0.3)
    overdispersed = random.poisson(mean * random.gamma(2.0, 0.5, len(mean)))
    both = overdispersed * (random.random(len(mean)) > 0.3)
    kinds = (("negative binomial", overdispersed), ("zip", inflated), ("zinb", both))
    for family, y in kinds:
        model = fit(family, drawn, y=y.astype(float))
        found = model._family.natural_parameters(model._result.coefficients.nuisance)
        assert found.get("size", 2.0) == pytest.approx(2.0, rel=0.3)
        assert found.get("share of extra zeros", 0.3) == pytest.approx(0.3, abs=0.06)
        assert model.log_likelihood_ > fit("poisson", drawn, y=y.astype(float)).log_likelihood_ + 50
        assert model.predict(drawn.x, drawn.clients).mean() == pytest.approx(y.mean(), rel=0.05)
        distance = np.abs(model.canonical_coef_[:, None] - drawn.theta[None]).max(2).min(1)
        assert distance.max() < 0.4


def test_one_negative_binomial_regression_has_the_best_likelihood() -> None:
    """Without clients and ridge, no coefficient and no size near the fitted ones is better."""
    drawn = draw_counts(3.0)
    model = PopulationRegressor(1, family="nb", ridge=0.0, tol=1e-7).fit(drawn.x, drawn.y)
    at = torch.tensor([model.canonical_intercept_[0], *model.canonical_coef_[0], *model._result.coefficients.nuisance])

    def likelihood(values: torch.Tensor) -> float:
        eta = values[0] + torch.from_numpy(drawn.x) @ values[1:3]
        return float(model._family.log_density(eta[:, None, None], torch.from_numpy(drawn.y), values[3:]).sum())

    assert likelihood(at) == pytest.approx(model.log_likelihood_, rel=1e-9)
    for entry in range(4):
        for step in (-0.01, 0.01):
            assert likelihood(at + step * torch.eye(4)[entry]) < likelihood(at)


def test_trials_are_two_weighted_rows_of_a_classifier() -> None:
    """The advice given for binomial counts: the same likelihood as one row for each trial."""
    random = np.random.default_rng(0)
    x, trials = random.normal(size=(40, 2)), random.integers(1, 9, 40)
    successes = random.binomial(trials, 1 / (1 + np.exp(-x[:, 0])))
    weighted = PopulationClassifier(1).fit(
        np.vstack([x, x]), np.repeat([1, 0], 40), sample_weight=np.concatenate([successes, trials - successes])
    )
    single = np.concatenate([np.arange(n) < s for n, s in zip(trials, successes, strict=True)])
    plain = PopulationClassifier(1).fit(np.repeat(x, trials, axis=0), single)
    np.testing.assert_allclose(weighted.canonical_coef_, plain.canonical_coef_, atol=1e-4)
    assert weighted.log_likelihood_ == pytest.approx(plain.log_likelihood_, rel=1e-6)
