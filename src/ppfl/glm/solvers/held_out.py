"""How well a fit predicts rows that were held out, client by client."""

from __future__ import annotations

from collections.abc import Sequence
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
_STEP, _MOST_STEPS = 0.3, 12  # of the log dispersion


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

    def fit(self, k: int, search: SearchSettings) -> None:
        self.last = solve_marginal(self.train.with_k(k), search, self.last)

    def log_likelihoods(self, wider: float = 0.0) -> Tensor:
        """Of each client's held-out rows, given its other rows: (M,). `wider` is added to the log dispersion."""
        assert self.last is not None
        solution, objective = self.last
        return objective.predictive_log_likelihoods(solution.vector, self.test, wider)


def make_folds(problem: GLMProblem, folds: int, random: np.random.Generator) -> list[Fold]:
    fold = draw_folds(problem.rows, folds, random)
    return [Fold(problem, fold == i) for i in range(folds)]


def held_out_log_likelihoods(folds: Sequence[Fold]) -> Tensor:
    """Of each client's rows, each predicted from the other folds: (M,).

    With few rows, a fit of many parameters has a dispersion that is too small for rows it has not seen, which would
    hide that its means are better. So the dispersion is made wider, by the one factor that suits the held-out rows
    best.
    """

    def score(wider: float) -> Tensor:
        return torch.stack([fold.log_likelihoods(wider) for fold in folds]).sum(0)

    found = score(0.0)
    if not folds[0].train.rows.family.has_dispersion:
        return found
    totals, scores = [float(found.sum())], [found]
    while len(totals) < _MOST_STEPS and (len(totals) == 1 or totals[-1] > totals[-2]):
        scores.append(score(_STEP * len(totals)))
        totals.append(float(scores[-1].sum()))
    if len(totals) > 2:  # the top of the parabola through the last three
        before, top, after = totals[-3:]
        shift = 0.5 * (before - after) / min(before - 2 * top + after, -1e-12)
        scores.append(score(_STEP * (len(totals) - 2 + min(max(shift, -1.0), 1.0))))
    return max(scores, key=lambda each: float(each.sum()))
