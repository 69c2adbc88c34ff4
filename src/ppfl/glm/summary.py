"""What `summary()` says of a fitted model: titled tables, as text and as HTML."""

from __future__ import annotations

import html
import math
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pandas as pd

from ..core.simplex import CLEAR
from ..errors import SettingError
from ..io.text import visible
from . import inference
from .families import GaussianFamily
from .formula import INTERCEPT

if TYPE_CHECKING:
    from .base import PopulationGLM

WIDTH = 100
_LONGEST = 32  # letters of a label
_STYLE = """
.ppfl-summary { font: 14px/1.45 system-ui, sans-serif; max-width: 62rem; }
.ppfl-summary h2 { font-size: 1.25em; margin: 0 0 .4em; }
.ppfl-summary h3 { font-size: 1em; margin: 1.4em 0 .3em; }
.ppfl-summary table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
.ppfl-summary th, .ppfl-summary td { padding: .2em 0 .2em 1.6em; text-align: right; border: 0; white-space: nowrap; }
.ppfl-summary th:first-child { text-align: left; font-weight: 500; padding-left: 0; }
.ppfl-summary thead th { border-bottom: 1px solid #888; font-weight: 600; }
.ppfl-summary .facts td { text-align: left; white-space: normal; }
.ppfl-summary p { margin: .4em 0; max-width: 50rem; opacity: .8; }
@media (prefers-color-scheme: dark) { body.ppfl-page { background: #181818; color: #e4e4e4; } }
"""


class SummaryTable(NamedTuple):
    """A DataFrame of text with its title. With one column without a name it is a list of facts."""

    title: str
    table: pd.DataFrame
    notes: tuple[str, ...] = ()

    @property
    def is_facts(self) -> bool:
        return list(self.table.columns) == [""]


class Summary:
    """Shown as text in a terminal and as HTML in a notebook; `to_html(path)` writes a page."""

    def __init__(self, title: str, tables: Sequence[SummaryTable]) -> None:
        self.title, self.tables = title, tuple(tables)

    def __str__(self) -> str:
        lines = [self.title, "=" * len(self.title)]
        for part in self.tables:
            lines += ["", *([part.title] if part.title else []), _text(part)]
            lines += [line for note in part.notes for line in textwrap.wrap(visible(note), WIDTH)]
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        parts = [f"<h2>{html.escape(self.title)}</h2>"]
        for part in self.tables:
            parts += [f"<h3>{html.escape(part.title)}</h3>"] if part.title else []
            parts.append(part.table.to_html(border=0, header=not part.is_facts, classes="facts" * part.is_facts))
            parts += [f"<p>{html.escape(note)}</p>" for note in part.notes]
        return f'<style>{_STYLE}</style><div class="ppfl-summary">{"".join(parts)}</div>'

    def to_html(self, path: str | Path | None = None) -> str:
        """The summary as a page of its own, which is also written to `path` if given."""
        head = f'<meta charset="utf-8"/><title>{html.escape(self.title)}</title>'
        body = f'<body class="ppfl-page">{self._repr_html_()}</body>'
        page = f'<!doctype html>\n<html lang="en"><head>{head}</head>{body}</html>\n'
        if path is not None:
            Path(path).write_text(page, encoding="utf-8")
        return page


def _text(part: SummaryTable) -> str:
    labels = [shown if len(shown := visible(str(name))) <= _LONGEST else shown[: _LONGEST - 1] + "…"
              for name in part.table.index]  # fmt: skip
    if part.is_facts:
        wide = max(map(len, labels)) + 2
        lines = [textwrap.wrap(visible(text), WIDTH - wide) or [""] for text in part.table[""]]
        pairs = zip(labels, lines, strict=True)
        return "\n".join(
            f"{label if at == 0 else '':{wide}}{line}" for label, found in pairs for at, line in enumerate(found)
        )
    shown = part.table.map(visible).set_axis(labels).rename(columns=visible)
    return str(shown.to_string(line_width=WIDTH)).replace("\\", "").rstrip()


# ---------------------------------------------------------------------- what is said


def summarize(model: PopulationGLM, level: float) -> Summary:
    """Facts, coefficients, the population, and the words of a mixed model."""
    inference.check_level(level)
    try:
        note, known = inference.covariance(model).note, True
    except SettingError as reason:
        note, known = f"No standard errors: {reason}.", False
    rows = pd.DataFrame(
        inference.coefficient_rows(model, level, errors_known=known),
        columns=["model", "term", "output", "estimate", "std_error", "lower", "upper", "df"],
    )
    k = model.k_
    effect = "" if model.residual_ == "none" else f" and a residual effect ({model.residual_})"
    title = f"{type(model).__name__}: {k} canonical model{'s' * (k > 1)}{effect}"
    tables = [_facts(model), *_coefficients(model, rows, level, note if known else "")]
    if k > 1:
        tables.append(_memberships(model, level, known=known))
    if k > 1 or model.residual_ != "none":
        tables += _mixed_model(model, rows)
    if not known:
        tables[1] = tables[1]._replace(notes=(*tables[1].notes, note))
    return Summary(title, tables)


