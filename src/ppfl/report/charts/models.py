"""Charts of population GLMs: coefficients, scores and residuals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt
import numpy as np

from ..theme import GREY, Metric, chart_config, evenly, model_colour, model_names
from .parts import MAX_DOTS, WIDTH, Array, Chart, Row, finished, of_rows, short


def coefficients(
    rows: Sequence[Mapping[str, Any]], names: Sequence[str], *,
    title: str = "change of the predictor per standard deviation of the column", width: Any = WIDTH,
) -> Chart:  # fmt: skip
    """Coefficients by term: rows have term, model, value and, where they are known, low and high; a model that is not
    among the names, such as one model for all, is grey."""
    terms = list(dict.fromkeys(row["term"] for row in rows))
    models = list(dict.fromkeys(row["model"] for row in rows))
    colours = [model_colour(names.index(model)) if model in names else GREY for model in models]
    colour = alt.Color("model:N", sort=models, title=None, scale=alt.Scale(domain=models, range=colours))
    y = alt.Y("term:N", title=None, sort=terms, axis=alt.Axis(grid=False))
    offset = alt.YOffset("model:N", sort=models)
    x = alt.X("value:Q", title=title)
    plain = [{key: short(value) if isinstance(value, float) else value for key, value in row.items()} for row in rows]
    base = of_rows(plain).encode(y, colour, offset)
    zero = of_rows([{"zero": 0}]).mark_rule(opacity=0.4).encode(alt.X("zero:Q"))
    tip = ["term:N", "model:N", alt.Tooltip("value:Q", format=".4~g")]
    points = base.mark_point(filled=True, size=70, opacity=1).encode(x, tooltip=tip)
    layers: list[Any] = [zero, points]
    if any("low" in row for row in rows):
        layers.insert(1, base.mark_rule(strokeWidth=2).encode(alt.X("low:Q", title=title), alt.X2("high:Q")))
    return finished(alt.layer(*layers), width, len(terms) * max(26, 11 * len(models)))


def plot_coefficients(model: Any, level: float = 0.95) -> Chart:
    """The coefficients of a fitted population GLM with their intervals, in the units of the table: of every canonical
    model, and in grey their mean over the population. Models are named by share, as in reports."""
    table, shares = model.conf_int(level).reset_index(), np.asarray(model.memberships_).mean(0)
    names = model_names(len(shares))
    place = {str(k): name for name, k in zip(names, np.argsort(-shares, kind="stable"), strict=True)}
    table["model"] = table["model"].astype(str)
    own = table[table["model"].isin([*place])]
    terms = [term for term in dict.fromkeys(own["term"]) if term not in ("concentration", "dispersion")]
    table = table[table["term"].isin(terms)]
    rows = [
        {"term": str(row.term), "model": place.get(row.model, row.model), "value": float(row.estimate),
         "low": float(row.lower), "high": float(row.upper)}
        for row in table.itertuples()
    ]  # fmt: skip
    rows.sort(key=lambda row: (terms.index(row["term"]), row["model"]))
    return coefficients(rows, names, title=f"coefficient, with {level:.0%} intervals")


def held_out_scores(scores: Mapping[str, float], metric: Metric, *, width: Any = WIDTH) -> Chart:
    """One dot for each way to predict, on an axis that need not start at zero."""
    rows = [{"label": label, "value": short(value), "text": metric.show(value), "ours": not at}
            for at, (label, value) in enumerate(scores.items())]  # fmt: skip
    x = alt.X("value:Q", title=metric.name, scale=alt.Scale(zero=False, padding=40),
              axis=alt.Axis(format=metric.axis_format))  # fmt: skip
    base = of_rows(rows).encode(x, alt.Y("label:N", title=None, sort=list(scores)))
    colour = alt.condition("datum.ours", alt.value("#D55E00"), alt.value(GREY))
    dots = base.mark_circle(size=120, opacity=1).encode(color=colour, tooltip=["label:N", "text:N"])
    return finished(dots + base.mark_text(dy=-14).encode(text="text:N"), width, 44 * len(scores))


def residuals(fitted: Array, found: Array, kind: str = "quantile") -> Chart:
    """Two panels: against the fitted values with running means, and against the quantiles of a normal distribution.

    In the first a trend says that the mean is wrong, and a funnel that the variance is. In the second, quantile
    residuals lie on the line if the model is right, for every family; other kinds do so for gaussian targets only.
    """
    from scipy.special import ndtri

    fitted, found = np.asarray(fitted, dtype=float), np.asarray(found, dtype=float)
    order = np.argsort(found, kind="stable")
    normal = ndtri((np.arange(len(order)) + 0.5) / len(order))
    scatter = np.random.default_rng(0).permutation(len(fitted))[:MAX_DOTS]
    parts = np.array_split(np.argsort(fitted, kind="stable"), min(12, max(1, len(fitted) // 5)))
    spread = float(found.std()) if kind != "quantile" else 1.0
    title = f"{kind} residual"
    dots = [{"x": short(fitted[i]), "y": short(found[i])} for i in scatter]
    means = [{"x": short(fitted[part].mean()), "y": short(found[part].mean())} for part in parts]
    some = evenly(len(order), MAX_DOTS)
    sorted_ = [{"x": short(normal[i]), "y": short(found[order[i]])} for i in some]
    ends = [{"x": short(normal[i]), "y": short(spread * normal[i])} for i in (0, -1)]

    def panel(rows: list[Row], line: list[Row], x: str, *, zero: bool) -> Any:
        place = {"x": alt.X("x:Q", title=x, scale=alt.Scale(zero=False)), "y": alt.Y("y:Q", title=title)}
        layers = [of_rows(rows).mark_circle(size=24, opacity=0.45, color=model_colour(0)).encode(**place)]
        if zero:
            layers.insert(0, of_rows([{"zero": 0}]).mark_rule(opacity=0.5, strokeDash=[4, 4]).encode(alt.Y("zero:Q")))
        layers.append(of_rows(line).mark_line(color="#D55E00", strokeWidth=2.5).encode(**place))
        return alt.layer(*layers).properties(width=340, height=280)

    both = panel(dots, means, "fitted value", zero=True) | panel(sorted_, ends, "normal quantile", zero=False)
    drawn: Chart = both.configure(**chart_config())
    return drawn


def plot_residuals(
    model: Any, X: Any, y: Any = None, clients: Any = None, *, kind: str = "quantile", offset: Any = None,
    seed: int = 0,
) -> Chart:  # fmt: skip
    """The residuals of a fitted population GLM; one fitted by a formula takes y and the clients from the table X."""
    found = model.residuals(X, y, clients, offset=offset, kind=kind, seed=seed)
    if hasattr(model, "classes_"):
        fitted = model.predict_proba(X, clients, offset)[:, 1]
    else:
        fitted = model.predict(X, clients, offset)
    return residuals(fitted, found, kind)
