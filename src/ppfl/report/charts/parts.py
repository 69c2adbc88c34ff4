"""Parts that charts have in common."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import altair as alt
import numpy as np

from ..theme import chart_config, model_colour, show_share

MAX_DOTS = 2000
MAX_POINTS = 200  # of a curve
WIDTH = 720

Array = Any  # (M, K) or anything that numpy makes such an array of
Row = dict[str, Any]
Chart: TypeAlias = alt.Chart | alt.LayerChart | alt.HConcatChart  # all are drawn, changed and saved alike


def of_rows(rows: list[Row]) -> alt.Chart:
    return alt.Chart(alt.InlineData(values=rows))


def chosen_client() -> alt.Chart:
    """Marks of the client that is chosen on the page."""
    return alt.Chart(alt.NamedData(name="chosen"))


def colour_of_models(names: Sequence[str], *, legend: bool = True) -> alt.Color:
    scale = alt.Scale(domain=list(names), range=[model_colour(at) for at in range(len(names))])
    return alt.Color("model:N", sort=list(names), scale=scale, title=None, legend=alt.Legend() if legend else None)


def finished(chart: Any, width: Any, height: Any, chosen: str | None = None) -> Chart:
    meta = {"chosen": chosen} if chosen else {}
    drawn: Chart = chart.properties(width=width, height=height, usermeta=meta).configure(**chart_config())
    return drawn


def short(value: float) -> float | None:
    """Four digits are finer than any screen; JSON has no number for what is not finite."""
    return float(f"{value:.4g}") if math.isfinite(value) else None


def said(row: Array, names: Sequence[str]) -> str:
    return ", ".join(f"{names[k]} {show_share(row[k])}" for k in np.argsort(-row, kind="stable") if row[k] >= 0.005)
