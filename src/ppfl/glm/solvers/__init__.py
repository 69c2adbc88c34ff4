"""Solvers for population GLMs.

`marginal` integrates memberships out, `profile` takes the best ones (found by `newton`), and both are minimised by
`lbfgs` from the starts of `starts` and `solve`. `federated` runs the paper's rounds instead. `problem` and `parameters`
say what is minimised over what, and `fitting` returns a result that the estimators can keep.
"""

from .fit_by_solver import (
    SelectionRecord,
    SolverResult,
    choose_by,
    fit_federated,
    fit_marginal,
    fit_profile,
    one_thread,
)
from .integral import LogLikelihood, marginal_log_likelihood
from .lbfgs import Solution, minimize_lbfgs
from .marginal import Marginal
from .parameters import Objective, ParameterShape, Regularization, concentration
from .problem import GLMProblem
from .profile import Profile
from .solve import SearchSettings, solve_marginal, solve_profile

__all__ = [
    "GLMProblem",
    "LogLikelihood",
    "Marginal",
    "Objective",
    "ParameterShape",
    "Profile",
    "Regularization",
    "SearchSettings",
    "SelectionRecord",
    "Solution",
    "SolverResult",
    "choose_by",
    "concentration",
    "fit_federated",
    "fit_marginal",
    "fit_profile",
    "marginal_log_likelihood",
    "minimize_lbfgs",
    "one_thread",
    "solve_marginal",
    "solve_profile",
]
