"""The integral over memberships, against independent integrations and known moments."""

import math

import numpy as np
import pytest
import torch
from scipy import integrate, special, stats

from kit.tables import draw_population, make_family, make_rows, to_double
from ppfl.glm.likelihood import Layout, Parameters, log_concentration
from ppfl.glm.marginal import Marginal
from ppfl.glm.moments import fastest_form
from ppfl.glm.points import LatentPoints, Proposals
from ppfl.glm.rows import RowLikelihood
from ppfl.glm.stick_breaking import StickBreaking


def make_data(name: str, k: int, clients: int, rows: int, alpha) -> tuple[RowLikelihood, Layout, Parameters]:
    table = make_rows(draw_population(name, clients=clients, rows=rows), make_family(name), "weights")
    layout = Layout(k, table.varying.columns, nuisance=len(table.family.nuisance))
    canonical = to_double(np.random.default_rng(0).normal(size=(k, layout.varying, 1)))
    none = torch.zeros(0, layout.varying).double()
    nuisance = torch.zeros(layout.nuisance).double()
    at = Parameters(canonical, torch.zeros(0, 1).double(), nuisance, none, log_concentration(to_double(alpha)))
    return table, layout, at


def log_integrals(data, layout: Layout, at: Parameters, count: int) -> torch.Tensor:
    vector = layout.pack(at)
    return Marginal.of(data, layout, count).adapted(vector).log_integrals(vector)


@pytest.mark.parametrize("alpha", [[0.2, 0.2], [1.0, 3.0, 0.5], [0.1, 0.4, 0.4, 2.0]])
def test_normal_scores_give_the_population(alpha):
    """Means and variances of the memberships of standard normal scores are those of the Dirichlet distribution."""
    total, share = sum(alpha), np.array(alpha) / sum(alpha)
    draw = Proposals.prior(16, len(alpha) - 1).final_draw(512, torch.arange(16))
    sample = LatentPoints.of(draw, StickBreaking.of(to_double(alpha)))
    weight, c = sample.log_weight.exp()[:, None] / 16, sample.shares
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
    found = StickBreaking.of(to_double(alpha)).log_memberships(scores.expand(1, len(alpha) - 1, -1))[0, 0]
    np.testing.assert_allclose(found.numpy()[known], np.log(expected[known]), rtol=1e-5, atol=1e-3)


def test_grids_of_clients_are_shifted_so_that_their_errors_cancel():
    """A coarse grid is wrong by much more for one client than on average over all of them."""
    table, layout, at = make_data("gaussian", 3, 400, 10, [0.4, 0.4, 0.4])
    moments = fastest_form(table)
    errors = log_integrals(moments, layout, at, 121) - log_integrals(moments, layout, at, 3600)
    assert float(errors.square().mean().sqrt()) < 0.05
    assert float(errors.mean().abs()) < 0.005


@pytest.mark.parametrize(("name", "rows"), [("gaussian", 3), ("bernoulli", 40), ("poisson", 3), ("poisson", 40)])
def test_two_canonical_models_are_integrated_like_scipy_does(name, rows):
    table, layout, at = make_data(name, 2, 2, rows, [0.4, 0.7])
    value = log_integrals(fastest_form(table), layout, at, 128)

    def log_likelihoods(first: np.ndarray) -> np.ndarray:
        return table.at(layout, at).log_likelihoods(to_double([[first, 1 - first]])).numpy()

    top = log_likelihoods(np.linspace(0, 1, 201)).max(1)

    def density(u: float, client: int) -> float:
        return math.exp(log_likelihoods(stats.beta.ppf([u], 0.4, 0.7))[client, 0] - top[client])

    for client in range(2):
        parts = [integrate.quad(density, a, a + 0.05, client, limit=200, epsabs=1e-7)[0] for a in np.arange(20) / 20]
        assert float(value[client]) == pytest.approx(math.log(sum(parts)) + top[client], abs=2e-3)


@pytest.mark.parametrize(("k", "rows"), [(3, 60), (4, 5)])
def test_more_canonical_models_are_integrated_like_sums_over_the_population(k, rows):
    alpha, random = np.full(k, 0.5), np.random.default_rng(1)
    table, layout, at = make_data("gaussian", k, 5, rows, alpha)
    data = fastest_form(table)
    value, again = log_integrals(data, layout, at, 4096), log_integrals(data, layout, at, 1024)
    draws = [to_double(random.dirichlet(alpha, 100_000).T)[None] for _ in range(4)]
    logs = torch.cat([data.at(layout, at).log_likelihoods(c) for c in draws], 1)
    expected = torch.logsumexp(logs, 1) - math.log(logs.shape[1])
    spread = (torch.logsumexp(2 * logs, 1) - 2 * torch.logsumexp(logs, 1)).exp().sqrt()  # standard error of the log
    assert float(((value - expected).abs() / (spread + (value - again).abs() + 2e-3)).max()) < 4


def test_points_follow_what_a_client_knows_well():
    """A hundred times the rows: proposals are narrow, and few points give the integral of many."""
    table, layout, at = make_data("gaussian", 3, 4, 2000, [0.4, 0.4, 0.4])
    data, vector = fastest_form(table), layout.pack(at)
    points = Marginal.of(data, layout, 512).adapted(vector)
    assert all(float(part.proposals.width(2).max()) < 0.3 for part in points.parts)
    few, many = points.log_integrals(vector), points.with_count(4096, vector).log_integrals(vector)
    torch.testing.assert_close(few, many, rtol=0, atol=0.02)


def test_moved_points_are_as_good_as_adapted_ones():
    table, layout, at = make_data("poisson", 3, 30, 6, [0.4, 0.4, 0.4])
    vector = layout.pack(at)
    points = Marginal.of(table, layout, 512).adapted(vector)
    near = vector + 0.05
    moved, adapted = points.moved(near, points.evaluate(vector).moments), points.adapted(near)
    assert moved.value(near) == pytest.approx(adapted.value(near), abs=0.15)


def test_held_out_rows_are_predicted_given_the_others():
    """Rows are independent given the membership, so log p(all) - log p(some) is log p(others | some)."""
    table, layout, at = make_data("poisson", 2, 10, 9, [0.4, 0.7])
    is_test, vector = torch.arange(90) % 3 == 0, layout.pack(at)
    some, others = (table._replace(weight=part.double()) for part in (~is_test, is_test))
    found = Marginal.of(some, layout, 512).adapted(vector).held_out(vector, others)[0]
    expected = log_integrals(table, layout, at, 512) - log_integrals(some, layout, at, 512)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-3)
