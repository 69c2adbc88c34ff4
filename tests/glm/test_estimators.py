"""Fitted estimators: recovery of a known population, memberships, new clients, penalties, and choices."""

import copy
import warnings

import numpy as np
import pytest
import torch
from sklearn.exceptions import ConvergenceWarning

from kit.tables import DrawnPopulation, choice, draw_population, fitted_population, make_estimator, papers_objective
from ppfl.core import simplex
from ppfl.glm import NEW, mixed_model


def match_truth(model, drawn: DrawnPopulation):
    """Memberships in the order of the truth, and the relative error of the canonical coefficients."""
    found = np.array(model.memberships_)
    order = simplex.match(torch.from_numpy(drawn.memberships), torch.from_numpy(found)).numpy()
    distance = np.linalg.norm(model.canonical_coef_[order] - drawn.theta)
    return found[:, order], distance / np.linalg.norm(drawn.theta)


def membership_error(a: np.ndarray, b: np.ndarray) -> float:
    """Mean total variation."""
    return float(np.abs(a - b).sum(1).mean() / 2)


def memberships_with_known_models(drawn: DrawnPopulation) -> np.ndarray:
    """Posterior means with known coefficients, noise and distribution of memberships: the best possible estimate."""
    grid = np.random.default_rng(1).dirichlet([0.3] * 3, 4000)
    errors = drawn.y[:, None] - drawn.x @ drawn.theta.T @ grid.T
    logs = -0.5 * errors**2 / drawn.eta.std() ** 2
    logs = logs.reshape(len(drawn.memberships), -1, len(grid)).sum(1)
    weight = np.exp(logs - logs.max(1, keepdims=True))
    return weight @ grid / weight.sum(1, keepdims=True)


def fit_federated(drawn: DrawnPopulation, family: str = "gaussian", rounds: int = 40, **settings):
    model = make_estimator(family, **{"k": 3, **settings}, solver="federated", max_iter=rounds)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # so few rounds do not converge
        return model.fit(drawn.x, drawn.y, clients=drawn.clients)


# ---------------------------------------------------------------------- recovery


def test_most_starts_recover_the_memberships():
    """200 clients with 40 rows, half of the variance noise: an error below 0.08, and within 0.01 of the best."""
    drawn = draw_population("gaussian", clients=200, rows=40, d=5)
    possible = membership_error(memberships_with_known_models(drawn), drawn.memberships)
    close = []
    for start in range(5):
        model = make_estimator(k=3, random_state=start).fit(drawn.x, drawn.y, clients=drawn.clients)
        found, relative = match_truth(model, drawn)
        error = membership_error(found, drawn.memberships)
        close.append(error <= 0.08 and error <= possible + 0.01 and relative < 0.08)
    assert sum(close) >= 4


@pytest.mark.parametrize(("name", "rows"), [("poisson", 100), ("bernoulli", 200)])
def test_other_families_recover_memberships_from_many_rows(name, rows):
    drawn = draw_population(name, clients=30, rows=rows, radius=1.5)
    model = make_estimator(name, k=3, n_init=4).fit(drawn.x, drawn.y, clients=drawn.clients)
    found, relative = match_truth(model, drawn)
    assert membership_error(found, drawn.memberships) < 0.1
    assert relative < 0.2


@pytest.mark.parametrize(("solver", "share", "error"), [("marginal", 0.95, 0.1), ("profile", 0.85, 0.25)])
def test_the_smallest_simplex_is_found(solver, share, error):
    """Pure clients are at the corners, though a larger simplex would fit as well. Points overfit the noise."""
    drawn = draw_population("gaussian", clients=60, rows=200, alpha=0.1)
    found, relative = match_truth(
        make_estimator(k=3, solver=solver, n_init=4).fit(*drawn[:2], clients=drawn.clients), drawn
    )
    pure = drawn.memberships.max(1) > 0.99
    assert pure.sum() >= 20
    assert found[pure].max(1).mean() > share
    assert relative < error


def test_the_order_of_canonical_models_does_not_depend_on_the_start():
    fits = [fitted_population("gaussian", 40, 40, n_init=4, random_state=seed) for seed in (0, 1)]
    np.testing.assert_allclose(*(model.canonical_coef_ for model in fits), atol=0.05)
    assert (np.diff(np.asarray(fits[0].memberships_).mean(0)) <= 0).all()


