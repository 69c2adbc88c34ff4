"""Families against scipy's distributions and their own draws; likelihoods of clients against loops and closed forms."""

import math

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from kit.tables import FAMILIES, HETEROSCEDASTIC, draw_population, make_family, make_problem, make_rows, to_double
from ppfl.glm.designs import ChoiceDesign
from ppfl.glm.families import REGRESSIONS, Family, family_name, is_positive_only
from ppfl.glm.gaussian_moments import GaussianMoments
from ppfl.glm.likelihoods import Coefficients
from ppfl.glm.sample_rows import ClientRows

K = 3
COUNTS = ("poisson", "negative binomial", "zero-inflated poisson", "zero-inflated negative binomial")
BY_SCIPY = (*FAMILIES, *COUNTS[1:])
WITH_HESSIAN = ("gaussian", HETEROSCEDASTIC, "poisson", "gamma", "bernoulli", "negative binomial")
POISSON, NEGATIVE_BINOMIAL = make_family("poisson"), make_family("negative binomial")
MEANS = to_double([0.01, 0.3, 2.0, 9.0, 60.0])
NONE = to_double([])


def column(log_means: Tensor) -> Tensor:
    """Mean parameters (1, G, 1)."""
    return log_means[None, :, None]


def nuisance_of(family: Family) -> Tensor:
    second = 1.5 if family.name == HETEROSCEDASTIC else 0.3  # with fewer degrees of freedom variances do not settle
    return to_double([-0.4, second])[: len(family.nuisance)]


def log_masses(family: Family, log_means: Tensor, counts: Tensor, nuisance: Tensor) -> Tensor:
    """(counts, G)."""
    return family.log_density(column(log_means).expand(len(counts), -1, 1), counts, nuisance)


# ---------------------------------------------------------------------- families


def test_negative_binomial_counts_have_scipys_probabilities():
    counts, family = to_double([0, 1, 2, 7, 40, 3000]), NEGATIVE_BINOMIAL
    for inverse_size in (1e-3, 1 / 16.1, 1 / 15.9, 0.7, 30.0):
        nuisance, size = to_double([inverse_size]).log(), 1 / inverse_size
        oracle = stats.nbinom(size, size / (size + MEANS.numpy()))
        found = log_masses(family, MEANS.log(), counts, nuisance)
        np.testing.assert_allclose(found, oracle.logpmf(counts[:, None]), rtol=1e-9, atol=1e-10)
        below = family.cdf(counts, column(MEANS.log()), nuisance)
        np.testing.assert_allclose(below, oracle.cdf(counts[:, None]), rtol=1e-7, atol=1e-9)


def test_without_overdispersion_or_extra_zeros_counts_are_poisson():
    counts, family = to_double([0, 1, 5, 100, 5000]), NEGATIVE_BINOMIAL
    expected = log_masses(POISSON, MEANS.log(), counts, NONE)
    below = POISSON.cdf(counts[:4], column(MEANS.log()), NONE)
    for log_inverse in (-25.0, -40.0, -200.0, -np.inf):
        nuisance, log_means = to_double([log_inverse]).requires_grad_(), MEANS.log().requires_grad_()
        found = log_masses(family, log_means, counts, nuisance)
        distance = math.exp(log_inverse) * 5000**2
        torch.testing.assert_close(found.detach(), expected, rtol=1e-12, atol=1e-11 + distance)
        slopes = torch.autograd.grad(found.sum(), (nuisance, log_means))
        assert bool(slopes[0].isfinite().all())
        torch.testing.assert_close(slopes[1], (counts[:, None] - MEANS).sum(0), rtol=1e-6, atol=1e-6)
        near = family.cdf(counts[:4], column(MEANS.log()), nuisance.detach())
        torch.testing.assert_close(near, below, rtol=1e-7, atol=1e-9)
    no_extra_zeros = to_double([-200.0]).requires_grad_()
    found = log_masses(make_family("zero-inflated poisson"), MEANS.log(), counts, no_extra_zeros)
    torch.testing.assert_close(found.detach(), expected)
    assert abs(float(torch.autograd.grad(found.sum(), no_extra_zeros)[0])) < 1e-10


