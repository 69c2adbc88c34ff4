"""Standard errors: classical formulas for one model, laws of units, and coverage in simulation."""

import numpy as np
import pandas as pd
import pytest
from sklearn.exceptions import NotFittedError

from kit.tables import choice, classifier, make_choice_table, make_client_table, regressor
from ppfl.core.errors import SettingError
from ppfl.glm import PopulationRegressor
from ppfl.glm.inference.standard_errors import hessian

TABLE = make_client_table()
DESIGN = np.c_[np.ones(len(TABLE.y)), TABLE.x]
EXACT = {"k": 1, "ridge": 0.0, "tol": 1e-9}


def test_one_gaussian_model_has_the_errors_of_least_squares():
    model = regressor(**EXACT).fit(TABLE.x, TABLE.y)
    beta = np.linalg.lstsq(DESIGN, TABLE.y)[0]
    variance = np.mean((TABLE.y - DESIGN @ beta) ** 2)  # of maximum likelihood
    expected = np.sqrt(np.diag(variance * np.linalg.inv(DESIGN.T @ DESIGN)))
    found = model.conf_int(0.95)
    np.testing.assert_allclose(found.loc["0", "std_error"], expected, rtol=1e-4)
    np.testing.assert_allclose(found.loc["0", "upper"] - found.loc["0", "estimate"], 1.959964 * expected, rtol=1e-4)
    np.testing.assert_allclose(found.loc["0", "estimate"], beta, rtol=1e-5)
    n = len(TABLE.y)
    assert found.loc[("", "dispersion"), "std_error"] == pytest.approx(variance * np.sqrt(2 / n), rel=1e-3)
    assert model.dispersion_ == pytest.approx(variance, rel=1e-5)


def test_one_logistic_model_has_the_errors_of_the_fisher_information():
    model = classifier(**EXACT).fit(TABLE.x, TABLE.labels)
    p = model.predict_proba(TABLE.x)[:, 1]
    expected = np.sqrt(np.diag(np.linalg.inv(DESIGN.T @ (DESIGN * (p * (1 - p))[:, None]))))
    np.testing.assert_allclose(model.conf_int().loc["0", "std_error"], expected, rtol=1e-4)


def test_the_information_is_the_curvature_of_the_log_likelihood():
    """Along random directions, from values of the objective instead of its gradient."""
    model = regressor().fit(TABLE.x, TABLE.y, clients=TABLE.clients)
    at, curvature = model._parameters(), hessian(model._objective, model._parameters())
    random = np.random.default_rng(0)
    for _ in range(5):
        step = 1e-3 * random.normal(size=len(at))
        values = [model._objective(at + sign * step)[0] for sign in (-1, 0, 1)]
        assert values[0] - 2 * values[1] + values[2] == pytest.approx(step @ curvature @ step, rel=1e-3)


def test_errors_follow_the_units_of_the_table():
    table = TABLE.x * [1.0, 1e6] + [3.0, 0.0]
    plain = regressor().fit(TABLE.x, TABLE.y, clients=TABLE.clients).conf_int()
    other = regressor().fit(table, 10 * TABLE.y, clients=TABLE.clients).conf_int()
    terms = [(k, name) for k in "01" for name in ("x0", "x1")]
    units = np.tile([10.0, 1e-5], 2)
    np.testing.assert_allclose(other.loc[terms, "std_error"], units * plain.loc[terms, "std_error"], rtol=1e-3)
    np.testing.assert_allclose(
        other.loc[("", "dispersion"), "std_error"], 100 * plain.loc[("", "dispersion"), "std_error"], rtol=1e-3
    )


def test_the_order_of_classes_and_the_class_left_out_do_not_matter():
    labels = TABLE.counts.clip(max=2)
    found = [classifier(k=1).fit(TABLE.x, y).conf_int() for y in (labels, np.array(["c", "a", "b"])[labels])]
    for name, other in (("0", "c"), ("1", "a"), ("2", "b")):
        np.testing.assert_allclose(
            found[0].xs(name, level="output")["std_error"], found[1].xs(other, level="output")["std_error"], rtol=1e-3
        )


def test_shared_and_constant_columns():
    model = regressor(shared=["x1"]).fit(np.c_[TABLE.x, np.ones(len(TABLE.x))], TABLE.y, clients=TABLE.clients)
    found = model.conf_int()
    assert found.loc[("shared", "x1"), "std_error"] > 0
    assert found.loc[["0", "1"]].index.get_level_values("term").tolist().count("x1") == 0
    assert np.isnan(found.loc[("0", "x2"), "std_error"])


def test_ninety_percent_intervals_cover():
    hits = []
    theta = np.array([[-1.0, 1.5], [1.0, -1.0]])  # intercept and slope
    for seed in range(8):
        random = np.random.default_rng(seed)
        clients = np.repeat(np.arange(30), 15)
        own = (random.dirichlet([0.5, 0.5], 30) @ theta)[clients]
        x = random.normal(size=(450, 1))
        y = own[:, 0] + own[:, 1] * x[:, 0] + random.normal(size=450)
        model = PopulationRegressor(2, n_init=2, random_state=0).fit(x, y, clients=clients)
        found = model.conf_int(0.9)
        order = np.argsort(model.canonical_intercept_).astype(str)
        for k, truth in zip(order, theta, strict=True):
            for term, value in zip(("intercept", "x0"), truth, strict=True):
                hits.append(found.loc[(k, term), "lower"] <= value <= found.loc[(k, term), "upper"])
            hits.append(found.loc[(k, "concentration"), "lower"] <= 0.5 <= found.loc[(k, "concentration"), "upper"])
    assert np.mean(hits) >= 0.8  # 48 intervals; experiments/glm_coverage.py has more


def test_choices_have_errors_without_an_intercept():
    table = make_choice_table()
    found = choice().fit(table.x, table.y, table.situations, table.clients).conf_int()
    assert isinstance(found, pd.DataFrame) and "intercept" not in found.index.get_level_values("term")
    assert (found["std_error"] > 0).all() and (found["lower"] < found["upper"]).all()


def test_what_has_no_standard_errors_says_why():
    with pytest.raises(NotFittedError):
        regressor().conf_int()
    model = regressor(solver="profile").fit(TABLE.x, TABLE.y, clients=TABLE.clients)
    with pytest.raises(SettingError, match="solver = 'profile' .*'marginal'"):
        model.conf_int()
    with pytest.raises(SettingError, match="level of an interval is 95"):
        regressor(k=1).fit(TABLE.x, TABLE.y).conf_int(95)
