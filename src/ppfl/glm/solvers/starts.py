"""Random starts, compared by successive halving on a few memberships that are the same for all clients."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from ..likelihoods import Coefficients
from ..sample_rows import ClientRows
from .lbfgs import Solution
from .newton_steps import minimize
from .parameters import Vector
from .problem import GLMProblem

_ROUNDS = ((8, 1.0), (12, 0.5), (30, 0.25))  # iterations of L-BFGS, and the share of starts that run them
_NEWTON_ROUNDS = ((2, 1.0), (3, 0.5), (5, 0.25))
_CLIENTS = 100
_POINTS = 64


def best_start(problem: GLMProblem, pooled: Solution, n_init: int, tol: float, random: np.random.Generator) -> Vector:
    """The best of n_init starts after a few iterations on some clients.

    The points are few, so clients that determine their membership more finely get a smaller weight.
    """
    k = problem.shape.k
    coefficients, _ = problem.shape._replace(k=1).unpack(torch.from_numpy(pooled.vector))
    deviations = client_deviations(problem.rows, coefficients)
    alpha = torch.full((k,), math.log(0.3), dtype=torch.float64)
    starts = []
    for _ in range(n_init):
        corners = coefficients.canonical + draw_corners(deviations, k, random)
        starts.append(problem.shape.pack(coefficients._replace(canonical=corners), alpha))
    if n_init == 1:
        return starts[0]
    some = problem.subset(random.permutation(problem.data.n_clients)[:_CLIENTS])
    coarse = some.marginal(k, _POINTS)
    for iterations, share in _NEWTON_ROUNDS if coarse.has_hessian else _ROUNDS:
        remaining = starts[: max(1, round(share * n_init))]
        client_weight = coarse.weights_for_common_points(remaining[0])
        weighted = coarse.with_client_weight(client_weight)
        ended = [minimize(weighted, start, tol, iterations) for start in remaining]
        starts = [solution.vector for solution in sorted(ended, key=lambda solution: solution.objective)]
    return starts[0]


def client_deviations(rows: ClientRows, coefficients: Coefficients, c: Tensor | None = None) -> Tensor:
    """How each client's own coefficients differ from those of its membership (M, K), from one gradient step: (M, q, m).

    Clients with few rows get a shorter step. Without memberships there is one model.
    """
    eta = rows.predictors(coefficients).detach()
    eta = (eta if c is None else (eta * c[rows.client][..., None]).sum(1, keepdim=True)).requires_grad_()
    logs = rows.family.log_density(rows.family.mean_parameters(eta), rows.y, coefficients.nuisance)
    (by_row,) = torch.autograd.grad((logs * rows.weight[:, None]).sum(), eta)
    by_row = by_row[:, 0]  # (n, m)
    gradient = rows.varying.client_gradients(by_row, rows.client, rows.n_clients)
    size = rows.weight.new_zeros(rows.n_clients).index_add(0, rows.client, rows.weight)
    weight = rows.weight[:, None].clamp_min(1e-300)
    information = (by_row.square() / weight).sum() / weight.sum() / by_row.shape[1]  # for standardised columns
    information = information.clamp_min(1e-12)
    return gradient / (information * (size + size.mean()))[:, None, None]


def draw_corners(deviations: Tensor, k: int, random: np.random.Generator) -> Tensor:
    """The deviations of K clients, drawn far from each other as in k-means++, stretched, and with noise: (K, q, m).

    They are stretched because most clients lie inside the simplex of canonical models.
    """
    flat = deviations.flatten(1).numpy()
    chosen = [int(random.integers(len(flat)))]
    while len(chosen) < k:
        distance = np.min([((flat - flat[i]) ** 2).sum(1) for i in chosen], 0)
        total = distance.sum()
        chosen.append(int(random.choice(len(flat), p=distance / total if total > 0 else None)))
    noise = torch.from_numpy(random.normal(size=(k, *deviations.shape[1:]))) * (0.1 * deviations.std().clamp_min(1e-2))
    return deviations[chosen] * random.uniform(1.0, 3.0) + noise
