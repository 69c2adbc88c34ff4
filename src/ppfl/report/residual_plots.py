"""Residuals of a population GLM: against the fitted values, and against the quantiles of a normal distribution."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy.special import ndtri

from .drawing import Axis, drawing, grid_lines, text, tick_labels
from .markup import Markup, element, escape, join
from .palette import MIDDLE_GREY, model_colour

MAX_DOTS = 2000  # of more rows, evenly spaced ones are drawn
_WIDTH, _HEIGHT, _PANEL = 900.0, 380.0, 450.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 52.0, 12.0, 34.0, 326.0
_RADIUS, _BINS = 2.2, 12


class _Panel(NamedTuple):
    """Dots, a reference line and a curve, in one frame that begins at x = start."""

    title: str
    x_name: str
    x: Sequence[float]
    y: Sequence[float]
    line: tuple[tuple[float, float], tuple[float, float]]  # (x, y) of its ends
    curve: Sequence[tuple[float, float]]
    start: float


def plot_residuals(
    model: Any, X: Any, y: Any = None, clients: Any = None, path: str | Path | None = None, *, kind: str = "quantile",
    offset: Any = None, seed: int = 0,
) -> str:  # fmt: skip
    """Draw the residuals of a fitted model as SVG, and write it to `path`: `.svg`, or a page for `.html`.

    Left: residuals against the fitted values, with the mean of each part; a trend says that the mean is wrong, and a
    funnel that the variance is. Right: their order statistics against normal quantiles. Quantile residuals lie on the
    line if the model is right, for every family; the other kinds do so for gaussian targets only. A model fitted by a
    formula takes y and the clients from the table X.
    """
    found = model.residuals(X, y, clients, offset=offset, kind=kind, seed=seed)
    if hasattr(model, "classes_"):
        fitted = model.predict_proba(X, clients, offset)[:, 1]
    else:
        fitted = np.asarray(model.predict(X, clients, offset), dtype=float)
    picture = residual_drawing(fitted, found, kind)
    if path is not None:
        from ppfl.io.files import write_text  # imported here so that drawing does not need engines and data sets

        write_text(Path(path), _page(picture) if Path(path).suffix == ".html" else picture)
    return picture


def residual_drawing(fitted: Any, residuals: Any, kind: str) -> Markup:
    """Both panels side by side."""
    order = np.argsort(residuals, kind="stable")
    normal = ndtri((np.arange(len(order)) + 0.5) / len(order))
    some = np.unique(np.linspace(0, len(order) - 1, min(len(order), MAX_DOTS)).round().astype(int))
    spread = float(np.std(residuals)) if kind != "quantile" else 1.0
    low, high = float(fitted.min()), float(fitted.max())
    shown = np.random.default_rng(0).permutation(len(fitted))[:MAX_DOTS]
    panels = (
        _Panel("Against fitted values", "fitted value", fitted[shown].tolist(), residuals[shown].tolist(),
               ((low, 0.0), (high, 0.0)), _running_means(fitted, residuals), 0.0),
        _Panel("Against a normal distribution", "normal quantile", normal[some].tolist(),
               residuals[order][some].tolist(),
               ((float(normal[0]), spread * float(normal[0])), (float(normal[-1]), spread * float(normal[-1]))),
               (), _PANEL),
    )  # fmt: skip
    title = text(14, (_TOP + _BOTTOM) / 2, f"{kind} residual", anchor="middle",
                 transform=f"rotate(-90 14 {(_TOP + _BOTTOM) / 2:g})")  # fmt: skip
    parts = [title, *(part for panel in panels for part in _draw_panel(panel))]
    return drawing(_WIDTH, _HEIGHT, f"{kind} residuals of {len(fitted)} rows", *parts, standalone=True)


def _running_means(fitted: Any, residuals: Any) -> list[tuple[float, float]]:
    """The mean residual of rows with similar fitted values, in parts of equal size."""
    parts = np.array_split(np.argsort(fitted, kind="stable"), min(_BINS, max(1, len(fitted) // 5)))
    return [(float(fitted[part].mean()), float(residuals[part].mean())) for part in parts]


def _draw_panel(panel: _Panel) -> list[Markup]:
    left, right = panel.start + _LEFT, panel.start + _PANEL - _RIGHT
    x_axis = _padded_axis([*panel.x, panel.line[0][0], panel.line[1][0]], left, right)
    y_axis = _padded_axis([*panel.y, panel.line[0][1], panel.line[1][1]], _BOTTOM, _TOP)
    dots = [
        element("circle", cx=x_axis.at(x), cy=y_axis.at(y), r=_RADIUS) for x, y in zip(panel.x, panel.y, strict=True)
    ]
    (x1, y1), (x2, y2) = panel.line
    ends = {"x1": x_axis.at(x1), "y1": y_axis.at(y1), "x2": x_axis.at(x2), "y2": y_axis.at(y2)}
    path = " ".join(f"{'L' if i else 'M'}{x_axis.at(x):.1f} {y_axis.at(y):.1f}" for i, (x, y) in enumerate(panel.curve))
    return [
        text((left + right) / 2, 16, panel.title, anchor="middle", font_weight="600"),
        *grid_lines(y_axis, left, right, "{:g}".format),
        *tick_labels(x_axis, _BOTTOM + 18, "{:g}".format),
        text((left + right) / 2, _BOTTOM + 38, panel.x_name, anchor="middle"),
        element("g", *dots, fill=model_colour(0), fill_opacity=0.45),
        element("line", **ends, stroke=MIDDLE_GREY, stroke_width=1.5, stroke_dasharray="5 4"),
        *([element("path", d=path, fill="none", stroke=model_colour(5), stroke_width=2.5)] if panel.curve else []),
    ]


def _padded_axis(values: Sequence[float], start: float, end: float) -> Axis:
    low, high = min(values), max(values)
    margin = 0.04 * (high - low) or abs(low) * 0.1 or 1.0
    return Axis(low - margin, high + margin, start, end)


def _page(picture: Markup) -> str:
    head = join([element("meta", charset="utf-8"), element("title", escape("Residuals"))])
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>{picture}</body></html>\n'
