"""Standard errors, intervals and residuals: classical formulas, laws of units, and coverage in simulation."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import stats

from kit.refusals import SettingError, assert_refused
from kit.tables import classifier, fitted, fitted_choice, make_client_table, make_estimator, penalized, regressor
from ppfl.glm import NEW
from ppfl.glm.families import REGRESSIONS, regression_family
from ppfl.glm.intervals import deviations, draw_parameters, mixture_quantile
from ppfl.glm.problem import find_posterior

TABLE = make_client_table()
GIVEN, AT = {"clients": TABLE.clients}, (TABLE.x, TABLE.clients)
DESIGN = np.c_[np.ones(len(TABLE.y)), TABLE.x]
EXACT = {"k": 1, "ridge": 0.0, "tol": 1e-9}


def test_one_gaussian_model_has_the_errors_of_least_squares():
    model = regressor(**EXACT).fit(TABLE.x, TABLE.y)
    beta = np.linalg.lstsq(DESIGN, TABLE.y)[0]
    variance = np.mean((TABLE.y - DESIGN @ beta) ** 2)  # of maximum likelihood
    expected = np.sqrt(np.diag(variance * np.linalg.inv(DESIGN.T @ DESIGN)))
    found, n = model.conf_int(0.95), len(TABLE.y)
    np.testing.assert_allclose(found.loc["0", "std_error"], expected, rtol=1e-4)
    np.testing.assert_allclose(found.loc["0", "upper"] - found.loc["0", "estimate"], 1.959964 * expected, rtol=1e-4)
    assert found.loc[("", "dispersion"), "std_error"] == pytest.approx(variance * np.sqrt(2 / n), rel=1e-3)
    assert model.log_likelihood_ == pytest.approx(-n / 2 * (np.log(2 * np.pi * variance) + 1))


def test_one_logistic_model_has_the_errors_of_the_fisher_information():
    model = classifier(**EXACT).fit(TABLE.x, TABLE.labels)
    p = model.predict_proba(TABLE.x)[:, 1]
    expected = np.sqrt(np.diag(np.linalg.inv(DESIGN.T @ (DESIGN * (p * (1 - p))[:, None]))))
    np.testing.assert_allclose(model.conf_int().loc["0", "std_error"], expected, rtol=1e-4)


def test_errors_follow_the_units_of_the_table():
    plain = fitted().conf_int()["std_error"]
    other = regressor().fit(TABLE.x * [1.0, 1e6] + [3.0, 0.0], 10 * TABLE.y, **GIVEN).conf_int()["std_error"]
    terms = [(k, name) for k in "01" for name in ("x0", "x1")] + [("", "dispersion")]
    np.testing.assert_allclose(other.loc[terms], [10.0, 1e-5, 10.0, 1e-5, 100.0] * plain.loc[terms], rtol=1e-3)


def test_the_order_of_classes_and_the_class_left_out_do_not_matter():
    labels = TABLE.target("multinomial")
    found = [classifier(k=1).fit(TABLE.x, y).conf_int() for y in (labels, np.array(["c", "a", "b"])[labels])]
    for name, other in (("0", "c"), ("1", "a"), ("2", "b")):
        errors = [each.xs(of, level="output")["std_error"] for each, of in zip(found, (name, other), strict=True)]
        np.testing.assert_allclose(*errors, rtol=1e-3)


def test_shared_columns_and_choices_have_errors_and_constant_columns_have_none():
    constant = np.c_[TABLE.x, np.ones(len(TABLE.x))]
    found = regressor(shared=["x1"]).fit(constant, TABLE.y, **GIVEN).conf_int()["std_error"]
    assert found[("shared", "x1")] > 0 and ("0", "x1") not in found and np.isnan(found[("0", "x2")])
    tastes = fitted_choice().conf_int()
    assert (tastes["std_error"] > 0).all() and (tastes["lower"] < tastes["upper"]).all()


def test_ninety_percent_intervals_cover():
    """Of parameters, memberships, clients' coefficients, means and new observations, over six populations."""
    theta = np.array([[-1.0, 1.5], [1.0, -1.0]])  # intercept and slope
    hits = {}

    def note(name, found, truth, ends=("lower", "upper"), near=0.0):
        hits.setdefault(name, []).append(np.mean((found[ends[0]] - near <= truth) & (truth <= found[ends[1]] + near)))

    for seed in range(6):
        random = np.random.default_rng(seed)
        clients, c, x = np.repeat(np.arange(30), 15), random.dirichlet([0.5, 0.5], 30), random.normal(size=(450, 1))
        own = (c @ theta)[clients]
        mean = own[:, 0] + own[:, 1] * x[:, 0]
        model = regressor().fit(x, mean + random.normal(size=450), clients=clients)
        memberships, parameters = model.membership_intervals(0.9), model.conf_int(0.9)
        for at, k in enumerate(np.argsort(model.canonical_intercept_)):
            note("memberships", memberships[k], c[:, at], near=1e-3)
            note("parameters", parameters.loc[str(k)].loc[["intercept", "x0", "concentration"]], [*theta[at], 0.5])
        for client in range(0, 30, 5):
            note("coefficients", model.client_coef(client, interval=0.9), c[client] @ theta)
        found = model.predict(x, clients, interval=0.9)
        note("mean", found, mean)
        note("new", found, mean + random.normal(size=450), ("new_lower", "new_upper"))
    for name, shares in hits.items():
        assert 0.8 <= np.mean(shares) <= 0.98, name  # experiments/glm_coverage.py has more


