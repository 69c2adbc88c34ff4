"""Intervals for memberships, for clients' coefficients and for predictions, from draws.

A draw has its own parameters: those of the canonical models, of the residual effects and of the Dirichlet distribution.
So intervals of new clients know that alpha and the residual variances are estimates too. Parameters and memberships of
known clients are drawn independently. Their errors are correlated, so this is a little wide for clients with many rows,
but it needs no rows of the fit.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from ..errors import SettingError
from .columns import Array
from .count_families import CountFamily
from .family import Family
from .formula import INTERCEPT
from .inference import check_level, covariance
from .likelihood import Parameters
from .problem import membership_deviations
from .rows import RowLikelihood

if TYPE_CHECKING:
    from .base import PopulationGLM, Reading

DRAWS = 200
_MEMBERSHIP_DRAWS = 400
_NEW_CLIENTS = 5  # that are drawn for each draw of the parameters
_PARTS = 50  # draws that a new observation's distribution is a mixture of
_ROWS_AT_ONCE, _CLIENTS_AT_ONCE = 5000, 2000
_SEED = 0  # so that the same call gives the same interval
_HALVINGS, _DOUBLINGS = 60, 60
_REACH = 4.0  # usual deviations between the means and the first guess of a quantile


def memberships(model: PopulationGLM, level: float) -> pd.DataFrame:
    """Lower and upper ends for each canonical model: one row per client."""
    ends, k = _levels(level), model.k_
    moved, random = deviations(model), np.random.default_rng(_SEED)
    noise = random.normal(size=(1, k, _MEMBERSHIP_DRAWS))
    found = []
    for some in torch.split(torch.arange(len(model.clients_)), _CLIENTS_AT_ONCE):
        drawn = model._posterior.sample(some, _MEMBERSHIP_DRAWS, random)[:, :k].numpy()
        drawn = (drawn + moved[some.numpy(), :, None] * noise).clip(0.0, 1.0) if k > 1 else drawn
        found.append(np.quantile(drawn, ends, axis=2))  # (2, m, K)
    columns = pd.MultiIndex.from_product([range(k), ["lower", "upper"]], names=["model", None])
    table = np.concatenate(found, 1).transpose(1, 2, 0).reshape(len(model.clients_), -1)
    return pd.DataFrame(table, pd.Index(model.clients_, name="client"), columns)


def deviations(model: PopulationGLM) -> Array:
    """How much the mean membership (M, K) moves because the canonical models are estimates. Computed once."""
    if model._deviations is None:
        matrix = covariance(model).matrix
        found = membership_deviations(model.fit_, model._need_rows("an interval for memberships"), matrix)
        model._deviations = np.minimum(found, 1.0).astype(np.float32)
    known = model._deviations
    onboarded = len(model.clients_) - len(known)  # their rows are not kept; the typical client stands for them
    return np.concatenate([known, np.tile(np.median(known, 0), (onboarded, 1))]) if onboarded else known


def client_coefficients(model: PopulationGLM, position: int, level: float) -> pd.DataFrame:
    """One row per term: mean, lower and upper end of the client's coefficient."""
    ends = _levels(level)
    model._refuse_points("intervals for coefficients")
    if model.canonical_coef_.ndim != 2:
        raise SettingError("a model of three or more classes has several predictors; look at canonical_coef_")
    random = np.random.default_rng(_SEED)
    shares = model._posterior.sample(torch.tensor([position]), DRAWS, random)[0]  # (K + s, S)
    drawn = []
    for s, at in enumerate(draw_parameters(model)):
        models = torch.cat([at.canonical, model._posterior.loadings(at)[..., None]])
        own = torch.tensordot(shares[:, s], models, 1)[None]
        drawn.append(model._scaling.to_units(own, at.shared, model._units)[0, :, 0].numpy())
    lower, upper = np.quantile(np.array(drawn), ends, axis=0)
    slope, intercept = model.client_coef(model.clients_[position])
    table = {"mean": [*slope, float(intercept)], "lower": lower, "upper": upper}
    frame = pd.DataFrame(table, pd.Index([*model._scaling.names, INTERCEPT], name="term"))
    frame = frame.iloc[[-1, *range(len(frame) - 1)]]
    return frame if model.fit_intercept else frame.drop(index=INTERCEPT)


