"""Choosing K, the number of canonical models, by held-out likelihood within clients or by BIC."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .held_out import Fold, held_out_log_likelihoods, make_folds
from .integral import LogLikelihood, marginal_log_likelihood
from .lbfgs import Solution
from .marginal import Marginal
from .parameters import concentration
from .problem import GLMProblem
from .solve import SearchSettings, solve_marginal

PREDICTION, BIC = "prediction", "bic"
CRITERIA = {"held_out": "the held-out likelihood", PREDICTION: "the highest held-out likelihood", BIC: "the BIC"}
_FOLDS, _FEW_FOLDS, _MANY_ROWS = 5, 2, 50_000
_CLEARLY, _PROBABLY = 2.0, 1.0  # standard errors by which a larger K must predict better
_SMALL_STEP = 0.5  # of the log-likelihood; folds need no better fit
_PRICE_OF_A_SPLIT = 3.0
_PATIENCE = 2  # larger K that predict no better before the search ends


class Selected(NamedTuple):
    """The fit with one number of canonical models."""

    k: int
    solution: Solution
    objective: Marginal
    held_out: Tensor | None  # (M,), the log-likelihood of each client's held-out rows

    def rough_bic(self) -> float:
        """From the points of the solver."""
        shape = self.objective.shape
        count = shape.free_parameters + (shape.k if shape.k > 1 else 0)
        log_clients = math.log(max(2, self.objective.data.n_clients))
        return log_clients * count - 2 * self.objective.log_likelihood(self.solution.vector)


def fit_path(
    make_problem: Callable[[int], GLMProblem], ks: Sequence[int], search: SearchSettings, criterion: str
) -> list[Selected]:
    """Fit every K, each also from the best fit of the next smaller one, so that the likelihood never falls with K."""
    found: list[Selected] = []
    folds: list[Fold] = []
    best, worse = 0, 0
    for k in sorted(ks):
        problem = make_problem(k)
        smaller = found[-1] if found else None
        start = None if smaller is None else (smaller.solution, smaller.objective)
        solution, objective = solve_marginal(problem, search, start)
        if smaller is not None:
            _warn_if_lower(solution, objective, smaller)
        score = None
        if criterion != BIC:
            if not folds:
                many = len(problem.rows.y) > _MANY_ROWS
                folds = make_folds(problem, _FEW_FOLDS if many else _FOLDS, search.random)
            roughly = search._replace(n_init=1, small_step=_SMALL_STEP)
            for fold in folds:
                fold.fit(k, roughly)
            score = held_out_log_likelihoods(folds)
        found.append(Selected(k, solution, objective, score))
        if score is not None:
            worse = 0 if len(found) == 1 or is_better(found[-1], found[best], criterion) else worse + 1
            best = len(found) - 1 if worse == 0 else best
            if worse >= _PATIENCE:
                break
    return found


def is_better(larger: Selected, smaller: Selected, criterion: str) -> bool:
    """Whether the larger K predicts held-out rows clearly better, or probably better and has the lower BIC as well.

    With few clients of different sizes the standard error is large. BIC alone takes noise that differs by client, or
    overdispersed counts, for more canonical models, but these do not help to predict. If only predictions count, it
    need not be clear.
    """
    assert larger.held_out is not None
    assert smaller.held_out is not None
    difference = larger.held_out - smaller.held_out
    gain, error = float(difference.sum()), float(difference.std(correction=0)) * len(difference) ** 0.5
    if criterion == PREDICTION:
        return gain > 0
    return gain > _CLEARLY * error or (gain > _PROBABLY * error and larger.rough_bic() < smaller.rough_bic())


def best_by_held_out(found: Sequence[Selected], criterion: str) -> int:
    best = 0
    for i in range(1, len(found)):
        if is_better(found[i], found[best], criterion):
            best = i
    return best


def exact_log_likelihood(selected: Selected) -> LogLikelihood:
    coefficients, log_alpha = selected.objective.shape.unpack(torch.from_numpy(selected.solution.vector))
    return marginal_log_likelihood(selected.objective.data, coefficients, concentration(log_alpha))


def _warn_if_lower(solution: Solution, objective: Marginal, smaller: Selected) -> None:
    fall = smaller.objective.log_likelihood(smaller.solution.vector) - objective.log_likelihood(solution.vector)
    # half of an alpha is less likely under its prior, which may cost this much, and the points have errors
    if fall > _PRICE_OF_A_SPLIT + 0.2 * math.sqrt(objective.data.n_clients):
        warnings.warn(
            f"the log-likelihood with k = {objective.shape.k} is {fall:.1f} lower than with k = {smaller.k}; it can "
            f"only be a worse minimum: raise n_init",
            stacklevel=2,
        )
