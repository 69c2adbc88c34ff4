"""Clients with their own noise: the density against integrals over variances, its limit, and what fits say of it."""

import copy
from functools import cache
from typing import NamedTuple

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import integrate, stats

from kit.tables import (
    HETEROSCEDASTIC,
    Array,
    draw_population,
    make_family,
    make_problem,
    make_rows,
    regressor,
    to_double,
)
from ppfl.glm import NEW
from ppfl.glm.families import HeteroscedasticGaussianFamily
from ppfl.glm.families.heteroscedastic import derivatives_of_sums, log_density_of_sums
from ppfl.glm.gaussian_moments import GaussianMoments, HeteroscedasticMoments, fastest_form
from ppfl.glm.inference.client_noise import nuisance_of_rows, points_of
from ppfl.glm.likelihoods import Coefficients

FAMILY = HeteroscedasticGaussianFamily()
NO_SHARED = torch.zeros(0, 1).double()


def tensor(*values: float) -> torch.Tensor:
    return to_double(values)


def log_integral(residuals: Array, shape: float, scale: float) -> float:
    """The log density of gaussian residuals with an inverse gamma variance, integrated over its logarithm."""
    log_variance = np.linspace(-20, 60, 80_001)
    variance = np.exp(log_variance)
    logs = stats.invgamma.logpdf(variance, shape, scale=scale) + log_variance
    logs += stats.norm.logpdf(residuals[:, None], 0, np.sqrt(variance)).sum(0)
    return float(logs.max() + np.log(integrate.trapezoid(np.exp(logs - logs.max()), log_variance)))


# ---------------------------------------------------------------------- the density


def test_the_density_is_the_integral_over_the_variance():
    for rows, shape, scale in ((1, 0.4, 2.1), (5, 40.0, 2.1), (30, 3.0, 2.1)):
        residuals = np.random.default_rng(0).normal(size=rows) * 1.3
        nuisance = tensor(np.log(scale / shape), np.log(shape))
        found = log_density_of_sums(tensor(float((residuals**2).sum())), tensor(float(rows)), nuisance)
        assert float(found) == pytest.approx(log_integral(residuals, shape, scale), abs=1e-8)


def test_one_row_of_a_new_client_is_scipys_t():
    nuisance, mean, y = tensor(0.6, 0.9), tensor(0.5, -2.0), tensor(1.2)
    oracle = stats.t(2 * np.exp(0.9), mean.numpy(), np.exp(0.3))
    parameters = mean[None, :, None]
    np.testing.assert_allclose(FAMILY.log_density(parameters, y, nuisance)[0], oracle.logpdf(1.2))
    np.testing.assert_allclose(FAMILY.cdf(y, parameters, nuisance)[0], oracle.cdf(1.2))
    np.testing.assert_allclose(FAMILY.variance(mean, nuisance), oracle.var())
    population = stats.invgamma(np.exp(0.9), scale=np.exp(0.6 + 0.9))
    assert FAMILY.variance_quantile(nuisance, 0.3) == pytest.approx(population.ppf(0.3))
    found = FAMILY.natural_parameters(nuisance)
    assert found["dispersion"] == pytest.approx(population.median())
    drawn = population.rvs(200_000, random_state=0)
    assert found["spread of log noise"] == pytest.approx(np.log(np.sqrt(drawn)).std(), rel=0.01)
    assert bool(torch.isinf(FAMILY.mean_variance(tensor(0.0, -0.1))))


def test_a_clients_variance_given_its_rows_follows_bayes_rule():
    nuisance, sums, size = tensor(0.2, 0.7), 7.3, 6.0
    log_scale, log_shape = FAMILY.given(nuisance, tensor(sums), tensor(size))[:, 0].tolist()
    prior = stats.invgamma(np.exp(0.7), scale=np.exp(0.9))
    posterior = stats.invgamma(np.exp(log_shape), scale=np.exp(log_scale + log_shape))
    variance = np.array([0.3, 1.0, 4.0])
    unscaled = prior.logpdf(variance) - 0.5 * size * np.log(variance) - 0.5 * sums / variance
    np.testing.assert_allclose(np.diff(posterior.logpdf(variance)), np.diff(unscaled))


