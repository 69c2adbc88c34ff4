"""Standard errors and intervals of parameters, and residuals of rows.

Standard errors invert the observed information of the marginal likelihood. Everything else follows by the delta method
from one function of the parameter vector to quantities in the units of the table.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from scipy import stats
from scipy.special import ndtri
from torch import Tensor

from ..errors import SettingError
from .columns import Array, TargetUnits
from .families import BernoulliFamily, GaussianFamily, MultinomialFamily
from .formula import INTERCEPT
from .likelihood import Parameters, concentration
from .mixed_model import dirichlet_moments
from .problem import curvature

if TYPE_CHECKING:
    from .base import PopulationGLM, Reading

POPULATION = "population"  # the mean of the clients' own coefficients
KINDS = ("deviance", "pearson", "quantile")
_SINGULAR = 1e-9  # curvatures below this share of the largest are rounding errors
_NO_VARIANCE = 1e-6  # between clients, of standardised targets
_STEP = 1e-4  # for derivatives of a few simple functions
_EDGE = 1e-15  # probabilities are kept this far from 0 and 1, so that residuals stay within about 8
_NUMBERS_AT_ONCE = 1 << 18


class Covariance(NamedTuple):
    """The covariance (P, P) of the parameter vector."""

    matrix: Array
    note: str  # what is wrong with it, or nothing


def covariance(model: PopulationGLM) -> Covariance:
    """The inverse of the observed information, without directions of which the data say nothing. Computed once.

    The ridge and the weak priors count as information too: standard errors are those of a posterior distribution, by
    Laplace's approximation.
    """
    model._refuse_points("standard errors")
    if model._covariance is None:
        model._covariance = invert(model, curvature(model.fit_, model._need_rows("standard errors")))
    return model._covariance


def invert(model: PopulationGLM, information: Array) -> Covariance:
    """The inverse of an information matrix (P, P), 0 in directions without any."""
    size, axes = np.linalg.eigh(information)
    negligible = _SINGULAR * size.max()
    inverse = np.where(size > negligible, 1 / np.maximum(size, negligible), 0.0)
    layout, note = model.fit_.layout, ""
    # a number added to the predictors of all classes changes nothing
    columns = (layout.k * layout.varying + layout.shared) * (layout.outputs > 1)
    known = columns + layout.outputs * model._scaling.redundant(layout.k)
    if (size < -negligible).any():
        note = (
            "the log-likelihood has no maximum here in some direction, so standard errors are too small; fit with a "
            "smaller tol, or with a smaller k"
        )
    elif int((size <= negligible).sum()) > known:
        note = "the data say nothing about some combinations of parameters; standard errors leave these out"
    return Covariance((axes * inverse) @ axes.T, note)


# ---------------------------------------------------------------------- quantities in the units of the table


def coefficients(model: PopulationGLM, at: Parameters, *, shifted: bool = True) -> Tensor:
    """Those of the canonical models (K, d + 1, m), the intercept last."""
    units = model._units if shifted else TargetUnits(0.0, model._units.scale)
    return model._scaling.to_units(at.canonical, at.shared, units)


def population_mean(model: PopulationGLM, at: Parameters) -> Tensor:
    """The mean of the clients' own coefficients in the population (d + 1, m)."""
    found: Tensor = torch.tensordot(membership_mean(model, at), coefficients(model, at), 1)
    return found


def membership_mean(model: PopulationGLM, at: Parameters) -> Tensor:
    """E[c] (K,): of the Dirichlet distribution, or of the clients if each has one membership."""
    if model.k_ == 1:
        return torch.ones(1, dtype=torch.float64)
    if model.is_point_fit:
        return model.fit_.posterior.mean.mean(0)
    return at.alpha / at.alpha.sum()


def shares(model: PopulationGLM) -> Array:
    """The mean membership of the clients (K,), or of the population where the clients are not known here."""
    posterior = model._posterior
    return (posterior.mean.mean(0) if len(posterior) else membership_mean(model, model.fit_.parameters)).numpy()


