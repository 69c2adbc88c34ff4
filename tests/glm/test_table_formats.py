"""Column names, dtypes, row order and units of a table do not change a fit, except for its labels and units."""

import sys
from functools import cache

import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from sklearn.base import clone
from sklearn.metrics import mean_squared_error, r2_score

from kit.tables import choice, classifier, make_choice_table, make_client_table, regressor
from ppfl.glm.client_affinity import make_affinity
from ppfl.glm.client_ids import ClientCodes
from ppfl.glm.families import BernoulliFamily
from ppfl.glm.standardize import ColumnScaling, sort_by_client

TABLE = make_client_table()
TOL = 1e-7
# The objective is flattest in the distribution of memberships, with a curvature of 0.05 / n. A gradient of TOL leaves
# this much uncertainty there, and less in predictions. The points that stand for the integral depend a little on the
# way to the minimum, which adds the rest.
NEAR = TOL * len(TABLE.x) / 0.05 + 3e-3
EXACT = {"ridge": 0.0, "tol": TOL}
ESTIMATORS = {
    "gaussian": (regressor(**EXACT), TABLE.y),
    "heteroscedastic": (regressor(family="heteroscedastic gaussian", **EXACT), TABLE.y),
    "poisson": (regressor(family="poisson", **EXACT), TABLE.counts),
    "gamma": (regressor(family="gamma", mix="predictions", **EXACT), TABLE.amounts),
    "classes": (classifier(**EXACT), TABLE.labels),
}
every_family = pytest.mark.parametrize(("estimator", "y"), ESTIMATORS.values(), ids=ESTIMATORS)


def fitted(estimator, y, x=TABLE.x, clients=TABLE.clients, **given):
    return clone(estimator).fit(x, y, clients=clients, **given)


@cache
def plain_fit(estimator):
    """The fit to the unchanged table, cached for all tests."""
    return fitted(estimator, dict(ESTIMATORS.values())[estimator])


def means(model, x=TABLE.x, clients=TABLE.clients):
    return (model.predict_proba if hasattr(model, "classes_") else model.predict)(x, clients)


def assert_near(found, wanted):
    found, wanted = np.asarray(found), np.asarray(wanted)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=NEAR * max(1.0, np.abs(wanted).max()))


# ---------------------------------------------------------------------- names


FRAME = pd.DataFrame(TABLE.x, columns=["price", "age"])


def test_columns_keep_their_names():
    model = fitted(regressor(shared="age"), TABLE.y, FRAME)
    assert model.feature_names_in_.tolist() == ["price", "age"]
    np.testing.assert_allclose(*model.canonical_coef_[:, 1])  # shared by both canonical models
    assert np.ptp(model.canonical_coef_[:, 0]) > 1
    by_number = fitted(regressor(shared=[1]), TABLE.y)
    np.testing.assert_allclose(by_number.canonical_coef_, model.canonical_coef_)
    score = by_number.score(TABLE.x, TABLE.y, TABLE.clients)
    assert model.score(FRAME, TABLE.y, TABLE.clients) == pytest.approx(score)


@pytest.mark.parametrize(
    "as_ids",
    [
        lambda ids: ids,
        lambda ids: [f"shop {i}" for i in ids],
        lambda ids: pd.Series(ids, index=range(5, 5 + len(ids))),
        lambda ids: pd.Series(ids).astype("Int64"),
        lambda ids: pd.Series(ids).astype(str).astype("string"),
        lambda ids: pd.Categorical([f"shop {i}" for i in ids], categories=[f"shop {i}" for i in range(20, -1, -1)]),
        lambda ids: ids / 2,
        lambda ids: np.array([np.str_(f"shop {i}") if i % 2 else f"shop {i}" for i in ids], dtype=object),
    ],
    ids=["ints", "strings", "series", "Int64", "string dtype", "categories", "floats", "objects"],
)
def test_memberships_are_labelled_by_client_id(as_ids):
    ids = as_ids(TABLE.clients)
    estimator, y = ESTIMATORS["gaussian"]
    model, plain = fitted(estimator, y, clients=ids), plain_fit(estimator)
    assert model.memberships_.index.name == "client"
    assert set(model.memberships_.index) == set(ids)
    assert_near(means(model, clients=ids), means(plain))
    first = list(ids)[::10]  # one per client
    assert_near(model.memberships_.loc[first], plain.memberships_)
    assert_near(model.client_coef(first[3])[0], plain.client_coef(3)[0])


