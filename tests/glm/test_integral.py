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
    """Rows of clients, and canonical models drawn at random."""
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
    logs = (weight * sample.logs).sum((0, 2))
    np.testing.assert_allclose(logs, special.digamma(alpha) - special.digamma(total), rtol=0.02)


@pytest.mark.parametrize("alpha", [[0.05, 0.1], [5.0, 9.0, 0.5], [0.1, 0.4, 0.4, 2.0]])
def test_sticks_are_quantiles_of_beta_distributions(alpha):
    """Against scipy, between the knots too: the first membership is beta distributed."""
    scores = to_double(np.linspace(-4, 4, 333))
    expected = stats.beta.ppf(stats.norm.cdf(scores.numpy()), alpha[0], sum(alpha[1:]))
    known = expected > 1e-290
    for knots, error in ((513, 5e-3), (16385, 5e-6)):
        breaking = StickBreaking.of(to_double(alpha), knots)
        found = breaking.log_memberships(scores.expand(1, len(alpha) - 1, -1))[0, 0]
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

    exact, fine = log_integrals(3600), log_integrals(121)
    assert float((log_integrals(2500) - exact).abs().max()) < 0.01
    assert float((fine - exact).square().mean().sqrt()) < 0.05
    assert float((fine - exact).mean().abs()) < 0.005


def test_the_same_points_serve_for_another_alpha():
    other = to_double([0.5, 0.8, 0.4])
    sample = draw_sample(Proposals.prior(16, 3), StickBreaking.of(to_double([0.4, 0.6, 0.5])), torch.arange(16), 512)
    weight = sample.log_weights(other).exp() / 16
    assert float(weight.sum()) == pytest.approx(1, abs=0.01)
    np.testing.assert_allclose((weight[:, None] * sample.memberships).sum((0, 2)), other / other.sum(), atol=0.01)


@pytest.mark.parametrize(("name", "rows"), [("gaussian", 3), ("bernoulli", 40), ("poisson", 3), ("poisson", 40)])
def test_two_canonical_models_are_integrated_like_scipy_does(name, rows):
    table, coefficients = make_data(name, 2, clients=2, rows=rows)
    alpha = np.array([0.4, 0.7])
    value, error = client_log_integrals(fastest_form(table), coefficients, to_double(alpha))
    for client in range(2):
        own = table.subset(torch.tensor([client]))

        def log_likelihoods(first: np.ndarray, own=own) -> np.ndarray:
            c = to_double([[first, 1 - first]])
            return own.client_log_likelihoods(coefficients, c)[0].numpy()

        top = log_likelihoods(np.linspace(0, 1, 201)).max()

        def density(u: float, top=top, log_likelihoods=log_likelihoods) -> float:
            return math.exp(log_likelihoods(np.atleast_1d(stats.beta.ppf(u, *alpha)))[0] - top)

        parts = [integrate.quad(density, a, a + 0.05, limit=200, epsabs=1e-7)[0] for a in np.arange(20) / 20]
        assert float(value[client]) == pytest.approx(math.log(sum(parts)) + top, abs=2e-3 + 3 * float(error[client]))


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
    assert max(three.error, four.error) < 0.1
    assert four.value == pytest.approx(three.value, abs=0.1)
    # and the points of the solver are good enough to see it
    rough = problem.marginal(4).adapted(vector).log_likelihood(vector)
    assert rough == pytest.approx(three.value, abs=1.0)


def test_points_follow_a_client_that_knows_its_membership():
    """Most points are within a few deviations of the membership, and none of the mass is lost."""
    table, coefficients = make_data("gaussian", 3, clients=6, rows=400)
    data, breaking = fastest_form(table), StickBreaking.of(to_double([0.5, 0.5, 0.5]))
    draw = adapt_proposals(data, coefficients, breaking, torch.arange(6)).draw(256, torch.arange(6), 7)
    logs = data.client_log_likelihoods(coefficients, memberships_of(breaking.log_memberships(draw.scores)))
    weights = torch.softmax(logs + draw.log_weight, 1)
    assert float((1 / weights.square().sum(1)).min()) > 20
