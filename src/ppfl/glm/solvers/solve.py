"""From several starts to the best minimum: a subset of clients finds its region, then all clients are used."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from ...core.affinity import Affinity
from .lbfgs import Solution, find_rescaling, minimize_lbfgs
from .marginal import Marginal
from .newton_steps import minimize_newton, newton_direction
from .parameters import Vector
from .problem import GLMProblem
from .profile import Profile
from .starts import best_start

_CLIENTS_TO_COMPARE = 400
_MAX_ADAPTATIONS = 10  # of the clients' points
_ITERATIONS_PER_ADAPTATION = 15
_MAX_REJECTED = 5
_MAX_ROUNDS = 3
_PATIENCE = 2  # steps that gain no more than noise
_ROUGH_TOL, _ROUGH_ITERATIONS, _PROFILE_ITERATIONS, _ROUGH_STEP = 1e-5, 150, 40, 0.5
_PRECISION, _LOWEST_PRECISION = {2: 0.003, 3: 0.01}, 0.05  # of one log integral, by K
_MAX_NEWTON_STEPS, _FEW_NEWTON_STEPS = 25, 8
_SMALL_GAIN = 0.05  # of the log-likelihood; points need not follow smaller ones
_NARROW_SHARE = 0.2  # share of clients with well-known memberships above which the profile is tried as well


class SearchSettings(NamedTuple):
    """How many starts, and when to stop."""

    n_init: int
    tol: float
    max_iter: int
    random: np.random.Generator


def solve_marginal(problem: GLMProblem, search: SearchSettings) -> tuple[Solution, Marginal]:
    """The best of `n_init` starts, and the objective that it minimises, with points adapted to the clients."""
    if problem.shape.k == 1:
        return problem.pooled(search.tol, search.max_iter), problem.marginal(1)
    found, objective = find_minimum(problem, search)
    if objective.data.n_clients < problem.data.n_clients:
        objective = problem.marginal(problem.shape.k)
    return minimize_adapting_points(objective, found.vector, search.tol, search.max_iter)


def solve_profile(
    problem: GLMProblem, affinity: Affinity | None, penalty: float, search: SearchSettings
) -> tuple[Solution, Profile]:
    """From the minimum of the marginal solver, because that one finds the smallest simplex."""
    profile = problem.profile(search.tol, affinity, penalty)
    if problem.shape.k == 1:
        start = problem.pooled(search.tol, search.max_iter).vector
    else:
        start = find_minimum(problem, search)[0].vector
    return minimize_lbfgs(profile, start, search.tol, search.max_iter), profile


def find_minimum(problem: GLMProblem, search: SearchSettings) -> tuple[Solution, Marginal]:
    """The best minimum for a subset of the clients, to a rough tolerance."""
    k = problem.shape.k
    pooled = problem.pooled(search.tol, search.max_iter)
    vector = best_start(problem, pooled, search.n_init, search.tol, search.random)
    some = problem.subset(search.random.permutation(problem.data.n_clients)[:_CLIENTS_TO_COMPARE])
    found = minimize_adapting_points(some.marginal(k), vector, _ROUGH_TOL, _ROUGH_ITERATIONS, _ROUGH_STEP)
    if found[1].narrow_share() > _NARROW_SHARE:
        # If clients determine their memberships well, simplices of all sizes are local optima of the marginal, because
        # a simplex can only change together with all memberships. The profile changes both, and finds the smallest.
        other = minimize_lbfgs(some.profile(_ROUGH_TOL), vector, _ROUGH_TOL, _PROFILE_ITERATIONS).vector
        second = minimize_adapting_points(some.marginal(k), other, _ROUGH_TOL, _ROUGH_ITERATIONS, _ROUGH_STEP)
        found = min(found, second, key=lambda pair: pair[0].objective)
    return found


def minimize_adapting_points(
    objective: Marginal, vector: Vector, tol: float, max_iter: int, small_step: float = 0.0
) -> tuple[Solution, Marginal]:
    """Minimise, and let the points follow the clients' memberships until a step gains less than `small_step` nats."""
    if objective.has_hessian:
        return _newton_adapting_points(objective, vector, tol, max_iter, small_step)
    count = _clients_for_rescaling(objective.data.n_clients, len(vector))
    cached: list[Vector | None] = []

    def rescaling(at: Vector, renew: bool) -> Vector | None:
        if renew or not cached:
            cached[:] = [find_rescaling(objective.subset(count), at)]
        return cached[0]

    for _ in range(_MAX_ADAPTATIONS):
        objective = objective.adapted(vector)
        solution = minimize_lbfgs(objective, vector, tol, _ITERATIONS_PER_ADAPTATION, rescaling)
        vector = solution.vector
        if (solution.path[0] - solution.objective) * objective.data.n_samples <= max(small_step, _SMALL_GAIN):
            break
    return minimize_lbfgs(objective, vector, tol, max_iter, rescaling), objective