def test_formulas_for_the_derivatives_of_a_negative_binomial_are_those_of_autograd():
    counts, family, eta = to_double([0, 1, 5, 100]), NEGATIVE_BINOMIAL, MEANS.log().expand(4, -1)
    for log_inverse in (-8.0, -2.7725, -2.0, 0.5, 3.0):
        found = family.derivatives(eta, counts, to_double([log_inverse]))
        expected = Family.derivatives(family, eta, counts, to_double([log_inverse]))
        for name in ("log", "slope", "curvature", "nuisance", "crosses", "seconds"):
            torch.testing.assert_close(getattr(found, name), getattr(expected, name), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", COUNTS)
def test_probabilities_of_counts_sum_to_one_with_the_right_moments(name):
    family = make_family(name)
    nuisance, counts, log_means = nuisance_of(family) - 1.0, torch.arange(4000).double(), MEANS.log()
    masses = log_masses(family, log_means, counts, nuisance).exp()
    torch.testing.assert_close(masses.sum(0), torch.ones(5).double())
    mean = family.mean(column(log_means), nuisance)[0]
    torch.testing.assert_close((masses * counts[:, None]).sum(0), mean)
    variance = (masses * (counts[:, None] - mean).square()).sum(0)
    torch.testing.assert_close(variance, family.variance(mean, nuisance))
    parameters = column(log_means).expand(len(counts), -1, 1)
    torch.testing.assert_close(family.cdf(counts, parameters, nuisance), masses.cumsum(0), rtol=1e-9, atol=1e-11)
    below = family.cdf_below(counts, parameters, nuisance)
    torch.testing.assert_close(below, masses.cumsum(0) - masses, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", COUNTS)
def test_counts_have_their_deviance_and_mix_their_means(name):
    """The deviance is twice the gain of a perfect prediction."""
    family, y = make_family(name), to_double([0, 1, 4, 30])
    nuisance = nuisance_of(family)
    best = log_masses(family, torch.linspace(-30, 5, 20_000).double(), y, nuisance).amax(1)
    for log_mean in (-1.0, 0.5, 3.0):
        parameters = torch.full((len(y), 1, 1), log_mean, dtype=torch.float64)
        own = family.log_density(parameters, y, nuisance)[:, 0]
        found = family.deviance(family.mean(parameters, nuisance)[:, 0], y, nuisance)
        torch.testing.assert_close(found, 2 * (best - own), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(family.deviance(0 * y[:1], 0 * y[:1], nuisance), 0 * y[:1])
    c, logs = (
        to_double([[[0.0, 0.3, 1.0], [1.0, 0.7, 0.0]]]),
        to_double([[0.1, 2.0], [-1.0, 0.5], [0.0, 0.0]])[..., None],
    )
    torch.testing.assert_close(family.mean(family.mix(c, logs), nuisance), family.mean(logs, nuisance) @ c[0])


@pytest.mark.parametrize("name", [*REGRESSIONS, "bernoulli", "multinomial"])
def test_draws_follow_the_mean_the_variance_and_the_distribution(name):
    family, count = make_family(name), 20_000
    if name == "quasipoisson":
        family = family.with_dispersion(2.5)
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
    y = drawn[:, 3]
    low = family.cdf_below(y, parameters[:, 3:4], nuisance)[:, 0]
    high = family.cdf(y, parameters[:, 3:4], nuisance)[:, 0]
    assert bool((low <= high).all())
    uniform = low + (high - low) * torch.rand(count, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert stats.kstest(uniform.numpy(), "uniform").pvalue > 1e-3


def test_distributions_of_numbers_are_scipys():
    mean, y, dispersion = to_double([0.4, 3.0]), to_double([1.2]), 1.8
    nuisance = to_double([dispersion]).log()
    gamma = stats.gamma(1 / dispersion, scale=mean.numpy() * dispersion)
    for name, parameters, oracle in (
        ("gaussian", column(mean), stats.norm(mean.numpy(), np.sqrt(dispersion))),
        ("gamma", column(mean.log()), gamma),
    ):
        family = make_family(name)
        np.testing.assert_allclose(family.cdf(y, parameters, nuisance)[0], oracle.cdf(1.2))
        np.testing.assert_allclose(family.log_density(parameters, y, nuisance)[0], oracle.logpdf(1.2))
        np.testing.assert_allclose(family.variance(mean, nuisance), oracle.var())


def test_the_prior_of_nuisance_parameters_is_weak_and_smallest_in_the_middle():
    for name in COUNTS[1:]:
        family = make_family(name)
        middle, side, far = (
            float(family.nuisance_penalty(to_double([value] * len(family.nuisance)))) for value in (-2.0, 0.5, -40.0)
        )
        assert middle == 0
        assert 0 < side < 0.3  # far less than one row of data says
        assert far > 10


def test_families_are_found_by_the_names_that_other_packages_use():
    for name in ("negative_binomial", "Negative-Binomial", "nb", "nbinom", "nbinom2"):
        assert family_name(name) == "negative binomial" and is_positive_only(name)
    for name in ("heteroscedastic", "gaussian by client", "Heteroscedastic_Gaussian"):
        assert family_name(name) == HETEROSCEDASTIC and not is_positive_only(name)
    assert (family_name("zip"), make_family("zip").name) == ("zero-inflated poisson",) * 2
    assert not is_positive_only("unknown")


# ---------------------------------------------------------------------- likelihoods of clients


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
    if name == "gaussian":
        return eta
    if name in REGRESSIONS:
        return np.exp(eta)
    if name == "bernoulli":
        return np.array([1 / (1 + np.exp(eta[0])), 1 / (1 + np.exp(-eta[0]))])
    return np.exp(eta) / np.exp(eta).sum()


@pytest.mark.parametrize("mix", ["weights", "predictions"])
@pytest.mark.parametrize("name", BY_SCIPY)
def test_a_clients_log_likelihood_is_the_sum_of_its_rows(name, mix):
    drawn = draw_population(name, clients=4, rows=5)
    weight = np.random.default_rng(1).uniform(0.5, 2, len(drawn.y))
    rows = make_rows(drawn, make_family(name), mix, shared=["x1"], weight=weight)
    memberships, coefficients = draw_memberships(4, 6), coefficients_for(rows)
    found = rows.client_log_likelihoods(coefficients, memberships)
    expected = np.zeros((4, 6))
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
    torch.testing.assert_close(rows.client_log_likelihoods(coefficients, memberships[..., 2:3]), found[:, 2:3])
    torch.testing.assert_close(rows.client_log_likelihoods(coefficients, memberships[:1])[0], found[0])


def test_moments_have_the_likelihood_of_gaussian_rows():
    rows = make_rows(draw_population("gaussian", clients=6, rows=9), make_family("gaussian"), "weights", shared=["x0"])
    coefficients, moments = coefficients_for(rows), GaussianMoments.of(rows)
    for c in (draw_memberships(1, 11), draw_memberships(6, 11), draw_memberships(6, 1)):
        found = moments.client_log_likelihoods(coefficients, c)
        torch.testing.assert_close(found, rows.client_log_likelihoods(coefficients, c))
    some, own = torch.tensor([1, 4, 5]), draw_memberships(6, 4)
    for data in (rows, moments):
        found = data.subset(some).client_log_likelihoods(coefficients, own[some])
        torch.testing.assert_close(found, data.client_log_likelihoods(coefficients, own)[some])


@pytest.mark.parametrize("mix", ["weights", "predictions"])
def test_a_choice_is_a_softmax_over_the_available_alternatives(mix):
    x, available = np.random.default_rng(0).normal(size=(6, 3, 2)), np.ones((6, 3), dtype=bool)
    available[::2, 2] = False
    varying, none = to_double(x * available[..., None]), torch.zeros(6, 3, 0).double()
    designs = (ChoiceDesign(each, torch.from_numpy(available)) for each in (varying, none))
    client, one = torch.tensor([0, 0, 0, 1, 1, 1]), torch.ones(6).double()
    rows = ClientRows(*designs, 0 * one, one, client, 2, make_family("multinomial"), mix)
    coefficients, atoms = coefficients_for(rows), draw_memberships(1, 5)
    theta = coefficients.canonical[..., 0].numpy()

    def probability(taste: np.ndarray, row: int) -> float:
        utility = np.exp(x[row] @ taste) * available[row]
        return float(utility[0] / utility.sum())

    found = rows.client_log_likelihoods(coefficients, atoms)
    for at, c in enumerate(atoms[0].T.numpy()):
        if mix == "weights":
            chances = [probability(c @ theta, row) for row in range(6)]
        else:
            chances = [sum(s * probability(t, row) for s, t in zip(c, theta, strict=True)) for row in range(6)]
        np.testing.assert_allclose(found[:, at], np.log(chances).reshape(2, 3).sum(1), rtol=1e-9)


@pytest.mark.parametrize("name", [*BY_SCIPY, HETEROSCEDASTIC])
def test_the_marginal_has_the_derivatives_of_finite_differences(name):
    """The gradient for both ways of mixing, and Louis' formula for the Hessian where a family has it."""
    for mix in ("weights", "predictions"):
        rows = make_rows(draw_population(name, clients=5, rows=4), make_family(name), mix, shared=["x2"])
        objective = make_problem(rows, K, spread=0.2).marginal(K, 16)
        at = np.random.default_rng(0).normal(size=objective.shape.size) / 3
        objective, steps = objective.adapted(at), 1e-5 * np.eye(len(at))
        value, gradient = objective(at)
        numerical = [(objective(at + step)[0] - objective(at - step)[0]) / 2e-5 for step in steps]
        np.testing.assert_allclose(gradient, numerical, rtol=1e-5, atol=1e-7)
        if mix == "weights" and name in WITH_HESSIAN:
            by_formula = objective.with_hessian(at)
            assert by_formula.value == pytest.approx(value, rel=1e-12)
            np.testing.assert_allclose(by_formula.gradient, gradient, atol=1e-10)
            numerical = [(objective(at + step)[1] - objective(at - step)[1]) / 2e-5 for step in steps]
            np.testing.assert_allclose(by_formula.hessian, numerical, rtol=1e-4, atol=1e-7)


def test_chunks_give_the_same_objective(monkeypatch):
    rows = make_rows(draw_population("poisson", clients=7, rows=5), make_family("poisson"), "weights")
    problem = make_problem(rows, K)
    at = np.random.default_rng(0).normal(size=problem.shape.size) / 3
    whole = problem.marginal(K, 16).adapted(at)
    monkeypatch.setattr("ppfl.glm.sample_rows.CHUNK_SIZE", 16 * 2 * 15)  # few clients at a time
    assert len(list(rows.chunks(16))) > 2
    parts = problem.marginal(K, 16).adapted(at)
    assert parts(at)[0] == pytest.approx(whole(at)[0], rel=1e-12)
    np.testing.assert_allclose(parts(at)[1], whole(at)[1], rtol=1e-10, atol=1e-14)
