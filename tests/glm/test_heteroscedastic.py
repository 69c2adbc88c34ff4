"""The density of clients with their own noise: integrals over variances, its limit and derivatives, held-out rows."""

from typing import Any

import numpy as np
import pytest
import torch
from scipy import integrate, stats

from kit.tables import draw_population, make_family, make_rows
from ppfl.glm.families import HeteroscedasticGaussianFamily
from ppfl.glm.families.heteroscedastic import derivatives_of_sums, log_density_of_sums
from ppfl.glm.gaussian_moments import GaussianMoments, HeteroscedasticMoments, fastest_form
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
