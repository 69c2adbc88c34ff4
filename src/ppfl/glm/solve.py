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

_CLIENTS_TO_COMPARE = 400
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
    profile = problem.profile(search.tol, affinity, penalty)
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
        other = descend(few.profile(_ROUGHLY), vector, _ROUGHLY, _UNTIL_ROUGHLY).vector
        best = min(best, settle(medium, other, _ROUGHLY, search.max_iter)[0], key=lambda each: each.objective)
    return best.vector


def settle(fine: Marginal, vector: Vector, tol: float, max_iter: int) -> tuple[Solution, Marginal]:
    """To the end from here, on grids that follow the clients."""
    some = _clients_for_axes(fine.data.n_clients, len(vector))
    objective = fine.on(fine.adapted(vector, fine.data))
    kept: list[Vector | None] = []

    def axes(at: Vector, anew: bool) -> Vector | None:
        if anew or not kept:
            kept[:] = [even_axes(objective.of_some(some), at)]
        return kept[0]

    for _ in range(_ADAPTIONS):
        iterations = _BETWEEN if objective.grid.any_narrow else max_iter
        solution = descend(objective, vector, tol, iterations, axes)
        vector = solution.vector
        grid = fine.adapted(vector, fine.data)
        moved = grid.differs(objective.grid)
        if not moved and iterations == max_iter:
            return solution, objective
        objective = fine.on(grid)
        if not moved:
            break
    return descend(objective, vector, tol, max_iter, axes), objective


def _clients_for_axes(clients: int, parameters: int) -> int:
    """As many as cost ten evaluations of all, but enough to tell, and no more than that."""
    return min(300, max(60, 10 * clients // parameters))