def _newton_adapting_points(
    objective: Marginal, vector: Vector, tol: float, max_iter: int, small_step: float
) -> tuple[Solution, Marginal]:
    """Newton's method until the last steps, for which the points stay as they are, gain next to nothing."""
    enough = max(small_step, _SMALL_GAIN, _noise(objective))
    many = objective.data.n_clients > _CLIENTS_TO_COMPARE  # the start is the minimum of some, so few steps are left
    for _ in range(1 if many else _MAX_ROUNDS):
        vector, objective, hessian, is_settled = _newton_moving_points(objective, vector, max_iter, small_step)
        solution = minimize_newton(objective, vector, tol, max_iter, hessian)
        if (solution.path[0] - solution.objective) * objective.data.n_samples <= enough:
            break
        if is_settled and objective.shape.k not in _PRECISION:
            # Away from here the points no longer stand for the integral, so their own minimum means nothing. The
            # gradient counts as 0, because what is left of it is an error of the points.
            solution = Solution(vector, solution.path[0], solution.path[:1], 0.0)
            break
        vector = solution.vector
    return solution, objective


def _noise(objective: Marginal) -> float:
    """The standard error of the log-likelihood, from the points."""
    precision = _PRECISION.get(objective.shape.k, _LOWEST_PRECISION)
    return precision * math.sqrt(objective.data.n_clients)


def _newton_moving_points(
    objective: Marginal, vector: Vector, max_iter: int, small_step: float
) -> tuple[Vector, Marginal, Vector, bool]:
    """Newton steps, with points that are adapted anew for each of them, and whether all that is left is noise.

    Gradient and Hessian are those of the integral itself, so a step may be larger than the points reach.
    """
    objective = objective.adapted(vector)
    value, gradient, hessian = objective.with_hessian(vector)
    n, noise = objective.data.n_samples, _noise(objective) / objective.data.n_samples
    small_step = max(small_step / n, 0.05 * noise)
    radius, rejected, is_settled, best, waited = 1.0, 0, False, value, 0
    most = _FEW_NEWTON_STEPS if objective.data.n_clients > _CLIENTS_TO_COMPARE else _MAX_NEWTON_STEPS
    for _ in range(min(max_iter, most)):
        step = newton_direction(gradient, hessian, radius)
        slope = float(gradient @ step)
        is_settled = -0.5 * float(gradient @ newton_direction(gradient, hessian)) <= max(small_step, 3 * noise)
        if -0.5 * slope <= small_step or rejected == _MAX_REJECTED or (is_settled and waited == _PATIENCE):
            break
        tried = objective.adapted(vector + step)
        reached, new_gradient, new_hessian = tried.with_hessian(vector + step)
        if reached <= value + noise:
            rejected, waited = 0, 0 if reached < best - 0.3 * noise else waited + 1
            best = min(best, reached)
            if np.abs(step).max() > 0.9 * radius:
                radius *= 2
            vector, objective, value, gradient, hessian = vector + step, tried, reached, new_gradient, new_hessian
        else:
            rejected += 1
            radius = float(np.abs(step).max()) / 3
    return vector, objective, hessian, is_settled


def _clients_for_rescaling(clients: int, parameters: int) -> int:
    """As many clients as cost ten evaluations of all, but at least 60 and at most 300."""
    return min(300, max(60, 10 * clients // parameters))
