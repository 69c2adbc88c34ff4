"""What a solver finds, in the form in which an estimator keeps it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from ..core.affinity import Affinity
from .descent import Solution
from .federated import solve_by_rounds
from .likelihoods import Coefficients
from .placement import Placement
from .problem import Problem
from .solve import Search, solve_marginal, solve_profile
from .vectors import Objective


class Fit(NamedTuple):
    """What a solver found."""

    coefficients: Coefficients
    placement: Placement
    log_alpha: Tensor  # (K,), of the distribution of memberships
    anybody: Placement  # one client of which nothing is known
    objective: Objective  # that can place more clients
    path: list[float]
    converged: bool
    log_likelihood: float
    membership_parameters: int


def fit_marginal(problem: Problem, search: Search) -> Fit:
    """Memberships integrated out under a distribution that is fitted."""
    solution, objective = solve_marginal(problem, search)
    k = problem.shape.k
    return _as_found(problem, objective, solution, k if k > 1 else 0, solution.gradient <= search.tol)


def fit_profile(problem: Problem, affinity: Affinity | None, penalty: float, search: Search) -> Fit:
    """A best membership for each client."""
    solution, profile = solve_profile(problem, affinity, penalty, search)
    left = max(solution.gradient, profile.gap(solution.vector))
    return _as_found(problem, profile, solution, problem.data.n_clients * (problem.shape.k - 1), left <= search.tol)


def fit_by_rounds(
    problem: Problem, affinity: Affinity | None, penalty: float, tol: float, rounds: int, seed: int
) -> Fit:
    """As a federation does it; newcomers are placed as by the profile."""
    rows, k = problem.rows, problem.shape.k
    found = solve_by_rounds(rows, k, affinity, penalty, tol, rounds, seed)
    profile = problem.profile(tol)
    profile.memberships = found.placement.mean
    return Fit(
        found.coefficients, found.placement, torch.zeros(k, dtype=torch.float64), found.placement.middle(),
        profile.without_data(), found.path, found.converged,
        float(rows.of_clients(found.coefficients, found.placement.mean[:, None]).sum()), rows.n_clients * (k - 1),
    )  # fmt: skip


def _as_found(problem: Problem, objective: Objective, solution: Solution, memberships: int, converged: bool) -> Fit:
    coefficients, log_alpha = problem.shape.unpack(torch.from_numpy(solution.vector))
    return Fit(
        coefficients, objective.place(solution.vector, problem.data), log_alpha, objective.anybody(solution.vector),
        objective.without_data(), solution.path, converged, objective.log_likelihood(solution.vector), memberships,
    )  # fmt: skip


@contextmanager
def one_thread() -> Iterator[None]:
    """Pieces that fit a cache gain nothing from a second thread, and wait for it where the machine is busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
