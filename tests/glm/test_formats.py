"""Column names, dtypes, row order and units of a table do not change a fit, except for its labels and units."""

import sys

import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from sklearn.metrics import mean_squared_error, r2_score

from kit.refusals import DataError, assert_refused
from kit.tables import HETEROSCEDASTIC, choice, fitted, make_choice_table, make_client_table, make_estimator, regressor
from ppfl.glm.client_affinity import make_affinity
from ppfl.glm.client_ids import ClientCodes
from ppfl.glm.column_spread import PrecisionWarning
from ppfl.glm.families import BernoulliFamily
from ppfl.glm.standardize import ColumnScaling, sort_by_client
from ppfl.glm.table import TableSettings, fit_table

TABLE = make_client_table()
CHOICES = make_choice_table()
GIVEN = {"clients": TABLE.clients}
TOL = 1e-7
EXACT = {"ridge": 0.0, "tol": TOL}
# The objective is flattest in the distribution of memberships, with a curvature of 0.05 / n. A gradient of TOL leaves
# this much uncertainty there, and less in predictions. The points that stand for the integral depend a little on the
# way to the minimum, which adds the rest.
NEAR = TOL * len(TABLE.x) / 0.05 + 3e-3
every_family = pytest.mark.parametrize("family", [HETEROSCEDASTIC, "poisson", "bernoulli"])


def means(model, x=TABLE.x, clients=TABLE.clients):
    return (model.predict_proba if hasattr(model, "classes_") else model.predict)(x, clients)


def assert_near(found, wanted):
    found, wanted = np.asarray(found), np.asarray(wanted)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=NEAR * max(1.0, np.abs(wanted).max()))


# ---------------------------------------------------------------------- names and storage


def test_columns_keep_their_names():
    frame = pd.DataFrame(TABLE.x, columns=["price", "age"])
    model = regressor(shared="age").fit(frame, TABLE.y, **GIVEN)
    assert model.feature_names_in_.tolist() == ["price", "age"]
    assert np.ptp(model.canonical_coef_[:, 1]) == 0 and np.ptp(model.canonical_coef_[:, 0]) > 1
    by_number = regressor(shared=[1]).fit(TABLE.x, TABLE.y, **GIVEN)
    np.testing.assert_allclose(by_number.canonical_coef_, model.canonical_coef_)
    score = by_number.score(TABLE.x, TABLE.y, TABLE.clients)
    assert model.score(frame, TABLE.y, TABLE.clients) == pytest.approx(score)


IDS = {
    "strings": lambda ids: [f"shop {i}" for i in ids],
    "series": lambda ids: pd.Series(ids, index=range(5, 5 + len(ids))),
    "Int64": lambda ids: pd.Series(ids).astype("Int64"),
    "string dtype": lambda ids: pd.Series(ids).astype(str).astype("string"),
    "categories": lambda ids: pd.Categorical([f"shop {i}" for i in ids], [f"shop {i}" for i in range(20, -1, -1)]),
    "floats": lambda ids: ids / 2,
    "objects": lambda ids: np.array([np.str_(f"shop {i}") if i % 2 else f"shop {i}" for i in ids], dtype=object),
    "any order": lambda ids: np.random.default_rng(3).permutation(100)[ids],
}


@pytest.mark.parametrize("kind", IDS)
def test_memberships_are_labelled_by_client_id(kind):
    ids, plain = IDS[kind](TABLE.clients), fitted(**EXACT)
    model = regressor(**EXACT).fit(TABLE.x, TABLE.y, clients=ids)
    assert model.memberships_.index.name == "client"
    assert set(model.memberships_.index) == set(ids)
    assert_near(means(model, clients=ids), means(plain))
    first = list(ids)[::10]  # one per client
    assert_near(model.memberships_.loc[first], plain.memberships_)
    assert_near(model.client_coef(first[3])[0], plain.client_coef(3)[0])


def test_without_pandas_memberships_are_an_array(monkeypatch):
    named = fitted().memberships_
    monkeypatch.setitem(sys.modules, "pandas", None)
    np.testing.assert_array_equal(fitted().memberships_, named.to_numpy())


SPARSE = np.where(np.abs(TABLE.x) < 0.7, 0.0, TABLE.x)


@pytest.mark.parametrize("family", ["gaussian", "poisson", "bernoulli"])
def test_sparse_and_dense_tables_give_the_same_fit(family):
    many_starts = {**EXACT, "n_init": 6}  # the starts differ, because sparse columns are not centred
    sparse, dense = (
        make_estimator(family, **many_starts).fit(x, TABLE.target(family), **GIVEN)
        for x in (sp.csr_array(SPARSE), SPARSE)
    )
    assert_near(means(sparse, sp.csr_array(SPARSE)), means(dense, SPARSE))
    np.testing.assert_allclose(means(sparse, SPARSE), means(sparse, sp.csr_array(SPARSE)))


