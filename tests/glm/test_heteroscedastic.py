"""Clients with their own noise: integrals over variances, limits, recovery, coverage, and what the fit says of each."""

from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
import torch
from scipy import integrate, stats

import ppfl.glm.gaussian_moments as gaussian_moments
import ppfl.glm.solvers.marginal as marginal
from client_tables import make_client_table, regressor
from drawn_populations import draw_population, make_family, make_rows
from ppfl.core.errors import SettingError
from ppfl.glm import NEW, PopulationRegressor
from ppfl.glm.families import HeteroscedasticGaussianFamily
from ppfl.glm.families.heteroscedastic import derivatives_of_sums, log_density_of_sums
from ppfl.glm.gaussian_moments import GaussianMoments, HeteroscedasticMoments, fastest_form
from ppfl.glm.inference.client_noise import nuisance_of_rows, points_of
from ppfl.glm.inference.parameter_table import covariance_of
from ppfl.glm.likelihoods import Coefficients
from ppfl.glm.solvers.marginal import Marginal
from ppfl.glm.solvers.parameters import ParameterShape, Regularization

NAME = "heteroscedastic gaussian"
FAMILY = HeteroscedasticGaussianFamily()
Array = np.ndarray[Any, Any]


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def log_integral(residuals: Array, shape: float, scale: float) -> float:
    """The log density of gaussian residuals with an inverse gamma variance, integrated over its logarithm."""
    log_variance = np.linspace(-20, 60, 80_001)
    variance = np.exp(log_variance)
    logs = stats.invgamma.logpdf(variance, shape, scale=scale) + log_variance
    logs += stats.norm.logpdf(residuals[:, None], 0, np.sqrt(variance)).sum(0)
    return float(logs.max() + np.log(integrate.trapezoid(np.exp(logs - logs.max()), log_variance)))


class NoisyTable(NamedTuple):
    x: Array  # (n, 2)
    y: Array
    clients: Array
    mean: Array  # (n,), of y
    noise: Array  # (M,), the standard deviation of each client


def draw_table(
    seed: int, clients: int, rows: int, *, shape: float | None = None, spread: float = 0.5, k: int = 2
) -> Any:
    """Variances are inverse gamma with mean inverse 1 and this shape, or log-normal with this spread of log noise."""
    random = np.random.default_rng(seed)
    client = np.repeat(np.arange(clients), rows)
    x = random.normal(size=(len(client), 2))
    theta = np.array([[1.5, 1.0], [-1.5, 0.5]])[:k]
    mean = (x * (random.dirichlet([0.5] * k, clients) @ theta)[client]).sum(1)
    log_normal = np.exp(spread * random.normal(size=clients))
    noise = log_normal if shape is None else np.sqrt(shape / random.gamma(shape, size=clients))
    return NoisyTable(x, mean + noise[client] * random.normal(size=len(client)), client, mean, noise)


# ---------------------------------------------------------------------- the density


@pytest.mark.parametrize("shape", [0.4, 3.0, 40.0])
@pytest.mark.parametrize("rows", [1, 5, 30])
def test_the_density_is_the_integral_over_the_variance(shape: float, rows: int) -> None:
    residuals, scale = np.random.default_rng(0).normal(size=rows) * 1.3, 2.1
    expected = log_integral(residuals, shape, scale)
    nuisance = tensor(np.log(scale / shape), np.log(shape))
    found = log_density_of_sums(tensor(float((residuals**2).sum())), tensor(float(rows)), nuisance)
    assert float(found) == pytest.approx(expected, abs=1e-8)


def test_one_row_of_a_new_client_is_scipys_t() -> None:
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


def test_a_clients_variance_given_its_rows_follows_bayes_rule() -> None:
    nuisance, sums, size = tensor(0.2, 0.7), 7.3, 6.0
    log_scale, log_shape = FAMILY.given(nuisance, tensor(sums), tensor(size))[:, 0].tolist()
    prior = stats.invgamma(np.exp(0.7), scale=np.exp(0.9))
    posterior = stats.invgamma(np.exp(log_shape), scale=np.exp(log_scale + log_shape))
    variance = np.array([0.3, 1.0, 4.0])
    unscaled = prior.logpdf(variance) - 0.5 * size * np.log(variance) - 0.5 * sums / variance
    np.testing.assert_allclose(np.diff(posterior.logpdf(variance)), np.diff(unscaled))