def effects(model: PopulationGLM, at: Parameters) -> Tensor:
    """L' in the units of the table (s, d + 1): what one unit of each residual score adds to the coefficients."""
    loadings = model.fit_.posterior.loadings(at)
    none = at.shared.new_zeros(len(at.shared), 1)
    return model._scaling.to_units(loadings[..., None], none, TargetUnits(0.0, model._units.scale))[..., 0]


def client_coefficients(model: PopulationGLM) -> Array:
    """Every client's own coefficients (M, d + 1, m), the intercept last: posterior means."""
    at, posterior = model.fit_.parameters, model._posterior
    own = posterior.coefficients(at) if len(posterior) else at.canonical[:0]
    return model._scaling.to_units(own, at.shared, model._units).numpy()


def between_clients(model: PopulationGLM) -> tuple[Array, Array]:
    """Covariances (d + 1, d + 1) of the clients' own coefficients: by the canonical models, and by residual effects."""
    at = model.fit_.parameters
    theta, residual = coefficients(model, at)[..., 0].numpy(), effects(model, at).numpy()
    mean = membership_mean(model, at).numpy()
    if model.k_ == 1:
        spread = np.zeros((1, 1))
    elif model.is_point_fit:
        points = model.fit_.posterior.mean.numpy()
        spread = np.cov(points.T, bias=True)
    else:
        spread = dirichlet_moments(model.concentration_)[1]
    centred = theta - mean @ theta  # centred first: coefficients that all clients share then vary by exactly 0
    return centred.T @ spread @ centred, residual.T @ residual


def explained(model: PopulationGLM) -> float:
    """Which share of the variance between clients the canonical models explain, over all standardised columns.

    NaN if clients do not differ.
    """
    scale = model._scaling.scale
    models, residual = between_clients(model)
    mean, some = model._scaling.mean, np.isfinite(scale)
    place = np.eye(len(mean) + 1)  # coefficients of standardised columns from those of the table
    place[:-1, :-1] = np.diag(np.where(some, scale, 0.0))
    place[-1, :-1] = mean
    parts = [float(np.trace(place @ part @ place.T)) for part in (models, residual)]
    return parts[0] / sum(parts) if sum(parts) > _NO_VARIANCE * model._units.scale**2 else math.nan


def natural_parameters(model: PopulationGLM, nuisance: Tensor | None = None) -> dict[str, float]:
    """The parameters of the distribution of y besides its mean, in the units of y."""
    nuisance = model.fit_.parameters.nuisance if nuisance is None else nuisance
    found: dict[str, float] = model._family.natural_parameters(nuisance)
    if isinstance(model._family, GaussianFamily):  # the dispersion is a variance
        found["dispersion"] *= model._units.scale**2
    return found


def jacobian(function: Callable[[Parameters], Tensor], model: PopulationGLM) -> Array:
    """Derivatives (..., P) of a function of the parameters at the fit."""
    layout = model.fit_.layout

    def of_vector(vector: Tensor) -> Tensor:
        return function(layout.unpack(vector))

    with torch.enable_grad():
        return np.asarray(torch.func.jacrev(of_vector)(torch.from_numpy(model.fit_.vector)).numpy())


def errors(model: PopulationGLM, slopes: Array) -> Array:
    """Standard errors of quantities with these derivatives (..., P)."""
    variance = np.einsum("...p,pq,...q->...", slopes, covariance(model).matrix, slopes)
    return np.asarray(np.sqrt(np.maximum(variance, 0.0)))


# ---------------------------------------------------------------------- the table of all parameters


def check_level(level: Any) -> float:
    if not isinstance(level, float | int) or not 0 < level < 1:
        raise SettingError(f"the level of an interval is {level!r}; set a number between 0 and 1, such as 0.9")
    return float(level)


def parameter_table(model: PopulationGLM, level: float) -> pd.DataFrame:
    """See `PopulationGLM.conf_int`."""
    check_level(level)
    rows = coefficient_rows(model, level) + _nuisance_rows(model, level) + _residual_rows(model)
    rows += _concentration_rows(model, level)
    columns = ["model", "term", "output", "estimate", "std_error", "lower", "upper", "df"]
    table = pd.DataFrame(rows, columns=columns)
    keys = ["model", "term", *(["output"] if (table["output"] != "").any() else [])]
    return table.drop(columns=[] if "output" in keys else ["output"]).set_index(keys)


