"""Families against scipy's distributions; likelihoods of clients against loops, densities and finite differences."""

import math

import numpy as np
import pytest
import torch
from scipy import special, stats
from torch import Tensor

from kit.tables import FAMILIES, draw_population, make_family, make_rows, to_double
from ppfl.glm.families import REGRESSIONS, family_name
from ppfl.glm.family import Family
from ppfl.glm.likelihood import Layout, Parameters, Residual
from ppfl.glm.marginal import Marginal
from ppfl.glm.moments import MomentLikelihood, fastest_form, given_other_rows
from ppfl.glm.nested import embedded
from ppfl.glm.regularization import Regularization
from ppfl.glm.rows import ChoiceDesign, RowLikelihood

K = 3
COUNTS = ("poisson", "negative binomial", "zero-inflated poisson", "zero-inflated negative binomial")
BY_SCIPY = (*FAMILIES, *COUNTS[1:])
MEANS = to_double([0.01, 0.3, 2.0, 9.0, 60.0])
LOG_MEANS = MEANS.log()


def nuisance_of(family: Family) -> Tensor:
    return to_double([-0.4, 0.3])[: len(family.nuisance)]


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
    given = LOG_MEANS.expand(5, -1)[..., None], counts[:5], nuisance
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


def test_distributions_of_numbers_are_scipys():
    mean, y = np.array([0.4, 3.0]), to_double([1.2])
    for name, nuisance, oracle in (
        ("gaussian", [np.log(1.8)], stats.norm(mean, np.sqrt(1.8))),
        ("gamma", [np.log(1.8)], stats.gamma(1 / 1.8, scale=mean * 1.8)),
    ):
        family, parameters = make_family(name), to_double(np.log(mean) if name == "gamma" else mean)[None, :, None]
        np.testing.assert_allclose(family.log_density(parameters, y, to_double(nuisance))[0], oracle.logpdf(1.2))
        np.testing.assert_allclose(family.cdf(y, parameters, to_double(nuisance))[0], oracle.cdf(1.2))
        np.testing.assert_allclose(family.variance(to_double(mean), to_double(nuisance)), oracle.var())


def test_families_are_found_by_the_names_that_other_packages_use():
    assert {family_name(name) for name in ("Negative-Binomial", "nb", "nbinom2")} == {"negative binomial"}
    assert family_name("zip") == "zero-inflated poisson"


def layout_of(rows: RowLikelihood, residual: Residual = "none", k: int = K) -> Layout:
    """Residual effects of the first column, which was centred, and of the intercept."""
    q, m = rows.varying.columns, rows.varying.outputs(rows.family.outputs)
    effects = {"none": (), "intercept": (q - 1,)}.get(residual, (0, q - 1))
    centres = (0.7, *[0.0] * (q - 1))
    return Layout(k, q, rows.shared.columns, m, len(rows.family.nuisance), residual, effects, centres, q - 1)


def parameters_for(layout: Layout) -> Parameters:
    return layout.unpack(np.random.default_rng(0).normal(size=layout.size) / 2)


def log_likelihoods(data, layout: Layout, at: Parameters, shares: Tensor) -> Tensor:
    return data.at(layout, at).log_likelihoods(shares)


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
    memberships, layout = draw_memberships(4, 6), layout_of(rows)
    at = parameters_for(layout)
    found, expected = log_likelihoods(rows, layout, at, memberships), np.zeros((4, 6))
    for row, client in enumerate(rows.client.tolist()):
        common = rows.shared.x[row].numpy() @ at.shared.numpy()
        eta = np.stack([rows.varying.x[row].numpy() @ theta.numpy() + common for theta in at.canonical])
        for g, c in enumerate(memberships[client].T.numpy()):
            if mix == "weights":
                mean = mean_by_numpy(name, c @ eta)
            else:
                mean = sum(share * mean_by_numpy(name, one) for share, one in zip(c, eta, strict=True))
            density = log_density_by_scipy(name, mean, float(rows.y[row]), at.nuisance.tolist())
            expected[client, g] += float(rows.weight[row]) * density
    np.testing.assert_allclose(found, expected, rtol=1e-9)
    torch.testing.assert_close(log_likelihoods(rows, layout, at, memberships[:1])[0], found[0])


