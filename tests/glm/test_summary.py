"""The summary says what the fit found, fits into a terminal, and is valid HTML."""

from html.parser import HTMLParser

import numpy as np
import pandas as pd
import pytest
from sklearn.exceptions import ConvergenceWarning

from kit.tables import choice, classifier, make_choice_table, make_client_table, regressor
from ppfl.glm import as_mixed_model

TABLE = make_client_table()


class Tags(HTMLParser):
    """Fails on a tag that is closed out of turn, and keeps the text."""

    def __init__(self):
        super().__init__()
        self.open, self.text = [], []

    def handle_starttag(self, tag, attrs):
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert tag in ("meta", "br") or self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


@pytest.fixture(scope="module")
def model():
    frame = pd.DataFrame(TABLE.x, columns=["price", "<size> & more"])
    return regressor(shared=["price"]).fit(frame, TABLE.y, clients=TABLE.clients)


def test_the_text_has_the_figures_of_the_model(model):
    shown = str(model.summary())
    assert max(map(len, shown.splitlines())) <= 100
    for part in (
        "gaussian, identity link", "120 rows of 12 clients", f"{model.log_likelihood_:,.2f}", f"{model.bic_:,.1f}",
        f"{model.dispersion_:.4g}", "reached the tolerance", "share", "price", "<size> & more",
    ):  # fmt: skip
        assert part in shown, part
    estimate, error = model.conf_int().loc[("0", "intercept"), ["estimate", "std_error"]]
    assert f"{estimate:.2f} ({error:.2f})" in shown
    covariance = as_mixed_model(model)[2]
    assert f"{covariance.loc['<size> & more', '<size> & more']:.4g}" in shown
    pure = (model.memberships_ >= 0.8).sum()
    line = next(line for line in shown.splitlines() if line.startswith("clients of at least 80%"))
    assert line.split()[-2:] == [str(count) for count in pure]


def test_the_icc_is_the_share_of_the_intercepts_variance():
    """Without other columns that vary, and at their means: by hand from the covariance of the population."""
    centred = TABLE.x - TABLE.x.mean(0)
    model = regressor().fit(centred, TABLE.y, clients=TABLE.clients)
    between = as_mixed_model(model)[2].loc["intercept", "intercept"]
    assert f"{between / (between + model.dispersion_):.3f}." in str(model.summary())


def test_html_is_well_formed_and_escaped(model, tmp_path):
    page = model.summary(0.9).to_html(tmp_path / "summary.html")
    assert (tmp_path / "summary.html").read_text(encoding="utf-8") == page
    for text in (page, model.summary()._repr_html_()):
        tags = Tags()
        tags.feed(text)
        assert tags.open == []
        assert "<size> & more" in "".join(tags.text)
    assert "90% interval" in page


def test_many_models_and_long_names_stay_within_the_terminal():
    names = [f"a column with a very long name that never seems to end, number {i}" for i in range(2)]
    frame = pd.DataFrame(TABLE.x, columns=names)
    model = regressor(k=7).fit(frame, TABLE.y, clients=TABLE.clients)
    lines = str(model.summary()).splitlines()
    assert max(map(len, lines)) <= 100
    assert all(f"model {k}" in "".join(lines) for k in range(7))


def test_every_estimator_and_solver_has_a_summary():
    shown = [str(m.summary()) for m in (
        classifier().fit(TABLE.x, TABLE.labels, clients=TABLE.clients),
        classifier().fit(TABLE.x, TABLE.counts.clip(max=2), clients=TABLE.clients),
        regressor(k=1).fit(TABLE.x, TABLE.y),
        regressor(solver="profile").fit(TABLE.x, TABLE.y, clients=TABLE.clients),
    )]  # fmt: skip
    assert "ICC" in shown[0]
    assert "class 2" in shown[1]
    assert "Memberships" not in shown[2] and "no clients" in shown[2]
    assert "No standard errors: " in shown[3] and "solver = 'marginal'" in shown[3]
    table = make_choice_table()
    tastes = choice().fit(table.x, table.y, table.situations, table.clients)
    assert f"{len(np.unique(table.situations))} situations of 12 clients" in str(tastes.summary())


def test_every_family_has_a_summary_with_its_own_parameters():
    """And quasi families, whose dispersion has no standard error."""
    for name, word in (("negative binomial", "size"), ("zip", "share of extra zeros"), ("quasipoisson", "dispersion")):
        model = regressor(k=1, family=name).fit(TABLE.x, TABLE.counts)
        shown = str(model.summary())
        assert word in shown
        found = model.conf_int()
        assert name == "quasipoisson" or found.loc[("", word), "lower"] < found.loc[("", word), "upper"]
        assert np.isfinite(model.residuals(TABLE.x, TABLE.counts, kind="quantile")).all()
        assert (model.predict(TABLE.x, interval=0.9)["new_upper"] >= 0).all()


def test_the_choice_of_k_is_reported():
    model = regressor(k=[1, 2]).fit(TABLE.x, TABLE.y, clients=TABLE.clients)
    line = next(line for line in str(model.summary()).splitlines() if line.startswith("held out"))
    for record in model.selection_:
        assert f"{record.held_out:.4f} with {record.k}" in line


def test_a_fit_that_did_not_converge_says_so():
    with pytest.warns(ConvergenceWarning):
        model = regressor(max_iter=1, tol=1e-12).fit(TABLE.x, TABLE.y, clients=TABLE.clients)
    assert "not converged: the fit stopped after 1 of 1 iterations" in " ".join(str(model.summary()).split())
