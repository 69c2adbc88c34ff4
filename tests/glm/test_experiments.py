"""The parts of the GLM experiments on which their conclusions rest."""

import sys
from pathlib import Path

import numpy as np
import pytest
from scipy.special import logsumexp, softmax

pd = pytest.importorskip("pandas")
sys.path.insert(0, str(Path(__file__).parents[2] / "experiments"))

import glm_choice  # noqa: E402
import glm_data  # noqa: E402
import glm_oracle  # noqa: E402
import glm_r  # noqa: E402
import glm_simulate  # noqa: E402

FAMILIES = glm_simulate.FAMILIES


def one_client(family, k, rows, seed=0):
    random = np.random.default_rng(seed)
    theta = glm_simulate.spread_corners(k, 3, 1.5, random)
    drawn = glm_simulate.draw(family, theta, 1, rows, 0.4, random)
    return drawn, glm_oracle.client_log_likelihood(family, drawn.x, drawn.y, theta)


@pytest.mark.parametrize("family", FAMILIES)
def test_quadrature_with_a_uniform_prior_is_a_mean_over_memberships(family):
    _, log_likelihood = one_client(family, 2, 30)
    first = (np.arange(20000) + 0.5) / 20000
    mean = logsumexp(log_likelihood(np.stack([first, 1 - first], 1))) - np.log(len(first))
    assert abs(glm_oracle.quadrature(log_likelihood, np.ones(2)).value - mean) < 1e-6


@pytest.mark.parametrize("rows", [5, 100])
@pytest.mark.parametrize("family", FAMILIES)
def test_importance_sampling_of_a_split_corner_is_quadrature_before_the_split(family, rows):
    drawn, log_likelihood = one_client(family, 2, rows)
    truth = glm_oracle.quadrature(log_likelihood, np.array([0.4, 0.6])).value
    twice = drawn.theta[[0, 1, 1]]
    split = glm_oracle.client_log_likelihood(family, drawn.x, drawn.y, twice)
    found = glm_oracle.integrate(split, np.array([0.4, 0.3, 0.3]), np.random.default_rng(1), 0.002)
    assert found.error < 0.002
    assert abs(found.value - truth) < 5 * found.error


def test_a_prior_without_data_has_mass_one():
    def nothing(c):
        return np.zeros(len(c))

    for alpha in ([0.1, 0.4], [0.1, 0.5, 2.0], [0.3] * 5):
        found = glm_oracle.integrate(nothing, np.array(alpha), np.random.default_rng(0), 0.003)
        assert abs(found.value) < max(5 * found.error, 1e-8)


def test_gaussian_sums_of_squares_from_the_triangle_are_those_of_the_rows():
    drawn, log_likelihood = one_client("gaussian", 3, 50)
    c = np.random.default_rng(0).dirichlet(np.ones(3), 10)
    direct = glm_oracle.log_density("gaussian", c @ drawn.theta @ drawn.x.T, drawn.y).sum(1)
    np.testing.assert_allclose(log_likelihood(c), direct, rtol=1e-10)


@pytest.mark.parametrize("k", [2, 3, 4])
def test_corners_are_at_the_same_distance(k):
    corners = glm_simulate.spread_corners(k, 4, 1.7, np.random.default_rng(0))
    gaps = np.linalg.norm(corners[:, None] - corners[None], axis=2)
    np.testing.assert_allclose(gaps[np.triu_indices(k, 1)], 1.7)


def test_the_same_share_of_every_client_is_held_out():
    clients = np.repeat(np.arange(6), [4, 8, 12, 4, 8, 12])
    table = glm_data.Table("gaussian", pd.DataFrame({"x": np.arange(48.0)}), np.zeros(48), clients)
    mask = glm_data.held_out(table, 0.25, seed=0)
    assert [int(mask[clients == i].sum()) for i in range(6)] == [1, 2, 3, 1, 2, 3]


def test_mixing_distributions_predict_choices_by_bayes_rule():
    random = np.random.default_rng(0)
    situations = np.repeat(np.arange(6), 3)
    clients, y = np.repeat([0, 0, 0, 1, 1, 1], 3), np.tile([1, 0, 0], 6)
    table = glm_data.Table("choice", pd.DataFrame(random.normal(size=(18, 2))), y, clients, situations)
    train, test = table.take(situations % 3 < 2), table.take(situations % 3 == 2)
    points, weight = random.normal(size=(2, 2)), np.array([0.3, 0.7])
    found = glm_choice.posterior_prediction(train, test, points, np.log(weight)).reshape(2, 3)
    each = np.stack([softmax((table.x.to_numpy() @ theta).reshape(6, 3), axis=1) for theta in points])  # (2, 6, 3)
    for client, seen, unseen in ((0, [0, 1], 2), (1, [3, 4], 5)):
        posterior = weight * each[:, seen, 0].prod(1)
        np.testing.assert_allclose(found[client], posterior / posterior.sum() @ each[:, unseen])


def test_without_r_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setattr(glm_r.shutil, "which", lambda name: None)
    with pytest.raises(SystemExit, match=r"Rscript is not installed.*r-cran-lme4"):
        glm_r.run_r("-e", "1")