def test_moments_have_the_likelihood_of_gaussian_rows():
    rows = make_rows(draw_population("gaussian", clients=6, rows=9), make_family("gaussian"), "weights", shared=["x0"])
    layout, moments, some = layout_of(rows), MomentLikelihood.of(rows), torch.tensor([1, 4, 5])
    at = parameters_for(layout)
    for c in (draw_memberships(1, 11), draw_memberships(6, 11)):
        found, expected = (log_likelihoods(data, layout, at, c) for data in (moments, rows))
        torch.testing.assert_close(found, expected)
    for data in (rows, moments):
        torch.testing.assert_close(log_likelihoods(data.subset(some), layout, at, c[some]), expected[some])


@pytest.mark.parametrize("residual", ["intercept", "diagonal", "full"])
def test_residual_effects_of_gaussian_targets_are_integrated_in_closed_form(residual):
    """y is normal with the covariance s^2 (I + Z L L' Z'), and other rows of a client are normal given these."""
    rows = make_rows(draw_population("gaussian", clients=5, rows=8), make_family("gaussian"), "weights", shared=["x1"])
    layout, moments = layout_of(rows, residual), MomentLikelihood.of(rows)
    at, c = parameters_for(layout), draw_memberships(5, 1)
    variance = torch.exp(at.nuisance[0])

    def log_density(y: Tensor, z: Tensor, x: Tensor, share: Tensor) -> Tensor:
        mean = z @ (at.canonical[..., 0].T @ share) + x @ at.shared[:, 0]
        covariance = variance * (torch.eye(len(y)) + z @ at.residual.T @ at.residual @ z.T)
        return torch.distributions.MultivariateNormal(mean, covariance).log_prob(y)

    found = log_likelihoods(moments, layout, at, c)[:, 0]
    for client in range(5):
        own = rows.client == client
        expected = log_density(rows.y[own], rows.varying.x[own], rows.shared.x[own], c[client, :, 0])
        torch.testing.assert_close(found[client], expected)
    is_test = torch.arange(40) % 3 == 0
    train, test = (MomentLikelihood.of(rows._replace(weight=part.double())) for part in (~is_test, is_test))
    both = log_likelihoods(train, layout, at, c) + given_other_rows(test, train, layout, at, 0.0).log_likelihoods(c)
    torch.testing.assert_close(both[:, 0], found)


def test_diagonal_residual_effects_are_independent_in_the_original_columns():
    """x = 5 + 2 s, where s is standardised: a slope u in x is a slope 2 u in s, and 5 u in the intercept."""
    layout = Layout(1, 2, residual="diagonal", effects=(0, 1), centres=(5 / 2, 0.0), intercept=1)
    at = layout.unpack(np.array([0.0, 0.0, 2 * 0.3, 0.4]))  # standard deviations 0.3 of the slope, 0.4 of the intercept
    change = to_double([[0.5, 0.0], [-2.5, 1.0]])  # from standardised coefficients to original ones
    found = change @ at.residual.T @ at.residual @ change.T
    torch.testing.assert_close(found, to_double([[0.09, 0.0], [0.0, 0.16]]))


@pytest.mark.parametrize("mix", ["weights", "predictions"])
def test_a_choice_is_a_softmax_over_the_available_alternatives(mix):
    x, available = np.random.default_rng(0).normal(size=(6, 3, 2)), np.ones((6, 3), dtype=bool)
    available[::2, 2] = False
    varying, none = to_double(x * available[..., None]), torch.zeros(6, 3, 0).double()
    designs = [ChoiceDesign(each, torch.from_numpy(available)) for each in (varying, none)]
    client, one = torch.tensor([0, 0, 0, 1, 1, 1]), torch.ones(6).double()
    rows = RowLikelihood(*designs, 0 * one, one, client, 2, make_family("multinomial"), mix)
    layout, atoms = layout_of(rows), draw_memberships(1, 5)
    at = parameters_for(layout)
    theta, c = at.canonical[..., 0].numpy(), atoms[0].numpy()

    def probabilities(tastes: np.ndarray) -> np.ndarray:
        """Of the first alternative, (rows, tastes)."""
        utility = np.exp(x @ tastes.T) * available[..., None]
        return utility[:, 0] / utility.sum(1)

    chances = probabilities(c.T @ theta) if mix == "weights" else probabilities(theta) @ c
    found = log_likelihoods(rows, layout, at, atoms)
    np.testing.assert_allclose(found, np.log(chances).reshape(2, 3, 5).sum(1), rtol=1e-9)

    assert_has_the_derivatives_of_differences(rows, layout)
    if mix == "weights":
        assert_has_the_derivatives_of_differences(rows, layout_of(rows, "diagonal", 2))