def test_without_pandas_memberships_are_an_array(monkeypatch):
    model = plain_fit(ESTIMATORS["gaussian"][0])
    named = model.memberships_
    monkeypatch.setitem(sys.modules, "pandas", None)
    np.testing.assert_array_equal(model.memberships_, named.to_numpy())


# ---------------------------------------------------------------------- storage


SPARSE = np.where(np.abs(TABLE.x) < 0.7, 0.0, TABLE.x)


@pytest.mark.parametrize("name", [name for name in ESTIMATORS if name != "heteroscedastic"])
def test_sparse_and_dense_tables_give_the_same_fit(name):
    estimator, y = ESTIMATORS[name]
    many_starts = clone(estimator).set_params(n_init=6)  # the starts differ, because sparse columns are not centred
    model = fitted(many_starts, y, sp.csr_array(SPARSE))
    assert_near(means(model, sp.csr_array(SPARSE)), means(fitted(many_starts, y, SPARSE), SPARSE))
    np.testing.assert_allclose(means(model, SPARSE), means(model, sp.csr_array(SPARSE)))


def test_all_sparse_formats_give_the_same_fit():
    wanted = means(fitted(regressor(tol=1e-3), TABLE.y, sp.csr_array(SPARSE)), SPARSE)
    for stored in (sp.csr_matrix, sp.csc_matrix, sp.csc_array, sp.coo_array):
        np.testing.assert_array_equal(means(fitted(regressor(tol=1e-3), TABLE.y, stored(SPARSE)), SPARSE), wanted)


@every_family
def test_single_precision_is_converted_to_double(estimator, y):
    x = TABLE.x.astype(np.float32)
    model, wanted = fitted(estimator, y, x), fitted(estimator, y, x.astype(np.float64))
    np.testing.assert_array_equal(means(model, x), means(wanted, x.astype(np.float64)))
    assert means(model, x).dtype == np.float64


@every_family
def test_the_order_of_rows_does_not_matter(estimator, y):
    order = np.random.default_rng(2).permutation(len(y))
    model = fitted(estimator, y[order], TABLE.x[order], TABLE.clients[order])
    assert_near(means(model), means(plain_fit(estimator)))


@every_family
def test_the_order_of_client_ids_does_not_matter(estimator, y):
    names = np.random.default_rng(3).permutation(100)[TABLE.clients]
    model, plain = fitted(estimator, y, clients=names), plain_fit(estimator)
    assert_near(means(model, clients=names), means(plain))
    assert model.log_likelihood_ == pytest.approx(plain.log_likelihood_, abs=NEAR)


@every_family
def test_a_weight_is_like_repeating_the_row(estimator, y):
    times = np.random.default_rng(4).integers(0, 4, len(y))
    many_starts = clone(estimator).set_params(n_init=6)  # the starts differ, because they see repeated rows
    weighted = fitted(many_starts, y, sample_weight=times)
    repeated = fitted(many_starts, y.repeat(times), TABLE.x.repeat(times, 0), TABLE.clients.repeat(times))
    assert_near(means(weighted), means(repeated))
    assert weighted.log_likelihood_ == pytest.approx(repeated.log_likelihood_, abs=NEAR)
    many = (TABLE.x.repeat(times, 0), y.repeat(times), TABLE.clients.repeat(times))
    for method in ("score", "deviance"):
        on_weights = getattr(weighted, method)(TABLE.x, y, TABLE.clients, times)
        assert on_weights == pytest.approx(getattr(weighted, method)(*many))
    fresh = many[2] + 100
    once = weighted.onboard(TABLE.x, y, TABLE.clients + 200, sample_weight=times)
    assert_near(once, weighted.onboard(many[0], many[1], fresh))


