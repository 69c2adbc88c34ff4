"""Counts that vary more than Poisson counts, and families that say so."""

import numpy as np
import pytest
import torch

from kit.tables import DrawnPopulation, regressor, triangle


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


def test_families_find_their_own_nuisance_parameters():
    drawn, random = draw_counts(1.0), np.random.default_rng(1)
    mean = np.exp(drawn.eta)
    inflated = random.poisson(mean) * (random.random(len(mean)) > 0.3)
    overdispersed = random.poisson(mean * random.gamma(2.0, 0.5, len(mean)))
    both = overdispersed * (random.random(len(mean)) > 0.3)
    for family, y in (("negative binomial", overdispersed), ("zip", inflated), ("zinb", both)):
        model, poisson = (fit(name, drawn, y) for name in (family, "poisson"))
        found = model._family.natural_parameters(model.fit_.parameters.nuisance)
        assert found.get("size", 2.0) == pytest.approx(2.0, rel=0.3)
        assert found.get("share of extra zeros", 0.3) == pytest.approx(0.3, abs=0.06)
        assert model.log_likelihood_ > poisson.log_likelihood_ + 50
        assert model.predict(drawn.x, drawn.clients).mean() == pytest.approx(y.mean(), rel=0.05)
        assert np.abs(model.canonical_coef_[:, None] - drawn.theta[None]).max(2).min(1).max() < 0.4


def test_one_negative_binomial_regression_has_the_best_likelihood():
    """Without clients and ridge, no coefficient and no size near the fitted ones is better."""
    drawn = draw_counts(3.0)
    model = regressor(k=1, family="nb", ridge=0.0, tol=1e-7).fit(drawn.x, drawn.y)
    at = torch.tensor([model.canonical_intercept_[0], *model.canonical_coef_[0], *model.fit_.parameters.nuisance])

    def likelihood(values: torch.Tensor) -> float:
        eta = values[0] + torch.from_numpy(drawn.x) @ values[1:3]
        return float(model._family.log_density(eta[:, None, None], torch.from_numpy(drawn.y), values[3:]).sum())

    assert likelihood(at) == pytest.approx(model.log_likelihood_, rel=1e-9)
    for step in 0.01 * torch.eye(4):
        assert max(likelihood(at - step), likelihood(at + step)) < likelihood(at)