def number(value: float) -> str:
    """Four significant digits.

    >>> number(1234567.0), number(0.5), number(-0.000123456), number(float("nan"))
    ('1.235e+06', '0.5', '-0.0001235', '–')
    """
    return "–" if math.isnan(value) else f"{value:.4g}"


def _style(row: Any) -> str | None:
    """As many decimals as show two digits of the standard error; None if that is too many, or there is no error."""
    if not row.std_error > 0:
        return None
    count = max(0, 1 - math.floor(math.log10(row.std_error)))
    largest = max(abs(row.estimate), abs(row.lower), abs(row.upper))
    return f".{count}f" if count <= 6 and largest < 1e6 else None


def _with_error(row: Any) -> tuple[str, str]:
    """The estimate with its standard error, and its interval."""
    if math.isnan(row.std_error):
        return number(row.estimate), ""
    style = _style(row)
    value, error, ends = (".4g", ".2g", ".3g") if style is None else (style,) * 3
    return f"{row.estimate:{value}} ({row.std_error:{error}})", f"[{row.lower:{ends}}, {row.upper:{ends}}]"


def _table(columns: dict[str, list[str]], index: Sequence[str]) -> pd.DataFrame:
    return pd.DataFrame(columns, index=list(index), dtype=str)


def _facts(model: PopulationGLM) -> SummaryTable:
    fit, family = model.fit_, model._family
    clients = f"{model._n_clients:,} clients" if model._has_clients else "no clients"
    noun = "situations" if type(model).__name__ == "PopulationChoice" else "rows"
    facts = {
        "family": f"{family.name}, {family.link} link, mixing {model.mix}",
        "data": f"{fit.n_rows:,} {noun} of {clients}",
    }
    if abs(fit.n_samples - fit.n_rows) > 1e-9 * fit.n_rows:
        facts["weights"] = f"frequencies that sum to {fit.n_samples:,.6g}"
    if model.formula_ is not None:
        facts["formula"] = "; ".join(model.formula_.describe())
    try:
        facts["log-likelihood"] = f"{model.log_likelihood_:,.2f} ± {model.log_likelihood_error_:.1g} of integration"
        by_rows = model.aic_ + model.n_parameters_ * (math.log(fit.n_samples) - 2)
        facts["AIC, BIC"] = (
            f"{model.aic_:,.1f}, {model.bic_:,.1f} with {model.n_parameters_} parameters; this BIC counts clients, "
            f"that of lme4 rows ({by_rows:,.1f})"
        )
    except SettingError as reason:
        facts["log-likelihood"] = f"not known: {reason}"
    if "held_out" in model.selection_ and model.selection_["held_out"].notna().any():
        facts["chosen by"] = _choice(model)
    for name, value in inference.natural_parameters(model).items():
        facts[name] = number(value)
        if name == "dispersion" and isinstance(family, GaussianFamily):
            facts[name] += f", a residual standard deviation of {number(math.sqrt(value))}"
    if model._scaling.aliased:
        names = [*model._scaling.names, INTERCEPT]
        facts["not counted"] = (
            f"{', '.join(names[i] for i in model._scaling.aliased)}: constant, or a sum of other columns"
        )
    facts["convergence"] = (
        f"a gradient of {fit.gradient:.1g} after {model.n_iter_} iteration{'s' * (model.n_iter_ != 1)}"
        if model.converged_ else f"not converged: {model._convergence_message()}"
    )  # fmt: skip
    return SummaryTable("", _table({"": list(facts.values())}, list(facts)))


def _choice(model: PopulationGLM) -> str:
    """The held-out scores of all candidates."""
    rows = [row for row in model.selection_.itertuples() if not math.isnan(row.held_out)]
    names = {(row.k, row.residual): f"{row.k}{'' if row.residual == 'none' else f' + {row.residual}'}" for row in rows}
    own = next((row for row in rows if (row.k, row.residual) == (model.k_, model.residual_)), rows[0])
    others = ", ".join(f"{row.held_out:.4f} with {names[row.k, row.residual]}" for row in rows if row is not own)
    return f"log-likelihood of a held-out row: {own.held_out:.4f} with {names[own.k, own.residual]}; {others}"


