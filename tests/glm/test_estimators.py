"""Fitted estimators: recovery of a known population, memberships, new clients, penalties, and choices."""

import copy
import pickle

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import special
from sklearn.linear_model import GammaRegressor, LinearRegression, LogisticRegression, PoissonRegressor

from kit.tables import (
    FAMILIES,
    choice,
    draw_population,
    fitted_population,
    make_choice_table,
    make_client_table,
    make_estimator,
    papers_objective,
    penalized,
)
from ppfl.core import simplex
from ppfl.glm import NEW, mixed_model


def match_truth(model, drawn):
    """Memberships in the order of the truth, and the relative error of the canonical coefficients."""
    found = np.array(model.memberships_)
    order = simplex.match(torch.from_numpy(drawn.memberships), torch.from_numpy(found)).numpy()
    distance = np.linalg.norm(model.canonical_coef_[order] - drawn.theta)
    return found[:, order], distance / np.linalg.norm(drawn.theta)


def membership_error(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.abs(a - b).sum(1).mean() / 2)


def fit(drawn, family="gaussian", **settings):
    return make_estimator(family, **{"k": 3, **settings}).fit(drawn.x, drawn.y, clients=drawn.clients)


def test_most_starts_recover_the_memberships():
    """As well as posterior means with known coefficients, noise and distribution of memberships, the best possible."""
    drawn, close = draw_population("gaussian", clients=200, rows=40, d=5), []
    grid = np.random.default_rng(1).dirichlet([0.3] * 3, 4000)
    logs = -0.5 * (drawn.y[:, None] - drawn.x @ drawn.theta.T @ grid.T) ** 2 / drawn.eta.std() ** 2
    possible = special.softmax(logs.reshape(200, 40, -1).sum(1), axis=1) @ grid
    for start in range(5):
        found, relative = match_truth(fit(drawn, random_state=start), drawn)
        error = membership_error(found, drawn.memberships)
        close.append(error <= min(0.08, membership_error(possible, drawn.memberships) + 0.01) and relative < 0.08)
    assert sum(close) >= 4


def test_the_smallest_simplex_is_found():
    """Pure clients are at the corners, though a larger simplex would fit as well."""
    drawn = draw_population("gaussian", clients=60, rows=200, alpha=0.1)
    found, relative = match_truth(fit(drawn, n_init=4), drawn)
    pure = drawn.memberships.max(1) > 0.99
    assert pure.sum() >= 20
    assert found[pure].max(1).mean() > 0.95 and relative < 0.1


def test_the_order_of_canonical_models_does_not_depend_on_the_start():
    fits = [fitted_population("gaussian", 40, 40, n_init=4, random_state=seed) for seed in (0, 1)]
    np.testing.assert_allclose(*(model.canonical_coef_ for model in fits), atol=0.05)
    assert (np.diff(np.asarray(fits[0].memberships_).mean(0)) <= 0).all()


def test_information_criteria_choose_the_right_number_of_models():
    """One model for identical clients, three for three kinds."""
    identical, kinds = (draw_population("gaussian", clients=40, rows=30, alpha=alpha) for alpha in (0.3, 0.05))
    noise = np.random.default_rng(0).normal(size=len(identical.y))
    for drawn, best in ((identical._replace(y=identical.x @ identical.theta[0] + noise), 1), (kinds, 3)):
        models = [fit(drawn, k=k) for k in (1, 2, 3)]
        assert [model.n_parameters_ for model in models] == [5, 11, 16]
        assert np.argmin([model.bic_ for model in models]) == best - 1
        assert models[2].bic_ - models[2].aic_ == pytest.approx((np.log(40) - 2) * 16)


@pytest.mark.filterwarnings("ignore:the fit stopped")
@pytest.mark.parametrize("name", ["poisson", "multinomial"])
def test_a_small_penalty_comes_near_the_fit_without_one(name):
    """The paper's rounds close more than half of the gap in likelihood between one model and memberships as points."""
    drawn = draw_population(name, clients=12, rows=60, radius=1.5, alpha=0.1)
    rounds = fit(drawn, name, penalty=1e-9, max_iter=50, shared=["x2"])
    exact, pooled = fit(drawn, name, shared=["x2"]), fit(drawn, name, k=1)
    deviance, possible, worst = (each.deviance(drawn.x, drawn.y, drawn.clients) for each in (rounds, exact, pooled))
    assert worst - deviance > 0.5 * (worst - possible) > 0


