"""Solvers: optimality conditions, and the results of other programs where they have the same model."""

import numpy as np
import pytest
import torch
from sklearn.linear_model import GammaRegressor, LinearRegression, LogisticRegression, PoissonRegressor

from kit.tables import FAMILIES, draw_population, make_family, make_rows, to_double
from ppfl.core import affinity as affinities
from ppfl.core import objective as core_objective
from ppfl.glm import PopulationClassifier, PopulationRegressor
from ppfl.glm.gaussian_moments import fastest_form
from ppfl.glm.solvers.marginal import Marginal
from ppfl.glm.solvers.newton_steps import newton_direction
from ppfl.glm.solvers.parameters import ParameterShape, Regularization, concentration
from ppfl.glm.solvers.problem import GLMProblem
from ppfl.glm.solvers.profile import Profile
from ppfl.glm.solvers.solve import SearchSettings, solve_marginal
from ppfl.glm.solvers.split import split_corner

K = 3


def make_profile(name: str, mix: str, penalty: float, tol: float = 1e-9) -> tuple[Profile, ParameterShape]:
    rows = make_rows(draw_population(name, clients=6, rows=8), make_family(name), mix, shared=["x2"])
    shape = ParameterShape(K, rows.varying.columns, rows.shared.columns, rows.family.outputs, len(rows.family.nuisance))
    W = affinities.uniform([str(i) for i in range(6)])
    start = torch.full((6, K), 1 / K, dtype=torch.float64)
    regularization = Regularization(0.1, 0.5, torch.ones(shape.varying).double(), torch.ones(shape.shared).double())
    return Profile(rows, shape, regularization, W, penalty, tol, start), shape


@pytest.mark.parametrize("penalty", [0.0, 0.01])
@pytest.mark.parametrize("mix", ["weights", "predictions"])
@pytest.mark.parametrize("name", FAMILIES)
def test_the_profile_has_the_best_memberships_and_the_right_gradient(name: str, mix: str, penalty: float) -> None:
    profile, shape = make_profile(name, mix, penalty)
    at = np.random.default_rng(0).normal(size=shape.size) / 3
    _, gradient = profile(at)
    assert profile.membership_gap(at) < 1e-7
    free = shape.size - shape.k  # the distribution of memberships is not part of it
    for entry in range(free):
        step = np.zeros(shape.size)
        step[entry] = 1e-5
        numerical = (profile(at + step)[0] - profile(at - step)[0]) / 2e-5
        assert gradient[entry] == pytest.approx(numerical, rel=1e-3, abs=1e-5)
    assert (gradient[free:] == 0).all()


def test_the_profile_is_the_papers_objective() -> None:
    """sum p_i f_i + lambda <C, L C> of the core with p_i = n_i / n, plus the ridges."""
    profile, shape = make_profile("gaussian", "weights", 0.02)
    at = np.random.default_rng(0).normal(size=shape.size) / 3
    value, _ = profile(at)
    coefficients, _ = shape.unpack(torch.from_numpy(at))
    c = profile.memberships
    losses = -profile.data.client_log_likelihoods(coefficients, c[..., None])[:, 0] / 8
    p = torch.full((6,), 1 / 6, dtype=torch.float64)
    W = affinities.uniform([str(i) for i in range(6)])
    paper = core_objective.objective(losses, c, p, W, penalty=0.02)
    assert value == pytest.approx(float(paper) + float(profile.regularization.value(coefficients)) / 48, rel=1e-9)


@pytest.mark.parametrize("mix", ["weights", "predictions"])
@pytest.mark.parametrize("solver", ["marginal", "profile"])
@pytest.mark.parametrize("name", ["gaussian", "poisson", "bernoulli"])
def test_a_fit_descends_to_a_stationary_point(name: str, solver: str, mix: str) -> None:
    drawn = draw_population(name, clients=12, rows=10)
    settings = {
        "k": 2,
        "mix": mix,
        "solver": solver,
        "n_init": 2,
        "random_state": 0,
        "penalty": 1e-3 * (solver == "profile"),
    }
    model = (
        PopulationClassifier(**settings) if name == "bernoulli" else PopulationRegressor(family=name, **settings)
    ).fit(drawn.x, drawn.y, clients=drawn.clients)
    assert model.converged_
    assert len(model.objective_path_) in (1, model.n_iter_ + 1)
    assert (np.diff(model.objective_path_) <= 1e-12).all()
    c = np.asarray(model.memberships_)
    assert (c >= 0).all()
    np.testing.assert_allclose(c.sum(1), 1)


@pytest.mark.parametrize("name", FAMILIES)
def test_one_canonical_model_is_the_pooled_glm(name: str) -> None:
    """The same as scikit-learn's."""
    drawn = draw_population(name, clients=20, rows=20)
    reference = {
        "gaussian": LinearRegression(),
        "poisson": PoissonRegressor(alpha=0, tol=1e-10, max_iter=1000),
        "gamma": GammaRegressor(alpha=0, tol=1e-10, max_iter=1000),
    }.get(name, LogisticRegression(C=np.inf, tol=1e-10, max_iter=1000))
    reference.fit(drawn.x, drawn.y)
    settings = {"k": 1, "ridge": 0.0, "tol": 1e-8}
    ours = (
        PopulationRegressor(family=name, **settings)
        if name in ("gaussian", "poisson", "gamma")
        else PopulationClassifier(**settings)
    ).fit(drawn.x, drawn.y, clients=drawn.clients)
    if name in ("gaussian", "poisson", "gamma"):
        np.testing.assert_allclose(ours.canonical_coef_[0], reference.coef_, atol=1e-5)
        assert ours.canonical_intercept_[0] == pytest.approx(reference.intercept_, abs=1e-5)
    else:
        np.testing.assert_allclose(ours.predict_proba(drawn.x), reference.predict_proba(drawn.x), atol=1e-5)