@pytest.mark.parametrize("log_shape", [14.0, 25.0, 60.0])
def test_with_equal_variances_this_is_the_gaussian_family(log_shape: float) -> None:
    """Density and derivatives, without cancellation of large numbers."""
    rows = make_rows(draw_population("gaussian", clients=5, rows=8), make_family("gaussian"), "weights")
    common, own = GaussianMoments.of(rows), HeteroscedasticMoments.of(rows)
    theta = torch.linspace(-1, 1, 3 * rows.varying.columns, dtype=torch.float64).view(3, -1, 1)
    empty, c = torch.zeros(0, 1, dtype=torch.float64), torch.full((5, 3, 2), 1 / 3, dtype=torch.float64)
    plain = common.scores(Coefficients(theta, empty, tensor(0.4)), c)
    limit = own.scores(Coefficients(theta, empty, tensor(0.4, log_shape)), c)
    near = {"rtol": 1e-9, "atol": 1e-9 + 1e3 * np.exp(-log_shape)}
    torch.testing.assert_close(limit.logs, plain.logs, **near)
    weights = torch.full((5, 2), 0.5, dtype=torch.float64)
    (columns, nuisance, information), wanted = limit.derivatives(weights), plain.derivatives(weights)
    torch.testing.assert_close(columns, wanted[0], **near)
    torch.testing.assert_close(nuisance[:, :1], wanted[1], **near)
    torch.testing.assert_close(information[:-1, :-1], wanted[2], **near)
    torch.testing.assert_close(information[-1], torch.zeros_like(information[-1]), **near)
    torch.testing.assert_close(nuisance[:, 1], torch.zeros_like(nuisance[:, 1]), **near)


@pytest.mark.parametrize("log_shape", [-3.0, 0.5, 2.7, 2.8, 9.0])
def test_derivatives_are_those_of_the_density(log_shape: float) -> None:
    sums, size = tensor(0.1, 4.0, 90.0)[:, None], tensor(1.0, 6.0, 40.0)[:, None]
    at = [tensor(*[v] * 3)[:, None].requires_grad_() for v in (-0.3, log_shape)]
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


def test_weights_count_rows() -> None:
    drawn = draw_population(NAME, clients=4, rows=6)
    times = np.random.default_rng(1).integers(0, 4, len(drawn.y)).astype(float)
    rows = make_rows(drawn, FAMILY, "weights")
    weighted = fastest_form(rows._replace(weight=torch.from_numpy(times)))
    index = torch.arange(len(times)).repeat_interleave(torch.from_numpy(times).long())
    repeated = fastest_form(rows.take(index)._replace(client=rows.client[index]))
    for one, other in zip(weighted, repeated, strict=True):  # type: ignore[call-overload]
        torch.testing.assert_close(one, other)


# ---------------------------------------------------------------------- rows given other rows


def test_rows_given_other_rows_of_the_client_use_its_variance() -> None:
    """Against integrals over the variance of all rows, and of the rows that are given."""
    rows = make_rows(draw_population(NAME, clients=3, rows=7), FAMILY, "weights")
    is_test = torch.arange(len(rows.y)) % 7 < 2
    test, train = (fastest_form(rows._replace(weight=part.double())) for part in (is_test, ~is_test))
    theta = torch.linspace(-1, 1, 2 * rows.varying.columns, dtype=torch.float64).view(2, -1, 1)
    coefficients = Coefficients(theta, torch.zeros(0, 1, dtype=torch.float64), tensor(0.1, 0.4))
    c = tensor(0.3, 0.7).view(1, 2, 1).expand(3, -1, -1)
    found = test.conditional_log_likelihoods(coefficients, c, train)[:, 0]
    residuals = (rows.y - rows.mean_parameters(coefficients, c[rows.client])[:, 0, 0]).numpy()
    for client in range(3):
        own, known = (rows.client == client).numpy(), ~is_test.numpy()
        both, given = (log_integral(residuals[some], np.exp(0.4), np.exp(0.5)) for some in (own, own & known))
        assert float(found[client]) == pytest.approx(both - given, abs=1e-7)
    plain = GaussianMoments.of(rows)
    torch.testing.assert_close(
        plain.conditional_log_likelihoods(coefficients, c, plain), plain.client_log_likelihoods(coefficients, c)
    )


def test_held_out_rows_have_the_likelihood_of_all_rows_over_that_of_the_others() -> None:
    rows = make_rows(draw_population(NAME, clients=6, rows=9), FAMILY, "weights")
    is_test = torch.arange(len(rows.y)) % 3 == 0
    test, train = (fastest_form(rows._replace(weight=part.double())) for part in (is_test, ~is_test))
    shape = ParameterShape(2, rows.varying.columns, 0, 1, 2)
    none = Regularization(0.0, 0.0, torch.ones(shape.varying).double(), torch.ones(0).double())
    at = np.random.default_rng(0).normal(size=shape.size) / 3
    objective = Marginal.of(train, shape, none, 64)
    whole = Marginal.of(fastest_form(rows), shape, none, 64)  # with the same points
    found = objective.predictive_log_likelihoods(at, test)
    assert float(found.sum()) == pytest.approx(whole.log_likelihood(at) - objective.log_likelihood(at), rel=1e-10)