@pytest.mark.parametrize("residual", [None, "full"])
def test_a_new_client_with_the_data_of_a_known_one_gets_its_membership(residual):
    drawn, model = draw_population("gaussian", clients=20, rows=20), copy.deepcopy(fitted_population(residual=residual))
    before, own = np.asarray(model.memberships_), drawn.clients == 7
    placed = np.asarray(model.onboard(drawn.x[own], drawn.y[own], clients=np.full(own.sum(), 99)))
    np.testing.assert_allclose(placed[0], before[7], atol=1e-3)
    np.testing.assert_array_equal(np.asarray(model.memberships_)[:-1], before)
    new, known = (model.predict(drawn.x, np.full(len(drawn.x), client)) for client in (99, 7))
    np.testing.assert_allclose(new, known, atol=5e-3)


def test_a_client_is_predicted_by_its_coefficients_and_an_unknown_one_like_the_mean_client():
    x, model = draw_population("gaussian", clients=20, rows=20).x, fitted_population()
    slope, intercept = model.client_coef(4)
    np.testing.assert_allclose(model.predict(x, np.full(len(x), 4)), x @ slope + intercept)
    mean = model.concentration_ / model.concentration_.sum()  # of the Dirichlet distribution memberships are drawn from
    expected = x @ (mean @ model.canonical_coef_) + mean @ model.canonical_intercept_
    np.testing.assert_allclose(model.predict(x, np.full(len(x), 1000)), expected, atol=0.05)
    points, x = penalized(), make_client_table().x
    mean_of_all = np.mean([points.predict(x, np.full(len(x), client)) for client in range(12)], 0)
    np.testing.assert_allclose(points.predict(x, NEW), mean_of_all)


@pytest.mark.filterwarnings("ignore:the fit stopped")
def test_with_W_all_ones_the_objective_is_a_mixed_models():
    """Theorem 1, for a fitted model: lambda = 1 / M and G = theta theta'."""
    drawn = draw_population("gaussian", clients=12, rows=10)
    model = fit(drawn, k=2, penalty=1 / 12, max_iter=20)
    c = np.array(model.memberships_)
    theta = np.vstack([model.canonical_intercept_, model.canonical_coef_.T])  # (d + 1, K)
    errors = drawn.y - model.predict(drawn.x, drawn.clients)
    losses = torch.from_numpy(np.bincount(drawn.clients, errors**2) / 10 / 2)
    theirs = float(losses.mean()) + mixed_model(theta, c).penalty()
    assert papers_objective(losses, torch.from_numpy(c), 1 / 12) == pytest.approx(theirs, rel=1e-9)


@pytest.mark.filterwarnings("ignore:the fit stopped")
def test_a_graph_pulls_neighbours_together():
    matrix, drawn = np.zeros((10, 10)), draw_population("gaussian", clients=10, rows=10)
    matrix[[0, 1, 2, 3], [1, 0, 3, 2]] = 1
    edges = [(0, 1), (2, 3)]
    graphs = {"free": (1e-9, edges), "tied": (10.0, edges), "same": (10.0, matrix)}
    free, tied, same = (
        np.asarray(fit(drawn, k=2, penalty=penalty, affinity=affinity, max_iter=40, random_state=0).memberships_)
        for penalty, affinity in graphs.values()
    )
    assert np.abs(tied[[0, 2]] - tied[[1, 3]]).sum(1).max() < 0.05
    assert np.abs(np.diff(free[:4], axis=0)).sum() > np.abs(np.diff(tied[:4], axis=0)).sum()
    np.testing.assert_allclose(same, tied, atol=1e-4)


@pytest.mark.filterwarnings("ignore:the fit stopped")
def test_a_penalty_takes_weights_offsets_and_choices():
    drawn = draw_population("gaussian", clients=8, rows=12)
    times = np.random.default_rng(0).integers(1, 4, len(drawn.y))
    few = {"penalty": 0.01, "max_iter": 5, "random_state": 0, "k": 2}
    weighted = make_estimator(**few).fit(drawn.x, drawn.y, drawn.clients, sample_weight=times)
    again = make_estimator(**few).fit(drawn.x, drawn.y, drawn.clients, sample_weight=2.0 * times)
    np.testing.assert_allclose(weighted.memberships_, again.memberships_, atol=1e-4)  # only their ratios count
    known = 3.0 * drawn.x[:, 0]
    moved = make_estimator(**few | {"max_iter": 40}).fit(drawn.x, drawn.y + known, drawn.clients, offset=known)
    assert np.abs(moved.canonical_coef_).max() < 2.0  # without the offset the slope would be above 2
    x, y, situations, clients = make_choice_table()
    tastes = choice(penalty=1e-9, max_iter=100).fit(x, y, situations, clients)
    assert tastes.score(x, y, situations, clients) > 0.6


