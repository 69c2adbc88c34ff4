"""Client ids, dtypes, row order and units of a table do not change a fit, except for its labels and units."""

import numpy as np
import pandas as pd
import pytest
from sklearn.metrics import mean_squared_error, r2_score

from kit.refusals import DataError, assert_refused
from kit.tables import choice, fitted, make_choice_table, make_client_table, make_estimator, regressor
from ppfl.glm.columns import PrecisionWarning

TABLE = make_client_table()
CHOICES = make_choice_table()
GIVEN = {"clients": TABLE.clients}
TOL = 1e-7
EXACT = {"ridge": 0.0, "tol": TOL}
# The objective is flattest in the distribution of memberships, with a curvature of 0.05 / n, where a gradient of TOL
# leaves this much uncertainty. The points that stand for the integral depend on the way to the minimum: the rest.
NEAR = TOL * len(TABLE.x) / 0.05 + 3e-3
WEIGHTED = [("gaussian", {}), ("bernoulli", {}), ("gaussian", {"residual": "intercept"})]


def means(model, x=TABLE.x, clients=TABLE.clients):
    return (model.predict_proba if hasattr(model, "classes_") else model.predict)(x, clients)


def assert_near(found, wanted):
    np.testing.assert_allclose(found, wanted, rtol=0, atol=NEAR * max(1.0, np.abs(np.asarray(wanted)).max()))


@pytest.mark.parametrize(
    "ids",
    [
        pd.Series(TABLE.clients, index=range(5, 125)).astype("Int64"),
        pd.Categorical([f"shop {i}" for i in TABLE.clients], [f"shop {i}" for i in range(20, -1, -1)]),
        np.random.default_rng(3).permutation(100)[TABLE.clients].astype(float),
    ],
)
def test_memberships_are_labelled_by_client_id(ids):
    plain, model = fitted(**EXACT), regressor(**EXACT).fit(TABLE.x, TABLE.y, clients=ids)
    assert set(model.memberships_.index) == set(ids)
    assert_near(means(model, clients=ids), means(plain))
    first = list(ids)[::10]  # one per client
    assert_near(model.memberships_.loc[first], plain.memberships_)


@pytest.mark.parametrize("family", ["gaussian", "bernoulli"])
def test_storage_precision_and_order_of_rows_do_not_matter(family):
    y, order = TABLE.target(family), np.random.default_rng(2).permutation(len(TABLE.x))
    single = TABLE.x.astype(np.float32)
    x = single.astype(np.float64)

    def fit(x, rows=slice(None)):
        return make_estimator(family, **EXACT).fit(x[rows], y[rows], clients=TABLE.clients[rows])

    wanted = means(fit(x), x)
    np.testing.assert_array_equal(means(fit(single), single), wanted)
    assert_near(means(fit(x, order), x), wanted)


@pytest.mark.parametrize(("family", "settings"), WEIGHTED)
def test_a_weight_is_like_repeating_the_row(family, settings):
    y, times = TABLE.target(family), np.random.default_rng(4).integers(0, 4, len(TABLE.x))
    estimator = {**EXACT, "n_init": 6, **settings}  # the starts differ, because they see repeated rows
    weighted = make_estimator(family, **estimator).fit(TABLE.x, y, **GIVEN, sample_weight=times)
    many = TABLE.x.repeat(times, 0), y.repeat(times), TABLE.clients.repeat(times)
    repeated = make_estimator(family, **estimator).fit(*many[:2], clients=many[2])
    assert_near(means(weighted), means(repeated))
    assert weighted.log_likelihood_ == pytest.approx(repeated.log_likelihood_, abs=NEAR)
    for method in (weighted.score, weighted.deviance):
        assert method(TABLE.x, y, TABLE.clients, times) == pytest.approx(method(*many))
    once = weighted.onboard(TABLE.x, y, TABLE.clients + 200, sample_weight=times)
    assert_near(once, weighted.onboard(*many[:2], many[2] + 100))


def test_the_gaussian_score_is_r_squared():
    given = TABLE.x, TABLE.y, TABLE.clients
    assert fitted().score(*given) == pytest.approx(r2_score(TABLE.y, means(fitted())))
    assert fitted().deviance(*given) == pytest.approx(mean_squared_error(TABLE.y, means(fitted())))