# ---------------------------------------------------------------------- fits


def test_newton_and_lbfgs_find_the_same_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    table = draw_table(0, clients=30, rows=15)
    newton = regressor(family=NAME).fit(table.x, table.y, clients=table.clients)
    monkeypatch.setattr(marginal, "_MAX_NEWTON", 0)
    lbfgs = regressor(family=NAME).fit(table.x, table.y, clients=table.clients)
    assert newton.log_likelihood_ == pytest.approx(lbfgs.log_likelihood_, abs=0.1)
    errors = np.sqrt(np.diag(covariance_of(newton).matrix))
    assert (np.abs(newton._parameters() - lbfgs._parameters()) < 0.2 * errors).all()
    np.testing.assert_allclose(newton.client_dispersion_, lbfgs.client_dispersion_, rtol=0.02)


@pytest.mark.parametrize("shape", [1.5, 6.0])
def test_the_population_of_variances_is_recovered(shape: float) -> None:
    """Estimates are as far from the truth as their standard errors say, and so are the clients' variances."""
    distances, levels = [], []
    for seed in range(4):
        table = draw_table(seed, clients=80, rows=20, shape=shape)
        model = regressor(family=NAME).fit(table.x, table.y, clients=table.clients)
        found = model.conf_int().loc[""]
        truth = FAMILY.natural_parameters(tensor(0.0, np.log(shape)))
        for name, value in truth.items():
            distances.append((found["estimate"][name] - value) / found["std_error"][name])
        clients = torch.arange(80)
        points, weights = points_of(model._memberships, clients)
        log_typical, log_shape = nuisance_of_rows(model, clients, points, model._result.coefficients.nuisance).numpy()
        variance = (table.noise / model._target_scale)[:, None] ** 2
        below = stats.invgamma.cdf(variance, np.exp(log_shape), scale=np.exp(log_typical + log_shape))
        levels.append((below * weights.numpy()).sum(1))
        expected = 2 * np.log(table.noise)
        assert np.corrcoef(np.log(model.client_dispersion_), expected)[0, 1] > 0.8
    assert np.abs(distances).max() < 3.5
    assert stats.kstest(np.concatenate(levels), "uniform").pvalue > 0.01


def test_intervals_of_new_observations_cover_for_quiet_and_for_noisy_clients() -> None:
    """One variance for all is too wide for quiet clients and too narrow for noisy ones."""
    share: dict[str, list[tuple[float, float]]] = {NAME: [], "gaussian": []}
    for seed in range(3):
        table = draw_table(seed, clients=40, rows=25, spread=0.6)
        new = table.mean + table.noise[table.clients] * np.random.default_rng(seed + 100).normal(size=len(table.y))
        quiet = (table.noise < np.median(table.noise))[table.clients]
        for name, found in share.items():
            model = regressor(family=name).fit(table.x, table.y, clients=table.clients)
            ends = model.predict(table.x, table.clients, interval=0.9)
            inside = ((ends["new_lower"] <= new) & (new <= ends["new_upper"])).to_numpy()
            found.append((inside[quiet].mean(), inside[~quiet].mean()))
    for_quiet, for_noisy = np.mean(share[NAME], 0)
    assert 0.87 < for_quiet < 0.95 and 0.85 < for_noisy < 0.93
    for_quiet, for_noisy = np.mean(share["gaussian"], 0)
    assert for_quiet > 0.96 and for_noisy < 0.86


def test_known_clients_have_their_own_t_and_new_ones_that_of_the_population() -> None:
    """With so many rows that the coefficients are known; what is left is scipy's t, computed from the rows."""
    table = draw_table(0, clients=300, rows=12, shape=2.0, k=1)
    model = regressor(k=1, family=NAME, ridge=0.0).fit(table.x, table.y, clients=table.clients)
    first = np.arange(0, len(table.y), 12)
    mean = model.predict(table.x, table.clients)
    population = model._family.given(model._result.coefficients.nuisance, tensor(0.0), tensor(0.0))[:, 0].numpy()
    typical, shape = np.exp(population) * [model._target_scale**2, 1.0]
    sums = np.bincount(table.clients, (table.y - mean) ** 2)
    scale = np.sqrt((shape * typical + sums / 2) / (shape + 6))
    known = model.predict(table.x[first], table.clients[first], interval=0.9)
    wanted = scale * (stats.t.ppf(0.95, 2 * shape + 12) - stats.t.ppf(0.05, 2 * shape + 12))
    np.testing.assert_allclose(known["new_upper"] - known["new_lower"], wanted, rtol=0.03)
    np.testing.assert_allclose(model.client_dispersion_, scale**2 * (shape + 6) / (shape + 5), rtol=1e-6)
    new = model.predict(table.x[first], NEW, interval=0.9)
    wanted = np.sqrt(typical) * 2 * stats.t.ppf(0.95, 2 * shape)
    np.testing.assert_allclose(new["new_upper"] - new["new_lower"], wanted, rtol=0.05)