def coefficient_rows(model: PopulationGLM, level: float, *, errors_known: bool = True) -> list[list[Any]]:
    """The intercept first; every varying term once for each canonical model, and then for the population's mean."""
    at, k = model.fit_.parameters, model.k_
    several = k > 1 or model.residual_ != "none"

    def every(where: Parameters) -> Tensor:
        return torch.cat([coefficients(model, where), population_mean(model, where)[None]])

    estimates = every(at).numpy()
    if estimates.shape[2] > 1:  # of differences from the mean of all classes
        estimates = estimates - estimates.mean(2, keepdims=True)
    found = np.full(estimates.shape, np.nan)
    if errors_known:
        slopes = jacobian(every, model)
        if slopes.shape[2] > 1:  # the same number added to all classes changes nothing
            slopes = slopes - slopes.mean(2, keepdims=True)
        found = errors(model, slopes)
        found[:, :-1][:, ~np.isfinite(model._scaling.scale)] = np.nan  # constant columns have no coefficient
    names, shared = [*model._scaling.names, INTERCEPT], set(model._scaling.shared)
    outputs = [str(c) for c in getattr(model, "classes_", ())] if estimates.shape[2] > 1 else [""]
    positions = sorted((*model._scaling.varying, *shared), key=lambda i: (i != len(names) - 1, i))
    rows = []
    for label, models in (("", range(k)), (POPULATION, [k] if k > 1 else [])):
        for i in positions:
            df = degrees_of_freedom(model, i, 1 if label or i in shared else k) if several else np.inf
            z = float(stats.t.ppf((1 + level) / 2, df))
            for row in [0] if i in shared and not label else [] if i in shared else models:
                for o, output in enumerate(outputs):
                    value, error = float(estimates[row, i, o]), float(found[row, i, o])
                    name = label or ("shared" if i in shared else str(row))
                    rows.append([name, names[i], output, value, error, value - z * error, value + z * error, df])
    return rows


def degrees_of_freedom(model: PopulationGLM, column: int, models: int = 1) -> float:
    """Of Student's t for the coefficient of a column, by the rule "between and within".

    An effect that differs between clients alone is known as well as so many clients tell it: their number less that of
    such effects. An effect within clients is known from the rows, for which the normal distribution is close enough.
    """
    d = len(model._scaling.names)
    used = {*model._scaling.varying, *model._scaling.shared} - set(model._scaling.aliased)
    between = {*model._between, d} & used
    if column not in between or not model._has_clients:
        return np.inf
    return float(max(1, model._n_clients - models * len(between)))


def _nuisance_rows(model: PopulationGLM, level: float) -> list[list[Any]]:
    """With intervals on the solver's scale: of logarithms and logits."""
    z, at = float(ndtri((1 + level) / 2)), model.fit_.parameters.nuisance
    place = model.fit_.layout.places["nuisance"]
    spread, axes = torch.from_numpy(covariance(model).matrix[place, place]), torch.eye(len(at), dtype=torch.float64)
    rows = []
    for name in list(natural_parameters(model))[: len(at)]:

        def value(change: Tensor, name: str = name) -> float:
            return natural_parameters(model, at + change)[name]

        slopes = [(value(_STEP * axis) - value(-_STEP * axis)) / (2 * _STEP) for axis in axes]
        slope = torch.tensor(slopes, dtype=torch.float64)
        error = float((slope @ spread @ slope).clamp_min(0.0).sqrt())
        # the parameters, changed together, that are most likely where this one is one standard error larger
        along = spread @ slope / max(error, 1e-300)
        ends = value(-z * along), value(z * along)
        rows.append(["", name, "", value(0 * along), error, min(ends), max(ends), np.inf])
    return rows


