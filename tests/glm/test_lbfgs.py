"""The way down: coordinates that make it short, and the same end as without them."""

import numpy as np
import pytest

from drawn_populations import FAMILIES, draw, family_of, rows_of
from ppfl.glm.likelihoods import fastest_form
from ppfl.glm.membership_grid import Grid
from ppfl.glm.solvers.lbfgs import find_rescaling, minimize_lbfgs
from ppfl.glm.solvers.marginal import Marginal
from ppfl.glm.solvers.parameters import ParameterShape, Regularization
from ppfl.glm.solvers.problem import GLMProblem

K = 3


class Bowl:
    """x'Hx / 2 - b'x, its axes a thousand times as long as others."""

    def __init__(self, size: int = 12) -> None:
        random = np.random.default_rng(0)
        turn = np.linalg.qr(random.normal(size=(size, size)))[0]
        self.H, self.b = turn @ np.diag(np.logspace(-3, 3, size)) @ turn.T, random.normal(size=size)

    def __call__(self, x):
        return float(x @ self.H @ x / 2 - self.b @ x), self.H @ x - self.b


def evenly(objective):
    return lambda at, anew: find_rescaling(objective, at)


def test_along_even_axes_a_bowl_is_round() -> None:
    bowl = Bowl()
    axes = find_rescaling(bowl, np.zeros(12))
    np.testing.assert_allclose(axes.T @ bowl.H @ axes, np.eye(12), atol=1e-5)


def test_a_round_bowl_has_one_way_down() -> None:
    bowl = Bowl()
    best = np.linalg.solve(bowl.H, bowl.b)
    there = minimize_lbfgs(bowl, np.ones(12), 1e-6, 500, evenly(bowl))
    assert len(there.path) <= 5 < len(minimize_lbfgs(bowl, np.ones(12), 1e-6, 500).path)
    assert there.objective == pytest.approx(bowl(best)[0], rel=1e-9)


def test_who_has_arrived_goes_nowhere() -> None:
    best = np.linalg.solve(Bowl().H, Bowl().b)
    there = minimize_lbfgs(Bowl(), best, 1e-6, 500)
    assert there.vector is best and len(there.path) == 1


def test_too_many_coordinates_stay_as_they_are() -> None:
    """Their curvature would cost more than it saves."""
    assert find_rescaling(Bowl(201), np.zeros(201)) is None
    rounded = minimize_lbfgs(Bowl(201), np.zeros(201), 1e-3, 100, evenly(Bowl(201)))
    assert rounded.path == minimize_lbfgs(Bowl(201), np.zeros(201), 1e-3, 100).path


@pytest.mark.parametrize("height", [0.0, np.nan])
def test_where_nothing_curves_coordinates_stay_as_they_are(height: float) -> None:
    bowl = Bowl()
    bowl.H = np.full_like(bowl.H, height)
    assert find_rescaling(bowl, np.zeros(12)) is None


def problem_of(name: str) -> GLMProblem:
    rows = rows_of(draw(name, clients=9, rows=8), family_of(name), "weights", shared=["x2"])
    shape = ParameterShape(K, rows.varying.columns, rows.shared.columns, rows.family.outputs)
    regularization = Regularization(0.9, 0.0, rows.weight.new_ones(shape.varying), rows.weight.new_ones(shape.shared))
    return GLMProblem(rows, fastest_form(rows), shape, regularization)


@pytest.mark.parametrize("name", FAMILIES)
def test_rounded_or_not_the_end_is_the_same_and_nothing_rises(name: str) -> None:
    objective = problem_of(name).marginal(K, 40)
    start = np.random.default_rng(0).normal(size=objective.shape.size) / 3
    plain = minimize_lbfgs(objective, start, 1e-7, 2000)
    for end in (plain, minimize_lbfgs(objective, start, 1e-7, 2000, evenly(objective))):
        assert end.gradient <= 1e-7
        assert np.all(np.diff(end.path) <= 1e-12)
    close = minimize_lbfgs(
        objective, plain.vector, 1e-7, 2000, evenly(objective)
    )  # both may be minima, but each is one
    assert close.objective == pytest.approx(plain.objective, abs=1e-9)


@pytest.mark.parametrize("name", ["gaussian", "poisson"])
def test_some_clients_are_a_problem_of_their_own(name: str) -> None:
    """The curvature is taken from theirs: data, grids and holds of these clients and no others."""
    problem = problem_of(name)
    objective = problem.marginal(K, 40)
    theirs = problem.subset(np.array([8, 0, 4])).marginal(K, 40)
    at = np.random.default_rng(0).normal(size=objective.shape.size) / 3
    np.testing.assert_allclose(objective.subset(3)(at)[1], theirs(at)[1], rtol=1e-12)
    assert objective.subset(9) is objective


def test_what_is_not_kept_is_computed_anew(monkeypatch) -> None:
    problem = problem_of("gaussian")
    grid = Grid.full(K, 40, 9)
    grid.floor[4] = 0.2
    at = np.random.default_rng(0).normal(size=problem.shape.size) / 3
    kept = Marginal(problem.data, problem.shape, grid, problem.regularization)(at)
    monkeypatch.setattr("ppfl.glm.solvers.marginal._MAX_CACHED", 0)
    anew = Marginal(problem.data, problem.shape, grid, problem.regularization)(at)
    assert anew[0] == kept[0]
    np.testing.assert_array_equal(anew[1], kept[1])