def test_intervals_contain_the_estimates_grow_with_the_level_and_shrink_with_rows():
    model = fitted()
    narrow, wide = model.membership_intervals(0.5), model.membership_intervals(0.95)
    for k in (0, 1):
        ends = np.stack([wide[k]["lower"], narrow[k]["lower"], narrow[k]["upper"], wide[k]["upper"]])
        assert ends.min() >= 0 and ends.max() <= 1 and (np.diff(ends, axis=0) >= 0).all()
        assert model.memberships_[k].between(wide[k]["lower"], wide[k]["upper"]).all()
    few, many = (fitted(rows=rows).membership_intervals()[0] for rows in (5, 80))
    assert (many["upper"] - many["lower"]).mean() < 0.6 * (few["upper"] - few["lower"]).mean()


def test_intervals_of_predictions_keep_the_index_of_the_table_and_are_wider_for_new_clients():
    frame = pd.DataFrame(TABLE.x, columns=["x0", "x1"], index=[f"row {i}" for i in range(len(TABLE.x))])
    model, far = regressor().fit(frame, TABLE.y, **GIVEN), np.abs(TABLE.x[:, 0]) > 1
    found, new = (model.predict(frame, clients, interval=0.9) for clients in (TABLE.clients, NEW))
    assert found.index.equals(frame.index)
    np.testing.assert_allclose(found["mean"], model.predict(frame, TABLE.clients))
    assert (found["new_lower"] < found["lower"]).all() and (found["upper"] < found["new_upper"]).all()
    assert (new["upper"] - new["lower"])[far].mean() > 2 * (found["upper"] - found["lower"])[far].mean()


@pytest.mark.parametrize("family", ["bernoulli", "multinomial"])
def test_probabilities_have_intervals_for_every_class(family):
    model = fitted(family)
    found = model.predict_proba(TABLE.x, TABLE.clients, interval=0.9)
    for name, probability in zip(model.classes_, model.predict_proba(TABLE.x, TABLE.clients).T, strict=True):
        lower, upper = found[name]["lower"], found[name]["upper"]
        np.testing.assert_allclose(found[name]["mean"], probability)
        assert (lower >= 0).all() and (lower < upper).all() and (upper <= 1).all()


