"""Down to a minimum from one start."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from scipy.optimize import OptimizeResult, minimize

from .vectors import Objective, Vector

_MOST_AXES, _SMALL = 200, 1e-4
_BEFORE_NEW_AXES = 40  # iterations


class Solution(NamedTuple):
    vector: Vector
    objective: float
    path: list[float]  # after every iteration; never rises
    gradient: float  # its largest component at the end


Axes = Callable[[Vector, bool], Vector | None]  # (P, P), that suit the objective at a point; anew, or near it


def descend(objective: Objective, start: Vector, tol: float, max_iter: int, axes: Axes = lambda *_: None) -> Solution:
    """L-BFGS from a start, in its own coordinates or along other axes."""
    value, slope = objective(start)
    path = [value]
    if np.abs(slope).max() <= tol:
        return Solution(start, value, path, _relative(slope, value))
    found, tries = start, 2  # once more where rounding errors have led it astray
    while True:
        turned = _Turned(objective, found, axes(found, len(path) > 1))
        before, left = len(path), max_iter + 1 - len(path)
        iterations = left if turned.axes is None else min(left, _BEFORE_NEW_AXES)
        found, value = _run(turned, iterations, tol, path)
        tries -= len(path) - before < iterations
        if len(path) > max_iter or np.abs(turned.slope).max() <= tol or tries == 0:
            return Solution(found, value, path, _relative(turned.slope, value))


def _relative(slope: Vector, value: float) -> float:
    """What rounding leaves of a gradient grows with the objective."""
    return float(np.abs(slope).max() / max(1.0, abs(value)))


def _run(turned: _Turned, iterations: int, tol: float, path: list[float]) -> tuple[Vector, float]:
    """Until the slope is small, in the objective's own coordinates; where it ends and the value there."""

    def after_each(intermediate_result: OptimizeResult) -> None:
        path.append(float(intermediate_result.fun))
        if np.abs(turned.slope).max() <= tol:
            raise StopIteration

    options = {"maxiter": iterations, "maxfun": 4 * iterations, "gtol": 0.0, "ftol": 0.0, "maxcor": 20}
    origin = np.zeros_like(turned.origin)
    ended = minimize(turned, origin, jac=True, method="L-BFGS-B", callback=after_each, options=options)
    return turned.back(ended.x), turned(ended.x)[0]


class _Turned:
    """The objective seen from a point along other axes."""

    slope: Vector  # of the objective itself, where it was asked last

    def __init__(self, objective: Objective, origin: Vector, axes: Vector | None) -> None:
        self.objective, self.origin, self.axes = objective, origin, axes

    def back(self, z: Vector) -> Vector:
        return self.origin + (z if self.axes is None else self.axes @ z)

    def __call__(self, z: Vector) -> tuple[float, Vector]:
        value, self.slope = self.objective(self.back(z))
        return value, self.slope if self.axes is None else self.axes.T @ self.slope


def even_axes(objective: Objective, at: Vector) -> Vector | None:
    """Directions along which the slope changes by about 1, as differences of slopes say.

    L-BFGS learns them too, but in hundreds of steps where canonical models overlap.
    """
    if len(at) > _MOST_AXES:
        return None
    slope = objective(at)[1]
    changes = np.stack([(objective(at + _SMALL * axis)[1] - slope) / _SMALL for axis in np.eye(len(at))])
    if not np.isfinite(changes).all() or not changes.any():
        return None  # too far out to say
    size, axes = np.linalg.eigh((changes + changes.T) / 2)
    size = np.abs(size)
    return np.asarray(axes / np.sqrt(np.maximum(size, 1e-6 * size.max())))
