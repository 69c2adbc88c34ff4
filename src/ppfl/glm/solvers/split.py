"""From K canonical models to K + 1: one of them is split in two.

Two copies with half the alpha each are exactly the same model, so its likelihood is a lower bound for K + 1. It is a
saddle point: the copies move apart in the direction in which the likelihood curves upwards most.
"""

from __future__ import annotations

import numpy as np
import torch

from .marginal import Marginal
from .parameters import ParameterShape, Vector, concentration, log_concentration
from .problem import GLMProblem

_STEPS = (0.25, 0.5, 1.0, 2.0)


def split_corner(shape: ParameterShape, vector: Vector, corner: int, alpha: float = 1.0) -> Vector:
    """The parameters of the same model, with two copies of a canonical model. `alpha` is used if there is one."""
    coefficients, log_alpha = shape.unpack(torch.from_numpy(vector))
    sizes = concentration(log_alpha) if shape.k > 1 else torch.full((1,), alpha, dtype=torch.float64)
    twice = [*range(shape.k), corner]
    halves = sizes[twice].clone()
    halves[[corner, -1]] /= 2
    larger = shape._replace(k=shape.k + 1)
    return larger.pack(coefficients._replace(canonical=coefficients.canonical[twice]), log_concentration(halves))


def split_start(problem: GLMProblem, vector: Vector) -> Vector:
    """A start for the K + 1 canonical models of the problem, from the parameters for K."""
    shape = problem.shape._replace(k=problem.shape.k - 1)
    size = shape.varying * shape.outputs
    best: tuple[float, Vector, Vector, Marginal] | None = None
    for corner in range(shape.k):
        start = split_corner(shape, vector, corner)
        objective = problem.marginal(problem.shape.k).adapted(start)
        curvature, axis = _most_negative(objective, start, slice(corner * size, (corner + 1) * size), shape.k * size)
        if best is None or curvature < best[0]:
            best = curvature, start, axis, objective
    assert best is not None
    _, start, axis, objective = best
    tried = [start + step * axis for step in _STEPS]
    return min(tried, key=lambda each: objective.adapted(each).value(each))


def _most_negative(objective: Marginal, at: Vector, first: slice, second: int) -> tuple[float, Vector]:
    """The smallest curvature of all directions in which the two copies move apart, and that direction."""
    size = first.stop - first.start
    apart = np.zeros((len(at), size))
    apart[first] = np.eye(size) / np.sqrt(2)
    apart[second : second + size] = -np.eye(size) / np.sqrt(2)
    if objective.has_hessian:
        hessian = apart.T @ objective.with_hessian(at)[2] @ apart
    else:
        step = 1e-4
        hessian = np.stack(
            [apart.T @ (objective(at + step * a)[1] - objective(at - step * a)[1]) / (2 * step) for a in apart.T]
        )
        hessian = (hessian + hessian.T) / 2
    curvature, axes = np.linalg.eigh(hessian)
    return float(curvature[0]), np.asarray(apart @ axes[:, 0])
