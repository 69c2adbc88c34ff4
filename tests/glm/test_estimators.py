"""Fitted estimators: recovery of a known population, memberships, new clients, and mixed models."""

import warnings

import numpy as np
import pytest
import torch
from sklearn.exceptions import ConvergenceWarning, NotFittedError

from kit.tables import DrawnPopulation, draw_population
from ppfl.core import affinity as affinities
from ppfl.core import simplex
from ppfl.core.objective import objective
from ppfl.glm import NEW, PopulationChoice, PopulationClassifier, PopulationRegressor, mixed_model


def match_truth(model: PopulationRegressor, drawn: DrawnPopulation) -> tuple[np.ndarray, np.ndarray]:  # type: ignore[type-arg]
    """Memberships and canonical coefficients in the order of the truth."""
    found = np.array(model.memberships_)
    order = simplex.match(torch.from_numpy(drawn.memberships), torch.from_numpy(found)).numpy()
    return found[:, order], model.canonical_coef_[order]


def membership_error(a: np.ndarray, b: np.ndarray) -> float:  # type: ignore[type-arg]
    """Mean total variation."""
    return float(np.abs(a - b).sum(1).mean() / 2)


def memberships_with_known_models(drawn: DrawnPopulation) -> np.ndarray:  # type: ignore[type-arg]
    """Posterior means with known coefficients, noise and distribution of memberships: the best possible estimate."""
    grid = np.random.default_rng(1).dirichlet([0.3] * 3, 4000)
    noise = drawn.eta.std()
    found = []
    for client in range(len(drawn.memberships)):
        own_rows = drawn.clients == client
        errors = drawn.y[own_rows][:, None] - drawn.x[own_rows] @ drawn.theta.T @ grid.T
        logs = -0.5 * (errors**2).sum(0) / noise**2
        weight = np.exp(logs - logs.max())
        found.append(weight @ grid / weight.sum())
    return np.array(found)


def test_nine_of_ten_starts_recover_the_memberships() -> None:
    """200 clients with 40 rows, half of the variance noise: an error below 0.08, and within 0.01 of the best."""
    drawn = draw_population("gaussian", clients=200, rows=40, d=5)
    possible = membership_error(memberships_with_known_models(drawn), drawn.memberships)
    close = []
    for start in range(10):
        model = PopulationRegressor(k=3, n_init=2, random_state=start).fit(drawn.x, drawn.y, clients=drawn.clients)
        found, theta = match_truth(model, drawn)
        error = membership_error(found, drawn.memberships)
        relative = np.linalg.norm(theta - drawn.theta) / np.linalg.norm(drawn.theta)
        close.append(error <= 0.08 and error <= possible + 0.01 and relative < 0.08)
    assert sum(close) >= 9


@pytest.mark.parametrize(("name", "rows"), [("poisson", 100), ("bernoulli", 200)])
def test_other_families_recover_memberships_as_well(name: str, rows: int) -> None:
    """With many rows per client."""
    drawn = draw_population(name, clients=30, rows=rows, radius=1.5)
    settings = {"k": 3, "n_init": 4, "random_state": 0}
    estimator = (
        PopulationClassifier(**settings) if name == "bernoulli" else PopulationRegressor(family=name, **settings)
    )
    found, theta = match_truth(estimator.fit(drawn.x, drawn.y, clients=drawn.clients), drawn)
    assert membership_error(found, drawn.memberships) < 0.1
    assert np.linalg.norm(theta - drawn.theta) / np.linalg.norm(drawn.theta) < 0.2


@pytest.mark.parametrize("solver", ["marginal", "profile"])
def test_the_smallest_simplex_is_found(solver: str) -> None:
    """Pure clients are at the corners, though a larger simplex would fit as well."""
    drawn = draw_population("gaussian", clients=60, rows=200, alpha=0.1)
    model = PopulationRegressor(k=3, solver=solver, n_init=4, random_state=0)
    model.fit(drawn.x, drawn.y, clients=drawn.clients)
    found, theta = match_truth(model, drawn)
    pure = drawn.memberships.max(1) > 0.99
    assert pure.sum() >= 20
    assert found[pure].max(1).mean() > (0.95 if solver == "marginal" else 0.85)  # points overfit the noise
    assert np.linalg.norm(theta - drawn.theta) / np.linalg.norm(drawn.theta) < (0.1 if solver == "marginal" else 0.25)