@pytest.mark.parametrize("log_shape", [14.0, 25.0, 60.0])
def test_with_equal_variances_this_is_the_gaussian_family(log_shape):
    """Density and derivatives, without cancellation of large numbers."""
    rows = make_rows(draw_population("gaussian", clients=5, rows=8), make_family("gaussian"), "weights")
    theta = torch.linspace(-1, 1, 3 * rows.varying.columns).double().view(3, -1, 1)
    c, weights = torch.full((5, 3, 2), 1 / 3).double(), torch.full((5, 2), 0.5).double()
    plain = GaussianMoments.of(rows).scores(Coefficients(theta, NO_SHARED, tensor(0.4)), c)
    limit = HeteroscedasticMoments.of(rows).scores(Coefficients(theta, NO_SHARED, tensor(0.4, log_shape)), c)
    near = {"rtol": 1e-9, "atol": 1e-9 + 1e3 * np.exp(-log_shape)}
    torch.testing.assert_close(limit.logs, plain.logs, **near)
    (columns, nuisance, information), wanted = limit.derivatives(weights), plain.derivatives(weights)
    torch.testing.assert_close((columns, nuisance[:, :1], information[:-1, :-1]), tuple(wanted), **near)
    for rest in (information[-1], nuisance[:, 1]):
        torch.testing.assert_close(rest, torch.zeros_like(rest), **near)


@pytest.mark.parametrize("log_shape", [-3.0, 0.5, 2.7, 2.8, 9.0])
def test_derivatives_are_those_of_the_density(log_shape):
    sums, size = tensor(0.1, 4.0, 90.0)[:, None], tensor(1.0, 6.0, 40.0)[:, None]
    at = [torch.full_like(sums, v).requires_grad_() for v in (-0.3, log_shape)]
    of = sums.clone().requires_grad_()
    log = log_density_of_sums(of, size, torch.stack(at))
    slopes = torch.autograd.grad(log.sum(), [of, *at], create_graph=True)
    second = [torch.autograd.grad(s.sum(), [of, *at], retain_graph=True) for s in slopes]
    found = derivatives_of_sums(sums, size, tensor(-0.3, log_shape))
    torch.testing.assert_close(found.logs, log.detach())
    torch.testing.assert_close(found.precision, -2 * slopes[0].detach())
    torch.testing.assert_close(found.bend, 4 * second[0][0])
    for i in range(2):
        torch.testing.assert_close(found.nuisance[i], slopes[1 + i].detach())
        torch.testing.assert_close(found.crosses[i], 2 * second[0][1 + i])
        for j in range(2):
            torch.testing.assert_close(found.seconds[i][j], -second[1 + i][1 + j])


def test_rows_given_other_rows_of_the_client_use_its_variance():
    """Against integrals over the variance of all rows, and of the rows that are given."""
    rows = make_rows(draw_population(HETEROSCEDASTIC, clients=3, rows=7), FAMILY, "weights")
    is_test = torch.arange(len(rows.y)) % 7 < 2
    test, train = (fastest_form(rows._replace(weight=part.double())) for part in (is_test, ~is_test))
    theta = torch.linspace(-1, 1, 2 * rows.varying.columns).double().view(2, -1, 1)
    coefficients, c = Coefficients(theta, NO_SHARED, tensor(0.1, 0.4)), tensor(0.3, 0.7).view(1, 2, 1).expand(3, -1, -1)
    found = test.conditional_log_likelihoods(coefficients, c, train)[:, 0]
    residuals = (rows.y - rows.mean_parameters(coefficients, c[rows.client])[:, 0, 0]).numpy()
    for client in range(3):
        own, known = (rows.client == client).numpy(), ~is_test.numpy()
        both, given = (log_integral(residuals[some], np.exp(0.4), np.exp(0.5)) for some in (own, own & known))
        assert float(found[client]) == pytest.approx(both - given, abs=1e-7)
    plain = GaussianMoments.of(rows)
    as_given = plain.conditional_log_likelihoods(coefficients, c, plain)
    torch.testing.assert_close(as_given, plain.client_log_likelihoods(coefficients, c))
    whole, others = (
        make_problem(rows, 2, 0.0)._replace(data=data).marginal(2, 64) for data in (fastest_form(rows), train)
    )
    at = np.random.default_rng(0).normal(size=whole.shape.size) / 3
    held_out = float(others.predictive_log_likelihoods(at, test).sum())
    assert held_out == pytest.approx(whole.log_likelihood(at) - others.log_likelihood(at), rel=1e-10)