def test_information_criteria_choose_the_right_number_of_models():
    """One model for identical clients, three for three kinds."""
    random = np.random.default_rng(0)
    identical, kinds = (draw_population("gaussian", clients=40, rows=30, alpha=alpha) for alpha in (0.3, 0.05))
    identical = identical._replace(y=identical.x @ identical.theta[0] + random.normal(size=len(identical.y)))
    for drawn, best in ((identical, 1), (kinds, 3)):
        bic = {}
        for k in (1, 2, 3):
            model = make_estimator(k=k).fit(drawn.x, drawn.y, clients=drawn.clients)
            assert model.n_parameters_ == k * 4 + 1 + (k if k > 1 else 0)
            assert model.bic_ - model.aic_ == pytest.approx((np.log(40) - 2) * model.n_parameters_)
            bic[k] = model.bic_
        assert min(bic, key=bic.__getitem__) == best


@pytest.mark.parametrize("name", ["poisson", "multinomial"])
def test_the_federated_solver_comes_near_the_exact_fit(name):
    """It closes more than half of the gap in likelihood between the pooled model and the exact fit."""
    drawn = draw_population(name, clients=12, rows=60, radius=1.5, alpha=0.1)
    federated = fit_federated(drawn, name, 50, shared=["x2"]).log_likelihood_
    exact, pooled = (
        make_estimator(name, **settings).fit(drawn.x, drawn.y, clients=drawn.clients).log_likelihood_
        for settings in ({"k": 3, "shared": ["x2"], "solver": "profile"}, {"k": 1})
    )
    assert federated - pooled > 0.5 * (exact - pooled) > 0


def test_a_federated_fit_does_not_depend_on_the_state_of_torchs_generator():
    drawn = draw_population("gaussian", clients=4, rows=20)
    found = []
    for state in (1, 2):
        torch.manual_seed(state)
        found.append(fit_federated(drawn, rounds=3).canonical_coef_)
    np.testing.assert_array_equal(*found)


# ---------------------------------------------------------------------- clients


def test_for_linear_models_mixing_predictions_is_mixing_weights():
    drawn = draw_population("gaussian", clients=15, rows=15)
    fits = [make_estimator(mix=mix).fit(drawn.x, drawn.y, clients=drawn.clients) for mix in ("weights", "predictions")]
    np.testing.assert_allclose(*(model.predict(drawn.x, drawn.clients) for model in fits), atol=1e-6)


@pytest.mark.parametrize("solver", ["marginal", "profile"])
def test_a_new_client_with_the_data_of_a_known_one_gets_its_membership(solver):
    drawn, model = draw_population("gaussian", clients=20, rows=20), copy.deepcopy(fitted_population(solver=solver))
    before, own = np.asarray(model.memberships_), drawn.clients == 7
    placed = np.asarray(model.onboard(drawn.x[own], drawn.y[own], clients=np.full(own.sum(), 99)))
    np.testing.assert_allclose(placed[0], before[7], atol=1e-3)
    np.testing.assert_array_equal(np.asarray(model.memberships_)[:-1], before)
    new, known = (model.predict(drawn.x, np.full(len(drawn.x), client)) for client in (99, 7))
    np.testing.assert_allclose(new, known, atol=5e-3)


def test_a_new_client_of_a_federated_fit_gets_the_best_membership_for_its_data():
    drawn = draw_population("gaussian", clients=12, rows=40, radius=1.5)
    model, own = fit_federated(drawn), drawn.clients == 7
    placed = np.asarray(model.onboard(drawn.x[own], drawn.y[own], clients=np.full(own.sum(), 99)))[0]
    assert placed.min() >= 0 and placed.sum() == pytest.approx(1)

    def residuals(c: np.ndarray) -> float:
        predicted = drawn.x[own] @ (c @ model.canonical_coef_) + c @ model.canonical_intercept_
        return float(np.square(drawn.y[own] - predicted).sum())

    others = np.random.default_rng(0).dirichlet([0.5] * 3, 300)
    assert residuals(placed) <= min(residuals(c) for c in [*others, *np.eye(3)]) * (1 + 1e-6)
    assert model.clients_[-1] == 99


def test_a_client_is_predicted_by_its_coefficients_and_an_unknown_one_like_the_mean_client():
    x, model = draw_population("gaussian", clients=20, rows=20).x, fitted_population()
    slope, intercept = model.client_coef(4)
    np.testing.assert_allclose(model.predict(x, np.full(len(x), 4)), x @ slope + intercept)
    mean = model.concentration_ / model.concentration_.sum()  # of the Dirichlet distribution memberships are drawn from
    expected = x @ (mean @ model.canonical_coef_) + mean @ model.canonical_intercept_
    np.testing.assert_allclose(model.predict(x, np.full(len(x), 1000)), expected, atol=0.05)
    points = fitted_population(solver="profile")
    mean_of_all = np.mean([points.predict(x, np.full(len(x), client)) for client in range(20)], 0)
    np.testing.assert_allclose(points.predict(x, NEW), mean_of_all)


