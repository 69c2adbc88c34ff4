"""What `summary()` says of a fitted model."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ...errors import SettingError
from ..client_memberships import PointMemberships
from ..families import GaussianFamily, HeteroscedasticGaussianFamily
from ..standardize import INTERCEPT
from .parameter_table import (
    ParameterRow,
    check_level,
    covariance_of,
    natural_parameters,
    original_units,
    parameter_rows,
)
from .summary_tables import Cell, ModelSummary, SummaryTable

_PURE = 0.8  # a client belongs to a canonical model if that is at least this share of it


def summarize(model: Any, level: float) -> ModelSummary:
    """Facts, coefficients, the population, variance components, and notes."""
    check_level(level)
    try:
        rows, note = parameter_rows(model, level), covariance_of(model).note
    except SettingError as reason:
        rows, note = _rows_without_errors(model), f"No standard errors: {reason}."
    k = len(model.concentration_)
    title = f"{type(model).__name__}: {k} canonical model{'s' * (k > 1)}"
    tables = [_facts(model), _coefficients(model, rows, level, note)]
    if shared := [row for row in rows if row.model == "shared"]:
        tables.append(_shared(shared, level))
    if k > 1:
        tables.append(_population(model, rows, level))
        tables += _variances(model)
    return ModelSummary(title, tables)


def number(value: float) -> str:
    """Four significant digits.

    >>> number(1234567.0), number(0.5), number(-0.000123456), number(float("nan"))
    ('1.235e+06', '0.5', '-0.0001235', '–')
    """
    return "–" if math.isnan(value) else f"{value:.4g}"


def _decimals(row: ParameterRow) -> int | None:
    """As many decimals as show two digits of the standard error; None if that is too many, or there is no error."""
    if not row.std_error > 0:
        return None
    count = max(0, 1 - math.floor(math.log10(row.std_error)))
    largest = max(abs(row.estimate), abs(row.lower), abs(row.upper))
    return count if count <= 6 and largest < 1e6 else None


def _interval(row: ParameterRow) -> str:
    if math.isnan(row.std_error):
        return ""
    count = _decimals(row)
    style = ".3g" if count is None else f".{count}f"
    return f"[{row.lower:{style}}, {row.upper:{style}}]"


def _with_error(row: ParameterRow) -> Cell:
    if math.isnan(row.std_error):
        return Cell(number(row.estimate))
    count = _decimals(row)
    value, error = (".4g", ".2g") if count is None else (f".{count}f",) * 2
    return Cell(f"{row.estimate:{value}} ({row.std_error:{error}})", _interval(row))


def _rows_without_errors(model: Any) -> list[ParameterRow]:
    estimates = original_units(model, model._parameters())
    names, scaling = [*model._scaling.names, INTERCEPT], model._scaling
    outputs = [str(c) for c in getattr(model, "classes_", ())] if estimates.shape[2] > 1 else [""]
    rows = []
    for i in sorted((*scaling.varying, *scaling.shared), key=lambda i: (i != len(names) - 1, i)):
        for k in range(1 if i in scaling.shared else len(estimates)):
            for o, output in enumerate(outputs):
                label = "shared" if i in scaling.shared else str(k)
                rows.append(ParameterRow(label, names[i], output, float(estimates[k, i, o]), *[math.nan] * 3))
    return rows


# ---------------------------------------------------------------------- tables


def _facts(model: Any) -> SummaryTable:
    family = model._family
    facts = {
        "family": f"{family.name}, {family.link} link",
        "data": f"{model._n_rows:,} {'situations' if not hasattr(model, '_shift') else 'rows'} of "
        + (f"{len(model._result.memberships.mean):,} clients" if model._has_clients else "no clients"),
        "solver": f"{_solver_name(model)}, mixing {model.mix}",
        "log-likelihood": number_with_error(model.log_likelihood_, getattr(model, "log_likelihood_error_", None)),
        "AIC, BIC": f"{model.aic_:,.1f}, {model.bic_:,.1f} with {model.n_parameters_} parameters",
    }
    if (held_out := _held_out(model)) is not None:
        facts["held out"] = held_out
    for name, value in natural_parameters(model, model._result.coefficients.nuisance).items():
        facts[name] = number(value)
        if name == "dispersion" and isinstance(family, GaussianFamily):
            facts[name] += f", a residual standard deviation of {number(math.sqrt(value))}{_noise_of_clients(model)}"
    facts["convergence"] = _convergence(model)
    if (dropped := getattr(model, "dropped_", None)) is not None and np.size(dropped):
        facts["rows dropped"] = _describe_dropped(dropped)
    return SummaryTable("", (), tuple((name, (Cell(text),)) for name, text in facts.items()))


def _noise_of_clients(model: Any) -> str:
    """Where most of the clients' standard deviations lie, if they differ."""
    family, nuisance = model._family, model._result.coefficients.nuisance
    if not isinstance(family, HeteroscedasticGaussianFamily) or not model._has_clients:
        return ""
    low, high = (model._target_scale * math.sqrt(family.variance_quantile(nuisance, level)) for level in (0.05, 0.95))
    return f" in the median client, and {number(low)} to {number(high)} in 90% of the clients"


def number_with_error(value: float, error: float | None) -> str:
    return f"{value:,.2f}" if error is None else f"{value:,.2f} ± {error:.1g} of numerical integration"


def _solver_name(model: Any) -> str:
    if not isinstance(model._result.memberships, PointMemberships):
        return "marginal likelihood"
    return "federated rounds" if model.solver == "federated" else "profile likelihood"