def test_unequal_noise_is_not_taken_for_another_canonical_model() -> None:
    for seed in (2, 5):
        table = draw_table(seed, clients=40, rows=15, spread=0.5, k=1)
        model = PopulationRegressor("auto", family=NAME, k_max=3, n_init=4, random_state=0)
        assert model.fit(table.x, table.y, clients=table.clients).k_ == 1


def test_clients_that_do_not_differ_are_like_one_another() -> None:
    table = draw_table(1, clients=40, rows=20, spread=0.0)
    own, common = (regressor(family=f).fit(table.x, table.y, clients=table.clients) for f in (NAME, "gaussian"))
    assert own.log_likelihood_ == pytest.approx(common.log_likelihood_, abs=1.5)
    assert own.dispersion_ == pytest.approx(common.dispersion_, rel=0.05)
    assert own.client_dispersion_.std() < 0.2 * own.dispersion_
    np.testing.assert_allclose(own.predict(table.x, table.clients), common.predict(table.x, table.clients), atol=0.1)


def test_units_of_the_target_do_not_matter() -> None:
    table = draw_table(0, clients=20, rows=10)
    one, other = (regressor(family=NAME).fit(table.x, f * table.y, clients=table.clients) for f in (1.0, 250.0))
    np.testing.assert_allclose(250.0**2 * one.client_dispersion_, other.client_dispersion_, rtol=1e-4)
    factors = pd.Series({"dispersion": 250.0**2, "spread of log noise": 1.0})
    rows = [m.conf_int().loc[""].loc[factors.index] for m in (one, other)]
    np.testing.assert_allclose(rows[0].mul(factors, axis=0), rows[1], rtol=1e-3)


# ---------------------------------------------------------------------- after the fit


def test_the_summary_and_the_dispersions_say_how_clients_differ() -> None:
    table = draw_table(0, clients=30, rows=15)
    model = regressor(family="gaussian by client").fit(table.x, table.y, clients=table.clients)
    text = str(model.summary())
    assert "in the median client" in text and "spread of log noise" in text
    assert model.client_dispersion_.index.tolist() == list(range(30))
    residual = next(line for line in text.splitlines() if line.startswith("residual"))
    assert float(residual.split()[1]) == pytest.approx(model.client_dispersion_.mean(), rel=1e-3)
    plain = regressor().fit(table.x, table.y, clients=table.clients)
    assert (plain.client_dispersion_ == plain.dispersion_).all()


def test_onboarded_clients_have_the_noise_of_their_rows() -> None:
    table = draw_table(0, clients=30, rows=15)
    model = regressor(family=NAME).fit(table.x, table.y, clients=table.clients)
    before = model.client_dispersion_
    some = table.clients < 3
    model.onboard(table.x[some], table.y[some], table.clients[some] + 100)
    after = model.client_dispersion_
    np.testing.assert_allclose(after.loc[before.index], before)
    np.testing.assert_allclose(after.loc[[100, 101, 102]], before.loc[[0, 1, 2]], rtol=0.01)
    ends = [model.predict(table.x[some], table.clients[some] + add, interval=0.9) for add in (0, 100)]
    np.testing.assert_allclose(*ends, atol=0.2)


def test_points_of_the_profile_solver_have_variances_too() -> None:
    table = draw_table(0, clients=20, rows=15)
    model = regressor(family=NAME, solver="profile").fit(table.x, table.y, clients=table.clients)
    assert model.converged_
    assert np.corrcoef(np.log(model.client_dispersion_), np.log(table.noise))[0, 1] > 0.8
    assert stats.kstest(model.residuals(table.x, table.y, table.clients, kind="quantile"), "norm").statistic < 0.06


def test_what_cannot_be_fitted_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    table = make_client_table()
    given = {"y": table.y, "clients": table.clients}
    with pytest.raises(SettingError, match=r"dense table, and X is sparse; use X.toarray\(\), or 'gaussian'"):
        regressor(family=NAME).fit(sp.csr_array(table.x), **given)
    with pytest.raises(SettingError, match="'federated' has no family 'heteroscedastic gaussian'.*another solver"):
        regressor(family=NAME, solver="federated").fit(table.x, **given)
    with pytest.raises(SettingError, match="has no link 'log'; use one of identity"):
        regressor(family=NAME, link="log").fit(table.x, **given)
    monkeypatch.setattr(gaussian_moments, "_MAX_MOMENTS", 100)
    with pytest.raises(SettingError, match="3 columns of 12 clients.*fewer columns, or 'gaussian'"):
        regressor(family=NAME).fit(table.x, **given)
