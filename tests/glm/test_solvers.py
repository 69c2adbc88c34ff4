"""Solvers: optimality conditions, the results of other programs where they have the same model, and the choice of k."""

import numpy as np
import pytest
import torch
from sklearn.linear_model import GammaRegressor, LinearRegression, LogisticRegression, PoissonRegressor

from kit import tables
from kit.tables import FAMILIES, draw_population, fitted_population, make_estimator, papers_objective
from ppfl.core import affinity
from ppfl.glm.solvers.held_out import held_out_log_likelihoods, make_folds
from ppfl.glm.solvers.lbfgs import find_rescaling, minimize_lbfgs
from ppfl.glm.solvers.newton_steps import newton_direction
from ppfl.glm.solvers.parameters import concentration
from ppfl.glm.solvers.problem import GLMProblem
from ppfl.glm.solvers.solve import SearchSettings, solve_marginal
from ppfl.glm.solvers.split import split_corner

K = 3


def draw_problem(name: str, clients: int, rows: int, k: int = K, mix="weights", shared=None, **settings) -> GLMProblem:
    data = tables.make_rows(draw_population(name, clients, rows), tables.make_family(name), mix, shared)
    return tables.make_problem(data, k, **settings)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(("mix", "penalty"), [("weights", 0.01), ("predictions", 0.0)])
def test_the_profile_is_the_papers_objective_with_the_best_memberships_and_the_right_gradient(name, mix, penalty):
    """sum p_i f_i + lambda <C, L C> of the core with p_i = n_i / n, plus the ridges; all clients are equally near."""
    problem = draw_problem(name, clients=6, rows=8, mix=mix, shared=["x2"])
    profile = problem.profile(1e-9, affinity.uniform([str(i) for i in range(6)]), penalty)
    size, k = profile.shape.size, profile.shape.k
    at = np.random.default_rng(0).normal(size=size) / 3
    value, gradient = profile(at)
    assert profile.membership_gap(at) < 1e-7
    coefficients, _ = profile.shape.unpack(torch.from_numpy(at))
    c = profile.memberships
    losses = -profile.data.client_log_likelihoods(coefficients, c[..., None])[:, 0] / 8
    ridges = float(profile.regularization.value(coefficients)) / 48
    assert value == pytest.approx(papers_objective(losses, c, penalty) + ridges, rel=1e-9)
    numerical = [(profile(at + step)[0] - profile(at - step)[0]) / 2e-5 for step in 1e-5 * np.eye(size)[:-k]]
    np.testing.assert_allclose(gradient[:-k], numerical, rtol=1e-3, atol=1e-5)
    assert (gradient[-k:] == 0).all()  # the distribution of memberships is not part of it


@pytest.mark.parametrize("solver", ["marginal", "profile"])
@pytest.mark.parametrize(
    ("name", "mix"), [("gaussian", "weights"), ("poisson", "predictions"), ("bernoulli", "weights")]
)
def test_a_fit_descends_and_converges(name, mix, solver):
    penalty = 1e-3 * (solver == "profile")
    model = fitted_population(name, 12, 10, k=2, mix=mix, solver=solver, penalty=penalty)
    assert model.converged_ and (np.diff(model.objective_path_) <= 1e-12).all()
    memberships = np.asarray(model.memberships_)
    assert (memberships >= 0).all() and np.allclose(memberships.sum(1), 1)


@pytest.mark.parametrize("name", FAMILIES)
def test_one_canonical_model_is_scikit_learns_pooled_glm(name):
    drawn, exactly = draw_population(name, clients=20, rows=20), {"tol": 1e-10, "max_iter": 1000}
    reference = {
        "gaussian": LinearRegression(),
        "poisson": PoissonRegressor(alpha=0, **exactly),
        "gamma": GammaRegressor(alpha=0, **exactly),
    }.get(name, LogisticRegression(C=np.inf, **exactly))
    ours = make_estimator(name, k=1, ridge=0.0, tol=1e-8).fit(drawn.x, drawn.y, clients=drawn.clients)
    predict = "predict_proba" if name in ("bernoulli", "multinomial") else "predict"
    found, expected = (getattr(model, predict)(drawn.x) for model in (ours, reference.fit(drawn.x, drawn.y)))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("noise", [0.3, 0.03])
def test_a_client_with_a_precise_membership_is_not_missed(noise):
    """Lines through 0 with slopes from -2 to 2 and little noise: the canonical models are the outermost clients."""
    random = np.random.default_rng(0)
    share = np.concatenate([np.zeros(4), np.ones(4), np.linspace(0.1, 0.9, 8)])
    clients, x = np.repeat(np.arange(16), 10), random.normal(size=(160, 1))
    y = (4 * share[clients] - 2) * x[:, 0] + noise * random.normal(size=160)
    model = make_estimator(n_init=4).fit(x, y, clients=clients)
    np.testing.assert_allclose(sorted(model.canonical_coef_[:, 0]), [-2, 2], atol=0.1 + 0.6 * noise)
    found = np.asarray(model.memberships_)[:, int(model.canonical_coef_[:, 0].argmax())]
    assert np.abs(found - share).mean() < 0.02 + 0.1 * noise


