"""L-BFGS from one start, in coordinates in which the objective curves equally in all directions."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from scipy.optimize import OptimizeResult, minimize

from .parameters import Objective, Vector

_MAX_RESCALED, _DIFFERENCE_STEP = 200, 1e-4
_ITERATIONS_PER_RESCALING = 40


class Solution(NamedTuple):
    vector: Vector
    objective: float
    path: list[float]  # the objective after every iteration; it never rises
    gradient: float  # the largest component at the end, relative to the objective if that is larger than 1


# From a point, and whether it is a new point far from the last, to the matrix (P, P) of new coordinates, if any.
Rescaling = Callable[[Vector, bool], Vector | None]


def minimize_lbfgs(
    objective: Objective, start: Vector, tol: float, max_iter: int, rescaling: Rescaling = lambda *_: None
) -> Solution:
    """Minimise until the largest component of the gradient is at most tol."""
    value, gradient = objective(start)
    path = [value]
    if np.abs(gradient).max() <= tol:
        return Solution(start, value, path, _relative_gradient(gradient, value))
    found, tries = start, 2  # a second try, in case rounding errors ended the first one
    while True:
        rescaled = _RescaledObjective(objective, found, rescaling(found, len(path) > 1))
        before, remaining = len(path), max_iter + 1 - len(path)
        iterations = remaining if rescaled.axes is None else min(remaining, _ITERATIONS_PER_RESCALING)
        found, value = _run(rescaled, iterations, tol, path)
        tries -= len(path) - before < iterations
        if len(path) > max_iter or np.abs(rescaled.gradient).max() <= tol or tries == 0:
            return Solution(found, value, path, _relative_gradient(rescaled.gradient, value))


def _relative_gradient(gradient: Vector, value: float) -> float:
    """Rounding errors in a gradient grow with the objective."""
    return float(np.abs(gradient).max() / max(1.0, abs(value)))


def _run(rescaled: _RescaledObjective, iterations: int, tol: float, path: list[float]) -> tuple[Vector, float]:
    """Run until the gradient in the original coordinates is small, and return the last point and its value."""

    def after_iteration(intermediate_result: OptimizeResult) -> None:
        path.append(float(intermediate_result.fun))
        if np.abs(rescaled.gradient).max() <= tol:
            raise StopIteration

    options = {"maxiter": iterations, "maxfun": 4 * iterations, "gtol": 0.0, "ftol": 0.0, "maxcor": 20}
    origin = np.zeros_like(rescaled.origin)
    result = minimize(rescaled, origin, jac=True, method="L-BFGS-B", callback=after_iteration, options=options)
    return rescaled.to_original(result.x), rescaled(result.x)[0]


class _RescaledObjective:
    """The objective as a function of coordinates z along other axes: x = origin + axes z."""

    gradient: Vector  # of the last call, in the original coordinates

    def __init__(self, objective: Objective, origin: Vector, axes: Vector | None) -> None:
        self.objective, self.origin, self.axes = objective, origin, axes

    def to_original(self, z: Vector) -> Vector:
        return self.origin + (z if self.axes is None else self.axes @ z)

    def __call__(self, z: Vector) -> tuple[float, Vector]:
        value, self.gradient = self.objective(self.to_original(z))
        return value, self.gradient if self.axes is None else self.axes.T @ self.gradient


def find_rescaling(objective: Objective, at: Vector) -> Vector | None:
    """Axes along which the curvature at a point is about 1, from finite differences of the gradient.

    L-BFGS would learn them too, but only over hundreds of steps when canonical models overlap.
    """
    if len(at) > _MAX_RESCALED:
        return None
    gradient = objective(at)[1]
    hessian = np.stack(
        [(objective(at + _DIFFERENCE_STEP * axis)[1] - gradient) / _DIFFERENCE_STEP for axis in np.eye(len(at))]
    )
    if not np.isfinite(hessian).all() or not hessian.any():
        return None  # too far from the minimum for a useful curvature
    size, axes = np.linalg.eigh((hessian + hessian.T) / 2)
    size = np.abs(size)
    return np.asarray(axes / np.sqrt(np.maximum(size, 1e-6 * size.max())))
