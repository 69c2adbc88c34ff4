"""Families against scipy's distributions and their own draws; likelihoods of clients against loops and closed forms."""

import math

import numpy as np
import pytest
import torch
from scipy import special, stats
from torch import Tensor

from kit.tables import FAMILIES, HETEROSCEDASTIC, draw_population, make_family, make_problem, make_rows, to_double
from ppfl.glm.designs import ChoiceDesign
from ppfl.glm.families import REGRESSIONS, Family, family_name
from ppfl.glm.gaussian_moments import GaussianMoments
from ppfl.glm.likelihoods import Coefficients
from ppfl.glm.sample_rows import ClientRows

K = 3
COUNTS = ("poisson", "negative binomial", "zero-inflated poisson", "zero-inflated negative binomial")
BY_SCIPY = (*FAMILIES, *COUNTS[1:])
WITH_HESSIAN = ("gaussian", HETEROSCEDASTIC, "poisson", "gamma", "bernoulli", "negative binomial")
MEANS = to_double([0.01, 0.3, 2.0, 9.0, 60.0])
LOG_MEANS = MEANS.log()


def nuisance_of(family: Family) -> Tensor:
    second = 1.5 if family.name == HETEROSCEDASTIC else 0.3  # with fewer degrees of freedom variances do not settle
    return to_double([-0.4, second])[: len(family.nuisance)]


def log_masses(family: Family, log_means: Tensor, counts: Tensor, nuisance: Tensor) -> Tensor:
    return family.log_density(log_means[None, :, None].expand(len(counts), -1, 1), counts, nuisance)


