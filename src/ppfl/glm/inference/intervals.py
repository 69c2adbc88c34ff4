"""Intervals for memberships, for clients' coefficients and for predictions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import torch

from ...errors import SettingError
from ..client_memberships import PointMemberships
from ..sample_rows import ClientRows
from ..standardize import INTERCEPT
from .client_noise import nuisance_of_rows
from .mixture_quantiles import mixture_quantile
from .parameter_table import check_level
from .posterior_draws import draw_memberships, draw_parameters, membership_deviations

_ROWS_PER_CHUNK = 5000
_PARTS = 50  # draws that a new observation's distribution is a mixture of
_MEMBERSHIP_DRAWS = 400


def membership_intervals(model: Any, level: float) -> Any:
    """A DataFrame with one row per client: lower and upper ends for each canonical model."""
    check_level(level)
    _refuse_points(model, "intervals for memberships")
    clients = torch.arange(len(model.clients_))
    drawn = draw_memberships(model._memberships, clients, _MEMBERSHIP_DRAWS)  # (M, S, K)
    noise = np.random.default_rng(2).normal(size=(1, *drawn.shape[1:]))
    if drawn.shape[2] > 1:
        drawn = (drawn + membership_deviations(model)[:, None] * noise).clip(0.0, 1.0)
    ends = np.quantile(drawn, [(1 - level) / 2, (1 + level) / 2], axis=1)  # (2, M, K)
    columns = pd.MultiIndex.from_product([range(drawn.shape[2]), ["lower", "upper"]], names=["model", None])
    table = ends.transpose(1, 2, 0).reshape(len(clients), -1)
    return pd.DataFrame(table, index=pd.Index(model.clients_, name="client"), columns=columns)


def client_coefficient_intervals(model: Any, position: int, level: float) -> Any:
    """A DataFrame with one row per term: mean, lower and upper end of the client's coefficient."""
    check_level(level)
    _refuse_points(model, "intervals for coefficients")
    if model.canonical_coef_.ndim != 2:
        raise SettingError("a model of three or more classes has several predictors; look at canonical_coef_")
    memberships = draw_memberships(model._memberships, torch.tensor([position]))[0]  # (S, K)
    shift, scale = model._predictor_units()
    drawn = []
    for c, coefficients in zip(memberships, draw_parameters(model), strict=True):
        slopes, intercepts = model._scaling.to_original_units(coefficients, shift, scale)
        drawn.append([float(c @ intercepts[:, 0]), *(c @ slopes[..., 0])])
    lower, upper = np.quantile(np.array(drawn), [(1 - level) / 2, (1 + level) / 2], axis=0)
    slope, intercept = model.client_coef(model.clients_[position])
    table = {"mean": [float(intercept), *slope], "lower": lower, "upper": upper}
    frame = pd.DataFrame(table, index=pd.Index([INTERCEPT, *model._scaling.names], name="term"))
    return frame if model.fit_intercept else frame.drop(index=INTERCEPT)


def predict_with_intervals(model: Any, X: Any, clients: Any, offset: Any, level: float) -> Any:
    """A DataFrame with the mean, its interval, and the interval of a new observation."""
    check_level(level)
    rows = model._rows_to_predict(X, offset)
    _refuse_points(model, "intervals for predictions")
    position = model._positions(clients, len(rows.varying))
    mean = model._mean_at(rows, position)
    levels = (1 - level) / 2, (1 + level) / 2
    draws = draw_parameters(model)
    parts = slice(None, None, max(1, len(draws) // _PARTS))
    nuisance = torch.stack([coefficients.nuisance for coefficients in draws[parts]], 1)  # (r, S)
    found = []
    for means, parameters, some, c in _drawn_means(model, rows, position, draws):
        own = nuisance_of_rows(model, some, c[..., parts], nuisance)
        new = [mixture_quantile(model._family, at, parameters[:, parts], own).numpy() for at in levels]
        found.append(np.stack([*np.quantile(means, levels, axis=1), *new], 1))
    table = model._shift + model._target_scale * np.c_[mean, np.concatenate(found)]
    return pd.DataFrame(table, _index(X), ["mean", "lower", "upper", "new_lower", "new_upper"])


def probabilities_with_intervals(model: Any, X: Any, clients: Any, offset: Any, level: float) -> Any:
    """A DataFrame with the probability of every class, and its interval."""
    check_level(level)
    rows = model._rows_to_predict(X, offset)
    _refuse_points(model, "intervals for predictions")
    position = model._positions(clients, len(rows.varying))
    mean = model._mean_at(rows, position)
    levels, draws = [(1 - level) / 2, (1 + level) / 2], draw_parameters(model)
    ends = [np.quantile(means, levels, axis=1) for means, *_ in _drawn_means(model, rows, position, draws)]
    table = np.concatenate([mean[None], np.concatenate(ends, 1)]).transpose(1, 2, 0)  # (n, classes, 3)
    columns = pd.MultiIndex.from_product([model.classes_, ["mean", "lower", "upper"]], names=["class", None])
    return pd.DataFrame(table.reshape(len(mean), -1), _index(X), columns)


def _index(X: Any) -> Any:
    """The index of a DataFrame; None, which numbers the rows, for arrays."""
    return X.index if hasattr(X, "index") and hasattr(X, "columns") else None


def _drawn_means(model: Any, rows: ClientRows, position: torch.Tensor, draws: Any) -> Any:
    """For chunks of rows, the mean (n, S) or the class probabilities (n, S, m) of every draw, and its mean parameters.

    Also the positions (n,) of their clients, and the drawn memberships (n, K, S).

    Parameters and memberships are drawn independently. Their errors are correlated, so this is a little wide for
    clients with many rows, but it needs no data of the clients.
    """
    known = model._memberships.concat(model._result.prior)
    for some in torch.split(torch.arange(len(position)), _ROWS_PER_CHUNK):
        part = rows.take(some)
        clients, at = torch.unique(position[some], return_inverse=True)
        memberships = torch.from_numpy(draw_memberships(known, clients))
        parameters = [
            part.mean_parameters(coefficients, memberships[at, s, :, None]) for s, coefficients in enumerate(draws)
        ]
        means = [
            rows.family.mean(each, coefficients.nuisance)[:, 0].numpy()
            for each, coefficients in zip(parameters, draws, strict=True)
        ]
        yield np.stack(means, 1), torch.cat(parameters, 1), position[some], memberships[at].mT


def _refuse_points(model: Any, what: str) -> None:
    if isinstance(model._result.memberships, PointMemberships):
        raise SettingError(
            f"{what} need a distribution of memberships, and solver = {model.solver!r} has one membership per client; "
            f"fit with solver = 'marginal' and penalty = 0"
        )
