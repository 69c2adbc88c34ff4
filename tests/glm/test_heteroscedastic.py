"""Clients with their own noise: the density against integrals over variances, its limit, and what fits say of it."""

import numpy as np
import pytest
import torch
from scipy import integrate, stats

from kit.tables import HETEROSCEDASTIC, draw_population, make_family, make_problem, make_rows, regressor, to_double
from ppfl.glm import NEW
from ppfl.glm.families import HeteroscedasticGaussianFamily
from ppfl.glm.families.heteroscedastic import log_density_of_sums
from ppfl.glm.gaussian_moments import GaussianMoments, HeteroscedasticMoments, fastest_form
from ppfl.glm.inference.client_noise import nuisance_of_rows, points_of
from ppfl.glm.likelihoods import Coefficients

FAMILY = HeteroscedasticGaussianFamily()
NO_SHARED = torch.zeros(0, 1).double()


def log_integral(residuals, shape: float, scale: float) -> float:
    """The log density of gaussian residuals with an inverse gamma variance, integrated over its logarithm."""
    log_variance = np.linspace(-20, 60, 80_001)
    variance = np.exp(log_variance)
    logs = stats.invgamma.logpdf(variance, shape, scale=scale) + log_variance
    logs += stats.norm.logpdf(residuals[:, None], 0, np.sqrt(variance)).sum(0)
    return float(logs.max() + np.log(integrate.trapezoid(np.exp(logs - logs.max()), log_variance)))


@pytest.mark.parametrize(("rows", "shape", "scale"), [(1, 0.4, 2.1), (5, 40.0, 2.1), (30, 3.0, 2.1)])
def test_the_density_is_the_integral_over_the_variance(rows, shape, scale):
    residuals = np.random.default_rng(0).normal(size=rows) * 1.3
    nuisance = to_double([np.log(scale / shape), np.log(shape)])
    found = log_density_of_sums(to_double([(residuals**2).sum()]), to_double([rows]), nuisance)
    assert float(found) == pytest.approx(log_integral(residuals, shape, scale), abs=1e-8)


@pytest.mark.parametrize("log_shape", [14.0, 25.0, 60.0])
def test_with_equal_variances_this_is_the_gaussian_family(log_shape):
    """Density and derivatives, without cancellation of large numbers."""
    rows = make_rows(draw_population("gaussian", clients=5, rows=8), make_family("gaussian"), "weights")
    theta = torch.linspace(-1, 1, 3 * rows.varying.columns).double().view(3, -1, 1)
    c, weights = torch.full((5, 3, 2), 1 / 3).double(), torch.full((5, 2), 0.5).double()
    plain = GaussianMoments.of(rows).scores(Coefficients(theta, NO_SHARED, to_double([0.4])), c)
    limit = HeteroscedasticMoments.of(rows).scores(Coefficients(theta, NO_SHARED, to_double([0.4, log_shape])), c)
    near = {"rtol": 1e-9, "atol": 1e-9 + 1e3 * np.exp(-log_shape)}
    torch.testing.assert_close(limit.logs, plain.logs, **near)
    (columns, nuisance, information), wanted = limit.derivatives(weights), plain.derivatives(weights)
    torch.testing.assert_close((columns, nuisance[:, :1], information[:-1, :-1]), tuple(wanted), **near)
    for rest in (information[-1], nuisance[:, 1]):
        torch.testing.assert_close(rest, torch.zeros_like(rest), **near)


def test_rows_given_other_rows_of_the_client_use_its_variance():
    """Against integrals over the variance of all rows, and of the rows that are given."""
    rows = make_rows(draw_population(HETEROSCEDASTIC, clients=3, rows=7), FAMILY, "weights")
    is_test = torch.arange(len(rows.y)) % 7 < 2
    test, train = (fastest_form(rows._replace(weight=part.double())) for part in (is_test, ~is_test))
    theta = torch.linspace(-1, 1, 2 * rows.varying.columns).double().view(2, -1, 1)
    coefficients, c = Coefficients(theta, NO_SHARED, to_double([0.1, 0.4])), to_double([[[0.3], [0.7]]] * 3)
    found = test.conditional_log_likelihoods(coefficients, c, train)[:, 0]
    residuals = (rows.y - rows.mean_parameters(coefficients, c[rows.client])[:, 0, 0]).numpy()
    for client in range(3):
        own, known = (rows.client == client).numpy(), ~is_test.numpy()
        both, given = (log_integral(residuals[some], np.exp(0.4), np.exp(0.5)) for some in (own, own & known))
        assert float(found[client]) == pytest.approx(both - given, abs=1e-7)
    problem = make_problem(rows, 2, 0.0)
    whole, others = (problem._replace(data=data).marginal(2, 64) for data in (fastest_form(rows), train))
    at = np.random.default_rng(0).normal(size=whole.shape.size) / 3
    held_out = float(others.predictive_log_likelihoods(at, test).sum())
    assert held_out == pytest.approx(whole.log_likelihood(at) - others.log_likelihood(at), rel=1e-10)


