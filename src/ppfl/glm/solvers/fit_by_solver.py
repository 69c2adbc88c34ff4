"""Run a solver, and return what an estimator keeps of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from ...core.affinity import Affinity
from ..client_memberships import ClientMemberships
from ..likelihoods import Coefficients
from .federated import solve_federated
from .lbfgs import Solution
from .parameters import Objective
from .problem import GLMProblem
from .solve import SearchSettings, solve_marginal, solve_profile


class SolverResult(NamedTuple):
    coefficients: Coefficients
    memberships: ClientMemberships
    log_alpha: Tensor  # (K,), of the distribution of memberships
    prior: ClientMemberships  # the membership of one client without data
    objective: Objective  # without data; it finds the memberships of new clients
    path: list[float]
    converged: bool
    log_likelihood: float
    membership_parameters: int


def fit_marginal(problem: GLMProblem, search: SearchSettings) -> SolverResult:
    """Integrate memberships out, and fit their distribution."""
    solution, objective = solve_marginal(problem, search)
    k = problem.shape.k
    return _make_result(problem, objective, solution, k if k > 1 else 0, solution.gradient <= search.tol)


def fit_profile(problem: GLMProblem, affinity: Affinity | None, penalty: float, search: SearchSettings) -> SolverResult:
    """Find the best membership of each client."""
    solution, profile = solve_profile(problem, affinity, penalty, search)
    gap = max(solution.gradient, profile.membership_gap(solution.vector))
    return _make_result(problem, profile, solution, problem.data.n_clients * (problem.shape.k - 1), gap <= search.tol)


def fit_federated(
    problem: GLMProblem, affinity: Affinity | None, penalty: float, tol: float, rounds: int, seed: int
) -> SolverResult:
    """Run federated rounds. The memberships of new clients are found like those of the profile."""
    rows, k = problem.rows, problem.shape.k
    found = solve_federated(rows, k, affinity, penalty, tol, rounds, seed)
    profile = problem.profile(tol)
    profile.memberships = found.memberships.mean
    log_likelihood = rows.client_log_likelihoods(found.coefficients, found.memberships.mean[:, None]).sum()
    return SolverResult(
        found.coefficients, found.memberships, torch.zeros(k, dtype=torch.float64), found.memberships.average(),
        profile.without_data(), found.path, found.converged, float(log_likelihood), rows.n_clients * (k - 1),
    )  # fmt: skip


def _make_result(
    problem: GLMProblem, objective: Objective, solution: Solution, membership_parameters: int, converged: bool
) -> SolverResult:
    coefficients, log_alpha = problem.shape.unpack(torch.from_numpy(solution.vector))
    return SolverResult(
        coefficients, objective.find_memberships(solution.vector, problem.data), log_alpha,
        objective.prior(solution.vector), objective.without_data(), solution.path, converged,
        objective.log_likelihood(solution.vector), membership_parameters,
    )  # fmt: skip


@contextmanager
def one_thread() -> Iterator[None]:
    """Chunks that fit in the cache gain nothing from a second thread, and wait for it on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
