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
from .starts import client_deviations

_STEP, _LONG_STEP = 0.3, 1.0  # standardised columns have coefficients of order 1
_CORNERS = 2  # to try
_CLIENTS_TO_TRY = 64


def split_corner(shape: ParameterShape, vector: Vector, corner: int, alpha: float = 1.0) -> Vector:
    """The parameters of the same model, with two copies of a canonical model. `alpha` is used if there is one."""
    coefficients, log_alpha = shape.unpack(torch.from_numpy(vector))
    sizes = concentration(log_alpha) if shape.k > 1 else torch.full((1,), alpha, dtype=torch.float64)
    twice = [*range(shape.k), corner]
    halves = sizes[twice].clone()
    halves[[corner, -1]] /= 2
    larger = shape._replace(k=shape.k + 1)
    return larger.pack(coefficients._replace(canonical=coefficients.canonical[twice]), log_concentration(halves))


def split_start(problem: GLMProblem, smaller: Marginal, vector: Vector) -> Vector:
    """A start for the K + 1 canonical models of the problem, from the minimum of an objective for K."""
    shape = smaller.shape
    size = shape.varying * shape.outputs
    axes = _axes(smaller, vector) if smaller.has_hessian else _axes_from_gradients(problem, smaller, vector)
    some = np.linspace(0, problem.data.n_clients - 1, min(problem.data.n_clients, _CLIENTS_TO_TRY)).astype(int)
    larger = problem.subset(some).marginal(shape.k + 1)

    def evaluate(corner: int, axis: Vector, step: float) -> tuple[float, Vector]:
        nonlocal larger
        start = split_corner(shape, vector, corner)
        start[corner * size : (corner + 1) * size] += step * axis
        start[shape.k * size : (shape.k + 1) * size] -= step * axis
        larger = larger.adapted(start)  # from the points of the start before, which are near
        return larger.value(start), start

    tried = [(*evaluate(corner, axis, _STEP), corner, axis) for corner, axis in axes[:_CORNERS]]
    value, start, corner, axis = min(tried, key=lambda each: each[0])
    longer_value, longer_start = evaluate(corner, axis, _LONG_STEP)
    return longer_start if longer_value < value else start


def _axes(smaller: Marginal, vector: Vector) -> list[tuple[int, Vector]]:
    """The corners with the directions in which their copies move apart, the most promising first.

    The share of a copy in the corner's membership is a beta variable that does not depend on the data, so the curvature
    follows from the points of the smaller model.
    """
    shape, found = smaller.shape, smaller.with_hessian(vector).apart
    assert found is not None
    _, log_alpha = shape.unpack(torch.from_numpy(vector))
    alpha = concentration(log_alpha) if shape.k > 1 else torch.ones(1)
    axes = []
    for corner in range(shape.k):
        place = slice(corner * shape.varying, (corner + 1) * shape.varying)
        curvature, directions = np.linalg.eigh(found[place, place])
        axes.append((curvature[0] / (1 + float(alpha[corner])), corner, directions[:, 0]))
    return [(corner, axis) for _, corner, axis in sorted(axes, key=lambda each: each[0])]


def _axes_from_gradients(problem: GLMProblem, smaller: Marginal, vector: Vector) -> list[tuple[int, Vector]]:
    """The same without a Hessian: the directions in which the members of a corner differ most from it."""
    coefficients, _ = smaller.shape.unpack(torch.from_numpy(vector))
    c = smaller.find_memberships(vector, problem.data).mean
    deviations = client_deviations(problem.rows, coefficients, c).flatten(1).numpy()
    axes = []
    for corner in range(smaller.shape.k):
        _, size, directions = np.linalg.svd(c[:, corner, None].numpy() * deviations, full_matrices=False)
        axes.append((-size[0], corner, directions[0]))
    return [(corner, axis) for _, corner, axis in sorted(axes, key=lambda each: each[0])]