class NoisyTable:
    """Variances are inverse gamma with mean inverse 1 and this shape, or log-normal with this spread of log noise."""

    def __init__(self, seed, clients, rows, *, shape=None, spread=0.5, k=2):
        random = np.random.default_rng(seed)
        self.clients = np.repeat(np.arange(clients), rows)
        self.x = random.normal(size=(len(self.clients), 2))
        theta = np.array([[1.5, 1.0], [-1.5, 0.5]])[:k]
        self.mean = (self.x * (random.dirichlet([0.5] * k, clients) @ theta)[self.clients]).sum(1)
        log_normal = np.exp(spread * random.normal(size=clients))
        self.noise = log_normal if shape is None else np.sqrt(shape / random.gamma(shape, size=clients))
        self.y = self.mean + self.noise[self.clients] * random.normal(size=len(self.clients))

    def fit(self, family: str = HETEROSCEDASTIC, **settings):
        return regressor(family=family, **settings).fit(self.x, self.y, clients=self.clients)


@pytest.mark.parametrize("shape", [1.5, 6.0])
def test_the_population_of_variances_is_recovered(shape):
    """Estimates are as far from the truth as their standard errors say, and so are the clients' variances."""
    distances, levels, clients = [], [], torch.arange(80)
    for seed in range(3):
        table = NoisyTable(seed, clients=80, rows=20, shape=shape)
        model = table.fit()
        found = model.conf_int().loc[""]
        for name, value in FAMILY.natural_parameters(to_double([0.0, np.log(shape)])).items():
            distances.append((found["estimate"][name] - value) / found["std_error"][name])
        points, weights = points_of(model._memberships, clients)
        log_typical, log_shape = nuisance_of_rows(model, clients, points, model._result.coefficients.nuisance).numpy()
        variance = (table.noise / model._target_scale)[:, None] ** 2
        below = stats.invgamma.cdf(variance, np.exp(log_shape), scale=np.exp(log_typical + log_shape))
        levels.append((below * weights.numpy()).sum(1))
    assert np.abs(distances).max() < 3.5
    assert stats.kstest(np.concatenate(levels), "uniform").pvalue > 0.01


def test_known_clients_have_their_own_t_and_new_ones_that_of_the_population():
    """With so many rows that the coefficients are known; what is left is scipy's t, computed from the rows."""
    table = NoisyTable(0, clients=300, rows=12, shape=2.0, k=1)
    model, first = table.fit(k=1, ridge=0.0), np.arange(0, len(table.y), 12)
    typical, shape = model._result.coefficients.nuisance.exp().numpy() * [model._target_scale**2, 1.0]
    sums = np.bincount(table.clients, (table.y - model.predict(table.x, table.clients)) ** 2)
    scale = np.sqrt((shape * typical + sums / 2) / (shape + 6))
    np.testing.assert_allclose(model.client_dispersion_, scale**2 * (shape + 6) / (shape + 5), rtol=1e-6)
    known, new = (model.predict(table.x[first], ids, interval=0.9) for ids in (table.clients[first], NEW))
    wanted = scale * 2 * stats.t.ppf(0.95, 2 * shape + 12)
    np.testing.assert_allclose(known["new_upper"] - known["new_lower"], wanted, rtol=0.03)
    wanted = np.sqrt(typical) * 2 * stats.t.ppf(0.95, 2 * shape)
    np.testing.assert_allclose(new["new_upper"] - new["new_lower"], wanted, rtol=0.05)


def test_clients_that_do_not_differ_are_like_one_another():
    table = NoisyTable(1, clients=40, rows=20, spread=0.0)
    own, common = (table.fit(family) for family in (HETEROSCEDASTIC, "gaussian"))
    assert own.log_likelihood_ == pytest.approx(common.log_likelihood_, abs=1.5)
    assert own.dispersion_ == pytest.approx(common.dispersion_, rel=0.05)
    assert own.client_dispersion_.std() < 0.2 * own.dispersion_
    np.testing.assert_allclose(own.predict(table.x, table.clients), common.predict(table.x, table.clients), atol=0.1)


def test_unequal_noise_is_not_taken_for_another_canonical_model():
    assert NoisyTable(2, clients=40, rows=15, spread=0.5, k=1).fit(k=[1, 2]).k_ == 1


@pytest.mark.parametrize("solver", ["marginal", "profile"])
def test_known_and_new_clients_have_their_own_variance(solver):
    table = NoisyTable(0, clients=20, rows=15)
    model, some = table.fit(solver=solver), table.clients < 3
    before = model.client_dispersion_
    assert model.converged_ and np.corrcoef(np.log(before), np.log(table.noise))[0, 1] > 0.8
    assert stats.kstest(model.residuals(table.x, table.y, table.clients, kind="quantile"), "norm").statistic < 0.06
    model.onboard(table.x[some], table.y[some], table.clients[some] + 100)
    np.testing.assert_allclose(model.client_dispersion_.loc[before.index], before)
    np.testing.assert_allclose(model.client_dispersion_.loc[[100, 101, 102]], before.loc[[0, 1, 2]], rtol=0.01)
