"""Standard errors, intervals and residuals: classical formulas, laws of units, and coverage in simulation."""

from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import stats

from kit.refusals import SettingError, assert_refused
from kit.tables import HETEROSCEDASTIC, classifier, fitted, fitted_choice, make_client_table, make_estimator, regressor
from ppfl.glm import NEW
from ppfl.glm.families import REGRESSIONS, regression_family
from ppfl.glm.inference.mixture_quantiles import mixture_quantile
from ppfl.glm.inference.parameter_table import covariance_of
from ppfl.glm.inference.posterior_draws import _deviations_by_draws, _deviations_by_scores
from ppfl.glm.inference.standard_errors import hessian

TABLE = make_client_table()
GIVEN = {"clients": TABLE.clients}
DESIGN = np.c_[np.ones(len(TABLE.y)), TABLE.x]
EXACT = {"k": 1, "ridge": 0.0, "tol": 1e-9}


# ---------------------------------------------------------------------- standard errors of parameters


def test_one_gaussian_model_has_the_errors_of_least_squares():
    model = regressor(**EXACT).fit(TABLE.x, TABLE.y)
    beta = np.linalg.lstsq(DESIGN, TABLE.y)[0]
    variance = np.mean((TABLE.y - DESIGN @ beta) ** 2)  # of maximum likelihood
    expected = np.sqrt(np.diag(variance * np.linalg.inv(DESIGN.T @ DESIGN)))
    found, n = model.conf_int(0.95), len(TABLE.y)
    np.testing.assert_allclose(found.loc["0", "std_error"], expected, rtol=1e-4)
    np.testing.assert_allclose(found.loc["0", "upper"] - found.loc["0", "estimate"], 1.959964 * expected, rtol=1e-4)
    np.testing.assert_allclose(found.loc["0", "estimate"], beta, rtol=1e-5)
    assert found.loc[("", "dispersion"), "std_error"] == pytest.approx(variance * np.sqrt(2 / n), rel=1e-3)
    assert model.dispersion_ == pytest.approx(variance, rel=1e-5)
    assert model.log_likelihood_ == pytest.approx(-n / 2 * (np.log(2 * np.pi * variance) + 1))


def test_one_logistic_model_has_the_errors_of_the_fisher_information():
    model = classifier(**EXACT).fit(TABLE.x, TABLE.labels)
    p = model.predict_proba(TABLE.x)[:, 1]
    expected = np.sqrt(np.diag(np.linalg.inv(DESIGN.T @ (DESIGN * (p * (1 - p))[:, None]))))
    np.testing.assert_allclose(model.conf_int().loc["0", "std_error"], expected, rtol=1e-4)


def test_the_information_is_the_curvature_of_the_log_likelihood():
    """Along random directions, from values of the objective instead of its gradient."""
    model, random = fitted(), np.random.default_rng(0)
    at, curvature = model._parameters(), hessian(model._objective, model._parameters())
    for _ in range(5):
        step = 1e-3 * random.normal(size=len(at))
        values = [model._objective(at + sign * step)[0] for sign in (-1, 0, 1)]
        assert values[0] - 2 * values[1] + values[2] == pytest.approx(step @ curvature @ step, rel=1e-3)


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


def test_shared_and_constant_columns_and_choices_have_errors():
    constant = np.c_[TABLE.x, np.ones(len(TABLE.x))]
    found = regressor(shared=["x1"]).fit(constant, TABLE.y, **GIVEN).conf_int()
    assert found.loc[("shared", "x1"), "std_error"] > 0
    assert "x1" not in found.loc[["0", "1"]].index.get_level_values("term")
    assert np.isnan(found.loc[("0", "x2"), "std_error"])
    tastes = fitted_choice().conf_int()
    assert "intercept" not in tastes.index.get_level_values("term")
    assert (tastes["std_error"] > 0).all() and (tastes["lower"] < tastes["upper"]).all()


# ---------------------------------------------------------------------- intervals


def test_ninety_percent_intervals_cover():
    """Of parameters, memberships, clients' coefficients, means and new observations, over six populations."""
    theta = np.array([[-1.0, 1.5], [1.0, -1.0]])  # intercept and slope
    hits: dict[str, list[Any]] = {name: [] for name in ("parameters", "memberships", "coefficients", "mean", "new")}

    def note(name: str, found: Any, truth: Any, ends: tuple[str, str] = ("lower", "upper"), near: float = 0.0) -> None:
        hits[name].append(np.mean((found[ends[0]] - near <= truth) & (truth <= found[ends[1]] + near)))

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