@pytest.mark.parametrize("inverse_size", [1e-3, 1 / 16.1, 1 / 15.9, 0.7, 30.0])
def test_negative_binomial_counts_have_scipys_probabilities_and_the_derivatives_of_autograd(inverse_size):
    counts, family = to_double([0, 1, 2, 7, 40, 3000]), make_family("negative binomial")
    nuisance, size = to_double([inverse_size]).log(), 1 / inverse_size
    oracle = stats.nbinom(size, size / (size + MEANS.numpy()))
    found = log_masses(family, LOG_MEANS, counts, nuisance)
    np.testing.assert_allclose(found, oracle.logpmf(counts[:, None]), rtol=1e-9, atol=1e-10)
    found = family.cdf(counts, LOG_MEANS[None, :, None], nuisance)
    np.testing.assert_allclose(found, oracle.cdf(counts[:, None]), rtol=1e-7, atol=1e-9)
    given = LOG_MEANS.expand(5, -1), counts[:5], nuisance
    by_formula, by_autograd = family.derivatives(*given), Family.derivatives(family, *given)
    for name in ("log", "slope", "curvature", "nuisance", "crosses", "seconds"):
        torch.testing.assert_close(getattr(by_formula, name), getattr(by_autograd, name), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("name", "log_extra"), [*[("negative binomial", log) for log in (-25.0, -200.0, -np.inf)], (COUNTS[2], -200.0)]
)
def test_without_overdispersion_or_extra_zeros_counts_are_poisson(name, log_extra):
    counts, family, poisson = to_double([0, 1, 5, 100, 5000]), make_family(name), make_family("poisson")
    nuisance, log_means = to_double([log_extra]).requires_grad_(), LOG_MEANS.clone().requires_grad_()
    found = log_masses(family, log_means, counts, nuisance)
    expected, distance = log_masses(poisson, LOG_MEANS, counts, to_double([])), math.exp(log_extra) * 5000**2
    torch.testing.assert_close(found.detach(), expected, rtol=1e-12, atol=1e-11 + distance)
    slopes = torch.autograd.grad(found.sum(), (nuisance, log_means))
    assert bool(slopes[0].isfinite().all())
    torch.testing.assert_close(slopes[1], (counts[:, None] - MEANS).sum(0), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", COUNTS)
def test_counts_have_the_right_moments_and_deviance_and_mix_their_means(name):
    family, counts = make_family(name), torch.arange(4000).double()
    nuisance, parameters = nuisance_of(family) - 1.0, LOG_MEANS[None, :, None].expand(4000, -1, 1)
    masses = log_masses(family, LOG_MEANS, counts, nuisance).exp()
    torch.testing.assert_close(masses.sum(0), torch.ones(5).double())
    mean = family.mean(parameters, nuisance)[0]
    torch.testing.assert_close((masses * counts[:, None]).sum(0), mean)
    variance = (masses * (counts[:, None] - mean).square()).sum(0)
    torch.testing.assert_close(variance, family.variance(mean, nuisance))
    torch.testing.assert_close(family.cdf(counts, parameters, nuisance), masses.cumsum(0), rtol=1e-9, atol=1e-11)
    y = to_double([0, 1, 4, 30])  # the deviance is twice the gain of a perfect prediction
    best = log_masses(family, torch.linspace(-30, 5, 20_000).double(), y, nuisance).amax(1)
    own = log_masses(family, to_double([0.5]), y, nuisance)[:, 0]
    found = family.deviance(family.mean(to_double([[[0.5]]] * 4), nuisance)[:, 0], y, nuisance)
    torch.testing.assert_close(found, 2 * (best - own), rtol=1e-5, atol=1e-5)
    c, logs = to_double([[[0.0, 0.3, 1.0], [1.0, 0.7, 0.0]]]), to_double([[[0.1], [2.0]], [[-1.0], [0.5]]])
    torch.testing.assert_close(family.mean(family.mix(c, logs), nuisance), family.mean(logs, nuisance) @ c[0])


@pytest.mark.parametrize("name", [*REGRESSIONS, "bernoulli", "multinomial"])
def test_draws_follow_the_mean_the_variance_and_the_distribution(name):
    family, count = make_family(name), 20_000
    family = family.with_dispersion(2.5) if name == "quasipoisson" else family
    nuisance = nuisance_of(family)
    eta = torch.linspace(-1.0, 2.0, 5 * family.outputs).double().reshape(1, 5, family.outputs)
    parameters = family.mean_parameters(eta)
    drawn = family.draw(parameters.expand(count, -1, -1), nuisance, np.random.default_rng(0))
    mean = family.mean(parameters, nuisance)[0]
    variance = family.variance(mean, nuisance)
    drawn_mean, drawn_variance = drawn.mean(0), drawn.var(0)
    if mean.ndim == 2:  # classes
        drawn_mean = torch.stack([(drawn == label).double().mean(0) for label in range(mean.shape[1])], 1)
        drawn_variance = drawn_mean * (1 - drawn_mean)
    assert bool(((drawn_mean - mean).abs() < 5 * (variance / count).sqrt()).all())
    torch.testing.assert_close(drawn_variance, variance, rtol=0.15, atol=0.0)
    # with ties broken at random, P(Y <= y) is uniform: the law that quantile residuals rest on
    low, high = (cdf(drawn[:, 3], parameters[:, 3:4], nuisance)[:, 0] for cdf in (family.cdf_below, family.cdf))
    uniform = low + (high - low) * torch.rand(count, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert stats.kstest(uniform.numpy(), "uniform").pvalue > 1e-3


def test_distributions_of_numbers_are_scipys():
    mean, y = np.array([0.4, 3.0]), to_double([1.2])
    for name, nuisance, oracle in (
        ("gaussian", [np.log(1.8)], stats.norm(mean, np.sqrt(1.8))),
        ("gamma", [np.log(1.8)], stats.gamma(1 / 1.8, scale=mean * 1.8)),
        (HETEROSCEDASTIC, [0.6, 0.9], stats.t(2 * np.exp(0.9), mean, np.exp(0.3))),  # one row of a new client
    ):
        family, parameters = make_family(name), to_double(np.log(mean) if name == "gamma" else mean)[None, :, None]
        np.testing.assert_allclose(family.log_density(parameters, y, to_double(nuisance))[0], oracle.logpdf(1.2))
        np.testing.assert_allclose(family.cdf(y, parameters, to_double(nuisance))[0], oracle.cdf(1.2))
        np.testing.assert_allclose(family.variance(to_double(mean), to_double(nuisance)), oracle.var())


def test_families_are_found_by_the_names_that_other_packages_use():
    assert {family_name(name) for name in ("Negative-Binomial", "nb", "nbinom2")} == {"negative binomial"}
    assert family_name("gaussian by client") == HETEROSCEDASTIC
    assert family_name("zip") == "zero-inflated poisson"


def coefficients_for(rows: ClientRows) -> Coefficients:
    g = torch.Generator().manual_seed(0)
    m = rows.varying.outputs(rows.family.outputs)
    canonical = torch.randn(K, rows.varying.columns, m, generator=g, dtype=torch.float64) / 2
    shared = torch.randn(rows.shared.columns, m, generator=g, dtype=torch.float64) / 2
    return Coefficients(canonical, shared, to_double([0.3, -0.7])[: len(rows.family.nuisance)])


def draw_memberships(clients: int, count: int) -> Tensor:
    """(clients, K, count), some of them at the faces of the simplex."""
    drawn = np.random.default_rng(0).dirichlet([0.3] * K, (clients, count))
    drawn[:, 0] = [0.0, *[1 / (K - 1)] * (K - 1)]
    return to_double(drawn.swapaxes(1, 2))


def log_density_by_scipy(name: str, mean: np.ndarray, y: float, nuisance: list[float]) -> float:
    if name.startswith("zero-inflated"):
        share = 1 / (1 + np.exp(-nuisance[-1]))
        counts = np.exp(log_density_by_scipy(name.removeprefix("zero-inflated "), mean, y, nuisance[:-1]))
        return np.log(share * (y == 0) + (1 - share) * counts)
    dispersion = float(np.exp(nuisance[0])) if nuisance else 1.0
    return {
        "negative binomial": lambda: stats.nbinom.logpmf(y, 1 / dispersion, 1 / (1 + dispersion * mean[0])),
        "gaussian": lambda: stats.norm.logpdf(y, mean[0], np.sqrt(dispersion)),
        "poisson": lambda: stats.poisson.logpmf(y, mean[0]),
        "gamma": lambda: stats.gamma.logpdf(y, 1 / dispersion, scale=mean[0] * dispersion),
    }.get(name, lambda: np.log(mean[int(y)]))()


def mean_by_numpy(name: str, eta: np.ndarray) -> np.ndarray:
    if name in REGRESSIONS:
        return eta if name == "gaussian" else np.exp(eta)
    return special.softmax(eta if name == "multinomial" else [0.0, eta[0]])


@pytest.mark.parametrize("mix", ["weights", "predictions"])
@pytest.mark.parametrize("name", BY_SCIPY)
def test_a_clients_log_likelihood_is_the_sum_of_its_rows(name, mix):
    drawn = draw_population(name, clients=4, rows=5)
    weight = np.random.default_rng(1).uniform(0.5, 2, len(drawn.y))
    rows = make_rows(drawn, make_family(name), mix, shared=["x1"], weight=weight)
    memberships, coefficients = draw_memberships(4, 6), coefficients_for(rows)
    found, expected = rows.client_log_likelihoods(coefficients, memberships), np.zeros((4, 6))
    for row, client in enumerate(rows.client.tolist()):
        common = rows.shared.x[row].numpy() @ coefficients.shared.numpy()
        eta = np.stack([rows.varying.x[row].numpy() @ theta.numpy() + common for theta in coefficients.canonical])
        for g, c in enumerate(memberships[client].T.numpy()):
            if mix == "weights":
                mean = mean_by_numpy(name, c @ eta)
            else:
                mean = sum(share * mean_by_numpy(name, one) for share, one in zip(c, eta, strict=True))
            density = log_density_by_scipy(name, mean, float(rows.y[row]), coefficients.nuisance.tolist())
            expected[client, g] += float(rows.weight[row]) * density
    np.testing.assert_allclose(found, expected, rtol=1e-9)
    torch.testing.assert_close(rows.client_log_likelihoods(coefficients, memberships[:1])[0], found[0])


def test_moments_have_the_likelihood_of_gaussian_rows():
    rows = make_rows(draw_population("gaussian", clients=6, rows=9), make_family("gaussian"), "weights", shared=["x0"])
    coefficients, moments, some = coefficients_for(rows), GaussianMoments.of(rows), torch.tensor([1, 4, 5])
    for c in (draw_memberships(1, 11), draw_memberships(6, 11)):
        found, expected = (data.client_log_likelihoods(coefficients, c) for data in (moments, rows))
        torch.testing.assert_close(found, expected)
    for data in (rows, moments):
        torch.testing.assert_close(data.subset(some).client_log_likelihoods(coefficients, c[some]), expected[some])


@pytest.mark.parametrize("mix", ["weights", "predictions"])
def test_a_choice_is_a_softmax_over_the_available_alternatives(mix):
    x, available = np.random.default_rng(0).normal(size=(6, 3, 2)), np.ones((6, 3), dtype=bool)
    available[::2, 2] = False
    varying, none = to_double(x * available[..., None]), torch.zeros(6, 3, 0).double()
    designs = (ChoiceDesign(each, torch.from_numpy(available)) for each in (varying, none))
    client, one = torch.tensor([0, 0, 0, 1, 1, 1]), torch.ones(6).double()
    rows = ClientRows(*designs, 0 * one, one, client, 2, make_family("multinomial"), mix)
    coefficients, atoms = coefficients_for(rows), draw_memberships(1, 5)
    theta, c = coefficients.canonical[..., 0].numpy(), atoms[0].numpy()

    def probabilities(tastes: np.ndarray) -> np.ndarray:
        """Of the first alternative, (rows, tastes)."""
        utility = np.exp(x @ tastes.T) * available[..., None]
        return utility[:, 0] / utility.sum(1)

    chances = probabilities(c.T @ theta) if mix == "weights" else probabilities(theta) @ c
    found = rows.client_log_likelihoods(coefficients, atoms)
    np.testing.assert_allclose(found, np.log(chances).reshape(2, 3, 5).sum(1), rtol=1e-9)


@pytest.mark.parametrize("name", [*BY_SCIPY, HETEROSCEDASTIC])
def test_the_marginal_has_the_derivatives_of_finite_differences(name, monkeypatch):
    """The gradient for both ways of mixing, Louis' formula for the Hessian, and the same with one client at a time."""
    for mix in ("weights", "predictions"):
        rows = make_rows(draw_population(name, clients=5, rows=4), make_family(name), mix, shared=["x2"])
        problem = make_problem(rows, K, spread=0.2)
        at = np.random.default_rng(0).normal(size=problem.shape.size) / 3
        points, steps = problem.marginal(K, 16), 1e-5 * np.eye(len(at))
        for objective in (points, points.adapted(at)):  # the same points for all clients, and points of their own
            value, gradient = objective(at)
            numerical = [(objective(at + step)[0] - objective(at - step)[0]) / 2e-5 for step in steps]
            np.testing.assert_allclose(gradient, numerical, rtol=1e-5, atol=1e-7)
        if mix == "weights" and name in WITH_HESSIAN:
            by_formula = objective.with_hessian(at)
            np.testing.assert_allclose(by_formula.gradient, gradient, atol=1e-10)
            numerical = [(objective(at + step)[1] - objective(at - step)[1]) / 2e-5 for step in steps]
            np.testing.assert_allclose(by_formula.hessian, numerical, rtol=1e-4, atol=1e-7)
        with monkeypatch.context() as patch:
            patch.setattr("ppfl.glm.sample_rows.CHUNK_SIZE", 1)
            assert len(list(rows.chunks(16))) == 5
            in_parts = problem.marginal(K, 16).adapted(at)(at)
        assert in_parts[0] == pytest.approx(value, rel=1e-12)
        np.testing.assert_allclose(in_parts[1], gradient, rtol=1e-10, atol=1e-13)
