"""Counts that vary more than Poisson counts: families that say so, and quasi-likelihoods."""

import numpy as np
import pytest
import torch

from kit.tables import DrawnPopulation, regressor, triangle
from ppfl.glm.families import QuasiPoissonFamily
from ppfl.glm.quasi import pearson_dispersion


def draw_counts(dispersion: float, rows: int = 20) -> DrawnPopulation:
    """Counts of 60 clients with a variance of `dispersion` times the mean, from two canonical models."""
    random = np.random.default_rng(0)
    theta = triangle(2, 0.8, random)[:2]
    c = random.dirichlet([0.4, 0.4], 60)
    client = np.repeat(np.arange(60), rows)
    x = random.normal(size=(len(client), 2))
    eta = 1 + (x * (c @ theta)[client]).sum(1)
    rate = np.exp(eta) if dispersion == 1 else random.gamma(np.exp(eta) / (dispersion - 1), dispersion - 1)
    return DrawnPopulation(x, random.poisson(rate).astype(float), client, c, theta, eta)


def fit(family: str, drawn: DrawnPopulation, y=None, **settings):
    y = drawn.y if y is None else y
    return regressor(family=family, **{"n_init": 1, **settings}).fit(drawn.x, y, clients=drawn.clients)


def test_without_clients_the_dispersion_is_pearsons():
    drawn = draw_counts(2.5)
    plain, quasi = (
        regressor(k=1, family=family, ridge=0.0, tol=1e-7).fit(drawn.x, drawn.y)
        for family in ("poisson", "quasipoisson")
    )
    mean = plain.predict(drawn.x)
    np.testing.assert_allclose(quasi.predict(drawn.x), mean, rtol=1e-4)
    expected = ((drawn.y - mean) ** 2 / mean).sum() / (len(mean) - 3)
    assert quasi._family.dispersion == pytest.approx(expected, rel=1e-4)
    assert quasi.log_likelihood_ == pytest.approx(plain.log_likelihood_ / expected, rel=1e-4)
    weights = np.full(len(mean), 2.0)  # a dispersion does not depend on the unit of the weights
    assert pearson_dispersion(quasi, drawn.x, drawn.y, None, weights, None) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("truth", [1.0, 3.0])
def test_the_dispersion_of_a_population_is_that_of_residuals_around_the_true_means(truth):
    """Residuals around fitted memberships alone would be too small by one degree of freedom for each client."""
    drawn = draw_counts(truth, rows=10)
    mean = np.exp(drawn.eta)
    expected = ((drawn.y - mean) ** 2 / mean).mean()
    assert fit("quasipoisson", drawn, n_init=2)._family.dispersion == pytest.approx(expected, rel=0.06)


def test_the_larger_the_dispersion_the_less_do_counts_say_about_memberships():
    drawn, model = draw_counts(1.0), fit("quasipoisson", draw_counts(1.0), n_init=2)
    prior, distances = model._result.prior.mean.numpy(), []
    for number, dispersion in enumerate((1.0, 10.0, 1e6)):
        model._family = QuasiPoissonFamily(None, dispersion)
        found = model.onboard(drawn.x, drawn.y, clients=drawn.clients + 1000 * (number + 1))
        distances.append(float(np.abs(found.to_numpy() - prior).mean()))
    assert distances[0] > distances[1] > distances[2]
    assert distances[2] < 1e-3


def test_families_find_their_own_nuisance_parameters():
    drawn, random = draw_counts(1.0), np.random.default_rng(1)
    mean = np.exp(drawn.eta)
    inflated = random.poisson(mean) * (random.random(len(mean)) > 0.3)
    overdispersed = random.poisson(mean * random.gamma(2.0, 0.5, len(mean)))
    both = overdispersed * (random.random(len(mean)) > 0.3)
    for family, y in (("negative binomial", overdispersed), ("zip", inflated), ("zinb", both)):
        model, poisson = (fit(name, drawn, y) for name in (family, "poisson"))
        found = model._family.natural_parameters(model._result.coefficients.nuisance)
        assert found.get("size", 2.0) == pytest.approx(2.0, rel=0.3)
        assert found.get("share of extra zeros", 0.3) == pytest.approx(0.3, abs=0.06)
        assert model.log_likelihood_ > poisson.log_likelihood_ + 50
        assert model.predict(drawn.x, drawn.clients).mean() == pytest.approx(y.mean(), rel=0.05)
        assert np.abs(model.canonical_coef_[:, None] - drawn.theta[None]).max(2).min(1).max() < 0.4


def test_one_negative_binomial_regression_has_the_best_likelihood():
    """Without clients and ridge, no coefficient and no size near the fitted ones is better."""
    drawn = draw_counts(3.0)
    model = regressor(k=1, family="nb", ridge=0.0, tol=1e-7).fit(drawn.x, drawn.y)
    at = torch.tensor([model.canonical_intercept_[0], *model.canonical_coef_[0], *model._result.coefficients.nuisance])

    def likelihood(values: torch.Tensor) -> float:
        eta = values[0] + torch.from_numpy(drawn.x) @ values[1:3]
        return float(model._family.log_density(eta[:, None, None], torch.from_numpy(drawn.y), values[3:]).sum())

    assert likelihood(at) == pytest.approx(model.log_likelihood_, rel=1e-9)
    for step in 0.01 * torch.eye(4):
        assert max(likelihood(at - step), likelihood(at + step)) < likelihood(at)
