"""Newton's method with a line search, for objectives with a Hessian."""

from __future__ import annotations

import math

import numpy as np

from .lbfgs import Solution, minimize_lbfgs
from .marginal import Evaluated, Marginal
from .parameters import Vector

_SMALLEST_CURVATURE = 1e-10  # relative to the largest; along flatter directions the step would leave the data behind
_LONGEST_STEP = 2.0  # of any parameter; all are of order 1, because columns are standardised
_MAX_HALVINGS = 12
_ROUNDING = 1e-13  # of an objective, relative
_LAST_STEP, _LAST_STEP_PER_SAMPLE = 1e-5, 1e-8  # gains of the log-likelihood


def minimize_newton(
    objective: Marginal,
    start: Vector,
    found: Evaluated,
    tol: float,
    max_iter: int,
    most: float = math.inf,
    longest: float = _LONGEST_STEP,
    enough: float = 0.0,
) -> Solution:
    """Minimise until the largest component of the gradient is at most tol, from a start that is evaluated already.

    Directions of negative curvature are followed downhill with the same length as positive ones. Steps end when they
    have gained more than `most` of the log-likelihood, or when the next one would gain less than `enough`.
    """
    at = start
    path = [found.value]
    n = objective.data.n_samples
    while np.abs(found.gradient).max() > tol and len(path) <= max_iter and n * (path[0] - found.value) <= most:
        step = padded(newton_direction(found.gradient, found.hessian, longest), len(at))
        slope = float(found.gradient @ step[: len(found.gradient)])
        if -slope <= max(_LAST_STEP / n, 2 * enough / n, _LAST_STEP_PER_SAMPLE, _ROUNDING * abs(found.value)):
            value = found.value + 0.5 * slope  # what is left after this step is of the order of its square
            return Solution(at + step, value, [*path, value], 0.0)
        length = 1.0
        for _ in range(_MAX_HALVINGS):
            tried = objective.with_hessian(at + length * step)
            if tried.value <= found.value + 1e-4 * length * slope:
                break
            length /= 2
        else:
            break
        at, found = at + length * step, tried
        path.append(found.value)
    return Solution(at, found.value, path, float(np.abs(found.gradient).max() / max(1.0, abs(found.value))))


def minimize(objective: Marginal, start: Vector, tol: float, max_iter: int) -> Solution:
    """With the points as they are."""
    if objective.has_hessian:
        return minimize_newton(objective, start, objective.with_hessian(start), tol, max_iter)
    return minimize_lbfgs(objective, start, tol, max_iter)


def padded(step: Vector, size: int) -> Vector:
    """A step in all parameters: without memberships, alpha is no parameter of the Hessian."""
    return np.concatenate([step, np.zeros(size - len(step))])


def newton_direction(gradient: Vector, hessian: Vector | None, longest: float = _LONGEST_STEP) -> Vector:
    assert hessian is not None
    size, axes = np.linalg.eigh(hessian)
    size = np.maximum(np.abs(size), _SMALLEST_CURVATURE * np.abs(size).max())
    step = -axes @ ((axes.T @ gradient) / size)
    return np.asarray(step * min(1.0, longest / np.abs(step).max()))
