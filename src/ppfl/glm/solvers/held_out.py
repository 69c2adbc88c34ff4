"""How well a fit predicts rows that were held out, client by client."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..gaussian_moments import fastest_form
from ..sample_rows import ClientRows
from .marginal import Marginal
from .newton_steps import newton_direction, padded
from .parameters import Vector
from .problem import GLMProblem
from .solve import minimize_adapting_points

_TOL, _MAX_ITER, _SMALL_STEP = 1e-4, 8, 0.5
_LENGTHS = (1.0, 0.3, 0.1, 0.0)  # of a step

Array = np.ndarray[Any, Any]


def draw_folds(rows: ClientRows, folds: int, random: np.random.Generator) -> Tensor:
    """The fold (n,) of every row; the rows of each client are spread evenly over the folds."""
    fold = np.empty(len(rows.y), dtype=np.int64)
    sizes = np.bincount(rows.client.numpy(), minlength=rows.n_clients)
    order = np.lexsort((random.random(len(fold)), rows.client.numpy()))
    first = np.repeat(np.cumsum(sizes) - sizes, sizes)
    shift = np.repeat(random.integers(folds, size=len(sizes)), sizes)  # so that small clients use all folds
    fold[order] = (np.arange(len(fold)) - first + shift) % folds
    return torch.from_numpy(fold)


def held_out_log_likelihoods(problem: GLMProblem, whole: Marginal, vector: Vector, fold: Tensor) -> Tensor:
    """The log-likelihood (M,) of each client's held-out rows, given its other rows, summed over the folds.

    Every fold is fitted without its rows, starting from the minimum of all rows.
    """
    rows = problem.rows
    found = torch.zeros(rows.n_clients, dtype=torch.float64)
    for i in range(int(fold.max()) + 1):
        is_test = fold == i
        train = fastest_form(rows._replace(weight=rows.weight * ~is_test))
        test = fastest_form(rows._replace(weight=rows.weight * is_test))
        regularization = problem.regularization.scaled(train.n_samples / problem.data.n_samples)
        at, objective = _fit_fold(whole.with_data(train, regularization), vector)
        found += objective.predictive_log_likelihoods(at, test)
    return found


def _fit_fold(objective: Marginal, vector: Vector) -> tuple[Vector, Marginal]:
    """One Newton step from the minimum of all rows is enough, because most of the rows are the same."""
    if not objective.has_hessian:
        solution, objective = minimize_adapting_points(objective, vector, _TOL, _MAX_ITER, _SMALL_STEP)
        return solution.vector, objective.adapted(solution.vector)
    found = objective.with_hessian(vector)
    step = padded(newton_direction(found.gradient, found.hessian, 1.0), len(vector))
    for length in _LENGTHS:
        at = vector + length * step
        moved = objective.moved(at, found)
        if moved.value(at) <= found.value + _SMALL_STEP / objective.data.n_samples:
            break
    return at, moved
