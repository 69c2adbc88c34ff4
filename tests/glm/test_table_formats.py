"""A table is what it says, not how it is stored: names, dtypes, order and units change nothing but labels and units."""

import sys
from functools import cache

import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from sklearn.base import clone
from sklearn.metrics import mean_squared_error, r2_score

from client_tables import choice, classifier, make_choice_table, make_client_table, regressor
from ppfl.glm.client_affinity import make_affinity
from ppfl.glm.client_ids import ClientCodes
from ppfl.glm.estimator import sort_by_client
from ppfl.glm.families import BernoulliFamily
from ppfl.glm.standardize import ColumnScaling

TABLE = make_client_table()
TOL = 1e-7
# What is least held is the distribution of memberships, with a curvature of 0.05 / n; a gradient of TOL leaves it
# uncertain by this much, and predictions by less.
NEAR = TOL * len(TABLE.x) / 0.05
EXACT = {"ridge": 0.0, "tol": TOL}
ESTIMATORS = {
    "gaussian": (regressor(**EXACT), TABLE.y),
    "poisson": (regressor(family="poisson", **EXACT), TABLE.counts),
    "gamma": (regressor(family="gamma", mix="predictions", **EXACT), TABLE.amounts),
    "classes": (classifier(**EXACT), TABLE.labels),
}
every_family = pytest.mark.parametrize(("estimator", "y"), ESTIMATORS.values(), ids=ESTIMATORS)


def fitted(estimator, y, x=TABLE.x, clients=TABLE.clients, **given):
    return clone(estimator).fit(x, y, clients=clients, **given)


@cache
def plain_fit(estimator):
    """To the table as it is, once for all tests."""
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
def test_memberships_go_by_client_id(as_ids):
    ids = as_ids(TABLE.clients)
    estimator, y = ESTIMATORS["gaussian"]
    model, plain = fitted(estimator, y, clients=ids), plain_fit(estimator)
    assert model.memberships_.index.name == "client"
    assert set(model.memberships_.index) == set(ids)
    assert_near(means(model, clients=ids), means(plain))
    first = list(ids)[::10]  # a client a row
    assert_near(model.memberships_.loc[first], plain.memberships_)
    assert_near(model.client_coef(first[3])[0], plain.client_coef(3)[0])


def test_without_pandas_memberships_are_rows(monkeypatch):
    model = plain_fit(ESTIMATORS["gaussian"][0])
    named = model.memberships_
    monkeypatch.setitem(sys.modules, "pandas", None)
    np.testing.assert_array_equal(model.memberships_, named.to_numpy())


# ---------------------------------------------------------------------- storage


SPARSE = np.where(np.abs(TABLE.x) < 0.7, 0.0, TABLE.x)


@every_family
def test_a_sparse_table_is_the_same_table(estimator, y):
    many_starts = clone(estimator).set_params(n_init=6)  # they differ, as columns are not centred
    model = fitted(many_starts, y, sp.csr_array(SPARSE))
    assert_near(means(model, sp.csr_array(SPARSE)), means(fitted(many_starts, y, SPARSE), SPARSE))
    np.testing.assert_allclose(means(model, SPARSE), means(model, sp.csr_array(SPARSE)))


def test_all_sparse_formats_are_one():
    wanted = means(fitted(regressor(tol=1e-3), TABLE.y, sp.csr_array(SPARSE)), SPARSE)
    for stored in (sp.csr_matrix, sp.csc_matrix, sp.csc_array, sp.coo_array):
        np.testing.assert_array_equal(means(fitted(regressor(tol=1e-3), TABLE.y, stored(SPARSE)), SPARSE), wanted)


@every_family
def test_single_precision_is_read_as_it_is(estimator, y):
    x = TABLE.x.astype(np.float32)
    model, wanted = fitted(estimator, y, x), fitted(estimator, y, x.astype(np.float64))
    np.testing.assert_array_equal(means(model, x), means(wanted, x.astype(np.float64)))
    assert means(model, x).dtype == np.float64


@every_family
def test_rows_come_in_any_order(estimator, y):
    order = np.random.default_rng(2).permutation(len(y))
    model = fitted(estimator, y[order], TABLE.x[order], TABLE.clients[order])
    assert_near(means(model), means(plain_fit(estimator)))


@every_family
def test_client_names_mean_nothing(estimator, y):
    names = np.random.default_rng(3).permutation(100)[TABLE.clients]
    model, plain = fitted(estimator, y, clients=names), plain_fit(estimator)
    assert_near(means(model, clients=names), means(plain))
    assert model.log_likelihood_ == pytest.approx(plain.log_likelihood_, abs=NEAR)


