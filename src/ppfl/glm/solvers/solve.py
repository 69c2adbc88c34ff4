"""From smaller fits to the best minimum: a subset of clients finds its region, then all clients are used."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from ...core.affinity import Affinity
from .adaptation import MANY_CLIENTS
from .lbfgs import Solution, find_rescaling, minimize_lbfgs
from .marginal import Evaluated, Marginal
from .newton_steps import minimize_newton, newton_direction
from .parameters import Vector
from .problem import GLMProblem
from .profile import Profile
from .split import split_start
from .starts import best_start

_CLIENTS_TO_COMPARE = 400
_MORE_CLIENTS = (2500, 16000)  # before all of them, because steps are cheaper with fewer
_MAX_ADAPTATIONS = 10  # of the clients' points
_ITERATIONS_PER_ADAPTATION = 15
_MAX_REJECTED = 5
_LITTLE = 0.02  # of the log-likelihood
_PATIENCE = 3  # steps that gain no more than the points' own error
_ROUGH_TOL, _ROUGH_ITERATIONS, _PROFILE_ITERATIONS, _ROUGH_STEP = 1e-5, 150, 40, 0.5
_PRECISION, _LOWEST_PRECISION = {2: 0.002, 3: 0.005}, 0.04  # of one log integral, by K
_LAST_STEP = 0.01  # relative to the points' own error
_SHORT_STEP = 0.3  # of any parameter: points stand for the integral only near where they were drawn
_SMALL_GAIN = 0.05  # of the log-likelihood; points need not follow smaller ones
_NARROW_SHARE = 0.2  # share of clients with well-known memberships above which the profile is tried as well


class SearchSettings(NamedTuple):
    """How many starts, and when to stop."""

    n_init: int
    tol: float
    max_iter: int
    random: np.random.Generator
    small_step: float = 0.0  # a gain of the log-likelihood that is small enough to stop


def solve_marginal(
    problem: GLMProblem, search: SearchSettings, smaller: tuple[Solution, Marginal] | None = None
) -> tuple[Solution, Marginal]:
    """The best minimum that the starts lead to, and the objective, with points adapted to the clients.

    `smaller` is the result for one canonical model fewer, if it is known.
    """
    if problem.shape.k == 1:
        return problem.pooled(search.tol, search.max_iter), problem.marginal(1)
    found, objective = find_minimum(problem, search, smaller)
    for count in _MORE_CLIENTS:
        if 2 * count < problem.data.n_clients:
            some = problem.subset(search.random.permutation(problem.data.n_clients)[:count]).roughly()
            found = minimize_adapting_points(
                some.marginal(problem.shape.k), found.vector, _ROUGH_TOL, _ROUGH_ITERATIONS, _ROUGH_STEP
            )[0]
    if search.small_step >= _ROUGH_STEP and objective.data.n_clients == problem.data.n_clients:
        return found, objective
    return minimize_adapting_points(
        problem.marginal(problem.shape.k), found.vector, search.tol, search.max_iter, search.small_step
    )


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


def find_minimum(
    problem: GLMProblem, search: SearchSettings, smaller: tuple[Solution, Marginal] | None = None
) -> tuple[Solution, Marginal]:
    """The best minimum for a subset of the clients, to a rough tolerance.

    Canonical models are split one by one. Random starts are compared with that on request.
    """
    some = problem.subset(search.random.permutation(problem.data.n_clients)[:_CLIENTS_TO_COMPARE]).roughly()
    found = smaller or (some.pooled(_ROUGH_TOL, _ROUGH_ITERATIONS), some.marginal(1))
    for k in range(found[1].shape.k + 1, problem.shape.k + 1):
        each = some.with_k(k)
        start = split_start(each, found[1], found[0].vector)
        found = minimize_adapting_points(each.marginal(k), start, _ROUGH_TOL, _ROUGH_ITERATIONS, _ROUGH_STEP)
        if k == 2 and found[1].narrow_share() > _NARROW_SHARE:
            # If clients determine their memberships well, simplices of all sizes are local optima of the marginal,
            # because a simplex can only change together with all memberships. The profile changes both, and finds the
            # smallest. With more corners, splits keep its size.
            profile = each.profile(_ROUGH_TOL)
            start = minimize_lbfgs(profile, found[0].vector, _ROUGH_TOL, _PROFILE_ITERATIONS).vector
            other = minimize_adapting_points(each.marginal(k), start, _ROUGH_TOL, _ROUGH_ITERATIONS, _ROUGH_STEP)
            found = min(found, other, key=lambda pair: pair[0].objective)
    if search.n_init > 1:
        pooled = some.pooled(_ROUGH_TOL, _ROUGH_ITERATIONS)
        start = best_start(some, pooled, search.n_init - 1, search.tol, search.random)
        points = some.marginal(problem.shape.k)
        other = minimize_adapting_points(points, start, _ROUGH_TOL, _ROUGH_ITERATIONS, _ROUGH_STEP)
        found = min(found, other, key=lambda pair: pair[0].objective)
    return found


def minimize_adapting_points(
    objective: Marginal, vector: Vector, tol: float, max_iter: int, small_step: float = 0.0
) -> tuple[Solution, Marginal]:
    """Minimise, and let the points follow the clients' memberships until a step gains less than `small_step` nats."""
    if objective.has_hessian:
        return _newton_moving_points(objective, vector, tol, max_iter, small_step)
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


