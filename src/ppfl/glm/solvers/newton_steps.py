"""Newton's method with a line search, for objectives with a Hessian."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from .lbfgs import Solution
from .parameters import Vector

_SMALLEST_CURVATURE = 1e-10  # relative to the largest; along flatter directions the step would leave the data behind
_LONGEST_STEP = 2.0  # of any parameter; all are of order 1, because columns are standardised
_MAX_HALVINGS = 12
_ROUNDING = 1e-13  # of an objective, relative


class SecondOrderObjective(Protocol):
    def __call__(self, vector: Vector) -> tuple[float, Vector]:
        """Value and gradient."""

    def with_hessian(self, vector: Vector) -> tuple[float, Vector, Vector]:
        """Value, gradient and Hessian."""


def minimize_newton(
    objective: SecondOrderObjective, start: Vector, tol: float, max_iter: int, hessian: Vector | None = None
) -> Solution:
    """Minimise until the largest component of the gradient is at most tol.

    Directions of negative curvature are followed downhill with the same length as positive ones. A Hessian that is
    known already serves for the first steps, as long as each of them halves the gradient.
    """
    at, size = start, _size(start, hessian)
    value, gradient = objective(at)
    gradient = gradient[:size]
    path = [value]
    while np.abs(gradient).max() > tol and len(path) <= max_iter:
        if hessian is None:
            hessian = objective.with_hessian(at)[2]
            size = len(hessian)
            gradient = gradient[:size]
        step = np.zeros_like(at)
        step[:size] = newton_direction(gradient, hessian)
        slope = float(gradient @ step[:size])
        if -slope <= _ROUNDING * max(1.0, abs(value)):
            gradient = np.zeros_like(gradient)  # all that is left to gain is below the rounding errors
            break
        length = 1.0
        for _ in range(_MAX_HALVINGS):
            reached, new_gradient = objective(at + length * step)
            if reached <= value + 1e-4 * length * slope:
                break
            length /= 2
        else:
            break
        if length < 1 or np.abs(new_gradient[:size]).max() > 0.5 * np.abs(gradient).max():
            hessian = None
        at, value, gradient = at + length * step, reached, new_gradient[:size]
        path.append(value)
    return Solution(at, value, path, float(np.abs(gradient).max() / max(1.0, abs(value))))


def _size(vector: Vector, hessian: Vector | None) -> int:
    """The number of parameters that the Hessian has: without memberships, alpha is no parameter."""
    return len(vector) if hessian is None else len(hessian)


def newton_direction(gradient: Vector, hessian: Vector, longest: float = _LONGEST_STEP) -> Vector:
    size, axes = np.linalg.eigh(hessian)
    size = np.maximum(np.abs(size), _SMALLEST_CURVATURE * np.abs(size).max())
    step = -axes @ ((axes.T @ gradient) / size)
    return np.asarray(step * min(1.0, longest / np.abs(step).max()))