@pytest.mark.parametrize(("name", "k"), [("gaussian", 2), ("poisson", 2), ("poisson", 3)])
def test_a_converged_marginal_fit_is_stationary(name, k):
    """Either for the points it has, or, where few clients say little, up to what the points themselves get wrong."""
    problem = draw_problem(name, 20, 10, k, ridge=0.01)
    solution, objective = solve_marginal(problem, SearchSettings(1, 1e-6, 500, np.random.default_rng(0)))
    found = objective.with_hessian(solution.vector)
    assert found.value == pytest.approx(solution.objective)
    left = -0.5 * problem.rows.n_samples * float(found.gradient @ newton_direction(found.gradient, found.hessian))
    assert np.abs(found.gradient).max() <= 1e-6 if k == 2 else left <= 0.2  # of the log-likelihood
    again = objective.adapted(solution.vector).log_likelihood(solution.vector)
    assert again == pytest.approx(objective.log_likelihood(solution.vector), abs=0.1)


def test_copies_of_a_canonical_model_move_apart_as_the_curvature_says():
    """The closed form from the smaller model, against differences of the likelihood of the larger one."""
    problem = draw_problem("poisson", 10, 6, k=2, ridge=0.0)
    shape, corner, step, axis = problem.shape, 1, 0.1, np.array([0.5, -0.5, 0.5, 0.5])
    at = np.random.default_rng(0).normal(size=shape.size) / 3
    smaller = problem.marginal(2, 256).adapted(at)
    _, log_alpha = shape.unpack(torch.from_numpy(at))
    split = split_corner(shape, at, corner)
    curvature = smaller.with_hessian(at).apart[4:8, 4:8] / (1 + float(concentration(log_alpha)[corner]))
    apart = np.zeros_like(split)
    apart[4:8], apart[8:12] = axis, -axis
    larger = problem.marginal(3, 4096).adapted(split)
    middle, *ends = (larger.log_likelihood(split + x * apart) for x in (0.0, -step, step))
    expected = (2 * middle - sum(ends)) / step**2 / problem.rows.n_samples
    assert axis @ curvature @ axis == pytest.approx(expected, rel=0.05)


def test_a_rescaled_quadratic_takes_a_few_iterations():
    """x'Hx / 2 - b'x, with eigenvalues of H from 1e-3 to 1e3."""
    random = np.random.default_rng(0)
    rotation, b = np.linalg.qr(random.normal(size=(12, 12)))[0], random.normal(size=12)
    H = rotation @ np.diag(np.logspace(-3, 3, 12)) @ rotation.T

    def quadratic(x):
        return float(x @ H @ x / 2 - b @ x), H @ x - b

    plain = minimize_lbfgs(quadratic, np.ones(12), 1e-6, 500)
    rescaled = minimize_lbfgs(quadratic, np.ones(12), 1e-6, 500, lambda at, renew: find_rescaling(quadratic, at))
    assert len(rescaled.path) <= 5 < len(plain.path)
    for end in (plain, rescaled):
        assert end.gradient <= 1e-6 and (np.diff(end.path) <= 1e-12).all()
        assert end.objective == pytest.approx(quadratic(np.linalg.solve(H, b))[0], rel=1e-9)
    assert find_rescaling(lambda x: (float(b @ x), b), np.ones(12)) is None  # no curvature to learn from


@pytest.mark.parametrize("name", ["gaussian", "poisson"])
def test_held_out_rows_are_scored_with_the_dispersion_that_suits_them_best(name):
    """Few rows and many parameters: the dispersion of the fit is too small for rows that it has not seen."""
    folds = make_folds(draw_problem(name, 8, 6, ridge=1.0), 3, np.random.default_rng(0))
    for fold in folds:
        fold.fit(K, SearchSettings(1, 1e-6, 200, np.random.default_rng(0), 0.5))
    found = float(held_out_log_likelihoods(folds).sum())
    if name == "poisson":  # has no dispersion and is scored as it is
        assert found == pytest.approx(float(sum(fold.log_likelihoods().sum() for fold in folds)))
    else:
        totals = [float(sum(fold.log_likelihoods(wider).sum() for fold in folds)) for wider in np.linspace(0, 3, 61)]
        assert found == pytest.approx(max(totals), abs=0.15)
        assert found > totals[0] + 1


def test_better_means_count_where_clients_have_few_rows():
    """Six workers at three machines, three rows each: every worker has its own difference between machines."""
    random = np.random.default_rng(4)
    workers, machines = np.repeat(np.arange(6), 9), np.tile(np.repeat(np.arange(3), 3), 6)
    y = random.normal(0, 5, (6, 3))[workers, machines] + random.normal(0, 1, 54)
    x = (machines[:, None] == [1, 2]).astype(float)
    model = make_estimator(k="auto", choose="prediction", n_init=1).fit(x, y, clients=workers)
    assert np.asarray(model.memberships_).shape[1] >= 3


def test_only_predictions_count_if_asked_for():
    held_out, prediction = (
        fitted_population("gaussian", 20, 8, k="auto", choose=choose, n_init=1) for choose in ("held_out", "prediction")
    )
    best = max(prediction.selection_, key=lambda record: record.held_out or -np.inf)
    assert prediction.k_ == best.k >= held_out.k_
