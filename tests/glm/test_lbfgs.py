"""L-BFGS: rescaled coordinates need fewer iterations and reach the same minimum."""

import numpy as np
import pytest

from kit.tables import FAMILIES, draw_population, make_family, make_rows
from ppfl.glm.gaussian_moments import fastest_form
from ppfl.glm.solvers.lbfgs import find_rescaling, minimize_lbfgs
from ppfl.glm.solvers.parameters import ParameterShape, Regularization
from ppfl.glm.solvers.problem import GLMProblem

K = 3


class Quadratic:
    """x'Hx / 2 - b'x, with eigenvalues of H from 1e-3 to 1e3."""

    def __init__(self, size: int = 12) -> None:
        random = np.random.default_rng(0)
        rotation = np.linalg.qr(random.normal(size=(size, size)))[0]
        self.H, self.b = rotation @ np.diag(np.logspace(-3, 3, size)) @ rotation.T, random.normal(size=size)

    def __call__(self, x):
        return float(x @ self.H @ x / 2 - self.b @ x), self.H @ x - self.b


def rescale(objective):
    return lambda at, renew: find_rescaling(objective, at)


def test_rescaled_axes_have_curvature_one() -> None:
    quadratic = Quadratic()
    axes = find_rescaling(quadratic, np.zeros(12))
    np.testing.assert_allclose(axes.T @ quadratic.H @ axes, np.eye(12), atol=1e-5)


def test_a_rescaled_quadratic_takes_a_few_iterations() -> None:
    quadratic = Quadratic()
    best = np.linalg.solve(quadratic.H, quadratic.b)
    found = minimize_lbfgs(quadratic, np.ones(12), 1e-6, 500, rescale(quadratic))
    assert len(found.path) <= 5 < len(minimize_lbfgs(quadratic, np.ones(12), 1e-6, 500).path)
    assert found.objective == pytest.approx(quadratic(best)[0], rel=1e-9)


def test_a_start_at_the_minimum_is_returned() -> None:
    best = np.linalg.solve(Quadratic().H, Quadratic().b)
    found = minimize_lbfgs(Quadratic(), best, 1e-6, 500)
    assert found.vector is best and len(found.path) == 1


def test_many_coordinates_are_not_rescaled() -> None:
    """Finding their curvature would cost more than it saves."""
    assert find_rescaling(Quadratic(201), np.zeros(201)) is None
    rescaled = minimize_lbfgs(Quadratic(201), np.zeros(201), 1e-3, 100, rescale(Quadratic(201)))
    assert rescaled.path == minimize_lbfgs(Quadratic(201), np.zeros(201), 1e-3, 100).path


@pytest.mark.parametrize("curvature", [0.0, np.nan])
def test_coordinates_without_curvature_are_not_rescaled(curvature: float) -> None:
    quadratic = Quadratic()
    quadratic.H = np.full_like(quadratic.H, curvature)
    assert find_rescaling(quadratic, np.zeros(12)) is None


def make_problem(name: str) -> GLMProblem:
    rows = make_rows(draw_population(name, clients=9, rows=8), make_family(name), "weights", shared=["x2"])
    shape = ParameterShape(K, rows.varying.columns, rows.shared.columns, rows.family.outputs, len(rows.family.nuisance))
    regularization = Regularization(0.9, 0.0, rows.weight.new_ones(shape.varying), rows.weight.new_ones(shape.shared))
    return GLMProblem(rows, fastest_form(rows), shape, regularization)


@pytest.mark.parametrize("name", FAMILIES)
def test_with_and_without_rescaling_it_descends_to_a_minimum(name: str) -> None:
    objective = make_problem(name).marginal(K, 32)
    start = np.random.default_rng(0).normal(size=objective.shape.size) / 3
    plain = minimize_lbfgs(objective, start, 1e-7, 2000)
    for end in (plain, minimize_lbfgs(objective, start, 1e-7, 2000, rescale(objective))):
        assert end.gradient <= 1e-7
        assert np.all(np.diff(end.path) <= 1e-12)
    # the two may be different local minima, so the second method also starts at the end of the first
    again = minimize_lbfgs(objective, plain.vector, 1e-7, 2000, rescale(objective))
    assert again.objective == pytest.approx(plain.objective, abs=1e-9)


@pytest.mark.parametrize("name", ["gaussian", "poisson"])
def test_a_subset_of_the_clients_is_a_problem_of_its_own(name: str) -> None:
    """The curvature comes from the data and regularization of these clients only."""
    problem = make_problem(name)
    objective = problem.marginal(K, 32)
    subset = problem.subset(np.array([8, 0, 4])).marginal(K, 32)
    at = np.random.default_rng(0).normal(size=objective.shape.size) / 3
    np.testing.assert_allclose(objective.subset(3)(at)[1], subset(at)[1], rtol=1e-12)
    assert objective.subset(9) is objective