def assert_has_the_derivatives_of_differences(data, layout: Layout) -> None:
    """Gradient and Hessian, on points that stay."""
    at = np.random.default_rng(0).normal(size=layout.size) / 3
    objective = Marginal.of(data, layout, 16).adapted(at)
    sums, steps = objective.evaluate(at).sums, 1e-5 * np.eye(layout.size)
    assert sums.value == pytest.approx(objective.value(at), rel=1e-12)
    ends = [(objective.evaluate(at + step).sums, objective.evaluate(at - step).sums) for step in steps]
    gradient = [(right.value - left.value) / 2e-5 for right, left in ends]
    np.testing.assert_allclose(sums.gradient, gradient, rtol=1e-5, atol=1e-5)
    hessian = [(right.gradient - left.gradient) / 2e-5 for right, left in ends]
    np.testing.assert_allclose(sums.hessian, hessian, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", BY_SCIPY)
def test_the_marginal_has_the_derivatives_of_finite_differences(name, monkeypatch):
    """For both ways of mixing and residual effects, by Louis' formula, and the same with one client at a time."""
    for mix, residual, k in (("weights", "none", 3), ("predictions", "none", 2), ("weights", "full", 2)):
        if residual != "none" and name == "multinomial":
            continue  # several predictors have no residual effects
        rows = make_rows(draw_population(name, clients=5, rows=4), make_family(name), mix, shared=["x2"])
        layout = layout_of(rows, residual, k)
        for data in {id(data): data for data in (rows, fastest_form(rows))}.values():
            if data is not rows or residual == "none" or name != "gaussian":
                assert_has_the_derivatives_of_differences(data, layout)
        at = np.random.default_rng(0).normal(size=layout.size) / 3
        whole = Marginal.of(rows, layout, 16).adapted(at).evaluate(at).sums
        with monkeypatch.context() as patch:
            patch.setattr("ppfl.glm.rows.CHUNK_SIZE", 1)
            assert len(list(rows.chunks(16))) == 5
            in_parts = Marginal.of(rows, layout, 16).adapted(at).evaluate(at).sums
        assert in_parts.value == pytest.approx(whole.value, rel=1e-12)
        np.testing.assert_allclose(in_parts.gradient, whole.gradient, rtol=1e-10, atol=1e-10)
        np.testing.assert_allclose(in_parts.hessian, whole.hessian, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("k", [1, 2, 3])
def test_the_penalty_has_the_derivatives_of_autograd_and_does_not_change_in_a_split(k):
    layout, family = Layout(k, 3, 1, nuisance=1, residual="full", effects=(0, 2)), make_family("negative binomial")
    ones = torch.ones(1).double()
    penalty = Regularization(0.7, to_double([1, 1, 0]), ones, 1e7, family.nuisance_penalty, 0.6)
    at = np.random.default_rng(0).normal(size=layout.size)

    def value(vector: Tensor) -> Tensor:
        return penalty.value(layout, layout.unpack(vector))

    found, gradient, hessian = penalty.derivatives(layout, at)
    vector = torch.from_numpy(at)
    assert found == pytest.approx(float(value(vector)))
    np.testing.assert_allclose(gradient, torch.autograd.functional.jacobian(value, vector), atol=1e-12)
    np.testing.assert_allclose(hessian, torch.autograd.functional.hessian(value, vector), atol=1e-12)
    larger = layout._replace(k=k + 1)
    split = embedded(layout, at, larger, corner=k - 1)
    assert float(penalty.value(larger, larger.unpack(split))) == pytest.approx(found, abs=0.05)
