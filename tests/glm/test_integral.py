"""The integral over memberships, against independent integrations and known moments."""

import math

import numpy as np
import pytest
import torch
from scipy import integrate, special, stats

from kit.tables import draw_population, make_family, make_problem, make_rows, to_double
from ppfl.glm.designs import DenseDesign
from ppfl.glm.gaussian_moments import fastest_form
from ppfl.glm.likelihoods import Coefficients
from ppfl.glm.proposals import Proposals, memberships_of
from ppfl.glm.solvers.adaptation import adapt_proposals, draw_sample
from ppfl.glm.solvers.integral import client_log_integrals, marginal_log_likelihood
from ppfl.glm.solvers.parameters import log_concentration
from ppfl.glm.solvers.split import split_corner
from ppfl.glm.stick_breaking import StickBreaking


def make_data(name: str, k: int, clients: int, rows: int):
    table = make_rows(draw_population(name, clients=clients, rows=rows), make_family(name), "weights")
    canonical = to_double(np.random.default_rng(0).normal(size=(k, table.varying.columns, 1)))
    nuisance = torch.zeros(len(table.family.nuisance)).double()
    return table, Coefficients(canonical, torch.zeros(0, 1).double(), nuisance)


@pytest.mark.parametrize("alpha", [[0.2, 0.2], [1.0, 3.0, 0.5], [0.1, 0.4, 0.4, 2.0]])
def test_normal_scores_give_the_population(alpha):
    """Means and variances of the memberships of standard normal scores are those of the Dirichlet distribution."""
    total, share = sum(alpha), np.array(alpha) / sum(alpha)
    sample = draw_sample(Proposals.prior(16, len(alpha)), StickBreaking.of(to_double(alpha)), torch.arange(16), 512)
    weight, c = sample.log_weight.exp()[:, None] / 16, sample.memberships
    mean = (weight * c).sum((0, 2))
    np.testing.assert_allclose(mean, share, atol=2e-3)
    variance = (weight * (c - mean[:, None]).square()).sum((0, 2))
    np.testing.assert_allclose(variance, share * (1 - share) / (total + 1), rtol=0.02)
    np.testing.assert_allclose((weight * sample.logs).sum((0, 2)), special.psi(alpha) - special.psi(total), rtol=0.02)


@pytest.mark.parametrize("alpha", [[0.05, 0.1], [5.0, 9.0, 0.5], [0.1, 0.4, 0.4, 2.0]])
def test_sticks_are_quantiles_of_beta_distributions(alpha):
    """Against scipy, between the knots too: the first membership is beta distributed."""
    scores = to_double(np.linspace(-4, 4, 333))
    expected = stats.beta.ppf(stats.norm.cdf(scores.numpy()), alpha[0], sum(alpha[1:]))
    known = expected > 1e-290
    for knots, error in ((513, 5e-3), (16385, 5e-6)):
        found = StickBreaking.of(to_double(alpha), knots).log_memberships(scores.expand(1, len(alpha) - 1, -1))[0, 0]
        np.testing.assert_allclose(found.numpy()[known], np.log(expected[known]), rtol=1e-5, atol=error)


def test_grids_of_clients_are_shifted_so_that_their_errors_cancel():
    """A coarse grid is wrong by much more for one client than on average over all of them."""
    data, coefficients = make_data("gaussian", 3, 400, 10)
    moments, breaking = fastest_form(data), StickBreaking.of(to_double([0.4, 0.4, 0.4]))
    proposals = adapt_proposals(moments, coefficients, breaking, torch.arange(400))

    def log_integrals(count: int) -> torch.Tensor:
        draw = proposals.regular_grid(count, torch.arange(400))
        logs = moments.client_log_likelihoods(coefficients, memberships_of(breaking.log_memberships(draw.scores)))
        return torch.logsumexp(logs + draw.log_weight, 1)

    errors = log_integrals(121) - log_integrals(3600)
    assert float(errors.square().mean().sqrt()) < 0.05
    assert float(errors.mean().abs()) < 0.005


@pytest.mark.parametrize(("name", "rows"), [("gaussian", 3), ("bernoulli", 40), ("poisson", 3), ("poisson", 40)])
def test_two_canonical_models_are_integrated_like_scipy_does(name, rows):
    table, coefficients = make_data(name, 2, clients=2, rows=rows)
    value, error = client_log_integrals(fastest_form(table), coefficients, to_double([0.4, 0.7]))

    def log_likelihoods(first: np.ndarray) -> np.ndarray:
        return table.client_log_likelihoods(coefficients, to_double([[first, 1 - first]])).numpy()

    top = log_likelihoods(np.linspace(0, 1, 201)).max(1)

    def density(u: float, client: int) -> float:
        return math.exp(log_likelihoods(stats.beta.ppf([u], 0.4, 0.7))[client, 0] - top[client])

    for client in range(2):
        parts = [integrate.quad(density, a, a + 0.05, client, limit=200, epsabs=1e-7)[0] for a in np.arange(20) / 20]
        expected = math.log(sum(parts)) + top[client]
        assert float(value[client]) == pytest.approx(expected, abs=2e-3 + 3 * float(error[client]))


@pytest.mark.parametrize(("k", "rows"), [(3, 60), (4, 5)])
def test_more_canonical_models_are_integrated_like_sums_over_the_population(k, rows):
    table, coefficients = make_data("gaussian", k, clients=5, rows=rows)
    data, alpha, random = fastest_form(table), np.full(k, 0.5), np.random.default_rng(1)
    value, error = client_log_integrals(data, coefficients, to_double(alpha))
    draws = [to_double(random.dirichlet(alpha, 100_000).T)[None] for _ in range(4)]
    logs = torch.cat([data.client_log_likelihoods(coefficients, c) for c in draws], 1)
    expected = torch.logsumexp(logs, 1) - math.log(logs.shape[1])
    spread = (torch.logsumexp(2 * logs, 1) - 2 * torch.logsumexp(logs, 1)).exp().sqrt()  # standard error of the log
    assert float(((value - expected).abs() / (spread + error + 2e-3)).max()) < 4


def test_a_model_with_one_corner_split_has_the_same_likelihood():
    """More canonical models than varying coefficients: some directions of the simplex say nothing about the data."""
    table, coefficients = make_data("gaussian", 3, clients=30, rows=30)
    coefficients = coefficients._replace(canonical=coefficients.canonical[:, :2])
    table = table._replace(varying=DenseDesign(table.varying.x[:, :2]))
    problem, alpha = make_problem(table, 3, ridge=1.0), to_double([0.5, 0.8, 0.4])
    vector = split_corner(problem.shape, problem.shape.pack(coefficients, log_concentration(alpha)), 1)
    larger, _ = problem.with_k(4).shape.unpack(torch.from_numpy(vector))
    three = marginal_log_likelihood(problem.data, coefficients, alpha)
    four = marginal_log_likelihood(problem.data, larger, to_double([0.5, 0.4, 0.4, 0.4]))
    assert max(three.error, four.error, abs(four.value - three.value)) < 0.1