def _coefficients(model: PopulationGLM, rows: pd.DataFrame, level: float, note: str) -> list[SummaryTable]:
    """Those of the canonical models, and those that all clients share."""
    k, found = model.k_, []
    labels = [f"{row.term}, class {row.output}" if row.output else row.term for row in rows.itertuples()]
    rows = rows.assign(label=labels)
    notes = [f"Estimate (standard error), and below it the {level:.0%} interval."]
    if (rows["output"] != "").any():
        notes.append("Coefficients are differences from the mean of all classes.")
    notes += [note[:1].upper() + note[1:]] if note else []
    share = inference.shares(model).tolist()
    columns: dict[str, list[str]] = {}
    for i in range(k):
        own = [_with_error(row) for row in rows[rows["model"] == str(i)].itertuples()]
        columns[f"model {i}: {share[i]:.0%}" if k > 1 else "estimate"] = [text for cell in own for text in cell]
    some = rows.loc[rows["model"] == "0", "label"]
    if len(some):
        title = "Coefficients" if k == 1 else "Coefficients of the canonical models"
        index = [text for label in some for text in (label, "")]
        found.append(SummaryTable(title, _table(columns, index), tuple(notes)))
    if len(shared := rows[rows["model"] == "shared"]):
        cells = [_with_error(row) for row in shared.itertuples()]
        parts = {"estimate": [cell[0] for cell in cells], f"{level:.0%} interval": [cell[1] for cell in cells]}
        found.append(SummaryTable("Coefficients that all clients share", _table(parts, shared["label"])))
    return found


def _memberships(model: PopulationGLM, level: float, *, known: bool) -> SummaryTable:
    """Their distribution, and how many clients are nearly of one kind."""
    c = model._posterior.mean.numpy()
    clear = (c >= CLEAR).sum(0)
    lines = {"share of the population": [f"{share:.1%}" for share in inference.shares(model)]}
    if known:
        table = inference.parameter_table(model, level).xs("concentration", level="term")
        lines["concentration (alpha)"] = [_with_error(row)[0] for row in table.itertuples()]
    notes = ["The clients' own memberships are at their sites."]
    if len(c):
        lines[f"clients of at least {CLEAR:.0%}"] = [f"{count:,}" for count in clear]
        mixed = len(c) - int(clear.sum())
        notes = [f"{mixed:,} of {len(c):,} clients are mixed: no canonical model has {CLEAR:.0%} of them."]
    columns = {f"model {i}": [line[i] for line in lines.values()] for i in range(c.shape[1])}
    return SummaryTable("Memberships", _table(columns, list(lines)), tuple(notes))


def _mixed_model(model: PopulationGLM, rows: pd.DataFrame) -> list[SummaryTable]:
    """The fit in the words of a mixed model."""
    from .mixed_model import as_mixed_model

    try:
        fixed, _, covariance = as_mixed_model(model)
    except SettingError:  # several predictors per row, or mixed predictions: a mixed model has neither
        return []
    own = rows[rows["model"] == (inference.POPULATION if model.k_ > 1 else "0")].set_index("term")
    residual = np.diag(inference.between_clients(model)[1])
    at = {name: i for i, name in enumerate([*model._scaling.names, INTERCEPT])}
    lines: dict[str, tuple[str, ...]] = {}
    for name in own.index:
        variance = float(covariance.loc[name, name])
        error, left = float(own.loc[name, "std_error"]), float(residual[at[name]])
        lines[name] = (number(float(fixed[name])), number(error), number(math.sqrt(max(variance, 0.0))),
                       f"{1 - left / variance:.0%}" if variance > 0 else "–")  # fmt: skip
    noise = _noise(model)
    notes = ["Mean of the clients' own coefficients with its standard error, their standard deviation between clients, "
             "and which share of their variance the canonical models explain."]  # fmt: skip
    share = inference.explained(model)
    explained = f"The canonical models explain {share:.0%} of the differences between clients."
    notes.append("All variances between clients are 0." if math.isnan(share) else explained)
    if noise is not None:
        lines["residual"] = ("", "", number(math.sqrt(noise)), "")
        if INTERCEPT in own.index:
            between = _between_at_means(model, covariance)
            notes.append(
                f"ICC, the share of the variance that lies between clients, for a row at the means of the columns: "
                f"{between / (between + noise):.3f}."
            )
    columns = ("mean", "std. error", "std. dev.", "explained")
    table = _table({name: [line[i] for line in lines.values()] for i, name in enumerate(columns)}, list(lines))
    return [SummaryTable("As a mixed model", table, tuple(notes))]


def _between_at_means(model: PopulationGLM, covariance: pd.DataFrame) -> float:
    row = np.r_[1.0, np.where(np.isfinite(model._scaling.scale), model._scaling.mean, 0.0)]
    return float(row @ covariance.to_numpy() @ row)


def _noise(model: PopulationGLM) -> float | None:
    """The variance of y on the scale of the predictor: pi^2 / 3 is that of the logistic distribution."""
    if isinstance(model._family, GaussianFamily):
        return model.dispersion_
    return math.pi**2 / 3 if model._family.name == "bernoulli" else None