@every_family
def test_precision_and_order_of_rows_do_not_matter(family):
    y, order = TABLE.target(family), np.random.default_rng(2).permutation(len(TABLE.x))
    single = TABLE.x.astype(np.float32)
    model, wanted = (make_estimator(family).fit(x, y, **GIVEN) for x in (single, single.astype(np.float64)))
    np.testing.assert_array_equal(means(model, single), means(wanted, single.astype(np.float64)))
    assert means(model, single).dtype == np.float64
    model = make_estimator(family, **EXACT).fit(TABLE.x[order], y[order], clients=TABLE.clients[order])
    assert_near(means(model), means(fitted(family, **EXACT)))


@every_family
def test_a_weight_is_like_repeating_the_row(family):
    y, times = TABLE.target(family), np.random.default_rng(4).integers(0, 4, len(TABLE.x))
    estimator = {**EXACT, "n_init": 6}  # the starts differ, because they see repeated rows
    weighted = make_estimator(family, **estimator).fit(TABLE.x, y, **GIVEN, sample_weight=times)
    many = TABLE.x.repeat(times, 0), y.repeat(times), TABLE.clients.repeat(times)
    repeated = make_estimator(family, **estimator).fit(*many[:2], clients=many[2])
    assert_near(means(weighted), means(repeated))
    assert weighted.log_likelihood_ == pytest.approx(repeated.log_likelihood_, abs=NEAR)
    for method in (weighted.score, weighted.deviance):
        assert method(TABLE.x, y, TABLE.clients, times) == pytest.approx(method(*many))
    once = weighted.onboard(TABLE.x, y, TABLE.clients + 200, sample_weight=times)
    assert_near(once, weighted.onboard(*many[:2], many[2] + 100))


@pytest.mark.parametrize("name", ["labels", "features"])
def test_named_affinities_use_sample_weights(name):
    def degrees(x, y, clients, weight):
        codes = ClientCodes.of(clients, len(x))
        scaling = ColumnScaling.of(x, weight, ["a", "b"], None, intercept=True)
        rows = sort_by_client(scaling, x, y, weight, codes, BernoulliFamily(), "weights")
        return make_affinity(codes.ids, name, rows).degree

    times = np.random.default_rng(5).integers(0, 4, len(TABLE.labels))
    everything = TABLE.x, TABLE.labels, TABLE.clients
    repeated = degrees(*(column.repeat(times, 0) for column in everything), np.ones(times.sum()))
    np.testing.assert_allclose(degrees(*everything, times.astype(float)), repeated)


def test_the_gaussian_score_is_r_squared():
    given = TABLE.x, TABLE.y, TABLE.clients
    assert fitted().score(*given) == pytest.approx(r2_score(TABLE.y, means(fitted())))
    assert fitted().deviance(*given) == pytest.approx(mean_squared_error(TABLE.y, means(fitted())))


@every_family
def test_unknown_clients_are_predicted_the_same_among_known_ones(family):
    model, some = fitted(family, **EXACT), TABLE.x[:7]
    unknown = means(model, some, np.full(7, 99))
    np.testing.assert_array_equal(means(model, some, "new"), unknown)
    mixed = means(model, some, np.array([3, 99, 3, 99, 3, 99, 3]))
    np.testing.assert_allclose(mixed[::2], means(model, some[::2], np.full(4, 3)))
    np.testing.assert_allclose(mixed[1::2], unknown[1::2])


def test_order_and_ids_of_a_choice_table_do_not_matter():
    model = choice(tol=TOL).fit(*CHOICES)
    order = np.random.default_rng(6).permutation(len(CHOICES.y))
    names = pd.Series([f"visit {s}" for s in CHOICES.situations])[order]
    frame = pd.DataFrame(CHOICES.x, columns=["price", "time"]).iloc[order]
    clients = CHOICES.clients[order].astype(str)
    other = choice(tol=TOL).fit(frame, CHOICES.y[order] == 1, names, pd.Series(clients))
    assert_near(other.canonical_coef_, model.canonical_coef_)
    probability = model.predict_proba(CHOICES.x, CHOICES.situations, CHOICES.clients)
    assert_near(other.predict_proba(frame, names, clients), probability[order])
    np.testing.assert_allclose(np.bincount(CHOICES.situations, probability), 1)


# ---------------------------------------------------------------------- units


@every_family
def test_units_of_a_column_change_only_its_coefficient(family):
    factor, shift = np.array([1e-14, 1e5]), np.array([0.0, 3e5])
    moved, plain = TABLE.x * factor + shift, fitted(family, **EXACT)
    model = make_estimator(family, **EXACT).fit(moved, TABLE.target(family), **GIVEN)
    assert_near(model.canonical_coef_ * factor, plain.canonical_coef_)
    assert_near(means(model, moved), means(plain))
    assert model.log_likelihood_ == pytest.approx(plain.log_likelihood_, abs=NEAR)


