"""Families, compared with scipy's distributions, with each other, and with what they draw."""

import math

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from kit.tables import make_family
from ppfl.core.errors import DataError, SettingError
from ppfl.glm.families import (
    REGRESSIONS,
    Family,
    HeteroscedasticGaussianFamily,
    NegativeBinomialFamily,
    PoissonFamily,
    QuasiPoissonFamily,
    ZeroInflatedPoissonFamily,
    family_name,
    is_positive_only,
    regression_family,
)
from ppfl.glm.families.negative_binomial import log_rising_ratio

COUNTS = ("poisson", "negative binomial", "zero-inflated poisson", "zero-inflated negative binomial")
ALL = (*REGRESSIONS, "bernoulli", "multinomial")
MEANS = torch.tensor([0.01, 0.3, 2.0, 9.0, 60.0], dtype=torch.float64)
NONE = torch.zeros(0, dtype=torch.float64)


def column(log_means: Tensor) -> Tensor:
    """Mean parameters (1, G, 1)."""
    return log_means[None, :, None]


def nuisance_of(family: Family) -> Tensor:
    if isinstance(family, HeteroscedasticGaussianFamily):
        return torch.tensor([-0.4, 1.5], dtype=torch.float64)  # with fewer degrees of freedom variances do not settle
    return torch.tensor([-0.4, 0.3], dtype=torch.float64)[: len(family.nuisance)]


def parameters_of(family: Family) -> Tensor:
    """Mean parameters (1, G, p) for a few predictors."""
    eta = torch.linspace(-1.0, 2.0, 5 * family.outputs, dtype=torch.float64).reshape(1, 5, family.outputs)
    return family.mean_parameters(eta)


def log_masses(family: Family, log_means: Tensor, counts: Tensor, nuisance: Tensor) -> Tensor:
    """(counts, G)."""
    return family.log_density(column(log_means).expand(len(counts), -1, 1), counts, nuisance)


