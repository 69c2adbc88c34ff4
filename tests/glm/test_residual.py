"""Residual effects: mixed models of lme4 and of numerical integration, and what is predicted with them."""

import numpy as np
import pytest
import torch
from scipy import optimize, special, stats

from kit.tables import make_family, to_double
from ppfl.glm import PopulationRegressor
from ppfl.glm.choose_k import Candidate, choose_model
from ppfl.glm.inference import explained
from ppfl.glm.likelihood import Layout
from ppfl.glm.population_fit import PopulationFit
from ppfl.glm.problem import Problem, find_posterior, precise_log_likelihood
from ppfl.glm.rows import DenseDesign, RowLikelihood

NODES = np.linspace(-8, 8, 2001)  # of a standard normal distribution, for sums that are as good as integrals


def problem_of(name: str, clients: int = 20, rows: int = 12) -> Problem:
    """A column and an intercept whose coefficients differ by client as normal numbers do, without a ridge."""
    random = np.random.default_rng(1)
    ids, x = np.repeat(np.arange(clients), rows), random.normal(size=(clients * rows, 1))
    x = (x - x.mean()) / x.std()
    eta = ([0.5, 0.3] + random.normal(size=(clients, 2)) * [0.8, 0.6])[ids]
    eta = (eta * np.c_[x, np.ones(len(x))]).sum(1)
    if name == "gaussian":
        y = eta + random.normal(size=len(eta))
    else:
        y = random.poisson(np.exp(eta)) if name == "poisson" else random.random(len(eta)) < special.expit(eta)
    return problem_for(name, x, y, ids)


def problem_for(name: str, x: np.ndarray, y: np.ndarray, ids: np.ndarray) -> Problem:
    """With one column of mean 0 and an intercept."""
    designs = (DenseDesign(to_double(part)) for part in (np.c_[x, np.ones(len(x))], np.zeros((len(x), 0))))
    one, family = torch.ones(len(x)).double(), make_family(name)
    rows = RowLikelihood(*designs, to_double(y), one, torch.from_numpy(ids), int(ids.max()) + 1, family, "weights")
    return Problem.of(rows, 0.0, to_double([1, 0]), to_double([]), (0.0, 0.0), 1)


def fit(problem: Problem, k: int, residual: str) -> PopulationFit:
    return choose_model(problem, [Candidate(k, residual)])[0]  # type: ignore[arg-type]


def normal_log_likelihood(problem: Problem, numbers: np.ndarray) -> float:
    """Of lme4's model: y ~ N(X b, s^2 I + Z S Z') with S = L L', from b, log s^2 and the triangle L."""
    rows, q = problem.rows, problem.rows.varying.columns
    b, log_dispersion, triangle = numbers[:q], numbers[q], np.zeros((q, q))
    triangle[np.tril_indices(q)] = numbers[q + 1 :]
    total = 0.0
    for client in range(rows.n_clients):
        own = (rows.client == client).numpy()
        x, y = rows.varying.x.numpy()[own], rows.y.numpy()[own]
        covariance = np.exp(log_dispersion) * np.eye(len(y)) + x @ triangle @ triangle.T @ x.T
        left = y - x @ b
        total -= 0.5 * (left @ np.linalg.solve(covariance, left) + np.linalg.slogdet(2 * np.pi * covariance)[1])
    return total


def test_one_canonical_model_with_a_full_effect_is_the_linear_mixed_model():
    """Its maximum likelihood by a general optimiser: log-likelihood, fixed effects and variance components."""
    problem = problem_of("gaussian")
    found = fit(problem, 1, "full")
    at = found.parameters
    start = np.concatenate([at.canonical[0, :, 0].numpy(), [float(at.nuisance[0])], [0.5, 0.1, 0.5]])
    best = optimize.minimize(lambda numbers: -normal_log_likelihood(problem, numbers), start, tol=1e-9)
    triangle = np.zeros((2, 2))
    triangle[np.tril_indices(2)] = best.x[3:]
    assert precise_log_likelihood(found, problem.data).value == pytest.approx(-best.fun, abs=1e-4)
    np.testing.assert_allclose(at.canonical[0, :, 0], best.x[:2], atol=1e-3)
    np.testing.assert_allclose(found.residual_covariance, triangle @ triangle.T, atol=2e-3)
    assert float(at.nuisance[0]) == pytest.approx(best.x[2], abs=1e-3)


