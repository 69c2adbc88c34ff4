"""Solvers for population GLMs.

`marginal` integrates memberships out, with points that `adaptation` fits to each client, and `profile` takes the best
memberships (found by `newton`). `solve` minimises both, by `newton_steps` or `lbfgs`, from smaller fits (`split`) and
random starts (`starts`). `federated` runs the paper's rounds instead. `problem` and `parameters` say what is minimised
over what, `choose_k` compares several K by `held_out` rows, `integral` computes likelihoods precisely, and
`fit_by_solver` returns a result that the estimators can keep.
"""

from .choose_k import CRITERIA
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
    "CRITERIA",
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
