"""Standard errors from the observed information of the marginal likelihood."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..solvers.marginal import Marginal
from ..solvers.parameters import Objective, Vector

_STEP = 1e-4  # columns are standardised, so parameters are of size 1
_SINGULAR = 1e-9  # curvatures below this share of the largest are rounding errors of the differences


class ParameterCovariance(NamedTuple):
    """The covariance (P, P) of the estimated parameters, in the order of the solver's vector."""

    matrix: Vector
    note: str  # what is wrong with it, or nothing


def parameter_covariance(
    objective: Objective, at: Vector, n_samples: float, unidentified: int = 0
) -> ParameterCovariance:
    """The inverse of the observed information, leaving out directions without any.

    The objective is the mean of minus the log-likelihood and of the ridge and the prior on alpha, so these count as
    information too: standard errors are those of a posterior distribution, by Laplace's approximation.
    `unidentified` is the number of directions that the model itself leaves open, which need no note.
    """
    information = n_samples * hessian(objective, at)
    size, axes = np.linalg.eigh(information)
    negligible = _SINGULAR * size.max()
    inverse = np.where(size > negligible, 1 / np.maximum(size, negligible), 0.0)
    note = ""
    if (size < -negligible).any():
        note = (
            "the log-likelihood has no maximum here in some direction, so standard errors are too small; fit with a "
            "smaller tol, or with a smaller k"
        )
    elif int((size <= negligible).sum()) > unidentified:
        note = "the data say nothing about some combinations of parameters; standard errors leave these out"
    return ParameterCovariance((axes * inverse) @ axes.T, note)


def hessian(objective: Objective, at: Vector) -> Vector:
    """Second derivatives (P, P): exact ones if the objective has them, else from differences of the gradient."""
    if isinstance(objective, Marginal) and objective.has_hessian:
        exact = objective.with_hessian(at).hessian
        assert exact is not None
        missing = len(at) - len(exact)  # a single model has no alpha
        return np.asarray(np.pad(exact, (0, missing)))
    rows = []
    for i, value in enumerate(at):
        step = np.zeros_like(at)
        step[i] = _STEP * max(1.0, abs(value))
        rows.append((objective(at + step)[1] - objective(at - step)[1]) / (2 * step[i]))
    found = np.array(rows)
    return np.asarray((found + found.T) / 2)
