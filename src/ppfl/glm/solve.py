"""From several starts to the best minimum: on a coarse grid of memberships the worse half drops out now and then, and
the one that is left goes on to the end on the fine grid."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.optimize import minimize
from torch import Tensor

from ..core.affinity import Affinity
from .grids import Grid, grid_size
from .likelihoods import Coefficients, Likelihood, Rows
from .marginal import Marginal
from .profile import Profile
from .vectors import Hold, Objective, Shape, Vector

_ROUNDS = ((8, 1.0), (12, 0.5), (30, 0.25))  # iterations, and the share of starts that are given them
_CLIENTS_FOR_STARTS = 100
_ADAPTIONS = 8  # of the clients' grids, at most
_BETWEEN = 20  # iterations
_ROUGHLY, _UNTIL_ROUGHLY = 1e-5, 150
_SURE = 0.5  # share of clients that know their membership better than the grid
SPREAD = 1.0  # holds canonical models together where memberships are points, as a normal prior of unit variance does


class Solution(NamedTuple):
    vector: Vector
    objective: float
    path: list[float]  # after every iteration; never rises
    gradient: float  # its largest component at the end


class Problem(NamedTuple):
    """Data as rows, for the starts, and in the form that is fastest, for all else."""

    rows: Rows
    data: Likelihood
    shape: Shape
    hold: Hold

    def marginal(self, k: int, points: int) -> Marginal:
        grid = Grid.whole(k, points, self.data.n_clients)
        return Marginal(self.data, self.shape._replace(k=k), grid, self.hold)

    def of_some(self, clients: np.ndarray[Any, np.dtype[np.int64]]) -> Problem:
        """Of some of the clients only."""
        chosen = torch.from_numpy(np.sort(clients))
        return self._replace(data=self.data.of_some(chosen)) if len(chosen) < self.data.n_clients else self

    def profile(self, affinity: Affinity | None = None, penalty: float = 0.0, tol: float = _ROUGHLY) -> Profile:
        level = torch.full((self.data.n_clients, self.shape.k), 1 / self.shape.k, dtype=torch.float64)
        hold = self.hold._replace(spread=SPREAD)
        return Profile(self.data, self.shape, hold, affinity, penalty, tol, level)


def descend(objective: Objective, start: Vector, tol: float, max_iter: int) -> Solution:
    """L-BFGS from a start, once more where rounding has led it astray."""
    path = [objective(start)[0]]
    found = None
    for _ in range(2):
        found = minimize(
            objective,
            start if found is None else found.x,
            jac=True,
            method="L-BFGS-B",
            callback=lambda intermediate_result: path.append(float(intermediate_result.fun)),
            options={"maxiter": max_iter, "maxfun": 4 * max_iter, "gtol": tol, "ftol": 0.0, "maxcor": 20},
        )
        if len(path) > max_iter or np.abs(found.jac).max() <= tol:
            break
    assert found is not None
    # what rounding leaves of a gradient grows with the objective
    return Solution(found.x, float(found.fun), path, float(np.abs(found.jac).max() / max(1.0, abs(found.fun))))


def solve_marginal(
    problem: Problem, n_init: int, tol: float, max_iter: int, random: np.random.Generator
) -> tuple[Solution, Marginal]:
    """The best of `n_init` starts, and the objective it minimises: with grids made for it."""
    pooled = solve_pooled(problem, tol, max_iter)
    k = problem.shape.k
    if k == 1:
        return pooled, problem.marginal(1, 1)
    vector = best_start(problem, pooled, n_init, tol, random)
    fine = problem.marginal(k, grid_size(k))
    medium = fine if k == 2 else problem.marginal(k, grid_size(k) // 4)
    found = [settle(medium, vector, _ROUGHLY, max_iter)]
    # Where clients are sure of their memberships, simplices of all sizes are local optima, as none can change without
    # all memberships; the profile changes them along, and finds the smallest.
    other = descend(problem.profile(), vector, _ROUGHLY, _UNTIL_ROUGHLY).vector
    if float(fine.adapted(other, problem.data).is_narrow.double().mean()) > _SURE:
        found.append(settle(medium, other, _ROUGHLY, max_iter))
    best, _ = min(found, key=lambda each: each[0].objective)
    return settle(fine, best.vector, tol, max_iter)


def settle(fine: Marginal, vector: Vector, tol: float, max_iter: int) -> tuple[Solution, Marginal]:
    """To the end from here, on grids that follow the clients."""
    grid = fine.adapted(vector, fine.data)
    for _ in range(_ADAPTIONS):
        iterations = _BETWEEN if bool(grid.is_narrow.any()) else max_iter
        solution = descend(fine.on(grid), vector, tol, iterations)
        last, grid = grid, fine.adapted(solution.vector, fine.data)
        if not grid.differs(last):
            if iterations == max_iter:
                return solution, fine.on(last)
            break
        vector = solution.vector
    return descend(fine.on(grid), solution.vector, tol, max_iter), fine.on(grid)


def best_start(problem: Problem, pooled: Solution, n_init: int, tol: float, random: np.random.Generator) -> Vector:
    """On a coarse grid, on which clients that know too much are counted for less, the worse half drops out."""
    k = problem.shape.k
    coefficients, _ = problem.shape._replace(k=1).unpack(torch.from_numpy(pooled.vector))
    away = deviations(problem.rows, coefficients)
    alpha = torch.full((k,), math.log(0.3), dtype=torch.float64)
    starts = []
    for _ in range(n_init):
        corners = coefficients.canonical + spread_corners(away, k, random)
        starts.append(problem.shape.pack(coefficients._replace(canonical=corners), alpha))
    if n_init == 1:
        return starts[0]
    few = problem.of_some(random.permutation(problem.data.n_clients)[:_CLIENTS_FOR_STARTS])
    coarse = few.marginal(k, max(24, grid_size(k) // 6))
    for iterations, share in _ROUNDS:
        still = starts[: max(1, round(share * n_init))]
        patience = coarse.patience_for(still[0])
        ended = [descend(coarse.on(coarse.grid, patience), start, tol, iterations) for start in still]
        starts = [solution.vector for solution in sorted(ended, key=lambda solution: solution.objective)]
    return starts[0]


def solve_pooled(problem: Problem, tol: float, max_iter: int) -> Solution:
    """One model for all."""
    shape, rows = problem.shape._replace(k=1), problem.rows
    start = torch.zeros(shape.size, dtype=torch.float64)
    if rows.family.has_dispersion:
        zero, _ = shape.unpack(start)
        mean = rows.family.mean(rows.parts(zero, torch.ones(len(rows.y), 1, 1, dtype=torch.float64)))[:, 0]
        start[-2] = rows.family.first_dispersion(mean, rows.y)
    return descend(problem.marginal(1, 1), start.numpy(), tol, max_iter)


def deviations(rows: Rows, pooled: Coefficients) -> Tensor:
    """How each client's own coefficients differ from the pooled ones (M, q, m): one step, shrunk for few rows."""
    eta = rows.predictors(pooled).detach().requires_grad_()
    logs = rows.family.log_density(rows.family.parts(eta), rows.y, pooled.log_dispersion) * rows.weight[:, None]
    (slope,) = torch.autograd.grad(logs.sum(), eta)
    slope = slope[:, 0]  # (n, m)
    gradient = rows.varying.sums(slope, rows.client, rows.n_clients)
    size = rows.weight.new_zeros(rows.n_clients).index_add(0, rows.client, rows.weight)
    weight = rows.weight[:, None].clamp_min(1e-300)
    information = (slope.square() / weight).sum() / weight.sum() / slope.shape[1]  # as standardised columns have it
    information = information.clamp_min(1e-12)
    return gradient / (information * (size + size.mean()))[:, None, None]


def spread_corners(away: Tensor, k: int, random: np.random.Generator) -> Tensor:
    """K clients' deviations, drawn far from each other and stretched, as corners lie beyond most clients: (K, q, m)."""
    flat = away.flatten(1).numpy()
    chosen = [int(random.integers(len(flat)))]
    while len(chosen) < k:
        distance = np.min([((flat - flat[at]) ** 2).sum(1) for at in chosen], 0)
        total = distance.sum()
        chosen.append(int(random.choice(len(flat), p=distance / total if total > 0 else None)))
    noise = torch.from_numpy(random.normal(size=(k, *away.shape[1:]))) * (0.1 * away.std().clamp_min(1e-2))
    return away[chosen] * random.uniform(1.0, 3.0) + noise
