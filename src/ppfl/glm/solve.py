"""From several starts to the best minimum: some clients find where it is, and all of them go there."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..core.affinity import Affinity
from .descent import Solution, descend, even_axes
from .grids import grid_size
from .marginal import Marginal
from .problem import Problem
from .profile import Profile
from .starts import best_start
from .vectors import Vector

_CLIENTS_TO_COMPARE, _CLIENTS_FOR_AXES = 400, 300
_ADAPTIONS = 8  # of the clients' grids, at most
_BETWEEN = 20  # iterations
_ROUGHLY, _UNTIL_ROUGHLY = 1e-5, 150
_SURE = 0.2  # share of clients that know their membership better than the grid


class Search(NamedTuple):
    """How long to look, and how closely."""

    n_init: int
    tol: float
    max_iter: int
    random: np.random.Generator


def solve_marginal(problem: Problem, search: Search) -> tuple[Solution, Marginal]:
    """The best of `n_init` starts, and the objective it minimises: with grids made for it."""
    k = problem.shape.k
    if k == 1:
        return problem.pooled(search.tol, search.max_iter), problem.marginal(1, 1)
    fine = problem.marginal(k, grid_size(k))
    return settle(fine, good_start(problem, search), search.tol, search.max_iter)


def solve_profile(
    problem: Problem, affinity: Affinity | None, penalty: float, search: Search
) -> tuple[Solution, Profile]:
    """From where memberships that are integrated out would begin, which knows the smallest simplex."""
    profile = problem.profile(affinity, penalty, search.tol)
    return descend(profile, good_start(problem, search), search.tol, search.max_iter), profile


def good_start(problem: Problem, search: Search) -> Vector:
    """Near the best minimum, as far as some clients can tell."""
    k = problem.shape.k
    pooled = problem.pooled(search.tol, search.max_iter)
    if k == 1:
        return pooled.vector
    vector = best_start(problem, pooled, search.n_init, search.tol, search.random)
    few = problem.of_some(search.random.permutation(problem.data.n_clients)[:_CLIENTS_TO_COMPARE])
    medium = few.marginal(k, grid_size(k) if k == 2 else grid_size(k) // 4)
    best = settle(medium, vector, _ROUGHLY, search.max_iter)[0]
    if float(few.marginal(k, grid_size(k)).adapted(best.vector, few.data).is_narrow.double().mean()) > _SURE:
        # Where clients are sure of their memberships, simplices of all sizes are local optima, as none can change
        # without all memberships; the profile changes them along, and finds the smallest.
        other = descend(few.profile(), vector, _ROUGHLY, _UNTIL_ROUGHLY).vector
        best = min(best, settle(medium, other, _ROUGHLY, search.max_iter)[0], key=lambda each: each.objective)
    return best.vector


def settle(fine: Marginal, vector: Vector, tol: float, max_iter: int) -> tuple[Solution, Marginal]:
    """To the end from here, on grids that follow the clients."""
    grid = fine.adapted(vector, fine.data)
    for _ in range(_ADAPTIONS):
        iterations = _BETWEEN if grid.any_narrow else max_iter
        solution = _descend_evenly(fine.on(grid), vector, tol, iterations)
        last, grid = grid, fine.adapted(solution.vector, fine.data)
        if not grid.differs(last):
            if iterations == max_iter:
                return solution, fine.on(last)
            break
        vector = solution.vector
    return _descend_evenly(fine.on(grid), solution.vector, tol, max_iter), fine.on(grid)


def _descend_evenly(objective: Marginal, vector: Vector, tol: float, max_iter: int) -> Solution:
    return descend(objective, vector, tol, max_iter, even_axes(objective.of_some(_CLIENTS_FOR_AXES)))