def test_tastes_are_recovered_from_choices():
    x, y, situations, clients = make_choice_table(clients=60, situations=12)
    model, kind = choice(n_init=4).fit(x, y, situations, clients), np.arange(60) % 2
    order = np.argsort(model.canonical_coef_[:, 0])
    for at in (0, 1):  # compare with a fit that knows the kind of each client
        same = kind[clients] == at
        known = choice(k=1).fit(x[same], y[same], situations[same])
        np.testing.assert_allclose(model.canonical_coef_[order[at]], known.canonical_coef_[0], atol=0.3)
    assert (np.asarray(model.memberships_)[:, order].argmax(1) == kind).mean() > 0.95


def test_two_alternatives_are_a_logistic_regression_of_their_difference():
    drawn = draw_population("bernoulli", clients=10, rows=12)
    x = np.stack([np.zeros_like(drawn.x), drawn.x], 1).reshape(-1, 3)
    y = np.stack([1 - drawn.y, drawn.y], 1).ravel()
    table = {"situations": np.repeat(np.arange(len(drawn.y)), 2), "clients": np.repeat(drawn.clients, 2)}
    exact = {"k": 1, "ridge": 0.0, "tol": 1e-8}
    logistic = make_estimator("bernoulli", fit_intercept=False, **exact).fit(drawn.x, drawn.y, clients=drawn.clients)
    found = choice(**exact).fit(x, y, **table)
    np.testing.assert_allclose(found.canonical_coef_, logistic.canonical_coef_, atol=1e-5)


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


@pytest.mark.parametrize(
    ("name", "mix"), [("gaussian", "weights"), ("poisson", "predictions"), ("bernoulli", "weights")]
)
def test_a_fit_descends_and_converges(name, mix):
    model = fitted_population(name, 12, 10, k=2, mix=mix)
    assert model.converged_ and (np.diff(model.objective_path_) <= 1e-9).all()
    memberships = np.asarray(model.memberships_)
    assert (memberships >= 0).all() and np.allclose(memberships.sum(1), 1)


def test_better_means_count_where_clients_have_few_rows():
    """Six workers at three machines, three rows each: every worker has its own difference between machines."""
    random = np.random.default_rng(4)
    workers, machines = np.repeat(np.arange(6), 9), np.tile(np.repeat(np.arange(3), 3), 6)
    y = random.normal(0, 5, (6, 3))[workers, machines] + random.normal(0, 1, 54)
    x = (machines[:, None] == [1, 2]).astype(float)
    model = make_estimator(k="auto", choose="prediction", n_init=1).fit(x, y, clients=workers)
    assert model.k_ >= 3 or model.residual_ == "full"


def test_constant_and_aliased_columns_are_said_and_not_counted():
    drawn = draw_population("gaussian", clients=12, rows=10)
    more = np.c_[drawn.x, np.full(len(drawn.y), 3.0), drawn.x @ [1.0, 2.0, 0.0]]
    plain, model = (make_estimator(k=2).fit(x, drawn.y, drawn.clients) for x in (drawn.x, more))
    assert model.n_parameters_ == plain.n_parameters_
    assert "x3, x4: constant, or a sum of other columns" in str(model.summary())
    shared = make_estimator(k=2, shared=["x4"]).fit(more, drawn.y, drawn.clients)
    assert shared.n_parameters_ == plain.n_parameters_


def test_weights_are_frequencies_and_the_summary_says_so():
    drawn = draw_population("gaussian", clients=8, rows=8)
    model = make_estimator(k=1).fit(drawn.x, drawn.y, drawn.clients, sample_weight=np.full(64, 2.5))
    assert "frequencies that sum to 160" in str(model.summary())


def test_pickling_computes_nothing():
    drawn = draw_population("gaussian", clients=8, rows=8)
    model = make_estimator(k=2).fit(drawn.x, drawn.y, drawn.clients)
    pickle.dumps(model)
    assert model._log_likelihood is None and model._covariance is None


def test_an_ordered_target_is_said_to_be_taken_as_unordered():
    drawn = draw_population("multinomial", clients=8, rows=8)
    y = pd.Series(pd.Categorical.from_codes(drawn.y.astype(int), ["low", "mid", "top"], ordered=True))
    with pytest.warns(UserWarning, match="low < mid < top.*unordered"):
        make_estimator("multinomial", k=1).fit(drawn.x, y, drawn.clients)
