"""What statisticians ask of a fit: comparisons of models, marginal means, contrasts, and intervals with few clients."""

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from kit.refusals import DataError, SettingError, assert_refused
from kit.tables import penalized, regressor
from ppfl.glm import PopulationClassifier, PopulationRegressor, anova, contrasts, for_marginaleffects, marginal_means

RANDOM = np.random.default_rng(0)
SHOPS = pd.DataFrame({"shop": np.repeat(np.arange(24), 8), "price": RANDOM.normal(size=192)})
SHOPS["day"] = RANDOM.choice(["mo", "tu", "we"], 192)
SHOPS["big"] = np.where(SHOPS["shop"] % 2, "yes", "no")
SHOPS["sold"] = SHOPS["price"] + (SHOPS["day"] == "tu") + RANDOM.normal(size=24)[SHOPS["shop"]]
SHOPS["sold"] += RANDOM.normal(size=192)
SHOPS["open"] = np.where(SHOPS["sold"] + RANDOM.logistic(size=192) > 0, "yes", "no")
MIXED = {"k": 1, "residual": "intercept", "ridge": 0}


def fit(formula, estimator=PopulationRegressor, **settings):
    return estimator.from_formula(formula, SHOPS, **{**MIXED, **settings})


@pytest.fixture(scope="module")
def full():
    return fit("sold ~ price + day + big + (1 | shop)")


def test_contrasts_of_a_linear_model_are_its_coefficients(full):
    found, table = contrasts(full, SHOPS, "day"), full.conf_int()
    for name in ("tu", "we"):
        row = table.loc[("shared", f"day[T.{name}]")]
        wanted = row[["estimate", "std_error", "lower", "upper"]].to_numpy(dtype=float)
        columns = ["mean", "std_error", "lower", "upper"]
        np.testing.assert_allclose(found.loc[f"{name} - mo", columns].to_numpy(dtype=float), wanted, rtol=1e-6)
    z = found.loc["tu - mo", "mean"] / found.loc["tu - mo", "std_error"]
    assert found.loc["tu - mo", "p_value"] == pytest.approx(2 * stats.norm.sf(abs(z)))


def test_a_marginal_mean_is_the_mean_prediction_with_one_value_for_all(full):
    classes = fit("open ~ price + day + (1 | shop)", PopulationClassifier)
    for model, predict in ((full, full.predict), (classes, lambda x, who: classes.predict_proba(x, who)[:, 1])):
        found = marginal_means(model, SHOPS, "day")
        for day in ("mo", "tu", "we"):
            assert found.loc[day, "mean"] == pytest.approx(predict(SHOPS.assign(day=day), "new").mean(), abs=1e-6)
        assert (found["lower"] < found["mean"]).all() and (found["mean"] < found["upper"]).all()


def test_errors_of_marginal_means_are_those_of_the_delta_method():
    """By differences of a logistic regression, whose probabilities follow from its coefficients."""
    model = PopulationClassifier(k=1, ridge=0.0).fit(SHOPS[["price"]], SHOPS["open"])
    covariance = np.linalg.inv(_information(model))
    x = np.array([[1.0, 0.5]])

    def probability(beta):
        return 1 / (1 + np.exp(-(x @ beta)[0]))

    beta = np.r_[model.canonical_intercept_, model.canonical_coef_[0]]
    slope = np.array([(probability(beta + d) - probability(beta - d)) / 2e-6 for d in 1e-6 * np.eye(2)])
    found = marginal_means(model, SHOPS[["price"]], "price", values=[0.5])
    assert found["std_error"].iloc[0] == pytest.approx(np.sqrt(slope @ covariance @ slope), rel=1e-4)


def _information(model):
    design = np.c_[np.ones(len(SHOPS)), SHOPS["price"]]
    p = model.predict_proba(SHOPS[["price"]])[:, 1]
    return design.T @ (design * (p * (1 - p))[:, None])