def test_unknown_clients_are_predicted_the_same_among_known_ones():
    model, known = fitted("bernoulli", **EXACT), np.arange(len(TABLE.x)) % 2 == 0
    mixed = means(model, clients=np.where(known, TABLE.clients, 99))
    np.testing.assert_allclose(mixed, np.where(known[:, None], means(model), means(model, clients="new")))


def test_order_and_ids_of_a_choice_table_do_not_matter():
    order = np.random.default_rng(6).permutation(len(CHOICES.y))
    situations = pd.Series([f"visit {s}" for s in CHOICES.situations])[order]
    frame, clients = pd.DataFrame(CHOICES.x).add_prefix("x").iloc[order], pd.Series(CHOICES.clients[order].astype(str))
    other = choice(tol=TOL).fit(frame, CHOICES.y[order] == 1, situations, clients)
    probability = choice(tol=TOL).fit(*CHOICES).predict_proba(CHOICES.x, *CHOICES[2:])
    assert_near(other.predict_proba(frame, situations, clients), probability[order])


@pytest.mark.parametrize("family", ["gaussian", "bernoulli"])
def test_units_of_a_column_change_only_its_coefficient(family):
    factor, shift = np.array([1e-14, 1e5]), np.array([0.0, 3e5])
    moved, plain = TABLE.x * factor + shift, fitted(family, **EXACT)
    model = make_estimator(family, **EXACT).fit(moved, TABLE.target(family), **GIVEN)
    assert_near(model.canonical_coef_ * factor, plain.canonical_coef_)
    assert_near(means(model, moved), means(plain))
    assert model.log_likelihood_ == pytest.approx(plain.log_likelihood_, abs=NEAR)


@pytest.mark.parametrize(("scale", "shift"), [(1e-60, 0.0), (1e4, -3e5)])
def test_units_of_y_scale_all_coefficients(scale, shift):
    plain, y = fitted(), scale * TABLE.y + shift
    model = regressor().fit(TABLE.x, y, **GIVEN)
    np.testing.assert_allclose(model.canonical_coef_, scale * plain.canonical_coef_, rtol=1e-3)
    np.testing.assert_allclose(means(model), scale * means(plain) + shift, atol=1e-4 * scale)
    assert model.log_likelihood_ == pytest.approx(plain.log_likelihood_ - len(y) * np.log(scale), abs=1e-2)


def test_a_column_may_be_far_from_zero():
    far = regressor().fit(TABLE.x + [1e9, 0.0], TABLE.y, **GIVEN)
    np.testing.assert_allclose(far.canonical_coef_, fitted().canonical_coef_, atol=1e-4)
    with pytest.warns(PrecisionWarning, match="column 'x0'"):
        farther = regressor().fit(TABLE.x + [1e13, 0.0], TABLE.y, **GIVEN)
    np.testing.assert_allclose(farther.canonical_coef_, fitted().canonical_coef_, atol=1e-3)  # 1e13 is rounded to 0.002
    with pytest.warns(PrecisionWarning, match="column 'x2' .*coefficient is set to 0"):
        model = regressor().fit(np.c_[TABLE.x, np.resize([0.3, 0.1 + 0.2], len(TABLE.y))], TABLE.y, **GIVEN)
    assert (model.canonical_coef_[:, 2] == 0).all()


def test_with_a_log_link_the_intercept_takes_up_the_scale_of_y():
    before, after = (regressor(family="gamma").fit(TABLE.x, scale * TABLE.amounts, **GIVEN) for scale in (1.0, 1e-9))
    np.testing.assert_allclose(after.canonical_coef_, before.canonical_coef_, atol=1e-3)
    np.testing.assert_allclose(means(after), 1e-9 * means(before), rtol=2e-3)


@pytest.mark.parametrize(
    ("family", "x", "y", "words"),
    [
        ("gaussian", TABLE.x, TABLE.y * 1e-200, ("'y'", "1e+200")),
        ("gaussian", TABLE.x * [1e300, 1.0], TABLE.y, ("'x0'", "1e+300")),
        ("bernoulli", TABLE.x * [1e-200, 1.0], TABLE.labels, ("'x0'", "varies")),
        ("gamma", TABLE.x, TABLE.amounts * 1e20, ("divide it",)),
    ],
)
def test_numbers_whose_squares_overflow_or_vanish_are_refused(family, x, y, words):
    assert_refused(lambda: make_estimator(family).fit(x, y, **GIVEN), DataError, *words)
