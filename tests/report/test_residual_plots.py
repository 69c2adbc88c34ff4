"""The plot of residuals: one dot per row in each panel, and files that a browser reads."""

import re
from xml.etree import ElementTree

import numpy as np
import pytest

from kit.tables import classifier, make_client_table, regressor
from ppfl.report import plot_residuals
from ppfl.report.residual_plots import MAX_DOTS, residual_drawing

TABLE = make_client_table()


def test_every_row_is_a_dot_in_both_panels(tmp_path):
    model = regressor(k=1).fit(TABLE.x, TABLE.y)
    picture = plot_residuals(model, TABLE.x, TABLE.y, path=tmp_path / "residuals.svg")
    assert ElementTree.fromstring(picture).tag.endswith("svg")
    assert picture.count("<circle") == 2 * len(TABLE.y)
    assert (tmp_path / "residuals.svg").read_text() == picture
    plot_residuals(model, TABLE.x, TABLE.y, path=tmp_path / "residuals.html", kind="pearson")
    page = (tmp_path / "residuals.html").read_text()
    assert page.startswith("<!doctype html>") and "pearson residual" in page
    labels = classifier(k=1).fit(TABLE.x, TABLE.labels)
    assert plot_residuals(labels, TABLE.x, TABLE.labels).count("<circle") == 2 * len(TABLE.y)


def test_normal_residuals_lie_on_the_line():
    """In the right panel dots and line have the same slope and place."""
    normal = np.random.default_rng(0).normal(size=20_000)
    picture = residual_drawing(np.arange(20_000.0), normal, "quantile")
    assert picture.count("<circle") <= 2 * MAX_DOTS
    dots = np.array(re.findall(r'<circle cx="([\d.]+)" cy="([\d.]+)"', picture), dtype=float)[MAX_DOTS:]
    ends = re.findall(r'<line x1="([\d.]+)" y1="([\d.]+)" x2="([\d.]+)" y2="([\d.]+)" stroke="#7A8088"', picture)[-1]
    x1, y1, x2, y2 = map(float, ends)
    middle = dots[len(dots) // 10 : -len(dots) // 10]
    on_line = y1 + (middle[:, 0] - x1) / (x2 - x1) * (y2 - y1)
    assert np.abs(middle[:, 1] - on_line).max() < 3


def test_constant_fitted_values_can_be_drawn():
    picture = residual_drawing(np.full(10, 2.0), np.linspace(-1, 1, 10), "deviance")
    assert "nan" not in picture


@pytest.mark.parametrize("kind", ["deviance", "quantile"])
def test_one_row_can_be_drawn(kind):
    assert residual_drawing(np.ones(1), np.ones(1), kind).count("<circle") == 2