def _newton_moving_points(
    objective: Marginal, vector: Vector, tol: float, max_iter: int, small_step: float
) -> tuple[Solution, Marginal]:
    """Newton steps with points that follow every step, until no more is left to gain than the points' own error.

    Gradient and Hessian are those of the integral itself, so a step may be larger than the points reach. The last steps
    keep the points, so that they end in a minimum.
    """
    objective = objective.adapted(vector)
    found = objective.with_hessian(vector)
    n, error = objective.data.n_samples, _standard_error(objective) / objective.data.n_samples
    radius, rejected, path, best, stalled = 1.0, 0, [found.value], found.value, 0
    while np.abs(found.gradient).max() > tol and len(path) <= max_iter:
        step = newton_direction(found.gradient, found.hessian, radius)
        gain = -0.5 * n * float(found.gradient @ step)
        if gain <= max(small_step, _LITTLE, n * error) or rejected == _MAX_REJECTED or stalled == _PATIENCE:
            break
        # points cannot follow memberships that are known much better than a step changes them
        is_narrow = objective.narrow_share() > _NARROW_SHARE
        moved = objective.adapted(vector + step) if is_narrow else objective.moved(vector + step, found)
        tried = moved.with_hessian(vector + step)
        if tried.value <= found.value + 2 * error or _is_closer(tried, found, n):
            rejected = 0
            if np.abs(step).max() > 0.9 * radius:
                radius *= 2
            vector, objective, found = vector + step, moved, tried
            path.append(found.value)
            stalled = 0 if found.value < best - error else stalled + 1
            best = min(best, found.value)
        else:
            rejected += 1
            radius = float(np.abs(step).max()) / 3
    if small_step:
        gradient = float(np.abs(found.gradient).max() / max(1.0, abs(found.value)))
        return Solution(vector, found.value, path, gradient), objective
    if objective.data.n_clients <= MANY_CLIENTS:
        objective = objective.adapted(vector)
        found = objective.with_hessian(vector)
    most, enough = _SMALL_GAIN + n * error, _LAST_STEP * n * error
    solution = minimize_newton(objective, vector, found, tol, max_iter, most, _SHORT_STEP, enough)
    if (found.value - solution.objective) * n > most:
        # The steps have left the region where the points stand for the integral. What was left to gain before is below
        # the points' own error, so the gradient that is left makes no difference.
        solution = Solution(vector, found.value, [found.value], 0.0)
    return solution, objective


def _is_closer(tried: Evaluated, found: Evaluated, n: float) -> bool:
    """Whether less is left to gain, where the errors of different points hide what a step has gained."""
    before, after = (
        -0.5 * n * float(each.gradient @ newton_direction(each.gradient, each.hessian)) for each in (found, tried)
    )
    return after < 0.5 * before < 1.0


def _standard_error(objective: Marginal) -> float:
    """Of the log-likelihood, from the points."""
    return _PRECISION.get(objective.shape.k, _LOWEST_PRECISION) * math.sqrt(objective.data.n_clients)


def _clients_for_rescaling(clients: int, parameters: int) -> int:
    """As many clients as cost ten evaluations of all, but at least 60 and at most 300."""
    return min(300, max(60, 10 * clients // parameters))