# ---------------------------------------------------------------------- penalties


def test_with_W_all_ones_the_objective_is_a_mixed_models():
    """Theorem 1, for a fitted model: lambda = 1 / M and G = theta theta'."""
    drawn, model = (
        draw_population("gaussian", clients=12, rows=10),
        fitted_population("gaussian", 12, 10, k=2, penalty=1 / 12),
    )
    c = np.array(model.memberships_)
    theta = np.vstack([model.canonical_intercept_, model.canonical_coef_.T])  # (d + 1, K)
    whole = np.hstack([np.ones((len(drawn.x), 1)), drawn.x])
    errors = drawn.y - (whole * (c @ theta.T)[drawn.clients]).sum(1)
    losses = torch.from_numpy(np.bincount(drawn.clients, errors**2) / 10 / 2)
    theirs = float(losses.mean()) + mixed_model(theta, c).penalty()
    assert papers_objective(losses, torch.from_numpy(c), 1 / 12) == pytest.approx(theirs, rel=1e-9)


def test_a_penalty_pulls_clients_together():
    fits = [fitted_population(solver="profile", penalty=penalty) for penalty in (0.0, 1e-3, 0.05)]
    spread = [float((np.asarray(m.memberships_) @ m.canonical_coef_).var(0).sum()) for m in fits]
    assert spread[0] > spread[1] > spread[2]


def test_a_graph_pulls_neighbours_together():
    matrix = np.zeros((10, 10))
    matrix[[0, 1, 2, 3], [1, 0, 3, 2]] = 1
    drawn = draw_population("gaussian", clients=10, rows=10)
    free, tied, same = (
        np.asarray(make_estimator(solver="profile", **graph).fit(drawn.x, drawn.y, clients=drawn.clients).memberships_)
        for graph in ({}, {"penalty": 10.0, "affinity": [(0, 1), (2, 3)]}, {"penalty": 10.0, "affinity": matrix})
    )
    assert np.abs(tied[0] - tied[1]).sum() < 0.01
    assert np.abs(tied[2] - tied[3]).sum() < 0.01
    assert np.abs(np.diff(free[:4], axis=0)).sum() > 0.02
    np.testing.assert_allclose(same, tied, atol=1e-4)


# ---------------------------------------------------------------------- choices


def test_tastes_are_recovered_from_choices():
    random = np.random.default_rng(0)
    people, situations, alternatives = 60, 12, 4
    tastes, kind = np.array([[-2.0, 0.0, 1.0], [0.5, 2.0, -1.0]]), random.integers(0, 2, people)
    owner = np.repeat(np.arange(people), situations)
    each = random.normal(size=(len(owner), alternatives, 3))
    utility = np.einsum("njq,nq->nj", each, tastes[kind[owner]]) + random.gumbel(size=each.shape[:2])
    x, y = each.reshape(-1, 3), (np.arange(alternatives) == utility.argmax(1)[:, None]).ravel()
    table = {"situations": np.repeat(np.arange(len(each)), alternatives), "clients": np.repeat(owner, alternatives)}
    model = choice(n_init=4).fit(x, y, **table)
    order = np.argsort(model.canonical_coef_[:, 0])
    for at in (0, 1):  # compare with a fit that knows the kind of each client
        same = kind[table["clients"]] == at
        known = choice(k=1).fit(x[same], y[same], situations=table["situations"][same])
        np.testing.assert_allclose(model.canonical_coef_[order[at]], known.canonical_coef_[0], atol=0.3)
    assert (np.asarray(model.memberships_)[:, order].argmax(1) == kind).mean() > 0.95
    assert model.score(x, y, **table) > choice(k=1).fit(x, y, **table).score(x, y, **table)


def test_two_alternatives_are_a_logistic_regression_of_their_difference():
    drawn = draw_population("bernoulli", clients=10, rows=12)
    x = np.stack([np.zeros_like(drawn.x), drawn.x], 1).reshape(-1, 3)
    y = np.stack([1 - drawn.y, drawn.y], 1).ravel()
    table = {"situations": np.repeat(np.arange(len(drawn.y)), 2), "clients": np.repeat(drawn.clients, 2)}
    exact = {"k": 1, "ridge": 0.0, "tol": 1e-8}
    logistic = make_estimator("bernoulli", fit_intercept=False, **exact).fit(drawn.x, drawn.y, clients=drawn.clients)
    found = choice(**exact).fit(x, y, **table)
    np.testing.assert_allclose(found.canonical_coef_, logistic.canonical_coef_, atol=1e-5)