@pytest.mark.parametrize(("family", "shared"), [("gaussian", ("x1",)), ("poisson", None)])
def test_memberships_move_with_the_parameters_as_far_as_the_delta_method_says(family, shared):
    """Against memberships that are found again for parameters that are drawn."""
    model = fitted(family, 30, 20, shared=shared)
    moved = []
    for at in draw_parameters(model, 20):
        fit = replace(model.fit_, vector=model.fit_.layout.pack(at))
        moved.append(find_posterior(fit, model._data).mean.numpy() - model.memberships_.to_numpy())
    exact, drawn = deviations(model), np.sqrt(np.square(moved).mean(0))
    np.testing.assert_allclose(exact.mean(), drawn.mean(), rtol=0.4)  # of 20 draws
    assert np.corrcoef(exact.ravel(), drawn.ravel())[0, 1] > 0.8


@pytest.mark.parametrize("name", sorted(REGRESSIONS))
def test_the_quantile_of_a_mixture_splits_its_probability(name):
    random, family = np.random.default_rng(0), regression_family(name)
    parameters = family.mean_parameters(torch.from_numpy(random.uniform(-1.0, 3.0, size=(30, 7, 1))))
    nuisance = torch.from_numpy(random.normal(size=(len(family.nuisance), 7)) - 1)
    for level in (0.05, 0.5, 0.95):
        found = mixture_quantile(family, level, parameters, nuisance)
        at, below = (cdf(found, parameters, nuisance).mean(1) for cdf in (family.cdf, family.cdf_below))
        if (at != below).any():  # counts
            assert (below < level).all() and (at >= level).all() and (found == found.round()).all()
        else:
            np.testing.assert_allclose(at, level, atol=1e-6)


RESIDUALS = ("gaussian", "poisson", "gamma", "bernoulli")


@pytest.mark.parametrize("name", RESIDUALS)
def test_squared_deviance_residuals_sum_to_the_deviance_and_pearsons_are_divided_by_deviations(name):
    model, y = fitted(name), TABLE.target(name)
    found, pearson = (model.residuals(TABLE.x, y, TABLE.clients, kind=kind) for kind in ("deviance", "pearson"))
    assert (found**2).mean() == pytest.approx(model.deviance(TABLE.x, y, TABLE.clients))
    mean = model.predict_proba(*AT)[:, 1] if name == "bernoulli" else model.predict(*AT)
    np.testing.assert_array_equal(np.sign(found), np.sign(y - mean))
    of_mean = {"poisson": mean, "gamma": mean**2, "bernoulli": mean * (1 - mean)}.get(name, 1.0)
    np.testing.assert_allclose(pearson, (y - mean) / np.sqrt(model.dispersion_ * of_mean), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", RESIDUALS)
def test_quantile_residuals_of_new_rows_are_standard_normal(name):
    """Half of the rows are judged by a law that is estimated from the other half, so this is a test of two samples."""
    table = make_client_table(60, 60)
    x, y, clients = table.x, table.target(name).astype(float), table.clients
    model, limit = make_estimator(name).fit(x[::2], y[::2], clients=clients[::2]), 1.95 * np.sqrt(2 / 1800)  # 99.9 %
    found, other = (model.residuals(x[1::2], y[1::2], clients[1::2], kind="quantile", seed=seed) for seed in (0, 1))
    assert stats.kstest(found, "norm").statistic < limit
    assert (found != other).all() if name in ("poisson", "bernoulli") else (found == other).all()
    wrong = model.residuals(x[1::2], y[1::2], clients[1::2][::-1], kind="quantile")
    assert stats.kstest(wrong, "norm").statistic > limit


REFUSED = {
    "errors of points": (lambda: penalized().conf_int(), "penalty > 0", "penalty = 0"),
    "intervals of points": (lambda: penalized().predict(TABLE.x, NEW, interval=0.9), "penalty = 0"),
    "level in percent": (lambda: fitted().predict(TABLE.x, TABLE.clients, interval=90), "90"),
    "kind": (lambda: fitted().residuals(TABLE.x, TABLE.y, TABLE.clients, kind="raw"), "'raw'", "quantile"),
    "classes": (lambda: fitted("multinomial").residuals(TABLE.x, TABLE.labels, TABLE.clients), "three or more"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_errors_or_residuals_says_why(name):
    call, *words = REFUSED[name]
    assert_refused(call, SettingError, *words)
