"""Fits of quasi families: the dispersion comes from the residuals of a fit, and the next fit uses it.

The log-likelihood is divided by the dispersion, so overdispersed counts say less about a client's membership than
Poisson counts would.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
from sklearn.utils.validation import _check_sample_weight
from torch import Tensor

from ..errors import SettingError
from .client_ids import Array
from .families import Family, QuasiPoissonFamily

if TYPE_CHECKING:
    from .table_estimator import TableEstimator

_MAX_FITS = 6
_ENOUGH = 0.02  # a relative change of the dispersion that no longer matters: standard errors change by half of it
_SMALLEST = 0.01


class _SquaredMeans(QuasiPoissonFamily):
    """The same counts; its `mean` is the square of theirs, so that a prediction is the mean of squares."""

    def mean(self, parameters: Tensor, nuisance: Tensor) -> Tensor:
        return super().mean(parameters, nuisance).square()


def fit_quasi(
    model: TableEstimator, x: Any, y: Array, clients: Any, sample_weight: Any, offset: Any,
    dispersion: float | None = None,
) -> float:  # fmt: skip
    """Fit until the dispersion of the fit is that of its residuals, and return it.

    With a given dispersion there is one fit. To compare several K, give all of them the dispersion of the largest:
    likelihoods that were divided by different numbers cannot be compared.
    """
    family = _quasi_family(model._family)
    used = 1.0 if dispersion is None else dispersion
    for _ in range(_MAX_FITS if dispersion is None else 1):
        model._family = family.with_dispersion(used)
        model._fit_table(x, y, clients, sample_weight, offset)
        fitted = used
        used = pearson_dispersion(model, x, y, clients, sample_weight, offset)
        if abs(math.log(used / fitted)) < _ENOUGH:
            break
    return fitted


def pearson_dispersion(model: TableEstimator, x: Any, y: Array, clients: Any, sample_weight: Any, offset: Any) -> float:
    """The mean of (y - mean)^2 / mean over rows and over the posterior of the clients' memberships.

    If y and a membership come from the model, then y and a draw from the posterior have the same joint distribution, so
    this mean needs no count of the degrees of freedom that memberships take. The coefficients take theirs.
    """
    family = _quasi_family(model._family)
    weight = _check_sample_weight(sample_weight, x, dtype=np.float64)
    mean = model._mean_of_validated(x, clients, offset)
    try:
        model._family = _SquaredMeans(family.link, family.dispersion)
        squares = model._mean_of_validated(x, clients, offset)
    finally:
        model._family = family
    each = (y**2 - 2 * y * mean + squares) / np.maximum(mean, 1e-12)
    rows = int((weight > 0).sum())
    coefficients = sum(part.numel() for part in model._result.coefficients)
    return max(_SMALLEST, float(np.average(each, weights=weight)) * rows / max(1, rows - coefficients))


def _quasi_family(family: Family) -> QuasiPoissonFamily:
    if not isinstance(family, QuasiPoissonFamily):
        raise SettingError(f"family {family.name!r} has no dispersion to find from residuals; use 'quasipoisson'")
    return family
