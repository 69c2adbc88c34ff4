"""Choosing K and the residual effect, by held-out likelihood within clients or by BIC."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import pandas as pd
from torch import Tensor

from .likelihood import Residual
from .population_fit import PopulationFit

CRITERIA = ("held_out", "prediction", "bic")


class Candidate(NamedTuple):
    k: int
    residual: Residual = "none"


@dataclass(frozen=True)
class Search:
    """How many starts, when to stop, and how to choose."""

    n_init: int = 1
    tol: float = 1e-6  # of the largest component of the gradient per sample
    max_iter: int = 500
    seed: int = 0
    criterion: str = "held_out"


@dataclass(frozen=True)
class Problem:
    """The rows of all clients, with what the fit of any candidate needs. The surface makes it by `Problem.of`."""

    rows: Any  # RowLikelihood, sorted by client

    @classmethod
    def of(
        cls, rows: Any, ridge: float, slopes: Tensor, shared_slopes: Tensor, centres: Sequence[float] = (),
        intercept: int = -1,
    ) -> Problem:  # fmt: skip
        """
        Args:
            rows: `RowLikelihood` with family, mix, weights and offset, sorted by client.
            ridge: Shrinks slopes to 0.
            slopes: (q,), 1 for varying columns that are slopes, 0 for the intercept.
            shared_slopes: (f,), the same for shared columns.
            centres: mean / scale of the varying columns, 0 for the intercept and where columns are not centred or
                constant. The residual effect "diagonal" is one of the original columns by them.
            intercept: The position of the intercept among the varying columns, -1 without.
        """
        raise NotImplementedError


def choose_model(
    problem: Problem, candidates: Sequence[Candidate], search: Search = Search()
) -> tuple[PopulationFit, pd.DataFrame]:
    """Fits every candidate and returns the best, with a table that has one row for each of them.

    The columns of the table are k, residual, log_likelihood, n_parameters, aic, bic, held_out, held_out_error,
    converged. With one candidate nothing is held out, and `held_out` is NaN.
    """
    raise NotImplementedError


def automatic(problem: Problem, ks: Sequence[int], residual: str) -> list[Candidate]:
    """The candidates of k="auto" or several k, with residual = "auto" or one of the kinds."""
    raise NotImplementedError


# In marginal.py, for what is asked after a fit:
#
# fastest_form(rows: RowLikelihood) -> Likelihood
#     moments for gaussian targets, else the rows.
# find_posterior(fit: PopulationFit, data: Likelihood) -> Posterior
#     of new clients (onboard).
# curvature(fit: PopulationFit, data: Likelihood) -> Matrix
#     the Hessian (P, P) of the penalised objective in nats, jointly in B, shared, nuisance, L and log alpha.
# deviations(fit, data) -> ScoreSums, as the present standard errors of memberships need them.
# precise_log_likelihood(fit: PopulationFit, data: Likelihood) -> LogLikelihood(value, error)
