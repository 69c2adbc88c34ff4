"""Where to begin: of several starts, on a coarse grid of memberships, the worse half drops out now and then."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from .descent import Solution, descend
from .grids import grid_size
from .likelihoods import Coefficients, Rows
from .problem import Problem
from .vectors import Vector

_ROUNDS = ((8, 1.0), (12, 0.5), (30, 0.25))  # iterations, and the share of starts that are given them
_CLIENTS = 100


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
    few = problem.of_some(random.permutation(problem.data.n_clients)[:_CLIENTS])
    coarse = few.marginal(k, max(24, grid_size(k) // 6))
    for iterations, share in _ROUNDS:
        still = starts[: max(1, round(share * n_init))]
        patience = coarse.patience_for(still[0])
        ended = [descend(coarse.on(coarse.grid, patience), start, tol, iterations) for start in still]
        starts = [solution.vector for solution in sorted(ended, key=lambda solution: solution.objective)]
    return starts[0]


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