# ---------------------------------------------------------------------- fits


class NoisyTable(NamedTuple):
    x: Array  # (n, 2)
    y: Array
    clients: Array
    mean: Array  # (n,), of y
    noise: Array  # (M,), the standard deviation of each client

    def fit(self, family: str = HETEROSCEDASTIC, **settings):
        return regressor(family=family, **settings).fit(self.x, self.y, clients=self.clients)


def draw_table(seed: int, clients: int, rows: int, *, shape=None, spread: float = 0.5, k: int = 2) -> NoisyTable:
    """Variances are inverse gamma with mean inverse 1 and this shape, or log-normal with this spread of log noise."""
    random = np.random.default_rng(seed)
    client = np.repeat(np.arange(clients), rows)
    x = random.normal(size=(len(client), 2))
    theta = np.array([[1.5, 1.0], [-1.5, 0.5]])[:k]
    mean = (x * (random.dirichlet([0.5] * k, clients) @ theta)[client]).sum(1)
    log_normal = np.exp(spread * random.normal(size=clients))
    noise = log_normal if shape is None else np.sqrt(shape / random.gamma(shape, size=clients))
    return NoisyTable(x, mean + noise[client] * random.normal(size=len(client)), client, mean, noise)


@cache
def small_fit():
    return draw_table(0, clients=30, rows=15).fit()


def test_newton_and_lbfgs_find_the_same_fit(monkeypatch):
    table, newton = draw_table(0, clients=30, rows=15), small_fit()
    monkeypatch.setattr("ppfl.glm.solvers.marginal._MAX_NEWTON", 0)
    lbfgs = table.fit()
    assert newton.log_likelihood_ == pytest.approx(lbfgs.log_likelihood_, abs=0.1)
    means = [model.predict(table.x, table.clients) for model in (newton, lbfgs)]
    np.testing.assert_allclose(*means, atol=0.02)  # noise has a standard deviation of about 1
    np.testing.assert_allclose(newton.client_dispersion_, lbfgs.client_dispersion_, rtol=0.02)


@pytest.mark.parametrize("shape", [1.5, 6.0])
def test_the_population_of_variances_is_recovered(shape):
    """Estimates are as far from the truth as their standard errors say, and so are the clients' variances."""
    distances, levels = [], []
    for seed in range(3):
        table = draw_table(seed, clients=80, rows=20, shape=shape)
        model = table.fit()
        found = model.conf_int().loc[""]
        for name, value in FAMILY.natural_parameters(tensor(0.0, np.log(shape))).items():
            distances.append((found["estimate"][name] - value) / found["std_error"][name])
        clients = torch.arange(80)
        points, weights = points_of(model._memberships, clients)
        log_typical, log_shape = nuisance_of_rows(model, clients, points, model._result.coefficients.nuisance).numpy()
        variance = (table.noise / model._target_scale)[:, None] ** 2
        below = stats.invgamma.cdf(variance, np.exp(log_shape), scale=np.exp(log_typical + log_shape))
        levels.append((below * weights.numpy()).sum(1))
        assert np.corrcoef(np.log(model.client_dispersion_), np.log(table.noise))[0, 1] > 0.8
    assert np.abs(distances).max() < 3.5
    assert stats.kstest(np.concatenate(levels), "uniform").pvalue > 0.01


def test_intervals_of_new_observations_cover_for_quiet_and_for_noisy_clients():
    """One variance for all is too wide for quiet clients and too narrow for noisy ones."""
    share = {HETEROSCEDASTIC: [], "gaussian": []}
    for seed in range(2):
        table = draw_table(seed, clients=40, rows=25, spread=0.6)
        new = table.mean + table.noise[table.clients] * np.random.default_rng(seed + 100).normal(size=len(table.y))
        quiet = (table.noise < np.median(table.noise))[table.clients]
        for name, found in share.items():
            ends = table.fit(name).predict(table.x, table.clients, interval=0.9)
            inside = ((ends["new_lower"] <= new) & (new <= ends["new_upper"])).to_numpy()
            found.append((inside[quiet].mean(), inside[~quiet].mean()))
    for_quiet, for_noisy = np.mean(share[HETEROSCEDASTIC], 0)
    assert 0.86 < for_quiet < 0.95 and 0.85 < for_noisy < 0.94
    for_quiet, for_noisy = np.mean(share["gaussian"], 0)
    assert for_quiet > 0.96 and for_noisy < 0.86