def _held_out(model: Any) -> str | None:
    """From `selection_`, the record of the numbers of canonical models that were compared."""
    records = [record for record in getattr(model, "selection_", ()) if record.held_out is not None]
    if not records:
        return None
    k = len(model.concentration_)
    others = ", ".join(f"{record.held_out:.4f} with {record.k}" for record in records if record.k != k)
    own = next(record.held_out for record in records if record.k == k)
    return f"mean log-likelihood of a row {own:.4f} with {k} models; {others}"


def _convergence(model: Any) -> str:
    if model.converged_:
        return f"reached the tolerance {model.tol:g} after {model.n_iter_} iteration{'s' * (model.n_iter_ != 1)}"
    return f"not converged: {model._convergence_message()}"


def _describe_dropped(dropped: Any) -> str:
    counts = dict(dropped) if hasattr(dropped, "keys") else {}
    if not counts:
        return str(dropped)
    named = ", ".join(f"{client} ({count})" for client, count in list(counts.items())[:5])
    more = f" and {len(counts) - 5} more clients" if len(counts) > 5 else ""
    return f"{sum(counts.values())} with missing values, of {named}{more}"


def _coefficients(model: Any, rows: list[ParameterRow], level: float, note: str) -> SummaryTable:
    k = len(model.concentration_)
    by_term: dict[str, list[Cell]] = {}
    for row in rows:
        if row.model not in ("", "shared") and row.term != "concentration":
            label = f"{row.term}, class {row.output}" if row.output else row.term
            by_term.setdefault(label, []).append(_with_error(row))
    share = model._result.memberships.mean.mean(0).tolist()
    names = tuple(f"model {i}: {share[i]:.0%}" for i in range(k)) if k > 1 else ("estimate",)
    notes = [] if note.startswith("No ") else [f"Estimate (standard error), and below it the [{level:.0%} interval]."]
    if any(row.output for row in rows):
        notes.append("Standard errors are of differences from the mean of all classes.")
    notes += [note[:1].upper() + note[1:]] * bool(note)
    return SummaryTable(
        "Coefficients" if k == 1 else "Coefficients of the canonical models", names,
        tuple((term, tuple(cells)) for term, cells in by_term.items()), tuple(notes),
    )  # fmt: skip


def _shared(rows: list[ParameterRow], level: float) -> SummaryTable:
    lines = []
    for row in rows:
        label = f"{row.term}, class {row.output}" if row.output else row.term
        lines.append((label, (Cell(number(row.estimate)), Cell(number(row.std_error)), Cell(_interval(row)))))
    return SummaryTable(
        "Coefficients that all clients share", ("estimate", "std. error", f"{level:.0%} interval"), tuple(lines)
    )


def _population(model: Any, rows: list[ParameterRow], level: float) -> SummaryTable:
    """Memberships: their distribution, and how many clients are nearly of one kind."""
    c = np.asarray(model._memberships.mean)
    k = c.shape[1]
    pure = (c >= _PURE).sum(0)
    lines = [("share of the population", tuple(Cell(f"{share:.1%}") for share in c.mean(0)))]
    alpha = [row for row in rows if row.term == "concentration"]
    if alpha:
        lines.append(("concentration (alpha)", tuple(_with_error(row) for row in alpha)))
    lines.append((f"clients of at least {_PURE:.0%}", tuple(Cell(f"{count:,}") for count in pure)))
    rest = len(c) - int(pure.sum())
    note = f"{rest:,} of {len(c):,} clients are mixed: no canonical model has {_PURE:.0%} of them."
    return SummaryTable("Memberships", tuple(f"model {i}" for i in range(k)), tuple(lines), (note,))


def _variances(model: Any) -> list[SummaryTable]:
    """The fit in the words of a mixed model."""
    from ..mixed_model import as_mixed_model, membership_moments  # both need the estimators, which import this folder

    try:
        fixed, _, covariance = as_mixed_model(model)
    except SettingError:  # several predictors per row, or mixed predictions: a mixed model has neither
        return []
    variance = np.diag(np.asarray(covariance))
    names, varying = [INTERCEPT, *model._scaling.names], model._scaling.varying
    positions = [0] * (len(names) - 1 in varying) + [i + 1 for i in varying if i < len(names) - 1]
    lines = []
    for i in positions:
        cells = (np.asarray(fixed)[i], variance[i], math.sqrt(max(float(variance[i]), 0.0)))
        lines.append((names[i], tuple(Cell(number(float(value))) for value in cells)))
    noise = _residual_variance(model)
    notes = ["Mean, variance and standard deviation of the clients' own coefficients in the population."]
    if noise is not None:
        lines.append(("residual", (Cell(""), Cell(number(noise)), Cell(number(math.sqrt(noise))))))
        if len(names) - 1 in varying:
            at = varying.index(len(names) - 1)
            theta = model._result.coefficients.canonical[:, at, 0].numpy() * model._predictor_units()[1]
            between = float(theta @ membership_moments(model)[1] @ theta)
            notes.append(
                f"ICC, the share of the variance that lies between clients, for a row at the means of the columns: "
                f"{between / (between + noise):.3f}."
            )
    return [SummaryTable("As a mixed model", ("mean", "variance", "std. dev."), tuple(lines), tuple(notes))]


def _residual_variance(model: Any) -> float | None:
    """On the scale of the predictor: pi^2 / 3 is the variance of the logistic distribution.

    If clients differ in it, the mean of all clients: that of the fitted population rests on its tail.
    """
    if isinstance(model._family, GaussianFamily) and model._family.link == "identity":
        return float(np.mean(model.client_dispersion_))
    return math.pi**2 / 3 if model._family.name == "bernoulli" else None
