"""A fit in the words of a mixed model, and the summary that shows it: in a terminal and as HTML."""

from functools import cache
from xml.etree import ElementTree

import numpy as np
import pandas as pd
import pytest
from sklearn.exceptions import ConvergenceWarning

from kit.tables import fitted, fitted_choice, make_client_table, penalized, regressor
from ppfl.glm import as_mixed_model

TABLE = make_client_table()
GIVEN = {"y": TABLE.y, "clients": TABLE.clients}


def test_the_covariance_is_that_of_a_client_drawn_from_the_fitted_dirichlet():
    model = fitted()
    fixed, effects, covariance = as_mixed_model(model)
    theta = np.hstack([model.canonical_intercept_[:, None], model.canonical_coef_])  # (K, d + 1)
    drawn = np.random.default_rng(0).dirichlet(model.concentration_, 400_000) @ theta
    scale = np.abs(theta).max()
    np.testing.assert_allclose(fixed, drawn.mean(0), atol=0.01 * scale)
    np.testing.assert_allclose(covariance, np.cov(drawn.T), atol=0.02 * scale**2)
    slope, intercept = model.client_coef(3)
    np.testing.assert_allclose(fixed + effects.loc[3], [intercept, *slope])
    assert list(covariance.columns) == list(effects.columns) == ["intercept", "x0", "x1"]


def test_points_have_their_own_moments_and_one_canonical_model_has_no_random_effects():
    _, effects, covariance = as_mixed_model(penalized())
    np.testing.assert_allclose(effects.mean(), 0, atol=1e-12)
    np.testing.assert_allclose(covariance, np.cov(effects.T, bias=True))
    _, effects, covariance = as_mixed_model(fitted(k=1))
    np.testing.assert_array_equal(effects, 0)
    np.testing.assert_array_equal(covariance, 0)


@cache
def hostile_fit():
    frame = pd.DataFrame(TABLE.x, columns=["price", "<size> & more"])
    return regressor(shared=["price"]).fit(frame, **GIVEN)


def test_the_text_has_the_figures_of_the_model():
    model = hostile_fit()
    shown = str(model.summary())
    estimate, error = model.conf_int().loc[("0", "intercept"), ["estimate", "std_error"]]
    deviation = as_mixed_model(model)[2].loc["<size> & more", "<size> & more"] ** 0.5
    figures = (f"{model.log_likelihood_:,.2f}", f"{model.dispersion_:.4g}", f"{deviation:.4g}")
    for part in ("120 rows of 12 clients", *figures, f"{estimate:.2f} ({error:.2f})"):
        assert part in shown, part
    line = next(line for line in shown.splitlines() if line.startswith("clients of at least 80%"))
    assert line.split()[-2:] == [str(count) for count in (model.memberships_ >= 0.8).sum()]


def test_the_icc_is_the_share_of_the_intercepts_variance():
    """At the means of all columns: by hand from the covariance of the population."""
    model = regressor().fit(TABLE.x - TABLE.x.mean(0), **GIVEN)
    between = as_mixed_model(model)[2].loc["intercept", "intercept"]
    assert f"{between / (between + model.dispersion_):.3f}." in str(model.summary())


def test_the_summary_says_whether_clients_differ_and_whether_there_are_kinds():
    clients, noise = np.arange(120) % 12, np.random.default_rng(5).normal(size=120)
    same = noise - (np.bincount(clients, noise) / 10)[clients]  # with equal means
    words = {"explain 100% of the differences": {}, "explain 0% of": {"k": 1, "residual": "full"}}
    for word, settings in words.items():
        assert word in str(fitted(**settings).summary())
    alike = regressor(k=1, residual="intercept").fit(TABLE.x, same, clients)
    assert "All variances between clients are 0." in str(alike.summary())


def test_html_is_well_formed_and_escaped(tmp_path):
    page = hostile_fit().summary(0.9).to_html(tmp_path / "summary.html")
    assert (tmp_path / "summary.html").read_text(encoding="utf-8") == page
    for text in (page.removeprefix("<!doctype html>"), f"<div>{hostile_fit().summary()._repr_html_()}</div>"):
        tree = ElementTree.fromstring(text.strip().replace("<br>", "<br/>"))
        assert "<size> & more" in "".join(tree.itertext())


@pytest.mark.filterwarnings("ignore:the fit stopped")
def test_many_models_and_long_names_stay_within_the_terminal():
    names = [f"a column with a very long name that never seems to end, number {i}" for i in range(2)]
    model = regressor(k=7, n_init=1).fit(pd.DataFrame(TABLE.x, columns=names), **GIVEN)
    lines = str(model.summary()).splitlines()
    assert max(map(len, lines)) <= 100
    assert all(f"model {k}" in "".join(lines) for k in range(7))


def test_every_estimator_and_family_has_a_summary():
    assert "ICC" in str(fitted("bernoulli").summary())
    assert "class 2" in str(fitted("multinomial").summary())
    assert "96 situations of 12 clients" in str(fitted_choice().summary())
    assert "no clients" in str(regressor(k=1).fit(TABLE.x, TABLE.y).summary())
    assert "No standard errors: " in str(penalized().summary())
    words = {"negative binomial": "size", "zip": "share of extra zeros"}
    for family, word in words.items():
        model = regressor(k=1, family=family).fit(TABLE.x[::4], TABLE.counts[::4])
        assert word in str(model.summary())
        found = model.conf_int().loc[("", word)]
        assert found["lower"] < found["upper"]


def test_the_summary_reports_the_choice_of_k_and_a_fit_that_did_not_converge():
    chosen = regressor(k=[1, 2]).fit(TABLE.x, **GIVEN)
    for record in chosen.selection_.itertuples():
        assert f"{record.held_out:.4f} with {record.k}" in str(chosen.summary())
    with pytest.warns(ConvergenceWarning, match="fits every row exactly"):
        stopped = regressor(k=1).fit(TABLE.x, TABLE.x @ [1.0, 2.0])
    assert not stopped.converged_ and "not converged" in str(stopped.summary())
