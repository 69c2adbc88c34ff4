"""Comparisons of fitted models, marginal means and contrasts, and a door to the package `marginaleffects`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from scipy import stats
from torch import Tensor

from ..errors import DataError, SettingError
from . import inference
from .columns import Array
from .formula import as_frame
from .likelihood import Parameters
from .rows import RowLikelihood

if TYPE_CHECKING:
    from .base import PopulationGLM

_MOST_VALUES = 12  # of a column whose values are taken one by one
_NUMBERS_AT_ONCE = 1 << 20


def anova(*models: PopulationGLM) -> pd.DataFrame:
    """Compares nested models by likelihood ratio, each with the next smaller one.

    The models have to be fitted to the same rows, with `ridge=0`. P-values come from the chi-squared distribution.
    Where a model has more canonical models or a residual effect, the smaller one lies on the boundary of its parameters
    (a share or a variance of 0), and these p-values are conservative: the true ones are smaller. The column `note`
    says where. `k="auto"` and `selection_` compare such models by held-out rows instead.

    Returns:
        One row per model, the smallest first: parameters, log-likelihood, AIC, BIC, and of the comparison with the row
        before it `chisq`, `df` and `p_value`.

    Example:
        >>> from ppfl.glm import PopulationRegressor
        >>> random = np.random.default_rng(0)
        >>> clients, x = np.repeat(np.arange(20), 10), random.normal(size=(200, 2))
        >>> y = random.normal(size=20)[clients] + x[:, 0] + random.normal(size=200)
        >>> settings = dict(k=1, residual="intercept", ridge=0)
        >>> small, large = (PopulationRegressor(**settings).fit(x[:, :d], y, clients) for d in (1, 2))
        >>> anova(small, large)[["n_parameters", "df"]].to_numpy().tolist()
        [[4.0, nan], [5.0, 1.0]]
    """
    if len(models) < 2:
        raise SettingError(f"anova got {len(models)} model; give two or more that are nested")
    for model in models:
        model._refuse_points("likelihood ratios")
    for other in models[1:]:
        seen = [(one.fit_.n_rows, one.fit_.n_samples, one._family.name, one._n_clients) for one in (models[0], other)]
        if seen[0] != seen[1]:
            raise DataError(f"the models have rows, weights, family and clients {seen[0]} and {seen[1]}; fit the same")
    if ridges := [float(model.ridge) for model in models if float(model.ridge) > 0]:
        raise SettingError(f"a model has ridge = {ridges[0]:g}, so its likelihood is no maximum; fit with ridge = 0")
    ordered = sorted(models, key=lambda model: model.n_parameters_)
    rows = [_compared(None, ordered[0])]
    rows += [_compared(small, large) for small, large in itertools.pairwise(ordered)]
    names = [_name(model) for model in ordered]
    return pd.DataFrame(rows, pd.Index(names, name="model"))


def _name(model: PopulationGLM) -> str:
    effect = "" if model.residual_ == "none" else f" + {model.residual_}"
    formula = f": {model.formula_.formula}" if model.formula_ is not None else ""
    return f"k = {model.k_}{effect}{formula}"


def _compared(small: PopulationGLM | None, large: PopulationGLM) -> dict[str, Any]:
    row: dict[str, Any] = {
        "n_parameters": large.n_parameters_, "log_likelihood": large.log_likelihood_, "aic": large.aic_,
        "bic": large.bic_,
    }  # fmt: skip
    nothing = {"chisq": math.nan, "df": math.nan, "p_value": math.nan, "note": ""}
    if small is None:
        return row | nothing
    df, chisq = large.n_parameters_ - small.n_parameters_, 2 * (large.log_likelihood_ - small.log_likelihood_)
    if df == 0:
        return row | nothing | {"note": "as many parameters as the row before, so not nested"}
    is_boundary = (small.k_, small.residual_) != (large.k_, large.residual_)
    note = "on the boundary: p is conservative" if is_boundary else ""
    p = float(stats.chi2.sf(max(chisq, 0.0), df))
    return row | {"chisq": chisq, "df": float(df), "p_value": p, "note": note}


# ---------------------------------------------------------------------- predictions of the population


def population_prediction(model: PopulationGLM, rows: RowLikelihood, at: Parameters) -> Tensor:
    """Means (n,) or probabilities (n, m) of standardised targets of a client drawn from the population.

    As a function of the parameters: the points of the population stay where they are, and their weights follow alpha.
    """
    fit = model.fit_
    one = torch.zeros(1, dtype=torch.long)
    shares, weights = fit.prior.shares(one), fit.prior.weights
    if fit.k > 1 and not model.is_point_fit:
        logs = shares[:, : fit.k].clamp_min(1e-300).log()
        change = (at.alpha - fit.alpha)[:, None] * logs
        weights = weights * change.sum(1).exp()
        weights = weights / weights.sum(1, keepdim=True)
    at = at._replace(residual=fit.prior.loadings(at))
    mean = fit.family.mean(rows.mean_parameters(at, shares), at.nuisance)
    return torch.einsum("g,ng...->n...", weights[0], mean)


def _average(model: PopulationGLM, frames: Sequence[Any]) -> Callable[[Parameters], Tensor]:
    """The mean prediction over the rows of every table, (T,) or (T, m), in the units of y."""
    tables = [model._rows(model._read(frame, None, "new", targets=False)) for frame in frames]
    size = max(1, _NUMBERS_AT_ONCE // tables[0].numbers_per_row(model.fit_.prior.weights.shape[1]))

    def average(at: Parameters) -> Tensor:
        found = []
        for rows in tables:
            parts = torch.split(torch.arange(len(rows.varying)), size)
            total = sum(population_prediction(model, rows.take(some), at).sum(0) for some in parts)
            found.append(torch.as_tensor(total) / len(rows.varying))
        mean = torch.stack(found)
        return mean if mean.ndim == 2 else model._units.shift + model._units.scale * mean

    return average


class _Means(NamedTuple):
    values: list[Any]
    mean: Array  # (T,)
    slopes: Array  # (T, P)
    df: float  # of means
    df_of_contrasts: float


def _means(model: PopulationGLM, data: Any, variable: Any, values: Sequence[Any] | None, outcome: Any) -> _Means:
    model._refuse_points("standard errors")
    frame = as_frame(data) if hasattr(data, "columns") else pd.DataFrame(np.asarray(data))
    if variable not in frame.columns:
        raise DataError(f"there is no column {variable!r}; the table has {', '.join(map(str, frame.columns))}")
    found = sorted(frame[variable].dropna().unique().tolist(), key=str) if values is None else list(values)
    if len(found) > _MOST_VALUES:
        raise SettingError(f"column {variable!r} has {len(found)} values; name those to compare: values=[...]")
    tables = [frame.assign(**{variable: value}) if isinstance(variable, str) else _with(frame, variable, value)
              for value in found]  # fmt: skip
    average = _average(model, tables if hasattr(data, "columns") else [table.to_numpy() for table in tables])
    mean, slopes = average(model.fit_.parameters).numpy(), inference.jacobian(average, model)
    if mean.ndim == 2:
        classes = list(getattr(model, "classes_", range(mean.shape[1])))
        chosen = classes[-1] if outcome is None and len(classes) == 2 else outcome
        if chosen not in classes:
            raise SettingError(f"outcome is {outcome!r}; name one of the classes {classes}")
        mean, slopes = mean[:, classes.index(chosen)], slopes[:, classes.index(chosen)]
    is_mixed = model.k_ > 1 or model.residual_ != "none"
    between = inference.degrees_of_freedom(model, len(model._scaling.names)) if is_mixed else np.inf
    own = between if _differs_between_clients(model, tables) else np.inf
    return _Means(found, mean, slopes, between, own)


def _with(frame: pd.DataFrame, variable: Any, value: Any) -> pd.DataFrame:
    changed = frame.copy()
    changed[variable] = value
    return changed


def _differs_between_clients(model: PopulationGLM, tables: Sequence[Any]) -> bool:
    """Whether all columns of the design that differ between the tables are constant within clients."""
    designs = [model._read(table, None, "new", targets=False).x for table in tables]
    changed = np.flatnonzero((np.stack(designs) != designs[0]).any((0, 1)))
    return len(changed) > 0 and set(changed.tolist()) <= set(model._between)


def marginal_means(
    model: PopulationGLM, data: Any, variable: Any, *, values: Sequence[Any] | None = None, outcome: Any = None,
    level: float = 0.95,
) -> pd.DataFrame:  # fmt: skip
    """The mean prediction of the population if all rows had the same value of one column, for each of its values.

    All other columns stay as they are in the data, and clients are drawn from the population.

    Args:
        model: A fitted regressor or classifier.
        data: The table to average over; with a formula a DataFrame with the columns of the fit.
        variable: A column of the table.
        values: Of the column; all that the table has if None.
        outcome: A class, for three or more of them; the second of two by default.
        level: Of the intervals.

    Returns:
        One row per value: mean, std_error, lower, upper, df.

    Example:
        >>> from ppfl.glm import PopulationRegressor
        >>> random = np.random.default_rng(0)
        >>> table = pd.DataFrame({"shop": np.repeat(np.arange(20), 10), "day": np.tile(["mo", "tu"], 100)})
        >>> table["sold"] = 2.0 * (table["day"] == "tu") + random.normal(size=200)
        >>> model = PopulationRegressor.from_formula("sold ~ day + (1 | shop)", table, k=1, residual="intercept")
        >>> bool(abs(marginal_means(model, table, "day")["mean"] - [0.0, 2.0]).max() < 0.3)
        True
    """
    inference.check_level(level)
    found = _means(model, data, variable, values, outcome)
    table = _with_errors(model, found.mean, found.slopes, found.df, level)
    return table.set_axis(pd.Index(found.values, name=variable))


def contrasts(
    model: PopulationGLM, data: Any, variable: Any, *, values: Sequence[Any] | None = None, outcome: Any = None,
    level: float = 0.95,
) -> pd.DataFrame:  # fmt: skip
    """The differences between all pairs of `marginal_means`, with standard errors and p-values.

    Args:
        model: A fitted regressor or classifier.
        data: The table to average over.
        variable: A column of the table.
        values: Of the column; all that the table has if None.
        outcome: A class, for three or more of them.
        level: Of the intervals.

    Returns:
        One row per pair: mean, std_error, lower, upper, df, p_value.

    Example:
        >>> from ppfl.glm import PopulationRegressor
        >>> table = pd.DataFrame({"shop": np.repeat(np.arange(20), 10), "day": np.tile(["mo", "tu"], 100)})
        >>> table["sold"] = 2.0 * (table["day"] == "tu") + np.sin(np.arange(200.0))
        >>> model = PopulationRegressor.from_formula("sold ~ day + (1 | shop)", table, k=1, residual="intercept")
        >>> contrasts(model, table, "day")["mean"].round().to_dict()
        {'tu - mo': 2.0}
    """
    inference.check_level(level)
    found = _means(model, data, variable, values, outcome)
    pairs = list(itertools.combinations(range(len(found.values)), 2))
    if not pairs:
        raise DataError(f"column {variable!r} has one value, so there is nothing to compare")
    mean = np.array([found.mean[j] - found.mean[i] for i, j in pairs])
    slopes = np.stack([found.slopes[j] - found.slopes[i] for i, j in pairs])
    table = _with_errors(model, mean, slopes, found.df_of_contrasts, level)
    table["p_value"] = 2 * stats.t.sf(np.abs(table["mean"] / table["std_error"]), found.df_of_contrasts)
    names = [f"{found.values[j]} - {found.values[i]}" for i, j in pairs]
    return table.set_axis(pd.Index(names, name=variable))


def _with_errors(model: PopulationGLM, mean: Array, slopes: Array, df: float, level: float) -> pd.DataFrame:
    error, t = inference.errors(model, slopes), float(stats.t.ppf((1 + level) / 2, df))
    columns = {"mean": mean, "std_error": error, "lower": mean - t * error, "upper": mean + t * error}
    return pd.DataFrame(columns | {"df": np.full(len(mean), df)})


# ---------------------------------------------------------------------- marginaleffects


def for_marginaleffects(model: PopulationGLM, data: Any) -> Any:
    """The model as the package `marginaleffects` takes it: predictions of the population, and their covariance.

    Args:
        model: Fitted, with or without a formula.
        data: The table of the fit, a DataFrame.

    Returns:
        What `marginaleffects.predictions`, `comparisons`, `slopes` and `hypotheses` take as their first argument.

    Example:
        >>> marginaleffects.avg_slopes(for_marginaleffects(model, table), variables="hours")  # doctest: +SKIP
    """
    try:
        import polars as pl
        from marginaleffects.classes import ModelAbstract, ModelVault
    except ImportError as error:
        raise DataError(f"this needs {error.name}; install it with: pip install marginaleffects") from None
    model._refuse_points("standard errors")
    frame = as_frame(data)
    names = list(model._scaling.names) if model.formula_ is None else model.formula_.columns
    kept = pl.from_pandas(frame[names])
    text = [name for name in names if kept[name].dtype == pl.String]
    kept = kept.with_columns([pl.col(name).cast(pl.Enum(sorted(kept[name].unique()))) for name in text])
    classes = [str(each) for each in getattr(model, "classes_", ())]

    class Population(ModelAbstract):  # type: ignore[misc]
        """Predictions for a client of the population."""

        def get_exog(self, newdata: Any) -> Any:
            return newdata

        def find_variables(self) -> list[str]:
            return ["y", *names]

        def get_vcov(self, vcov: Any = True) -> Any:
            return inference.covariance(model).matrix if vcov is not False else None

        def get_predict(self, params: Any, newdata: Any) -> Any:
            rows = model._rows(model._read(newdata.to_pandas(), None, "new", targets=False))
            mean = population_prediction(model, rows, model.fit_.layout.unpack(np.asarray(params, dtype=np.float64)))
            found = mean.numpy()
            if found.ndim == 1:
                found = model._units.shift + model._units.scale * found
            elif found.shape[1] == 2:
                found = found[:, 1]
            number = np.arange(len(found), dtype=np.int32)
            if found.ndim == 1:
                return pl.DataFrame({"rowid": number, "estimate": found})
            parts = [pl.DataFrame({"rowid": number, "group": name, "estimate": found[:, i]})
                     for i, name in enumerate(classes)]  # fmt: skip
            return pl.concat(parts)

    vector = model.fit_.vector
    vault = ModelVault(
        coef=vector, coefnames=np.array([f"p{i}" for i in range(len(vector))]), modeldata=kept,
        package="ppfl", formula=lambda table: (None, table),  # ours builds the design
    )  # fmt: skip
    return Population(model, vault)