@every_family
def test_a_weight_is_a_number_of_rows(estimator, y):
    times = np.random.default_rng(4).integers(0, 4, len(y))
    many_starts = clone(estimator).set_params(n_init=6)  # they differ, as the same rows are counted otherwise
    weighted = fitted(many_starts, y, sample_weight=times)
    repeated = fitted(many_starts, y.repeat(times), TABLE.x.repeat(times, 0), TABLE.clients.repeat(times))
    assert_near(means(weighted), means(repeated))
    assert weighted.log_likelihood_ == pytest.approx(repeated.log_likelihood_, abs=NEAR)
    many = (TABLE.x.repeat(times, 0), y.repeat(times), TABLE.clients.repeat(times))
    for ask in ("score", "deviance"):
        on_weights = getattr(weighted, ask)(TABLE.x, y, TABLE.clients, times)
        assert on_weights == pytest.approx(getattr(weighted, ask)(*many))
    fresh = many[2] + 100
    once = weighted.onboard(TABLE.x, y, TABLE.clients + 200, sample_weight=times)
    assert_near(once, weighted.onboard(many[0], many[1], fresh))


@pytest.mark.parametrize("name", ["labels", "features"])
def test_an_affinity_by_name_counts_weights_too(name):
    def degrees(x, y, clients, weight):
        codes = ClientCodes.of(clients, len(x))
        columns = ColumnScaling.of(x, weight, ["a", "b"], None, intercept=True)
        return make_affinity(
            codes.ids, name, sort_by_client(columns, x, y, weight, codes, BernoulliFamily(), "weights")
        ).degree

    times = np.random.default_rng(5).integers(0, 4, len(TABLE.labels))
    everything = TABLE.x, TABLE.labels, TABLE.clients
    repeated = degrees(*(column.repeat(times, 0) for column in everything), np.ones(times.sum()))
    np.testing.assert_allclose(degrees(*everything, times.astype(float)), repeated)


# ---------------------------------------------------------------------- units


@every_family
def test_units_of_a_column_move_its_coefficient_only(estimator, y):
    factor, shift = np.array([1e-14, 1e5]), np.array([0.0, 3e5])
    plain, model = plain_fit(estimator), fitted(estimator, y, TABLE.x * factor + shift)
    assert_near(model.canonical_coef_ * factor, plain.canonical_coef_)
    assert_near(means(model, TABLE.x * factor + shift), means(plain))
    assert model.log_likelihood_ == pytest.approx(plain.log_likelihood_, abs=NEAR)


def test_units_of_y_move_coefficients_with_them():
    plain = fitted(regressor(), TABLE.y)  # with its ridge, which knows no units either
    model = fitted(regressor(), 1e4 * TABLE.y - 3e5)
    np.testing.assert_allclose(model.canonical_coef_, 1e4 * plain.canonical_coef_, rtol=1e-3)
    np.testing.assert_allclose(means(model), 1e4 * means(plain) - 3e5, atol=1.0)
    assert model.log_likelihood_ == pytest.approx(plain.log_likelihood_ - len(TABLE.y) * np.log(1e4), abs=1e-3)


def test_one_gaussian_model_has_the_likelihood_of_least_squares():
    model = regressor(**EXACT).fit(TABLE.x, TABLE.y)
    design = np.c_[TABLE.x, np.ones(len(TABLE.x))]
    residual = TABLE.y - design @ np.linalg.lstsq(design, TABLE.y)[0]
    by_hand = -len(residual) / 2 * (np.log(2 * np.pi * (residual**2).mean()) + 1)
    assert model.log_likelihood_ == pytest.approx(by_hand)


def test_the_gaussian_score_is_r_squared():
    model = fitted(regressor(), TABLE.y)
    predicted = model.predict(TABLE.x, TABLE.clients)
    assert model.score(TABLE.x, TABLE.y, TABLE.clients) == pytest.approx(r2_score(TABLE.y, predicted))
    assert model.deviance(TABLE.x, TABLE.y, TABLE.clients) == pytest.approx(mean_squared_error(TABLE.y, predicted))


# ---------------------------------------------------------------------- clients that are not there


@pytest.mark.parametrize("estimator", dict(ESTIMATORS.values()), ids=ESTIMATORS)
def test_a_stranger_among_clients_is_predicted_as_one_alone(estimator):
    model, some = plain_fit(estimator), TABLE.x[:7]
    stranger = means(model, some, np.full(7, 99))
    np.testing.assert_array_equal(means(model, some, None), stranger)
    mixed = means(model, some, np.array([3, 99, 3, 99, 3, 99, 3]))
    np.testing.assert_allclose(mixed[::2], means(model, some[::2], np.full(4, 3)))
    np.testing.assert_allclose(mixed[1::2], stranger[1::2])


def test_a_choice_table_may_come_in_any_order_and_with_any_ids():
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