def test_the_order_of_canonical_models_does_not_depend_on_the_start() -> None:
    drawn = draw_population("gaussian", clients=40, rows=40)
    fits = [
        PopulationRegressor(k=3, n_init=4, random_state=seed).fit(drawn.x, drawn.y, clients=drawn.clients)
        for seed in (0, 1)
    ]
    np.testing.assert_allclose(fits[0].canonical_coef_, fits[1].canonical_coef_, atol=0.05)
    share = np.asarray(fits[0].memberships_).mean(0)
    assert (np.diff(share) <= 0).all()


def test_for_linear_models_mixing_predictions_is_mixing_weights() -> None:
    drawn = draw_population("gaussian", clients=15, rows=15)
    settings = {"k": 2, "n_init": 2, "random_state": 0}
    a = PopulationRegressor(mix="weights", **settings).fit(drawn.x, drawn.y, clients=drawn.clients)
    b = PopulationRegressor(mix="predictions", **settings).fit(drawn.x, drawn.y, clients=drawn.clients)
    np.testing.assert_allclose(a.predict(drawn.x, drawn.clients), b.predict(drawn.x, drawn.clients), atol=1e-6)


def test_shared_columns_have_one_coefficient() -> None:
    drawn = draw_population("gaussian", clients=15, rows=15)
    model = PopulationRegressor(k=3, shared=[1], n_init=2, random_state=0).fit(drawn.x, drawn.y, clients=drawn.clients)
    assert np.ptp(model.canonical_coef_[:, 1]) == 0
    assert (np.ptp(model.canonical_coef_[:, [0, 2]], axis=0) > 0).all()


def test_predictions_use_the_clients_own_coefficients() -> None:
    drawn = draw_population("gaussian", clients=15, rows=15)
    model = PopulationRegressor(k=3, n_init=2, random_state=0).fit(drawn.x, drawn.y, clients=drawn.clients)
    slope, intercept = model.client_coef(4)
    own_rows = drawn.clients == 4
    np.testing.assert_allclose(
        model.predict(drawn.x[own_rows], drawn.clients[own_rows]), drawn.x[own_rows] @ slope + intercept
    )


@pytest.mark.parametrize("solver", ["marginal", "profile"])
def test_a_new_client_with_the_data_of_a_known_one_gets_its_membership(solver: str) -> None:
    drawn = draw_population("gaussian", clients=20, rows=20)
    model = PopulationRegressor(k=3, solver=solver, n_init=2, random_state=0)
    model.fit(drawn.x, drawn.y, clients=drawn.clients)
    before = np.asarray(model.memberships_)
    own_rows = drawn.clients == 7
    placed = np.asarray(model.onboard(drawn.x[own_rows], drawn.y[own_rows], clients=np.full(own_rows.sum(), 99)))
    np.testing.assert_allclose(placed[0], before[7], atol=1e-3)
    after = np.asarray(model.memberships_)
    np.testing.assert_array_equal(after[:-1], before)
    ninety_nine = np.full(len(drawn.x), 99)
    seven = np.full(len(drawn.x), 7)
    np.testing.assert_allclose(model.predict(drawn.x, ninety_nine), model.predict(drawn.x, seven), atol=5e-3)