@pytest.mark.parametrize(("scale", "shift"), [(1e-60, 0.0), (1e60, 0.0), (1e4, -3e5)])
def test_units_of_y_scale_all_coefficients(scale, shift):
    """With the default ridge, which does not depend on units."""
    plain, y = fitted(), scale * TABLE.y + shift
    model = regressor().fit(TABLE.x, y, **GIVEN)
    np.testing.assert_allclose(model.canonical_coef_, scale * plain.canonical_coef_, rtol=1e-3)
    np.testing.assert_allclose(means(model), scale * means(plain) + shift, atol=1e-4 * scale)
    np.testing.assert_allclose(model.memberships_, plain.memberships_, atol=1e-4)
    assert model.score(TABLE.x, y, TABLE.clients) == pytest.approx(plain.score(TABLE.x, TABLE.y, TABLE.clients))
    assert model.log_likelihood_ == pytest.approx(plain.log_likelihood_ - len(y) * np.log(scale), abs=1e-2)


def test_scaling_a_column_scales_its_coefficient():
    units = np.array([1e-60, 1e60])
    before, after = (regressor().fit(sp.csr_array(TABLE.x * each), TABLE.y, **GIVEN) for each in (1.0, units))
    np.testing.assert_allclose(after.canonical_coef_ * units, before.canonical_coef_, rtol=1e-6)


def test_shifting_a_column_changes_the_intercept_alone():
    """Floating-point numbers near 1e13 are 0.002 apart, so that is how exact the slopes can be."""
    model = regressor().fit(TABLE.x + [1e9, 0.0], TABLE.y, **GIVEN)
    np.testing.assert_allclose(model.canonical_coef_, fitted().canonical_coef_, atol=1e-6)
    np.testing.assert_allclose(means(model, TABLE.x + [1e9, 0.0]), means(fitted()), atol=1e-5)
    with pytest.warns(PrecisionWarning, match="column 'x0'"):
        model = regressor().fit(TABLE.x + [1e13, 0.0], TABLE.y, **GIVEN)
    np.testing.assert_allclose(model.canonical_coef_, fitted().canonical_coef_, atol=1e-3)


@pytest.mark.parametrize("settings", [{"link": "log"}, {"family": "gamma"}])
def test_with_a_log_link_the_intercept_takes_up_the_scale_of_y(settings):
    before, after = (regressor(**settings).fit(TABLE.x, scale * TABLE.amounts, **GIVEN) for scale in (1.0, 1e-9))
    np.testing.assert_allclose(after.canonical_coef_, before.canonical_coef_, atol=1e-5)
    np.testing.assert_allclose(means(after), 1e-9 * means(before), rtol=1e-4)
    shift = len(TABLE.y) * np.log(1e-9)  # of the density
    assert after.log_likelihood_ == pytest.approx(before.log_likelihood_ - shift, abs=1e-3)  # the integral's error


def test_a_column_that_differs_by_rounding_errors_has_coefficient_zero_and_a_warning():
    noise = np.where(np.arange(len(TABLE.y)) % 2, 0.3, 0.1 + 0.2)
    with pytest.warns(PrecisionWarning, match="column 'x2' .*coefficient is set to 0"):
        model = regressor().fit(np.c_[TABLE.x, noise], TABLE.y, **GIVEN)
    assert (model.canonical_coef_[:, 2] == 0).all()


def fit_scaled(family: str = "gaussian", x: float = 1.0, y: float = 1.0, kind=np.asarray):
    return make_estimator(family).fit(kind(TABLE.x * [x, 1.0]), TABLE.target(family) * y, **GIVEN)


def fit_named(column: str, size: float):
    random = np.random.default_rng(0)
    frame = pd.DataFrame({"who": ["a", "b"] * 20, "x": random.normal(size=40), "y": random.gamma(2.0, size=40)})
    frame[column] *= size
    return fit_table(frame, TableSettings("who", "y", "gamma", ks=(1,)))


REFUSED = {
    "tiny y": (lambda: fit_scaled(y=1e-200), "'y'", "1e+200"),
    "huge y": (lambda: fit_scaled(y=1e160), "'y'", "1e+160"),
    "huge x": (lambda: fit_scaled(x=1e300), "'x0'", "1e+300"),
    "tiny x": (lambda: fit_scaled(x=1e-200), "'x0'", "varies"),
    "huge sparse x": (lambda: fit_scaled(x=1e300, kind=sp.csr_array), "'x0'", "1e+300"),
    "tiny sparse x": (lambda: fit_scaled(x=1e-200, kind=sp.csr_array), "'x0'", "varies"),
    "huge x of classes": (lambda: fit_scaled("bernoulli", x=1e300), "'x0'"),
    "huge x of choices": (lambda: choice().fit(CHOICES.x * [1e300, 1.0], *CHOICES[1:]), "'x0'"),
    "no exponential is so large": (lambda: fit_scaled("gamma", y=1e20), "divide it"),
    "sparse and shifted": (
        lambda: regressor().fit(sp.csr_array(TABLE.x + [1e9, 0.0]), TABLE.y, **GIVEN),
        "'x0'",
        "dense",
    ),
    "tiny column": (lambda: fit_named("x", 1e-300), "'x'", "unit"),
    "huge column": (lambda: fit_named("x", 1e150), "'x'", "unit"),
    "huge target": (lambda: fit_named("y", 1e300), "'y'", "unit"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_numbers_whose_squares_overflow_or_vanish_are_refused(name):
    call, *words = REFUSED[name]
    assert_refused(call, DataError, *words)
