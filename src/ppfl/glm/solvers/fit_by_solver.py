"""Run a solver, and return what an estimator keeps of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...core.affinity import Affinity
from ..client_memberships import ClientMemberships
from ..likelihoods import Coefficients
from .choose_k import BIC, best_by_held_out, exact_log_likelihood, fit_path
from .federated import solve_federated
from .integral import LogLikelihood
from .lbfgs import Solution
from .marginal import Marginal
from .parameters import Objective
from .problem import GLMProblem
from .solve import SearchSettings, solve_marginal, solve_profile


class SolverResult(NamedTuple):
    coefficients: Coefficients
    memberships: ClientMemberships
    log_alpha: Tensor  # (K,), of the distribution of memberships
    prior: ClientMemberships  # the membership of one client without data
    objective: Objective  # it also finds the memberships of new clients
    path: list[float]
    converged: bool
    log_likelihood: LogLikelihood | None  # None where an integral is left for later
    membership_parameters: int


def fit_marginal(problem: GLMProblem, search: SearchSettings) -> SolverResult:
    """Integrate memberships out, and fit their distribution."""
    solution, objective = solve_marginal(problem, search)
    return _marginal_result(problem, objective, solution, search)


def _marginal_result(
    problem: GLMProblem, objective: Marginal, solution: Solution, search: SearchSettings
) -> SolverResult:
    k = problem.shape.k
    return _make_result(problem, objective, solution, k if k > 1 else 0, solution.gradient <= search.tol)


class SelectionRecord(NamedTuple):
    """How good one number of canonical models is."""

    k: int
    log_likelihood: float
    aic: float
    bic: float
    held_out: float | None  # mean log-likelihood of a held-out row, given its client's other rows
    held_out_error: float | None  # standard error of the difference to the best
    converged: bool

    def in_units(self, change: float, samples: float) -> SelectionRecord:
        """The same for a target in other units, whose log-likelihood is larger by this change."""
        return self._replace(
            log_likelihood=self.log_likelihood + change,
            aic=self.aic - 2 * change,
            bic=self.bic - 2 * change,
            held_out=None if self.held_out is None else self.held_out + change / samples,
        )


def choose_by(
    make_problem: Callable[[int], GLMProblem], ks: Sequence[int], search: SearchSettings, criterion: str
) -> tuple[SolverResult, list[SelectionRecord]]:
    """Fit all K, and return the best by held-out likelihood or by BIC, with a record of each."""
    found = fit_path(make_problem, ks, search, criterion)
    results = [_marginal_result(make_problem(each.k), each.objective, each.solution, search) for each in found]
    exact = criterion == BIC
    logs = [
        exact_log_likelihood(each) if exact else LogLikelihood(each.objective.log_likelihood(each.solution.vector), 0.0)
        for each in found
    ]
    clients = found[0].objective.data.n_clients
    counts = [
        each.objective.shape.free_parameters + result.membership_parameters
        for each, result in zip(found, results, strict=True)
    ]
    bic = [math.log(max(2, clients)) * count - 2 * log.value for count, log in zip(counts, logs, strict=True)]
    best = int(np.argmin(bic)) if exact else best_by_held_out(found, criterion)
    means, errors = _compare_held_out([each.held_out for each in found], found[0].objective.data.n_samples)
    records = [
        SelectionRecord(each.k, log.value, 2 * count - 2 * log.value, b, mean, error, result.converged)
        for each, log, count, b, mean, error, result in zip(
            found, logs, counts, bic, means, errors, results, strict=True
        )
    ]
    return results[best]._replace(log_likelihood=logs[best] if exact else None), records


def _compare_held_out(scores: list[Tensor | None], samples: float) -> tuple[list[float | None], list[float | None]]:
    """Means per sample, and standard errors of the differences to the best one."""
    known = [score for score in scores if score is not None]
    if not known:
        return [None for _ in scores], [None for _ in scores]
    best = max(known, key=lambda score: float(score.sum()))
    errors = [float((score - best).std(correction=0)) * len(score) ** 0.5 / samples for score in known]
    return [float(score.sum()) / samples for score in known], list(errors)


def fit_profile(problem: GLMProblem, affinity: Affinity | None, penalty: float, search: SearchSettings) -> SolverResult:
    """Find the best membership of each client."""
    solution, profile = solve_profile(problem, affinity, penalty, search)
    gap = max(solution.gradient, profile.membership_gap(solution.vector))
    return _make_result(problem, profile, solution, problem.data.n_clients * (problem.shape.k - 1), gap <= search.tol)


def fit_federated(
    problem: GLMProblem, ids: Sequence[str], affinity: Affinity | None, penalty: float, tol: float, rounds: int,
    seed: int,
) -> SolverResult:  # fmt: skip
    """Run federated rounds. The memberships of new clients are found like those of the profile."""
    rows, k = problem.rows, problem.shape.k
    found = solve_federated(rows, k, ids, affinity, penalty, tol, rounds, seed)
    profile = problem.profile(tol)
    profile.memberships = found.memberships.mean
    log_likelihood = rows.client_log_likelihoods(found.coefficients, found.memberships.mean[..., None]).sum()
    return SolverResult(
        found.coefficients, found.memberships, torch.zeros(k, dtype=torch.float64), found.memberships.average(),
        profile, found.path, found.converged, LogLikelihood(float(log_likelihood), 0.0), rows.n_clients * (k - 1),
    )  # fmt: skip


def _make_result(
    problem: GLMProblem, objective: Objective, solution: Solution, membership_parameters: int, converged: bool
) -> SolverResult:
    coefficients, log_alpha = problem.shape.unpack(torch.from_numpy(solution.vector))
    is_exact = not isinstance(objective, Marginal) or problem.shape.k == 1
    log_likelihood = LogLikelihood(objective.log_likelihood(solution.vector), 0.0) if is_exact else None
    return SolverResult(
        coefficients, objective.find_memberships(solution.vector, problem.data), log_alpha,
        objective.prior(solution.vector), objective, solution.path, converged, log_likelihood, membership_parameters,
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