def test_a_new_client_of_a_federated_fit_gets_the_best_membership_for_its_data() -> None:
    drawn = draw_population("gaussian", clients=12, rows=40, radius=1.5)
    model = PopulationRegressor(k=3, solver="federated", max_iter=40, random_state=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        model.fit(drawn.x, drawn.y, clients=drawn.clients)
    own_rows = drawn.clients == 7
    placed = np.asarray(model.onboard(drawn.x[own_rows], drawn.y[own_rows], clients=np.full(own_rows.sum(), 99)))[0]
    assert placed.min() >= 0 and placed.sum() == pytest.approx(1)

    def residuals(c: np.ndarray) -> float:
        own = np.tensordot(c, model.canonical_coef_, 1), c @ model.canonical_intercept_
        return float(np.square(drawn.y[own_rows] - np.asarray(drawn.x)[own_rows] @ own[0] - own[1]).sum())

    others = np.random.default_rng(0).dirichlet([0.5] * 3, 300)
    assert residuals(placed) <= min(residuals(c) for c in [*others, *np.eye(3)]) * (1 + 1e-6)
    np.testing.assert_array_equal(model.clients_[-1], 99)


def test_an_unknown_client_is_predicted_like_the_mean_client() -> None:
    drawn = draw_population("gaussian", clients=20, rows=20)
    model = PopulationRegressor(k=3, n_init=2, random_state=0).fit(drawn.x, drawn.y, clients=drawn.clients)
    mean = model.concentration_ / model.concentration_.sum()  # of the Dirichlet distribution memberships are drawn from
    expected = drawn.x @ (mean @ model.canonical_coef_) + mean @ model.canonical_intercept_
    np.testing.assert_allclose(model.predict(drawn.x, np.full(len(drawn.x), 1000)), expected, atol=0.05)
    np.testing.assert_array_equal(model.predict(drawn.x, NEW), model.predict(drawn.x, np.full(len(drawn.x), 1000)))
    points = PopulationRegressor(k=3, solver="profile", n_init=2, random_state=0)
    points.fit(drawn.x, drawn.y, clients=drawn.clients)
    mean_of_all = np.mean([points.predict(drawn.x, np.full(len(drawn.x), client)) for client in range(20)], 0)
    np.testing.assert_allclose(points.predict(drawn.x, NEW), mean_of_all)


def test_information_criteria_choose_the_right_number_of_models() -> None:
    """One model for identical clients, three for three kinds."""
    random = np.random.default_rng(0)
    identical = draw_population("gaussian", clients=40, rows=30)
    identical = identical._replace(y=identical.x @ identical.theta[0] + random.normal(size=len(identical.y)))
    kinds = draw_population("gaussian", clients=40, rows=30, alpha=0.05)
    for drawn, best in ((identical, 1), (kinds, 3)):
        bic = {}
        for k in (1, 2, 3):
            model = PopulationRegressor(k=k, n_init=4, random_state=0).fit(drawn.x, drawn.y, clients=drawn.clients)
            assert model.n_parameters_ == k * 4 + 1 + (k if k > 1 else 0)
            assert model.bic_ - model.aic_ == pytest.approx((np.log(40) - 2) * model.n_parameters_)
            bic[k] = model.bic_
        assert min(bic, key=bic.__getitem__) == best


def test_with_W_all_ones_the_objective_is_a_mixed_models() -> None:
    """Theorem 1, for a fitted model: lambda = 1 / M and G = theta theta'."""
    drawn = draw_population("gaussian", clients=12, rows=10, d=4)
    model = PopulationRegressor(k=3, penalty=1 / 12, n_init=2, random_state=0)
    model.fit(drawn.x, drawn.y, clients=drawn.clients)
    c = np.array(model.memberships_)
    theta = np.vstack([model.canonical_intercept_, model.canonical_coef_.T])  # (d + 1, K)
    whole = np.hstack([np.ones((len(drawn.x), 1)), drawn.x])
    errors = drawn.y - (whole * (c @ theta.T)[drawn.clients]).sum(1)
    losses = torch.from_numpy(np.bincount(drawn.clients, errors**2) / 10 / 2)
    p = torch.full((12,), 1 / 12, dtype=torch.float64)
    W = affinities.uniform([str(i) for i in range(12)])
    ours = objective(losses, torch.from_numpy(c), p, W, penalty=1 / 12)
    theirs = float(p @ losses) + mixed_model(theta, c).penalty()
    assert float(ours) == pytest.approx(theirs, rel=1e-9)


def test_a_penalty_pulls_clients_together() -> None:
    drawn = draw_population("gaussian", clients=20, rows=20)
    spread = []
    for penalty in (0.0, 1e-3, 0.05):
        model = PopulationRegressor(k=3, solver="profile", penalty=penalty, n_init=2, random_state=0)
        model.fit(drawn.x, drawn.y, clients=drawn.clients)
        coefficients = np.asarray(model.memberships_) @ model.canonical_coef_
        spread.append(float(coefficients.var(0).sum()))
    assert spread[0] > spread[1] > spread[2]


def test_a_graph_pulls_neighbours_together() -> None:
    drawn = draw_population("gaussian", clients=10, rows=10)
    settings = {"k": 2, "solver": "profile", "n_init": 2, "random_state": 0}
    free = PopulationRegressor(**settings).fit(drawn.x, drawn.y, clients=drawn.clients)
    tied = PopulationRegressor(penalty=10.0, affinity=[(0, 1), (2, 3)], **settings)
    tied.fit(drawn.x, drawn.y, clients=drawn.clients)
    c = np.asarray(tied.memberships_)
    assert np.abs(c[0] - c[1]).sum() < 0.01
    assert np.abs(c[2] - c[3]).sum() < 0.01
    assert np.abs(np.diff(np.asarray(free.memberships_)[:4], axis=0)).sum() > 0.02
    matrix = np.zeros((10, 10))
    matrix[[0, 1, 2, 3], [1, 0, 3, 2]] = 1
    same = PopulationRegressor(penalty=10.0, affinity=matrix, **settings).fit(drawn.x, drawn.y, clients=drawn.clients)
    np.testing.assert_allclose(np.asarray(same.memberships_), c, atol=1e-4)


@pytest.mark.parametrize("name", ["gaussian", "poisson", "bernoulli", "multinomial"])
def test_the_federated_solver_comes_near_the_exact_fit(name: str) -> None:
    """It closes more than half of the gap in likelihood between the pooled model and the exact fit."""
    drawn = draw_population(name, clients=12, rows=60, radius=1.5, alpha=0.1)
    classes = name in ("bernoulli", "multinomial")
    settings = {"k": 3, "shared": ["x2"], "random_state": 0}
    fits = {}
    for solver in ("federated", "profile"):
        estimator = PopulationClassifier(**settings) if classes else PopulationRegressor(family=name, **settings)
        estimator.set_params(solver=solver, max_iter=150 if solver == "federated" else 500, n_init=2)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # 150 rounds do not converge
            fits[solver] = estimator.fit(drawn.x, drawn.y, clients=drawn.clients)
    estimator = PopulationClassifier(k=1) if classes else PopulationRegressor(k=1, family=name)
    pooled = estimator.fit(drawn.x, drawn.y, clients=drawn.clients).log_likelihood_
    federated, exact = fits["federated"].log_likelihood_, fits["profile"].log_likelihood_
    assert federated - pooled > 0.5 * (exact - pooled) > 0


def test_tastes_are_recovered_from_choices() -> None:
    random = np.random.default_rng(0)
    people, situations, alternatives = 60, 12, 4
    tastes = np.array([[-2.0, 0.0, 1.0], [0.5, 2.0, -1.0]])
    kind = random.integers(0, 2, people)
    x = random.normal(size=(people * situations, alternatives, 3))
    owner = np.repeat(np.arange(people), situations)
    utility = np.einsum("njq,nq->nj", x, tastes[kind[owner]]) + random.gumbel(size=x.shape[:2])
    y = (np.arange(alternatives) == utility.argmax(1)[:, None]).ravel()
    table = {"situations": np.repeat(np.arange(len(x)), alternatives), "clients": np.repeat(owner, alternatives)}
    model = PopulationChoice(k=2, n_init=4, random_state=0).fit(x.reshape(-1, 3), y, **table)
    order = [int(model.canonical_coef_[:, 0].argmin()), int(model.canonical_coef_[:, 0].argmax())]
    for at in (0, 1):  # compare with a fit that knows the kind of each client
        same_kind = kind[table["clients"]] == at
        known = PopulationChoice(k=1).fit(
            x.reshape(-1, 3)[same_kind], y[same_kind], situations=table["situations"][same_kind]
        )
        np.testing.assert_allclose(model.canonical_coef_[order[at]], known.canonical_coef_[0], atol=0.3)
    assert (np.asarray(model.memberships_)[:, order].argmax(1) == kind).mean() > 0.95
    chance = model.predict_proba(x.reshape(-1, 3), **table)
    np.testing.assert_allclose(chance.reshape(-1, alternatives).sum(1), 1)
    assert model.score(x.reshape(-1, 3), y, **table) > PopulationChoice(k=1).fit(x.reshape(-1, 3), y, **table).score(
        x.reshape(-1, 3), y, **table
    )
    shuffled = random.permutation(len(y))
    mixed_up = {name: values[shuffled] for name, values in table.items()}
    np.testing.assert_allclose(model.predict_proba(x.reshape(-1, 3)[shuffled], **mixed_up), chance[shuffled])


def test_two_alternatives_are_a_logistic_regression_of_their_difference() -> None:
    drawn = draw_population("bernoulli", clients=10, rows=12)
    x = np.stack([np.zeros_like(drawn.x), drawn.x], 1).reshape(-1, 3)
    y = np.stack([1 - drawn.y, drawn.y], 1).ravel()
    table = {"situations": np.repeat(np.arange(len(drawn.y)), 2), "clients": np.repeat(drawn.clients, 2)}
    choice = PopulationChoice(k=1, ridge=0.0, tol=1e-8).fit(x, y, **table)
    logistic = PopulationClassifier(k=1, ridge=0.0, fit_intercept=False, tol=1e-8)
    logistic.fit(drawn.x, drawn.y, clients=drawn.clients)
    np.testing.assert_allclose(choice.canonical_coef_, logistic.canonical_coef_, atol=1e-5)


def test_an_unfitted_model_raises() -> None:
    with pytest.raises(NotFittedError):
        PopulationRegressor().predict([[1.0]])
    with pytest.raises(NotFittedError):
        _ = PopulationRegressor().memberships_