def test_known_clients_have_their_own_t_and_new_ones_that_of_the_population():
    """With so many rows that the coefficients are known; what is left is scipy's t, computed from the rows."""
    table = draw_table(0, clients=300, rows=12, shape=2.0, k=1)
    model, first = table.fit(k=1, ridge=0.0), np.arange(0, len(table.y), 12)
    population = FAMILY.given(model._result.coefficients.nuisance, tensor(0.0), tensor(0.0))[:, 0].numpy()
    typical, shape = np.exp(population) * [model._target_scale**2, 1.0]
    sums = np.bincount(table.clients, (table.y - model.predict(table.x, table.clients)) ** 2)
    scale = np.sqrt((shape * typical + sums / 2) / (shape + 6))
    known, new = (model.predict(table.x[first], ids, interval=0.9) for ids in (table.clients[first], NEW))
    wanted = scale * (stats.t.ppf(0.95, 2 * shape + 12) - stats.t.ppf(0.05, 2 * shape + 12))
    np.testing.assert_allclose(known["new_upper"] - known["new_lower"], wanted, rtol=0.03)
    np.testing.assert_allclose(model.client_dispersion_, scale**2 * (shape + 6) / (shape + 5), rtol=1e-6)
    wanted = np.sqrt(typical) * 2 * stats.t.ppf(0.95, 2 * shape)
    np.testing.assert_allclose(new["new_upper"] - new["new_lower"], wanted, rtol=0.05)


def test_unequal_noise_is_not_taken_for_another_canonical_model():
    model = draw_table(2, clients=40, rows=15, spread=0.5, k=1).fit(k=[1, 2])
    assert model.k_ == 1


def test_clients_that_do_not_differ_are_like_one_another():
    table = draw_table(1, clients=40, rows=20, spread=0.0)
    own, common = (table.fit(family) for family in (HETEROSCEDASTIC, "gaussian"))
    assert own.log_likelihood_ == pytest.approx(common.log_likelihood_, abs=1.5)
    assert own.dispersion_ == pytest.approx(common.dispersion_, rel=0.05)
    assert own.client_dispersion_.std() < 0.2 * own.dispersion_
    assert (common.client_dispersion_ == common.dispersion_).all()
    np.testing.assert_allclose(own.predict(table.x, table.clients), common.predict(table.x, table.clients), atol=0.1)


def test_units_of_the_target_do_not_matter():
    table, one = draw_table(0, clients=30, rows=15), small_fit()
    other = table._replace(y=250.0 * table.y).fit()
    np.testing.assert_allclose(250.0**2 * one.client_dispersion_, other.client_dispersion_, rtol=1e-4)
    factors = pd.Series({"dispersion": 250.0**2, "spread of log noise": 1.0})
    rows = [m.conf_int().loc[""].loc[factors.index] for m in (one, other)]
    np.testing.assert_allclose(rows[0].mul(factors, axis=0), rows[1], rtol=1e-3)


def test_the_summary_and_the_dispersions_say_how_clients_differ():
    text, table, model = str(small_fit().summary()), draw_table(0, clients=30, rows=15), copy.deepcopy(small_fit())
    assert "in the median client" in text and "spread of log noise" in text
    residual = next(line for line in text.splitlines() if line.startswith("residual"))
    assert float(residual.split()[1]) == pytest.approx(model.client_dispersion_.mean(), rel=1e-3)
    before, some = model.client_dispersion_, table.clients < 3
    model.onboard(table.x[some], table.y[some], table.clients[some] + 100)
    after = model.client_dispersion_
    np.testing.assert_allclose(after.loc[before.index], before)
    np.testing.assert_allclose(after.loc[[100, 101, 102]], before.loc[[0, 1, 2]], rtol=0.01)


def test_points_of_the_profile_solver_have_variances_too():
    table = draw_table(0, clients=20, rows=15)
    model = table.fit(solver="profile")
    assert model.converged_
    assert np.corrcoef(np.log(model.client_dispersion_), np.log(table.noise))[0, 1] > 0.8
    assert stats.kstest(model.residuals(table.x, table.y, table.clients, kind="quantile"), "norm").statistic < 0.06
