"""All parameters of a fitted model in the units of its table, with standard errors and intervals."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.special import ndtri

from ...errors import SettingError
from ..client_ids import Array
from ..client_memberships import PointMemberships
from ..families import GaussianFamily
from ..likelihoods import Coefficients
from ..solvers.parameters import ParameterShape, concentration
from ..standardize import INTERCEPT
from .standard_errors import ParameterCovariance, parameter_covariance

_STEP = 1e-4  # for derivatives of a few simple functions


class ParameterRow(NamedTuple):
    """One parameter: of a canonical model, of all of them ("shared"), or of the distributions of y and of c."""

    model: str
    term: str
    output: str  # the class, for three or more classes
    estimate: float
    std_error: float
    lower: float
    upper: float


def check_level(level: Any) -> float:
    if not isinstance(level, float | int) or not 0 < level < 1:
        raise SettingError(f"the level of an interval is {level!r}; set a number between 0 and 1, such as 0.9")
    return float(level)


def covariance_of(model: Any) -> ParameterCovariance:
    """The covariance of the solver's parameter vector, computed once."""
    if model._covariance is None:
        if isinstance(model._result.memberships, PointMemberships):
            raise SettingError(
                f"standard errors need the marginal likelihood, and solver = {model.solver!r} has one membership per "
                f"client instead; fit with solver = 'marginal' and penalty = 0"
            )
        if model._objective is None:
            raise SettingError(
                "standard errors need the rows of the fit, which pickles do not hold; call conf_int() or summary() "
                "before pickling, or use model.save(path), which stores them"
            )
        shape, n_samples = parameter_shape(model), model._objective.data.n_samples
        # a number added to the predictors of all classes changes nothing, and constant columns have no coefficients
        columns = shape.k * shape.varying + shape.shared
        constant = int(np.isinf(model._scaling.scale).sum()) * shape.k * shape.outputs
        unidentified = columns * (shape.outputs > 1) + constant + (shape.k == 1)
        model._covariance = parameter_covariance(model._objective, model._parameters(), n_samples, unidentified)
    found: ParameterCovariance = model._covariance
    return found


def parameter_shape(model: Any) -> ParameterShape:
    k, q, m = model._result.coefficients.canonical.shape
    return ParameterShape(k, q, len(model._result.coefficients.shared), m, len(model._result.coefficients.nuisance))


def in_solver_order(model: Any, vector: Array) -> tuple[Coefficients, torch.Tensor]:
    """Coefficients and log alpha of a parameter vector, with canonical models in the order of the estimator."""
    coefficients, log_alpha = parameter_shape(model).unpack(torch.from_numpy(vector))
    return coefficients._replace(canonical=coefficients.canonical[model._order]), log_alpha[model._order]


def original_units(model: Any, vector: Array, *, shifted: bool = True) -> Array:
    """Coefficients (K, d + 1, m) in the units of the table, with the intercept last, of a parameter vector."""
    shift, scale = model._predictor_units()
    slopes, intercepts = model._scaling.to_original_units(
        in_solver_order(model, vector)[0], shift if shifted else 0.0, scale
    )
    return np.concatenate([slopes, intercepts[:, None]], 1)


def coefficient_errors(model: Any) -> Array:
    """Standard errors (K, d + 1, m) of the coefficients in the units of the table, by the delta method."""
    covariance = covariance_of(model).matrix
    axes = np.eye(len(covariance))
    jacobian = np.stack([original_units(model, axis, shifted=False) for axis in axes], -1)  # (K, d + 1, m, P)
    if jacobian.shape[2] > 1:  # the same number added to all classes changes nothing, so errors are of differences
        jacobian = jacobian - jacobian.mean(2, keepdims=True)
    variance = np.einsum("...p,pq,...q->...", jacobian, covariance, jacobian)
    errors = np.sqrt(np.maximum(variance, 0.0))
    errors[:, :-1][:, ~np.isfinite(model._scaling.scale)] = np.nan  # constant columns have no coefficient
    return np.asarray(errors)


def parameter_rows(model: Any, level: float) -> list[ParameterRow]:
    """Every parameter with its interval; dispersion and concentration have theirs on the scale of logarithms."""
    z = float(ndtri((1 + check_level(level)) / 2))
    estimates, errors = original_units(model, model._parameters()), coefficient_errors(model)
    names = [*model._scaling.names, INTERCEPT]
    outputs = [str(c) for c in getattr(model, "classes_", ())] if estimates.shape[2] > 1 else [""]
    shared = set(model._scaling.shared)
    positions = (*model._scaling.varying, *model._scaling.shared)
    rows = []
    for i in sorted(positions, key=lambda i: (i != len(names) - 1, i)):  # the intercept first
        for k in range(1 if i in shared else len(estimates)):
            for o, output in enumerate(outputs):
                value, error = float(estimates[k, i, o]), float(errors[k, i, o])
                label = "shared" if i in shared else str(k)
                rows.append(ParameterRow(label, names[i], output, value, error, value - z * error, value + z * error))
    return [*rows, *_nuisance_rows(model, z), *_concentration_rows(model, z)]


def _nuisance_rows(model: Any, z: float) -> list[ParameterRow]:
    """With intervals on the scale of the solver: of logarithms and logits."""
    shape, covariance = parameter_shape(model), covariance_of(model).matrix
    first = (shape.k * shape.varying + shape.shared) * shape.outputs
    at, axes = model._result.coefficients.nuisance, torch.eye(shape.nuisance, dtype=torch.float64)
    spread = torch.from_numpy(covariance[first : first + shape.nuisance, first : first + shape.nuisance])
    rows = []
    for name in list(natural_parameters(model, at))[: shape.nuisance]:

        def value(change: torch.Tensor, name: str = name) -> float:
            return natural_parameters(model, at + change)[name]

        slopes = [(value(_STEP * axis) - value(-_STEP * axis)) / (2 * _STEP) for axis in axes]
        slope = torch.tensor(slopes, dtype=torch.float64)
        error = float((slope @ spread @ slope).clamp_min(0.0).sqrt())
        # the parameters, changed together, that are most likely where this one is one standard error larger
        along = spread @ slope / max(error, 1e-300)
        ends = value(-z * along), value(z * along)
        rows.append(ParameterRow("", name, "", value(0 * along), error, min(ends), max(ends)))
    return rows


def natural_parameters(model: Any, nuisance: torch.Tensor) -> dict[str, float]:
    """The parameters of the distribution of y besides its mean, in the units of y."""
    found: dict[str, float] = model._family.natural_parameters(nuisance)
    if isinstance(model._family, GaussianFamily):  # the dispersion is a variance
        found["dispersion"] *= model._target_scale**2
    return found


def _concentration_rows(model: Any, z: float) -> list[ParameterRow]:
    k = len(model.concentration_)
    if k == 1:
        return []
    variance = np.diag(covariance_of(model).matrix)[-k:][model._order.numpy()]
    rows = []
    for i, (log_alpha, error) in enumerate(zip(model._result.log_alpha.tolist(), np.sqrt(variance), strict=True)):
        at = torch.tensor([log_alpha, log_alpha - z * error, log_alpha + z * error], dtype=torch.float64)
        at.requires_grad_()
        found = concentration(at)
        (slope,) = torch.autograd.grad(found[0], at)
        value, lower, upper = found.tolist()
        rows.append(ParameterRow(str(i), "concentration", "", value, float(slope[0]) * error, lower, upper))
    return rows
