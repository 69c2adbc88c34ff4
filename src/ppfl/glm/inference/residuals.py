"""Residuals of each row, given its client: deviance, Pearson, and randomised quantile residuals."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from scipy.special import ndtri

from ...errors import SettingError
from ..client_ids import Array
from ..families import BernoulliFamily, HeteroscedasticGaussianFamily, MultinomialFamily
from ..sample_rows import ClientRows
from .client_noise import client_variances, nuisance_of_rows, points_of

KINDS = ("deviance", "pearson", "quantile")
_NUMBERS_AT_ONCE = 1 << 18
_EDGE = 1e-15  # probabilities are kept this far from 0 and 1, so that residuals stay within about 8


def residuals(model: Any, X: Any, y: Any, clients: Any, offset: Any, kind: str, seed: int) -> Array:
    """See `InferenceMixin.residuals`."""
    if kind not in KINDS:
        raise SettingError(f"kind is {kind!r}; use one of {', '.join(KINDS)}")
    family = model._family
    if isinstance(family, MultinomialFamily) and not isinstance(family, BernoulliFamily):
        raise SettingError("three or more classes have no order, so no residuals; use predict_proba or deviance")
    x, target = model._validate(X, y)
    rows = model._validated_rows(x, offset)
    position = model._positions(clients, len(target))
    standard = (target - model._shift) / model._target_scale
    if kind == "quantile":
        return _quantile_residuals(model, rows, position, standard, seed)
    mean = torch.from_numpy(np.ascontiguousarray(model._mean_at(rows, position)))
    nuisance = model._result.coefficients.nuisance
    observed = torch.from_numpy(standard)
    expected = mean[:, 1] if mean.ndim == 2 else mean
    if kind == "pearson":
        variance = family.variance(expected, nuisance)
        if isinstance(family, HeteroscedasticGaussianFamily):
            variance = client_variances(model)[position]
        return np.asarray(((observed - expected) / variance.clamp_min(1e-300).sqrt()).numpy())
    each = family.deviance(mean, observed).clamp_min(0.0)  # as model.deviance
    return np.asarray(model._target_scale * (observed - expected).sign() * each.sqrt())


def _quantile_residuals(model: Any, rows: ClientRows, position: torch.Tensor, y: Array, seed: int) -> Array:
    below, upto = _cumulative(model, rows, position, y)
    level = below + np.random.default_rng(seed).random(len(y)) * (upto - below)
    return np.asarray(ndtri(level.clip(_EDGE, 1 - _EDGE)))


def _cumulative(model: Any, rows: ClientRows, position: torch.Tensor, y: Array) -> tuple[Array, Array]:
    """P(Y < y) and P(Y <= y), over the posterior distribution of each row's client."""
    family, coefficients = model._family, model._result.coefficients
    memberships = model._memberships.concat(model._result.prior)
    count = points_of(memberships, torch.zeros(1, dtype=torch.long))[1].shape[1]
    found = []
    for some in torch.split(torch.arange(len(y)), max(1, _NUMBERS_AT_ONCE // rows.numbers_per_row(count))):
        points, weights = points_of(memberships, position[some])
        parameters = rows.take(some).mean_parameters(coefficients, points)
        nuisance = nuisance_of_rows(model, position[some], points, coefficients.nuisance)
        given = torch.from_numpy(y)[some], parameters, nuisance
        found.append(torch.stack([(weights * part(*given)).sum(1) for part in (family.cdf_below, family.cdf)]))
    below, upto = torch.cat(found, 1).numpy()
    return below, upto
