"""From several starts to the best minimum: a subset of clients finds its region, then all clients are used."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ...core.affinity import Affinity
from ..membership_grid import grid_size
from .lbfgs import Solution, find_rescaling, minimize_lbfgs
from .marginal import Marginal
from .parameters import Vector
from .problem import GLMProblem
from .profile import Profile
from .starts import best_start

_CLIENTS_TO_COMPARE = 400
_MAX_ADAPTATIONS = 8  # of the clients' grids
_ITERATIONS_PER_ADAPTATION = 20
_ROUGH_TOL, _ROUGH_ITERATIONS = 1e-5, 150
_SHRUNK_SHARE = 0.2  # share of clients whose grids are shrunk above which the profile is tried as well


class SearchSettings(NamedTuple):
    """How many starts, and when to stop."""

    n_init: int
    tol: float
    max_iter: int
    random: np.random.Generator


def solve_marginal(problem: GLMProblem, search: SearchSettings) -> tuple[Solution, Marginal]:
    """The best of `n_init` starts, and the objective that it minimises, with grids adapted to the clients."""
    k = problem.shape.k
    if k == 1:
        return problem.pooled(search.tol, search.max_iter), problem.marginal(1, 1)
    fine = problem.marginal(k, grid_size(k))
    return minimize_adapting_grids(fine, find_start(problem, search), search.tol, search.max_iter)


def solve_profile(
    problem: GLMProblem, affinity: Affinity | None, penalty: float, search: SearchSettings
) -> tuple[Solution, Profile]:
    """From the start of the marginal solver, because that one finds the smallest simplex."""
    profile = problem.profile(search.tol, affinity, penalty)
    return minimize_lbfgs(profile, find_start(problem, search), search.tol, search.max_iter), profile


def find_start(problem: GLMProblem, search: SearchSettings) -> Vector:
    """A point near the best minimum, found with a subset of the clients."""
    k = problem.shape.k
    pooled = problem.pooled(search.tol, search.max_iter)
    if k == 1:
        return pooled.vector
    vector = best_start(problem, pooled, search.n_init, search.tol, search.random)
    some = problem.subset(search.random.permutation(problem.data.n_clients)[:_CLIENTS_TO_COMPARE])
    medium = some.marginal(k, grid_size(k) if k == 2 else grid_size(k) // 4)
    best = minimize_adapting_grids(medium, vector, _ROUGH_TOL, search.max_iter)[0]
    shrunk = some.marginal(k, grid_size(k)).adapted_grid(best.vector, some.data).is_shrunk
    if float(shrunk.double().mean()) > _SHRUNK_SHARE:
        # If clients determine their memberships well, simplices of all sizes are local optima of the marginal, because
        # a simplex can only change together with all memberships. The profile changes both, and finds the smallest.
        other = minimize_lbfgs(some.profile(_ROUGH_TOL), vector, _ROUGH_TOL, _ROUGH_ITERATIONS).vector
        second = minimize_adapting_grids(medium, other, _ROUGH_TOL, search.max_iter)[0]
        best = min(best, second, key=lambda solution: solution.objective)
    return best.vector


def minimize_adapting_grids(fine: Marginal, vector: Vector, tol: float, max_iter: int) -> tuple[Solution, Marginal]:
    """Minimise, and adapt the clients' grids to their memberships along the way."""
    count = _clients_for_rescaling(fine.data.n_clients, len(vector))
    objective = fine.with_grid(fine.adapted_grid(vector, fine.data))
    cached: list[Vector | None] = []

    def rescaling(at: Vector, renew: bool) -> Vector | None:
        if renew or not cached:
            cached[:] = [find_rescaling(objective.subset(count), at)]
        return cached[0]

    for _ in range(_MAX_ADAPTATIONS):
        iterations = _ITERATIONS_PER_ADAPTATION if objective.grid.any_shrunk else max_iter
        solution = minimize_lbfgs(objective, vector, tol, iterations, rescaling)
        vector = solution.vector
        grid = fine.adapted_grid(vector, fine.data)
        moved = grid.differs(objective.grid)
        if not moved and iterations == max_iter:
            return solution, objective
        objective = fine.with_grid(grid)
        if not moved:
            break
    return minimize_lbfgs(objective, vector, tol, max_iter, rescaling), objective


def _clients_for_rescaling(clients: int, parameters: int) -> int:
    """As many clients as cost ten evaluations of all, but at least 60 and at most 300."""
    return min(300, max(60, 10 * clients // parameters))