def test_effects_between_clients_have_the_degrees_of_freedom_of_the_clients(full):
    table = full.conf_int()
    assert table.loc[("shared", "big[T.yes]"), "df"] == 22  # 24 shops less the intercept and this effect
    assert table.loc[("0", "intercept"), "df"] == 22
    assert np.isinf(table.loc[("shared", "price"), "df"])
    assert contrasts(full, SHOPS, "big")["df"].iloc[0] == 22
    row = table.loc[("shared", "big[T.yes]")]
    assert row["upper"] - row["estimate"] == pytest.approx(stats.t.ppf(0.975, 22) * row["std_error"])


def test_intervals_of_a_treatment_between_few_clients_cover():
    """24 clients of 8 rows; 95 % intervals should cover about as often."""
    hits, treated = [], np.repeat(np.arange(24) % 2, 8)
    for seed in range(60):
        random = np.random.default_rng(seed)
        clients, x = np.repeat(np.arange(24), 8), random.normal(size=192)
        y = x + random.normal(size=24)[clients] + random.normal(size=192)
        model = regressor(**MIXED).fit(np.c_[x, treated], y, clients=clients)
        row = model.conf_int(0.95).loc[("0", "x1")]
        hits.append(row["lower"] <= 0.0 <= row["upper"])
    assert np.mean(hits) >= 0.88  # two and a half standard errors below 95 %


def test_a_new_clients_interval_knows_that_the_variance_between_clients_is_an_estimate():
    random = np.random.default_rng(1)
    clients = np.repeat(np.arange(8), 20)
    y = 2 * random.normal(size=8)[clients] + random.normal(size=160)
    model = regressor(**MIXED).fit(np.zeros((160, 0)), y, clients=clients)
    between = model.conf_int().loc[("residual", "intercept"), "estimate"]
    error = model.conf_int().loc[("0", "intercept"), "std_error"]
    found = model.predict(np.zeros((1, 0)), "new", interval=0.95)
    known = 2 * stats.norm.ppf(0.975) * np.hypot(between, error)
    assert found["upper"].iloc[0] - found["lower"].iloc[0] > known


def test_nested_models_are_compared_by_likelihood_ratio(full):
    small = fit("sold ~ price + big + (1 | shop)")
    found = anova(full, small)
    assert found["n_parameters"].tolist() == [5, 7]
    chisq = 2 * (full.log_likelihood_ - small.log_likelihood_)
    assert found["chisq"].iloc[1] == pytest.approx(chisq) and found["p_value"].iloc[1] == pytest.approx(
        stats.chi2.sf(chisq, 2)
    )
    none = fit("sold ~ price + big + (1 | shop)", residual=None)
    assert "conservative" in anova(none, small)["note"].iloc[1] and not anova(small, full)["note"].iloc[1]


def test_what_cannot_be_compared_is_refused(full):
    for call, error, *words in (
        (lambda: anova(full), SettingError, "two or more"),
        (lambda: anova(full, fit("sold ~ price + (1 | shop)", ridge=1.0)), SettingError, "ridge = 0"),
        (lambda: anova(full, penalized()), SettingError, "penalty"),
        (lambda: anova(full, regressor(**MIXED).fit(np.zeros((9, 0)), np.arange(9.0), np.arange(9) % 3)), DataError),
        (lambda: marginal_means(full, SHOPS, "colour"), DataError, "'colour'", "'price'"),
        (lambda: marginal_means(full, SHOPS, "price"), SettingError, "values=[...]"),
        (lambda: contrasts(full, SHOPS, "day", values=["mo"]), DataError, "nothing to compare"),
    ):
        assert_refused(call, error, *(word.replace("'price'", "price") for word in words))


def test_the_package_marginaleffects_gives_the_same(full):
    marginaleffects = pytest.importorskip("marginaleffects")
    found = marginaleffects.avg_comparisons(for_marginaleffects(full, SHOPS), variables="day")
    ours = contrasts(full, SHOPS, "day").iloc[:2]
    np.testing.assert_allclose(found["estimate"], ours["mean"], rtol=1e-6)
    np.testing.assert_allclose(found["std_error"], ours["std_error"], rtol=1e-4)
