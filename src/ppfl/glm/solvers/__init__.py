"""Solvers for population GLMs.

`marginal` integrates memberships out, `profile` takes the best ones (found by `newton`), and both are minimised by
`lbfgs` from the starts of `starts` and `solve`. `federated` runs the paper's rounds instead. `problem` and `parameters`
say what is minimised over what, and `fitting` returns a result that the estimators can keep.
"""

from .fit_by_solver import SolverResult, fit_federated, fit_marginal, fit_profile, one_thread
from .lbfgs import Solution, minimize_lbfgs
from .marginal import Marginal
from .parameters import Objective, ParameterShape, Regularization
from .problem import GLMProblem
from .profile import Profile
from .solve import SearchSettings, solve_marginal, solve_profile

__all__ = [
    "GLMProblem",
    "Marginal",
    "Objective",
    "ParameterShape",
    "Profile",
    "Regularization",
    "SearchSettings",
    "Solution",
    "SolverResult",
    "fit_federated",
    "fit_marginal",
    "fit_profile",
    "minimize_lbfgs",
    "one_thread",
    "solve_marginal",
    "solve_profile",
]