def predictions(model: PopulationGLM, table: Reading, X: Any, level: float) -> pd.DataFrame:
    """The mean, its interval, and the interval of a new observation."""
    ends = _levels(level)
    model._refuse_points("intervals for predictions")
    mean, draws = model._table_mean(table), draw_parameters(model)
    ends_of_means, ends_of_new = np.zeros((2, len(mean))), np.zeros((2, len(mean)))
    for some, parameters, used in _drawn(model, table, draws):
        means = _means(model._family, parameters, used).numpy()
        ends_of_means[:, some] = np.quantile(means, ends, axis=1)
        parts = slice(None, None, max(1, len(used) // _PARTS))
        nuisance = torch.stack([at.nuisance for at in used[parts]], 1)  # (r, S)
        quantiles = [mixture_quantile(model._family, at, parameters[:, parts], nuisance) for at in ends]
        ends_of_new[:, some] = torch.stack(quantiles).numpy()
    both = model._units.shift + model._units.scale * np.concatenate([ends_of_means, ends_of_new])
    return pd.DataFrame(np.c_[mean, both.T], _index(X), ["mean", "lower", "upper", "new_lower", "new_upper"])


def probabilities(model: Any, table: Reading, X: Any, level: float) -> pd.DataFrame:
    """The probability of every class, and its interval."""
    ends = _levels(level)
    model._refuse_points("intervals for predictions")
    mean, draws = model._table_mean(table), draw_parameters(model)
    found = np.zeros((2, *mean.shape))
    for some, parameters, used in _drawn(model, table, draws):
        found[:, some] = np.quantile(_means(model._family, parameters, used).numpy(), ends, axis=1)
    columns = pd.MultiIndex.from_product([model.classes_, ["mean", "lower", "upper"]], names=["class", None])
    whole = np.concatenate([mean[None], found]).transpose(1, 2, 0)  # (n, classes, 3)
    return pd.DataFrame(whole.reshape(len(mean), -1), _index(X), columns)


def _levels(level: float) -> list[float]:
    check_level(level)
    return [(1 - level) / 2, (1 + level) / 2]


def _index(X: Any) -> Any:
    """The index of a DataFrame; None, which numbers the rows, for arrays."""
    return X.index if hasattr(X, "index") and hasattr(X, "columns") else None


# ---------------------------------------------------------------------- draws


def draw_parameters(model: PopulationGLM, count: int = DRAWS) -> list[Parameters]:
    """From the normal distribution around the estimate with the inverse information as covariance."""
    matrix, random = covariance(model).matrix, np.random.default_rng(_SEED)
    size, axes = np.linalg.eigh(matrix)
    root = axes * np.sqrt(np.maximum(size, 0.0))
    layout, center = model.fit_.layout, model.fit_.vector
    return [layout.unpack(center + root @ random.normal(size=len(root))) for _ in range(count)]


class _Drawn(NamedTuple):
    rows: Array  # positions (n,)
    parameters: Tensor  # the family's mean parameters (n, S, p)
    draws: list[Parameters]  # (S,)


def _drawn(model: PopulationGLM, table: Reading, draws: list[Parameters]) -> Iterator[_Drawn]:
    """For chunks of rows, the mean parameters of every draw."""
    rows, random = model._rows(table), np.random.default_rng(_SEED + 1)
    position = model._positions(table.clients, len(table.x))
    for posterior, some, client in model._by_posterior(position):
        is_new = posterior is model.fit_.prior
        here = [at._replace(residual=posterior.loadings(at)) for at in draws * (_NEW_CLIENTS if is_new else 1)]
        new = _new_clients(here, random) if is_new else None
        for at, own in zip(torch.split(some, _ROWS_AT_ONCE), torch.split(client, _ROWS_AT_ONCE), strict=True):
            which, place = torch.unique(own, return_inverse=True)
            shares = new if new is not None else posterior.sample(which, len(draws), random)
            yield _Drawn(at.numpy(), _parameters(rows.take(at), here, shares[place]), here)


def _parameters(rows: RowLikelihood, draws: list[Parameters], shares: Tensor) -> Tensor:
    return torch.cat([rows.mean_parameters(at, shares[..., s : s + 1]) for s, at in enumerate(draws)], 1)


def _new_clients(draws: list[Parameters], random: np.random.Generator) -> Tensor:
    """Shares (1, K + s, S) of a client without data, each from the population of its own draw."""
    found = []
    for at in draws:
        alpha = at.alpha.numpy()
        c = random.dirichlet(np.maximum(alpha, 1e-3)) if len(alpha) else np.ones(1)
        found.append(np.r_[c, random.normal(size=len(at.residual))])
    return torch.from_numpy(np.array(found).T[None])


def _means(family: Family, parameters: Tensor, draws: list[Parameters]) -> Tensor:
    """Means (n, S), or probabilities of classes (n, S, m)."""
    each = [family.mean(parameters[:, s : s + 1], at.nuisance)[:, 0] for s, at in enumerate(draws)]
    return torch.stack(each, 1)


def mixture_quantile(family: Family, level: float, parameters: Tensor, nuisance: Tensor) -> Tensor:
    """Quantiles (n,) of equal mixtures of S distributions, by bisection.

    Those of counts are whole: the smallest with at least this probability below or at it.

    Args:
        family: Of y.
        level: Such as 0.95.
        parameters: Mean parameters (n, S, p).
        nuisance: (r, S).
    """
    is_count = isinstance(family, CountFamily)

    def reaches(y: Tensor) -> Tensor:
        return family.cdf(y, parameters, nuisance).mean(1) >= level

    mean = family.mean(parameters, nuisance)
    deviation = family.typical_deviation(mean, nuisance).clamp_min(1e-300)
    low, high = (mean - _REACH * deviation).amin(1), (mean + _REACH * deviation).amax(1)
    width = high - low
    if family.positive_only:
        low = torch.full_like(low, -1.0 if is_count else 0.0)
    for _ in range(_DOUBLINGS):
        missing = ~reaches(high)
        too_high = torch.zeros_like(missing) if family.positive_only else reaches(low)
        if not bool(missing.any() | too_high.any()):
            break
        high, low, width = torch.where(missing, high + width, high), torch.where(too_high, low - width, low), 2 * width
    high = high.ceil() if is_count else high
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        middle = middle.floor() if is_count else middle
        reached = reaches(middle)
        low, high = torch.where(reached, low, middle), torch.where(reached, middle, high)
    return high