@pytest.mark.parametrize("noise", [0.3, 0.1, 0.03])
def test_a_client_with_a_precise_membership_is_not_missed(noise: float) -> None:
    """Lines through 0 with slopes from -2 to 2 and little noise: the canonical models are the outermost clients."""
    random = np.random.default_rng(0)
    share = np.concatenate([np.zeros(4), np.ones(4), np.linspace(0.1, 0.9, 8)])
    clients = np.repeat(np.arange(16), 10)
    x = random.normal(size=(160, 1))
    y = (4 * share[clients] - 2) * x[:, 0] + noise * random.normal(size=160)
    model = PopulationRegressor(k=2, n_init=4, random_state=0).fit(x, y, clients=clients)
    np.testing.assert_allclose(sorted(model.canonical_coef_[:, 0]), [-2, 2], atol=0.1 + 0.6 * noise)
    found = np.asarray(model.memberships_)[:, int(model.canonical_coef_[:, 0].argmax())]
    assert np.abs(found - share).mean() < 0.02 + 0.1 * noise


@pytest.mark.parametrize(("name", "k"), [("gaussian", 2), ("poisson", 2), ("gaussian", 3), ("poisson", 3)])
def test_a_converged_marginal_fit_is_stationary(name: str, k: int) -> None:
    """Either for the points it has, or, where few clients say little, up to what the points themselves get wrong."""
    rows = make_rows(draw_population(name, clients=20, rows=10), make_family(name), "weights")
    samples = rows.n_samples * rows.family.has_dispersion
    regularization = Regularization(0.01, 0.0, torch.ones(4).double(), torch.ones(0).double(), samples)
    shape = ParameterShape(k, 4, 0, 1, len(rows.family.nuisance))
    problem = GLMProblem(rows, fastest_form(rows), shape, regularization)
    solution, objective = solve_marginal(problem, SearchSettings(1, 1e-6, 500, np.random.default_rng(0)))
    found = objective.with_hessian(solution.vector)
    assert found.value == pytest.approx(solution.objective)
    left = -0.5 * rows.n_samples * float(found.gradient @ newton_direction(found.gradient, found.hessian))
    assert np.abs(found.gradient).max() <= 1e-6 if k == 2 else left <= 0.2  # of the log-likelihood
    again = objective.adapted(solution.vector).log_likelihood(solution.vector)
    assert again == pytest.approx(objective.log_likelihood(solution.vector), abs=0.1)


def test_moments_and_rows_give_the_same_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = draw_population("gaussian", clients=12, rows=10)
    fits = []
    for limit in (None, 0):
        if limit is not None:
            monkeypatch.setattr("ppfl.glm.gaussian_moments._MAX_MOMENTS", limit)
        model = PopulationRegressor(k=2, n_init=2, random_state=0, tol=1e-8).fit(
            drawn.x, drawn.y, clients=drawn.clients
        )
        fits.append(model)
    assert fits[0].log_likelihood_ == pytest.approx(fits[1].log_likelihood_, rel=1e-8)
    np.testing.assert_allclose(fits[0].canonical_coef_, fits[1].canonical_coef_, atol=1e-4)


def test_without_a_penalty_each_client_has_its_own_best_mixture() -> None:
    """For fixed canonical models, no other membership has a higher likelihood."""
    profile, shape = make_profile("gaussian", "weights", 0.0, tol=1e-12)
    at = np.random.default_rng(3).normal(size=shape.size)
    profile(at)
    coefficients, _ = shape.unpack(torch.from_numpy(at))
    best = profile.data.client_log_likelihoods(coefficients, profile.memberships[..., None])
    others = to_double(np.random.default_rng(0).dirichlet([0.5] * K, 200).T)[None]
    assert bool((profile.data.client_log_likelihoods(coefficients, others) <= best + 1e-9).all())


def test_copies_of_a_canonical_model_move_apart_as_the_curvature_says() -> None:
    """The closed form from the smaller model, against differences of the likelihood of the larger one."""
    rows = make_rows(draw_population("poisson", clients=10, rows=6), make_family("poisson"), "weights")
    shape = ParameterShape(2, 4, 0, 1, 0)
    regularization = Regularization(0.0, 0.0, torch.ones(4).double(), torch.ones(0).double())
    at = np.random.default_rng(0).normal(size=shape.size) / 3
    smaller = Marginal.of(rows, shape, regularization, 256).adapted(at)
    _, log_alpha = shape.unpack(torch.from_numpy(at))
    split, axis, corner, step = split_corner(shape, at, 1), np.array([0.5, -0.5, 0.5, 0.5]), 1, 0.1
    curvature = smaller.with_hessian(at).apart[4:8, 4:8] / (1 + float(concentration(log_alpha)[corner]))
    apart = np.zeros_like(split)
    apart[4:8], apart[8:12] = axis, -axis
    larger = Marginal.of(rows, shape._replace(k=3), regularization, 4096).adapted(split)
    middle, *ends = (larger.log_likelihood(split + x * apart) for x in (0.0, -step, step))
    expected = (2 * middle - sum(ends)) / step**2 / rows.n_samples
    assert axis @ curvature @ axis == pytest.approx(expected, rel=0.05)