@pytest.mark.parametrize("name", ["bernoulli", "poisson"])
def test_one_canonical_model_with_an_intercept_effect_is_adaptive_quadrature(name):
    """glmer with one random intercept, against a fine sum, at its own maximum."""
    problem = problem_of(name)
    rows = problem.rows

    def log_likelihood(numbers: np.ndarray) -> float:
        eta = (rows.varying.x.numpy() @ numbers[:2])[:, None] + numbers[2] * NODES
        y = rows.y.numpy()[:, None]
        logs = y * eta - (np.logaddexp(0, eta) if name == "bernoulli" else np.exp(eta) + special.gammaln(y + 1))
        by_client = np.zeros((rows.n_clients, len(NODES)))
        np.add.at(by_client, rows.client.numpy(), logs)
        return float(special.logsumexp(by_client, 1, b=stats.norm.pdf(NODES) * (NODES[1] - NODES[0])).sum())

    found = fit(problem, 1, "intercept")
    at = found.parameters
    own = np.array([*at.canonical[0, :, 0].tolist(), abs(float(at.residual[0, 1]))])
    best = optimize.minimize(lambda numbers: -log_likelihood(numbers), own + 0.1, tol=1e-10)
    assert precise_log_likelihood(found, problem.data).value == pytest.approx(-best.fun, abs=1e-3)
    np.testing.assert_allclose(own, np.abs(best.x) * np.sign(own), atol=2e-3)


def test_clients_are_predicted_as_best_linear_unbiased_predictions():
    """With one canonical model, b_i has the mean of the normal distribution given the client's rows."""
    problem = problem_of("gaussian")
    found, rows = fit(problem, 1, "full"), problem.rows
    at = found.parameters
    fixed, covariance = at.canonical[0, :, 0], found.residual_covariance
    coefficients, expected = found.posterior.coefficients(at)[..., 0], []
    for client in range(rows.n_clients):
        z, y = (part[rows.client == client] for part in (rows.varying.x, rows.y))
        whole = z @ covariance @ z.T + torch.exp(at.nuisance[0]) * torch.eye(len(y))
        expected.append(fixed + covariance @ z.T @ torch.linalg.solve(whole, y - z @ fixed))
    torch.testing.assert_close(coefficients, torch.stack(expected))
    of_rows = found.posterior.predict(rows, at, rows.client)
    torch.testing.assert_close(of_rows, (rows.varying.x * coefficients[rows.client]).sum(1))
    torch.testing.assert_close(found.prior.coefficients(at)[0, :, 0], fixed)
    draws = found.posterior.sample(torch.tensor([3]), 20_000, np.random.default_rng(0))
    z = rows.varying.x[rows.client == 3]
    inverse = torch.linalg.inv(covariance) + z.T @ z * torch.exp(-at.nuisance[0])
    own = torch.einsum("sq,sg->qg", found.posterior.loadings(at), draws[0, 1:])
    torch.testing.assert_close(torch.cov(own), torch.linalg.inv(inverse), rtol=0.06, atol=1e-3)


@pytest.mark.parametrize("name", ["gaussian", "poisson"])
def test_new_clients_have_the_posterior_that_they_would_have_had(name):
    problem = problem_of(name)
    found = fit(problem, 2, "intercept")
    again = find_posterior(found, problem.data)
    torch.testing.assert_close(again.mean, found.posterior.mean)
    torch.testing.assert_close(again.residual_mean, found.posterior.residual_mean)
    both = found.posterior.concat(again.reorder(torch.tensor([0, 1])))
    torch.testing.assert_close(both.mean[20:], found.posterior.mean)
    turned = both.reorder(torch.tensor([1, 0]))
    torch.testing.assert_close(turned.mean.flip(1), both.mean)


def test_two_groups_are_explained_by_canonical_models_and_smooth_differences_are_not():
    random = np.random.default_rng(0)
    ids, x = np.repeat(np.arange(40), 10), random.normal(size=(400, 1))
    shares = []
    for slopes in (np.where(np.arange(40) % 2, 2.0, -2.0), random.normal(size=40)):
        y = slopes[ids] * x[:, 0] + 0.5 * random.normal(size=400)
        model = PopulationRegressor(k=2, residual="full", fit_intercept=False).fit(x, y, clients=ids)
        shares.append(explained(model))
    assert shares[0] > 0.95 > shares[1]


def test_a_residual_effect_has_its_place_in_the_vector():
    layout = Layout(2, 3, 1, nuisance=1, residual="full", effects=(0, 2))
    vector = np.random.default_rng(0).normal(size=layout.size)
    np.testing.assert_allclose(layout.pack(layout.unpack(vector)), vector)
    assert layout.unpack(vector).residual.shape == (2, 3) and layout.n_residual == 3