@pytest.mark.parametrize("name", ["labels", "features"])
def test_named_affinities_use_sample_weights(name):
    def degrees(x, y, clients, weight):
        codes = ClientCodes.of(clients, len(x))
        scaling = ColumnScaling.of(x, weight, ["a", "b"], None, intercept=True)
        return make_affinity(
            codes.ids, name, sort_by_client(scaling, x, y, weight, codes, BernoulliFamily(), "weights")
        ).degree

    times = np.random.default_rng(5).integers(0, 4, len(TABLE.labels))
    everything = TABLE.x, TABLE.labels, TABLE.clients
    repeated = degrees(*(column.repeat(times, 0) for column in everything), np.ones(times.sum()))
    np.testing.assert_allclose(degrees(*everything, times.astype(float)), repeated)


# ---------------------------------------------------------------------- units


@every_family
def test_units_of_a_column_change_only_its_coefficient(estimator, y):
    factor, shift = np.array([1e-14, 1e5]), np.array([0.0, 3e5])
    plain, model = plain_fit(estimator), fitted(estimator, y, TABLE.x * factor + shift)
    assert_near(model.canonical_coef_ * factor, plain.canonical_coef_)
    assert_near(means(model, TABLE.x * factor + shift), means(plain))
    assert model.log_likelihood_ == pytest.approx(plain.log_likelihood_, abs=NEAR)


def test_units_of_y_scale_all_coefficients():
    plain = fitted(regressor(), TABLE.y)  # with the default ridge, which does not depend on units
    model = fitted(regressor(), 1e4 * TABLE.y - 3e5)
    np.testing.assert_allclose(model.canonical_coef_, 1e4 * plain.canonical_coef_, rtol=1e-3)
    np.testing.assert_allclose(means(model), 1e4 * means(plain) - 3e5, atol=1.0)
    assert model.log_likelihood_ == pytest.approx(plain.log_likelihood_ - len(TABLE.y) * np.log(1e4), abs=1e-3)


def test_one_gaussian_model_has_the_likelihood_of_least_squares():
    model = regressor(**{**EXACT, "k": 1}).fit(TABLE.x, TABLE.y)
    design = np.c_[TABLE.x, np.ones(len(TABLE.x))]
    residual = TABLE.y - design @ np.linalg.lstsq(design, TABLE.y)[0]
    by_hand = -len(residual) / 2 * (np.log(2 * np.pi * (residual**2).mean()) + 1)
    assert model.log_likelihood_ == pytest.approx(by_hand)


def test_the_gaussian_score_is_r_squared():
    model = fitted(regressor(), TABLE.y)
    predicted = model.predict(TABLE.x, TABLE.clients)
    assert model.score(TABLE.x, TABLE.y, TABLE.clients) == pytest.approx(r2_score(TABLE.y, predicted))
    assert model.deviance(TABLE.x, TABLE.y, TABLE.clients) == pytest.approx(mean_squared_error(TABLE.y, predicted))


# ---------------------------------------------------------------------- unknown clients


@pytest.mark.parametrize("estimator", dict(ESTIMATORS.values()), ids=ESTIMATORS)
def test_unknown_clients_are_predicted_the_same_among_known_ones(estimator):
    model, some = plain_fit(estimator), TABLE.x[:7]
    unknown = means(model, some, np.full(7, 99))
    np.testing.assert_array_equal(means(model, some, "new"), unknown)
    mixed = means(model, some, np.array([3, 99, 3, 99, 3, 99, 3]))
    np.testing.assert_allclose(mixed[::2], means(model, some[::2], np.full(4, 3)))
    np.testing.assert_allclose(mixed[1::2], unknown[1::2])


def test_order_and_ids_of_a_choice_table_do_not_matter():
    table = make_choice_table()
    model = choice(tol=TOL).fit(table.x, table.y, table.situations, table.clients)
    order = np.random.default_rng(6).permutation(len(table.y))
    names = pd.Series([f"visit {s}" for s in table.situations])[order]
    frame = pd.DataFrame(table.x, columns=["price", "time"]).iloc[order]
    other = choice(tol=TOL).fit(frame, table.y[order] == 1, names, pd.Series(table.clients[order]).astype(str))
    assert_near(other.canonical_coef_, model.canonical_coef_)
    probability = model.predict_proba(table.x, table.situations, table.clients)
    assert_near(other.predict_proba(frame, names, table.clients[order].astype(str)), probability[order])
    np.testing.assert_allclose(np.bincount(table.situations, probability), 1)
