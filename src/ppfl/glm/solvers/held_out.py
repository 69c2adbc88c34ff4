"""How well a fit predicts rows that were held out, client by client."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..gaussian_moments import fastest_form
from ..sample_rows import ClientRows
from .lbfgs import Solution
from .marginal import Marginal
from .problem import GLMProblem
from .solve import SearchSettings, solve_marginal

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


class Fold:
    """Some rows of every client are held out, and the others are fitted with one canonical model more at a time.

    A fit that starts from that of all rows would remember the rows that are held out.
    """

    def __init__(self, problem: GLMProblem, is_test: Tensor) -> None:
        rows = problem.rows
        self.test = fastest_form(rows._replace(weight=rows.weight * is_test))
        rows = rows._replace(weight=rows.weight * ~is_test)
        data = fastest_form(rows)
        regularization = problem.regularization.scaled(data.n_samples / problem.data.n_samples)
        self.train = problem._replace(rows=rows, data=data, regularization=regularization).roughly()
        self.last: tuple[Solution, Marginal] | None = None

    def log_likelihoods(self, k: int, search: SearchSettings) -> Tensor:
        """Of each client's rows that are held out, given its other rows: (M,)."""
        self.last = solution, objective = solve_marginal(self.train.with_k(k), search, self.last)
        return objective.predictive_log_likelihoods(solution.vector, self.test)


def make_folds(problem: GLMProblem, folds: int, random: np.random.Generator) -> list[Fold]:
    fold = draw_folds(problem.rows, folds, random)
    return [Fold(problem, fold == i) for i in range(folds)]