def _residual_rows(model: PopulationGLM) -> list[list[Any]]:
    """Standard deviations of the residual effects; like lme4, without errors: their distributions are skewed."""
    if model.residual_ == "none":
        return []
    size = np.sqrt(np.diag(between_clients(model)[1]))
    names, d = [*model._scaling.names, INTERCEPT], len(size) - 1
    some = sorted((model._scaling.varying[i] for i in model.fit_.layout.effects), key=lambda i: (i != d, i))
    return [["residual", names[i], "", float(size[i]), *[np.nan] * 3, np.nan] for i in some]


def _concentration_rows(model: PopulationGLM, level: float) -> list[list[Any]]:
    if model.k_ == 1:
        return []
    place, z = model.fit_.layout.places["log_alpha"], float(ndtri((1 + level) / 2))
    error = torch.from_numpy(np.sqrt(np.maximum(np.diag(covariance(model).matrix)[place], 0.0)))
    at = model.fit_.parameters.log_alpha
    slope = torch.func.jacrev(concentration)(at).diag()
    ends = [concentration(at + sign * z * error) for sign in (0, -1, 1)]
    values = zip(ends[0].tolist(), (slope * error).tolist(), ends[1].tolist(), ends[2].tolist(), strict=True)
    return [[str(i), "concentration", "", *each, np.inf] for i, each in enumerate(values)]


# ---------------------------------------------------------------------- residuals


def residuals(model: PopulationGLM, table: Reading, kind: str, seed: int) -> Array:
    """See `TableGLM.residuals`."""
    if kind not in KINDS:
        raise SettingError(f"kind is {kind!r}; use one of {', '.join(KINDS)}")
    family = model._family
    if isinstance(family, MultinomialFamily) and not isinstance(family, BernoulliFamily):
        raise SettingError("three or more classes have no order, so no residuals; use predict_proba or deviance")
    if kind == "quantile":
        below, upto = _cumulative(model, table)
        level = below + np.random.default_rng(seed).random(len(below)) * (upto - below)
        return np.asarray(ndtri(level.clip(_EDGE, 1 - _EDGE)))
    mean, observed = torch.from_numpy(model._table_mean(table)), torch.from_numpy(table.y)
    expected = mean[:, 1] if mean.ndim == 2 else mean
    if kind == "deviance":
        each = family.deviance(mean, observed).clamp_min(0.0)
        return ((observed - expected).sign() * each.sqrt()).numpy()
    standard = (expected - model._units.shift) / model._units.scale
    variance = family.variance(standard, model.fit_.parameters.nuisance) * model._units.scale**2
    return ((observed - expected) / variance.clamp_min(1e-300).sqrt()).numpy()


def _cumulative(model: PopulationGLM, table: Reading) -> tuple[Array, Array]:
    """P(Y < y) and P(Y <= y) (n,), over the posterior distribution of each row's client."""
    family, at, rows = model._family, model.fit_.parameters, model._rows(table)
    position = model._positions(table.clients, len(table.x))
    y = torch.from_numpy((table.y - model._units.shift) / model._units.scale)
    found = torch.zeros(2, len(y), dtype=torch.float64)
    for posterior, some, client in model._by_posterior(position):
        here = at._replace(residual=posterior.loadings(at))
        size = max(1, _NUMBERS_AT_ONCE // rows.numbers_per_row(posterior.weights.shape[1]))
        for part, own in zip(torch.split(some, size), torch.split(client, size), strict=True):
            these, nuisance = rows.take(part), at.nuisance
            if posterior.residual is not None:  # z given c is normal, and so adds to the variance
                loading = torch.einsum("nq,sq->ns", these.varying.x, here.residual)  # type: ignore[attr-defined]
                added = torch.einsum("ns,nst,nt->n", loading, posterior.residual.covariance[own], loading)
                nuisance = (at.nuisance[0].exp() + added).log()[None, :, None]
            given = y[part], these.mean_parameters(here, posterior.shares(own)), nuisance
            weights = posterior.weights[own]
            found[:, part] = torch.stack([(weights * each(*given)).sum(1) for each in (family.cdf_below, family.cdf)])
    return found[0].numpy(), found[1].numpy()