@pytest.mark.parametrize("inverse_size", [1e-3, 1 / 16.1, 1 / 15.9, 0.7, 30.0])
def test_negative_binomial_counts_have_scipys_probabilities(inverse_size: float) -> None:
    counts = torch.tensor([0, 1, 2, 7, 40, 3000], dtype=torch.float64)
    nuisance = torch.tensor([inverse_size], dtype=torch.float64).log()
    found = log_masses(NegativeBinomialFamily(), MEANS.log(), counts, nuisance)
    size = 1 / inverse_size
    expected = stats.nbinom.logpmf(counts.numpy()[:, None], size, size / (size + MEANS.numpy()))
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-9, atol=1e-10)
    family = NegativeBinomialFamily()
    below = stats.nbinom.cdf(counts.numpy()[:, None], size, size / (size + MEANS.numpy()))
    np.testing.assert_allclose(family.cdf(counts, column(MEANS.log()), nuisance).numpy(), below, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("size", [0.01, 15.9, 16.1, 1e4, 1e9, 1e15])
def test_the_rising_product_of_sizes_is_exact_for_all_sizes(size: float) -> None:
    """scipy's differences of lgamma have an error of 1e-4 at a size of 1e8."""
    counts = torch.tensor([0, 1, 2, 9, 400], dtype=torch.float64)
    exact = [math.fsum(math.log1p(j / size) for j in range(int(y))) for y in counts.tolist()]
    found = log_rising_ratio(counts, -torch.tensor(size, dtype=torch.float64).log())
    np.testing.assert_allclose(found.numpy(), exact, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("log_inverse", [-25.0, -40.0, -200.0, -np.inf])
def test_without_overdispersion_a_negative_binomial_is_a_poisson(log_inverse: float) -> None:
    counts = torch.tensor([0, 1, 5, 100, 5000], dtype=torch.float64)
    nuisance = torch.tensor([log_inverse], dtype=torch.float64, requires_grad=True)
    log_means = MEANS.log().requires_grad_()
    found = log_masses(NegativeBinomialFamily(), log_means, counts, nuisance)
    expected = log_masses(PoissonFamily(), MEANS.log(), counts, NONE)
    distance = float(nuisance.detach().exp()) * 5000**2
    torch.testing.assert_close(found.detach(), expected, rtol=1e-12, atol=1e-11 + distance)
    slopes = torch.autograd.grad(found.sum(), (nuisance, log_means))
    assert all(bool(slope.isfinite().all()) for slope in slopes)
    torch.testing.assert_close(slopes[1], (counts[:, None] - MEANS).sum(0), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(
        NegativeBinomialFamily().cdf(counts, column(MEANS.log()), nuisance),
        PoissonFamily().cdf(counts, column(MEANS.log()), NONE), rtol=1e-7, atol=1e-9,
    )  # fmt: skip


@pytest.mark.parametrize("log_inverse", [-8.0, -2.0, 0.5, 3.0])
def test_formulas_for_the_derivatives_of_a_negative_binomial_are_right(log_inverse: float) -> None:
    counts, nuisance = torch.tensor([0, 1, 5, 100], dtype=torch.float64), torch.tensor([log_inverse]).double()
    family, eta = NegativeBinomialFamily(), MEANS.log().expand(4, -1)
    found, expected = family.derivatives(eta, counts, nuisance), Family.derivatives(family, eta, counts, nuisance)
    for name in ("log", "slope", "curvature"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(found.nuisance[0], expected.nuisance[0], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(found.crosses[0], expected.crosses[0], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(found.seconds[0][0], expected.seconds[0][0], rtol=1e-9, atol=1e-9)


def test_the_log_density_falls_smoothly_to_the_poisson_one() -> None:
    """No jump where one formula takes over from another, and the slope is that of finite differences."""
    counts = torch.tensor([0, 3, 50], dtype=torch.float64)
    at = torch.linspace(-30, 3, 2000, dtype=torch.float64)
    values = torch.stack([log_masses(NegativeBinomialFamily(), MEANS[2:3].log(), counts, v[None])[:, 0] for v in at])
    assert float(values.diff(dim=0).diff(dim=0).abs().max()) < 0.02
    nuisance = torch.tensor([-2.7725], dtype=torch.float64, requires_grad=True)  # size 16
    assert torch.autograd.gradcheck(lambda v: log_masses(NegativeBinomialFamily(), MEANS.log(), counts, v), (nuisance,))


@pytest.mark.parametrize("name", COUNTS)
def test_probabilities_of_counts_sum_to_one_with_the_right_moments(name: str) -> None:
    family = regression_family(name, None)
    nuisance = nuisance_of(family) - 1.0
    counts, log_means = torch.arange(4000, dtype=torch.float64), MEANS.log()
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
def test_the_deviance_of_counts_is_twice_the_gain_of_a_perfect_prediction(name: str) -> None:
    family = regression_family(name, None)
    nuisance = nuisance_of(family)
    y = torch.tensor([0, 1, 4, 30], dtype=torch.float64)
    fine = torch.linspace(-30, 5, 20_000, dtype=torch.float64)
    best = log_masses(family, fine, y, nuisance).amax(1)
    for log_mean in (-1.0, 0.5, 3.0):
        parameters = torch.full((len(y), 1, 1), log_mean, dtype=torch.float64)
        own = family.log_density(parameters, y, nuisance)[:, 0]
        found = family.deviance(family.mean(parameters, nuisance)[:, 0], y, nuisance)
        torch.testing.assert_close(found, 2 * (best - own), rtol=1e-5, atol=1e-5)
    perfect = family.deviance(torch.zeros(3).double(), torch.zeros(3).double(), nuisance)
    torch.testing.assert_close(perfect, torch.zeros(3).double())


@pytest.mark.parametrize("name", ALL)
def test_draws_follow_the_mean_the_variance_and_the_distribution(name: str) -> None:
    family, count = make_family(name), 20_000
    if isinstance(family, QuasiPoissonFamily):
        family = family.with_dispersion(2.5)
    nuisance, parameters = nuisance_of(family), parameters_of(family)
    many = parameters.expand(count, -1, -1)
    drawn = family.draw(many, nuisance, np.random.default_rng(0))
    mean = family.mean(parameters, nuisance)[0]
    variance = family.variance(mean, nuisance)
    if mean.ndim == 2:  # classes
        drawn_mean = torch.stack([(drawn == label).double().mean(0) for label in range(mean.shape[1])], 1)
        drawn_variance = drawn_mean * (1 - drawn_mean)
    else:
        drawn_mean, drawn_variance = drawn.mean(0), drawn.var(0)
    error = (variance / count).sqrt()
    assert bool(((drawn_mean - mean).abs() < 5 * error).all())
    torch.testing.assert_close(drawn_variance, variance, rtol=0.15, atol=0.0)
    # with ties broken at random, P(Y <= y) is uniform: the law that quantile residuals rest on
    y = drawn[:, 3]
    low = family.cdf_below(y, parameters[:, 3:4], nuisance)[:, 0]
    high = family.cdf(y, parameters[:, 3:4], nuisance)[:, 0]
    assert bool((low <= high).all())
    uniform = low + (high - low) * torch.rand(count, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert stats.kstest(uniform.numpy(), "uniform").pvalue > 1e-3


@pytest.mark.parametrize(("name", "mean", "y"), [("gaussian", [0.5, -2.0], 1.2), ("gamma", [0.4, 3.0], 1.2)])
def test_distributions_of_numbers_are_scipys(name: str, mean: list[float], y: float) -> None:
    family = regression_family(name, None)
    nuisance = torch.tensor([0.6], dtype=torch.float64)
    dispersion = float(np.exp(0.6))
    parameters = torch.tensor(mean, dtype=torch.float64)[None, :, None]
    parameters = parameters if name == "gaussian" else parameters.log()
    oracle = (
        stats.norm(mean, np.sqrt(dispersion))
        if name == "gaussian"
        else stats.gamma(1 / dispersion, scale=np.array(mean) * dispersion)
    )
    target = torch.tensor([y], dtype=torch.float64)
    np.testing.assert_allclose(family.cdf(target, parameters, nuisance)[0].numpy(), oracle.cdf(y))
    np.testing.assert_allclose(family.log_density(parameters, target, nuisance)[0].numpy(), oracle.logpdf(y))
    np.testing.assert_allclose(family.variance(torch.tensor(mean).double(), nuisance).numpy(), oracle.var())


def test_counts_without_extra_zeros_are_the_plain_ones() -> None:
    counts = torch.tensor([0, 1, 5], dtype=torch.float64)
    nuisance = torch.tensor([-200.0], dtype=torch.float64, requires_grad=True)
    found = log_masses(ZeroInflatedPoissonFamily(), MEANS.log(), counts, nuisance)
    torch.testing.assert_close(found, log_masses(PoissonFamily(), MEANS.log(), counts, NONE))
    (slope,) = torch.autograd.grad(found.sum(), nuisance)
    assert abs(float(slope[0])) < 1e-10


@pytest.mark.parametrize("name", COUNTS)
def test_mixed_predictions_of_counts_mix_their_means(name: str) -> None:
    family, c = regression_family(name, None), torch.tensor([[[0.0, 0.3, 0.5, 1.0], [1.0, 0.7, 0.5, 0.0]]]).double()
    nuisance = nuisance_of(family)
    logs = torch.tensor([[0.1, 2.0], [-1.0, 0.5], [0.0, 0.0]], dtype=torch.float64)[..., None]
    mixed = family.mean(family.mix(c, logs), nuisance)
    expected = family.mean(logs, nuisance) @ c[0]
    torch.testing.assert_close(mixed, expected)


@pytest.mark.parametrize("name", ["negative binomial", "zero-inflated poisson", "zero-inflated negative binomial"])
def test_the_prior_of_nuisance_parameters_is_weak_and_smallest_in_the_middle(name: str) -> None:
    family = regression_family(name, None)

    def penalty(value: float) -> float:
        return float(family.nuisance_penalty(torch.full((len(family.nuisance),), value, dtype=torch.float64)))

    assert penalty(-2.0) == 0
    assert 0 < penalty(0.5) < 0.3  # far less than one row of data says
    assert penalty(-40.0) > 10
    assert float(PoissonFamily().nuisance_penalty(NONE)) == 0


def test_families_are_found_by_the_names_that_other_packages_use() -> None:
    for name in ("negative_binomial", "Negative-Binomial", "nb", "nbinom", "nbinom2"):
        assert family_name(name) == "negative binomial"
        assert is_positive_only(name)
    assert isinstance(regression_family("zip", "sqrt"), ZeroInflatedPoissonFamily)
    assert not is_positive_only("gaussian")
    assert not is_positive_only("unknown")
    for name in ("heteroscedastic", "gaussian by client", "Heteroscedastic_Gaussian"):
        assert family_name(name) == "heteroscedastic gaussian"
        assert not is_positive_only(name)
    with pytest.raises(SettingError, match="one of gaussian, poisson, gamma, negative binomial"):
        regression_family("weibull", None)
    with pytest.raises(SettingError, match="PopulationClassifier"):
        regression_family("quasibinomial", None)


@pytest.mark.parametrize("name", [*COUNTS, "quasipoisson"])
def test_counts_that_are_none_are_refused_with_the_name_of_the_family(name: str) -> None:
    with pytest.raises(DataError, match=f"{name}.*not all are whole"):
        regression_family(name, None).check(torch.tensor([0.5, 1.0]))
    with pytest.raises(DataError, match="smallest is -2"):
        regression_family(name, None).check(torch.tensor([-2.0, 1.0]))