def test_intervals_contain_the_estimates_and_grow_with_the_level():
    model = fitted()
    narrow, wide = model.membership_intervals(0.5), model.membership_intervals(0.95)
    for k in (0, 1):
        assert (wide[k]["lower"] <= narrow[k]["lower"]).all() and (narrow[k]["upper"] <= wide[k]["upper"]).all()
        assert (wide[k]["lower"] <= model.memberships_[k]).all() and (model.memberships_[k] <= wide[k]["upper"]).all()
        assert (wide[k]["lower"] >= 0).all() and (wide[k]["upper"] <= 1).all()
    shares = wide.to_numpy().reshape(-1, 2, 2)  # two memberships sum to 1, so one interval mirrors the other
    np.testing.assert_allclose(shares[:, 0], 1 - shares[:, 1, ::-1], atol=0.1)
    few, many = (
        float((found[0]["upper"] - found[0]["lower"]).mean())
        for found in (fitted(rows=rows).membership_intervals() for rows in (5, 80))
    )
    assert many < 0.6 * few
    coefficients, (slope, intercept) = model.client_coef(3, interval=0.9), model.client_coef(3)
    np.testing.assert_allclose(coefficients["mean"], [intercept, *slope])
    assert coefficients.index.tolist() == ["intercept", "x0", "x1"]


def test_intervals_of_predictions_keep_the_index_of_the_table_and_are_wider_for_new_clients():
    frame = pd.DataFrame(TABLE.x, columns=["x0", "x1"], index=[f"row {i}" for i in range(len(TABLE.x))])
    model = regressor().fit(frame, TABLE.y, **GIVEN)
    found, new = (model.predict(frame, clients, interval=0.9) for clients in (TABLE.clients, NEW))
    assert found.index.equals(frame.index)
    np.testing.assert_allclose(found["mean"], model.predict(frame, TABLE.clients))
    assert (found["new_lower"] < found["lower"]).all() and (found["upper"] < found["new_upper"]).all()
    pd.testing.assert_frame_equal(found, model.predict(frame, TABLE.clients, interval=0.9))
    far = np.abs(TABLE.x[:, 0]) > 1
    assert (new["upper"] - new["lower"])[far].mean() > 2 * (found["upper"] - found["lower"])[far].mean()


def test_probabilities_have_intervals_for_every_class():
    for family in ("bernoulli", "multinomial"):
        model = fitted(family)
        found = model.predict_proba(TABLE.x, TABLE.clients, interval=0.9)
        probability = model.predict_proba(TABLE.x, TABLE.clients)
        for at, name in enumerate(model.classes_):
            lower, upper = found[name]["lower"], found[name]["upper"]
            np.testing.assert_allclose(found[name]["mean"], probability[:, at])
            assert (lower >= 0).all() and (lower < upper).all() and (upper <= 1).all()


@pytest.mark.parametrize(("family", "shared"), [("gaussian", ("x1",)), ("poisson", None)])
def test_memberships_move_with_the_parameters_as_far_as_the_delta_method_says(family, shared):
    """Against memberships that are found again for parameters that are drawn."""
    model = fitted(family, 30, 20, shared=shared)
    covariance = covariance_of(model).matrix
    exact, drawn = _deviations_by_scores(model, covariance), _deviations_by_draws(model, covariance)
    np.testing.assert_allclose(exact.mean(), drawn.mean(), rtol=0.4)  # of 20 draws
    assert np.corrcoef(exact.ravel(), drawn.ravel())[0, 1] > 0.8


@pytest.mark.parametrize("name", sorted(REGRESSIONS))
def test_the_quantile_of_a_mixture_splits_its_probability(name):
    random, family = np.random.default_rng(0), regression_family(name, None)
    parameters = family.mean_parameters(torch.from_numpy(random.uniform(-1.0, 3.0, size=(30, 7, 1))))
    nuisance = torch.from_numpy(random.normal(size=(len(family.nuisance), 7)) - 1)
    for level in (0.05, 0.5, 0.95):
        found = mixture_quantile(family, level, parameters, nuisance)
        at, below = (cdf(found, parameters, nuisance).mean(1) for cdf in (family.cdf, family.cdf_below))
        if (at != below).any():  # counts
            assert (below < level).all() and (at >= level).all() and (found == found.round()).all()
        else:
            np.testing.assert_allclose(at, level, atol=1e-6)


