"""How well a fit predicts rows that were held out, client by client."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..gaussian_moments import fastest_form
from ..sample_rows import ClientRows
from .parameters import Vector
from .problem import GLMProblem
from .solve import minimize_adapting_points

_TOL, _MAX_ITER, _SMALL_STEP = 1e-4, 8, 0.5

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


def held_out_log_likelihoods(problem: GLMProblem, vector: Vector, fold: Tensor) -> Tensor:
    """The log-likelihood (M,) of each client's held-out rows, given its other rows, summed over the folds.

    Every fold is fitted without its rows, starting from the parameters of all rows.
    """
    rows, k = problem.rows, problem.shape.k
    found = torch.zeros(rows.n_clients, dtype=torch.float64)
    for i in range(int(fold.max()) + 1):
        is_test = fold == i
        train = fastest_form(rows._replace(weight=rows.weight * ~is_test))
        test = fastest_form(rows._replace(weight=rows.weight * is_test))
        fraction = train.n_samples / problem.data.n_samples
        part = problem._replace(data=train, regularization=problem.regularization.scaled(fraction))
        objective = part.marginal(k)
        if k == 1:
            solution = part.pooled_from(vector, _TOL, _MAX_ITER)
        else:
            solution, objective = minimize_adapting_points(objective, vector, _TOL, _MAX_ITER, _SMALL_STEP)
        found += objective.adapted(solution.vector).predictive_log_likelihoods(solution.vector, test)
    return found