# ---------------------------------------------------------------------- residuals


RESIDUALS = ("gaussian", HETEROSCEDASTIC, "poisson", "gamma", "bernoulli")


@pytest.mark.parametrize("name", RESIDUALS)
def test_squared_deviance_residuals_sum_to_the_deviance_and_pearsons_are_divided_by_deviations(name):
    model, y = fitted(name), TABLE.target(name)
    found, pearson = (model.residuals(TABLE.x, y, TABLE.clients, kind=kind) for kind in ("deviance", "pearson"))
    assert (found**2).mean() == pytest.approx(model.deviance(TABLE.x, y, TABLE.clients))
    predicted = (model.predict_proba if name == "bernoulli" else model.predict)(TABLE.x, TABLE.clients)
    mean = predicted[:, 1] if name == "bernoulli" else predicted
    np.testing.assert_array_equal(np.sign(found), np.sign(y - mean))
    of_mean = {"poisson": mean, "gamma": mean**2, "bernoulli": mean * (1 - mean)}.get(name, 1.0)
    dispersion = model.client_dispersion_.loc[TABLE.clients].to_numpy()
    assert (dispersion == model.dispersion_).all() == (name != HETEROSCEDASTIC)
    np.testing.assert_allclose(pearson, (y - mean) / np.sqrt(dispersion * of_mean), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", RESIDUALS)
def test_quantile_residuals_of_new_rows_are_standard_normal(name):
    """Half of the rows of every client are fitted, the others are judged."""
    random = np.random.default_rng(0)
    clients, x = np.repeat(np.arange(60), 60), random.normal(size=(3600, 1))
    eta = (random.dirichlet([0.5, 0.5], 60) @ [-1.0, 1.0])[clients] * x[:, 0]
    noise = np.exp(0.7 * random.normal(size=60))[clients]
    y = {
        "gaussian": lambda: eta + random.normal(size=len(eta)),
        HETEROSCEDASTIC: lambda: eta + noise * random.normal(size=len(eta)),
        "poisson": lambda: random.poisson(np.exp(eta)).astype(float),
        "gamma": lambda: random.gamma(2.0, np.exp(eta) / 2),
        "bernoulli": lambda: (random.random(len(eta)) < 1 / (1 + np.exp(-eta))).astype(float),
    }[name]()
    model = make_estimator(name).fit(x[::2], y[::2], clients=clients[::2])
    found = model.residuals(x[1::2], y[1::2], clients[1::2], kind="quantile")
    assert stats.kstest(found, "norm").pvalue > 0.01
    if name not in ("poisson", "bernoulli"):  # with other clients' memberships they are not; counts and bits say less
        wrong = model.residuals(x[1::2], y[1::2], clients[1::2][::-1], kind="quantile")
        assert stats.kstest(wrong, "norm").pvalue < 1e-3


def test_the_seed_decides_on_the_random_part_of_discrete_residuals():
    first, same, other = (
        fitted("poisson").residuals(TABLE.x, TABLE.counts, TABLE.clients, kind="quantile", seed=seed)
        for seed in (0, 0, 1)
    )
    np.testing.assert_array_equal(first, same)
    assert (first != other).all()


# ---------------------------------------------------------------------- refusals


NO_POSTERIOR = ("'profile'", "'marginal'")
REFUSED = {
    "errors of points": (lambda: fitted(solver="profile").conf_int(), *NO_POSTERIOR),
    "intervals of points": (lambda: fitted(solver="profile").membership_intervals(), *NO_POSTERIOR),
    "coefficients of points": (lambda: fitted(solver="profile").client_coef(3, interval=0.9), *NO_POSTERIOR),
    "predictions of points": (lambda: fitted(solver="profile").predict(TABLE.x, NEW, interval=0.9), *NO_POSTERIOR),
    "level in percent": (lambda: fitted().predict(TABLE.x, TABLE.clients, interval=90), "90"),
    "level of errors": (lambda: fitted().conf_int(95), "95"),
    "kind": (lambda: fitted().residuals(TABLE.x, TABLE.y, TABLE.clients, kind="raw"), "'raw'", "quantile"),
    "classes": (
        lambda: fitted("multinomial").residuals(TABLE.x, TABLE.target("multinomial"), TABLE.clients), "three or more",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_errors_or_residuals_says_why(name):
    call, *words = REFUSED[name]
    assert_refused(call, SettingError, *words)
