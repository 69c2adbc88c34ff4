"""Bad input raises an error that names the problem, and unusual but valid input is fitted."""

import re

import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from sklearn.exceptions import ConvergenceWarning

from kit.tables import choice, classifier, make_choice_table, make_client_table, regressor

TABLE = make_client_table()
X, CLIENTS, N = TABLE.x, TABLE.clients, len(TABLE.x)
CHOICES = make_choice_table()


def with_entry(values, at, value):
    changed = np.array(values, dtype=float if isinstance(value, float) else object)
    changed[at] = value
    return changed


def assert_raises(call, *patterns):
    """The call raises a ValueError whose message matches all patterns."""
    with pytest.raises(ValueError, match=".") as caught:
        call()
    for pattern in patterns:
        assert re.search(pattern, str(caught.value)), f"{pattern!r} is not in: {caught.value}"


# ---------------------------------------------------------------------- clients


@pytest.mark.parametrize(
    "ids",
    [
        with_entry(CLIENTS, 3, None),
        with_entry(CLIENTS, 3, np.nan),
        with_entry(CLIENTS, 3, pd.NA),
        [np.nan if at == 3 else f"shop {client}" for at, client in enumerate(CLIENTS)],  # a name for numpy
        pd.Series(CLIENTS).astype("Int64").mask(np.arange(N) == 3),
        pd.Series(CLIENTS).astype(str).astype("string").mask(np.arange(N) == 3),
        pd.Series(pd.Categorical(CLIENTS.astype(str))).mask(np.arange(N) == 3),
    ],
    ids=["None", "NaN", "NA", "NaN among names", "Int64", "string", "categories"],
)
def test_missing_client_ids(ids):
    assert_raises(lambda: regressor().fit(X, TABLE.y, clients=ids), f"1 of {N} rows", "no client id", "drop these rows")
    assert_raises(lambda: choice().fit(X, TABLE.labels, ids), "no situation id")


@pytest.mark.parametrize("as_table", [list, lambda ids: np.array(ids, dtype=object)])
def test_client_ids_of_several_kinds(as_table):
    ids = as_table([client if client < 6 else f"shop {client}" for client in CLIENTS.tolist()])
    assert_raises(lambda: regressor().fit(X, TABLE.y, clients=ids), "number, str", "turn all into strings")


def test_client_ids_of_the_wrong_shape_or_type():
    for ids, shape in (
        (CLIENTS[:-1], f"({N - 1},)"),
        (CLIENTS[:, None], f"({N}, 1)"),
        ("shop", "()"),
        ([(client, "a") for client in CLIENTS], f"({N}, 2)"),
    ):
        assert_raises(
            lambda: regressor().fit(X, TABLE.y, clients=ids), re.escape(shape), f"{N} rows", "one client id per row"
        )
    dates = pd.to_datetime(CLIENTS)
    assert_raises(lambda: regressor().fit(X, TABLE.y, clients=dates), "datetime64", "turn them into strings")


def test_ids_of_another_kind_than_in_the_fit_do_not_count_as_new_clients():
    model = classifier().fit(X, TABLE.labels, clients=CLIENTS)
    names = CLIENTS.astype(str)
    words = "'0'", "such as 0", "as the fit did"
    assert_raises(lambda: model.predict(X, names), *words)
    assert_raises(lambda: model.score(X, TABLE.labels, names), *words)
    assert_raises(lambda: model.onboard(X, TABLE.labels, names), *words)
    np.testing.assert_array_equal(model.predict_proba(X, CLIENTS.astype(float)), model.predict_proba(X, CLIENTS))


def test_more_canonical_models_than_clients():
    assert_raises(lambda: regressor(k=13).fit(X, TABLE.y, clients=CLIENTS), "k is 13", "number of clients is 12")
    assert_raises(lambda: regressor().fit(X, TABLE.y, clients=np.zeros(N)), "k is 2", "number of clients is 1")
    assert regressor(k=1).fit(X, TABLE.y, clients=np.zeros(N)).memberships_.shape == (1, 1)
    assert regressor(k=3).fit(X, TABLE.y, clients=CLIENTS % 3).memberships_.shape == (3, 3)


@pytest.mark.parametrize("solver", ["marginal", "profile"])
def test_one_row_per_client_is_enough(solver):
    model = classifier(solver=solver).fit(X, TABLE.labels, clients=np.arange(N))
    np.testing.assert_allclose(model.memberships_.sum(axis=1), 1)
    assert np.isfinite(model.canonical_coef_).all()


def test_onboarding_needs_new_clients():
    model = regressor().fit(X, TABLE.y, clients=CLIENTS)
    assert_raises(lambda: model.onboard(X, TABLE.y, CLIENTS), "client 0 is known already")
    assert_raises(lambda: model.onboard(X, TABLE.y, None), "clients is None")
    assert_raises(lambda: model.client_coef(99), "client 99", "onboard")
    alone = regressor(k=1).fit(X, TABLE.y)
    assert_raises(lambda: alone.onboard(X, TABLE.y, CLIENTS + 1), "fitted without clients")
    np.testing.assert_array_equal(alone.predict(X, CLIENTS.astype(str)), alone.predict(X))


# ---------------------------------------------------------------------- tables


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_missing_and_infinite_numbers(value):
    word = "NaN" if np.isnan(value) else "infinity"
    bad = with_entry(X, (3, 1), value)
    for x in (bad, sp.csr_array(bad)):
        assert_raises(lambda: regressor().fit(x, TABLE.y, clients=CLIENTS), word)
    assert_raises(lambda: classifier().fit(bad, TABLE.labels, clients=CLIENTS), "X contains", word)
    assert_raises(lambda: regressor().fit(X, with_entry(TABLE.y, 3, value), clients=CLIENTS), "y contains", word)
    model = regressor().fit(X, TABLE.y, clients=CLIENTS)
    assert_raises(lambda: model.predict(bad, CLIENTS), "X contains", word)
    assert_raises(lambda: model.score(X, with_entry(TABLE.y, 3, value), CLIENTS), "y contains", word)


def test_columns_of_the_wrong_number_or_type():
    model = regressor().fit(X, TABLE.y, clients=CLIENTS)
    assert_raises(lambda: model.predict(X[:, :1], CLIENTS), "1 features", "2 features")
    assert_raises(lambda: model.onboard(np.c_[X, X], TABLE.y, CLIENTS + 100), "4 features", "2 features")
    frame = pd.DataFrame({"price": X[:, 0], "town": np.where(CLIENTS % 2, "Rome", "Oslo")})
    assert_raises(lambda: regressor().fit(frame, TABLE.y, clients=CLIENTS), "convert string to float", "Oslo|Rome")
    assert_raises(lambda: regressor().fit(X, np.c_[TABLE.y, TABLE.y], clients=CLIENTS), "1d array")


@pytest.mark.parametrize("value", [0.0, 0.1, 7e9])
def test_a_constant_column_has_coefficient_zero(value):
    """The data do not determine its coefficient, and a later table may have other values in this column."""
    more = np.c_[X, np.full(N, value)]
    for table in (more, sp.csr_array(more)):
        model = regressor(ridge=0.0).fit(table, TABLE.y, clients=CLIENTS)
        assert (model.canonical_coef_[:, 2] == 0).all()
        np.testing.assert_array_equal(
            model.predict(np.c_[X, X[:, 0]], CLIENTS), model.predict(np.c_[X, X[:, 1]], CLIENTS)
        )


def test_a_constant_column_replaces_the_intercept():
    exact = {"ridge": 0.0, "tol": 1e-7}
    by_hand = regressor(fit_intercept=False, **exact).fit(np.c_[X, np.full(N, 2.0)], TABLE.y + 5, clients=CLIENTS)
    model = regressor(**exact).fit(X, TABLE.y + 5, clients=CLIENTS)
    np.testing.assert_allclose(
        by_hand.predict(np.c_[X, np.full(N, 2.0)], CLIENTS), model.predict(X, CLIENTS), atol=1e-3
    )


def test_bad_sample_weights():
    model = regressor().fit(X, TABLE.y, clients=CLIENTS)
    for weight, word in (
        (np.zeros(N), "non-zero|is 0 for all"),
        (with_entry(np.ones(N), 3, -1.0), "Negative"),
        (with_entry(np.ones(N), 3, np.nan), "NaN"),
        (np.ones(3), "shape"),
    ):
        assert_raises(lambda: regressor().fit(X, TABLE.y, clients=CLIENTS, sample_weight=weight), word)
        assert_raises(lambda: model.score(X, TABLE.y, CLIENTS, sample_weight=weight), word)
        assert_raises(lambda: model.onboard(X, TABLE.y, CLIENTS + 100, sample_weight=weight), word)


def test_a_client_with_zero_weight_has_the_prior_membership():
    counted = CLIENTS > 1
    model = regressor().fit(X, TABLE.y, clients=CLIENTS, sample_weight=counted)
    without = regressor().fit(X[counted], TABLE.y[counted], clients=CLIENTS[counted])
    np.testing.assert_allclose(model.memberships_.loc[2:], without.memberships_, atol=1e-3)
    np.testing.assert_array_equal(model.memberships_.loc[0], model.memberships_.loc[1])


# ---------------------------------------------------------------------- targets


@pytest.mark.parametrize(
    ("family", "y", "words"),
    [
        ("poisson", TABLE.counts - 1, ("'poisson'", "smallest is -1")),
        ("poisson", TABLE.counts + 0.5, ("'poisson'", "not all are whole")),
        ("gamma", TABLE.counts, ("'gamma'", "y > 0", "smallest is 0")),
        ("gamma", -TABLE.amounts, ("'gamma'", "y > 0", "smallest is -")),
        ("gaussian", TABLE.y.astype(str).astype(object) + "?", ("could not convert string",)),
    ],
)
def test_targets_a_family_cannot_have(family, y, words):
    assert_raises(lambda: regressor(family=family).fit(X, y, clients=CLIENTS), *words)


def test_targets_are_also_checked_after_the_fit():
    model = regressor(family="poisson").fit(X, TABLE.counts, clients=CLIENTS)
    for method in (model.score, model.deviance):
        assert_raises(lambda: method(X, TABLE.counts + 0.5, CLIENTS), "not all are whole")
    assert_raises(lambda: model.onboard(X, TABLE.counts - 1, CLIENTS + 100), "smallest is -1")


def test_a_client_with_only_zeros_can_be_fitted():
    y = np.where(CLIENTS == 0, 0, TABLE.counts)
    model = regressor(family="poisson").fit(X, y, clients=CLIENTS)
    assert np.isfinite(model.predict(X, CLIENTS)).all()
    all_zero = regressor(family="poisson").fit(X, np.zeros(N), clients=CLIENTS)
    assert all_zero.predict(X, CLIENTS).max() < 0.05


@pytest.mark.parametrize("solver", ["marginal", "profile"])
def test_linearly_separable_classes_have_finite_coefficients(solver):
    y = X[:, 0] > 0.5
    model = classifier(solver=solver).fit(X, y, clients=CLIENTS)
    assert np.isfinite(model.canonical_coef_).all() and np.isfinite(model.canonical_intercept_).all()
    assert np.abs(model.canonical_coef_).max() < 1e3
    assert model.score(X, y, CLIENTS) == 1


@pytest.mark.parametrize("kind", [str, bool, object, "string", "category"])
def test_labels_may_be_of_any_kind(kind):
    plain = classifier().fit(X, TABLE.labels, clients=CLIENTS)
    names = np.array([False, True] if kind is bool else ["no", "yes"])
    y = names[TABLE.labels]
    y = pd.Series(y).astype(kind) if isinstance(kind, str) else y.astype(kind)
    model = classifier().fit(X, y, clients=CLIENTS)
    assert model.classes_.tolist() == names.tolist()
    np.testing.assert_array_equal(model.predict(X, CLIENTS), names[plain.predict(X, CLIENTS)])
    assert model.score(X, y, CLIENTS) == plain.score(X, TABLE.labels, CLIENTS)
    assert model.deviance(X, y, CLIENTS) == pytest.approx(plain.deviance(X, TABLE.labels, CLIENTS))


def test_bad_labels():
    assert_raises(lambda: classifier().fit(X, TABLE.y, clients=CLIENTS), "continuous")
    assert_raises(lambda: classifier().fit(X, np.full(N, "yes"), clients=CLIENTS), "one class only, 'yes'")
    labels = np.array(["no", "yes"], dtype=object)[TABLE.labels]
    for missing in (None, np.nan, pd.NA):
        bad = labels.copy()
        bad[3] = missing
        assert_raises(lambda: classifier().fit(X, bad, clients=CLIENTS), "y is missing in 1 of 120 rows")


def test_a_class_the_fit_did_not_have():
    model = classifier().fit(X, np.array(["no", "yes"])[TABLE.labels], clients=CLIENTS)
    y = np.where(TABLE.labels, "yes", "maybe")
    for call in (lambda: model.onboard(X, y, CLIENTS + 100), lambda: model.deviance(X, y, CLIENTS)):
        assert_raises(call, "the class 'maybe'", re.escape("['no', 'yes']"))
    right = (model.predict(X, CLIENTS) == "yes") & (TABLE.labels == 1)
    assert model.score(X, y, CLIENTS) == pytest.approx(right.mean())  # it is never predicted, so it counts as an error
    assert_raises(lambda: model.score(X, TABLE.labels, CLIENTS), "string and number")


# ---------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("mix", "outputs", ("'outputs'", "weights, predictions")),
        ("solver", "newton", ("'newton'", "auto, marginal, profile, federated")),
        ("family", "tweedie", ("'tweedie'", "gaussian, poisson, gamma")),
        ("link", "cloglog", ("'gaussian'", "'cloglog'", "identity, log")),
        ("affinity", "friends", ("'friends'", "uniform, labels, features")),
        ("affinity", 3, ("is a int", "DataFrame")),
        ("shared", "prise", ("'prise'", "x0, x1, intercept")),
        ("shared", [2], ("names 2", "x0, x1, intercept")),
        ("shared", [True, False], ("names True",)),
        ("shared", ["x0", "x1", "intercept"], ("all columns are shared",)),
        ("penalty", -1.0, ("penalty is -1", "at least 0")),
        ("penalty", np.inf, ("penalty is inf", "at least 0")),
        ("ridge", -1.0, ("ridge is -1", "at least 0")),
        ("ridge", "none", ("ridge is 'none'", "at least 0")),
        ("tol", -1e-6, ("tol is -1e-06", "at least 0")),
        ("tol", np.nan, ("tol is nan", "at least 0")),
        ("k", 0, ("k is 0", "at least 1")),
        ("k", 2.0, ("k is 2.0", "whole number")),
        ("n_init", 0, ("n_init is 0", "at least 1")),
        ("max_iter", None, ("max_iter is None", "at least 1")),
        ("fit_intercept", "no", ("fit_intercept is 'no'", "True or False")),
        ("random_state", "seed", ("'seed'", "RandomState")),
    ],
)
def test_bad_settings(name, value, words):
    assert_raises(lambda: regressor(**{name: value}).fit(X, TABLE.y, clients=CLIENTS), *words)


def test_a_shared_column_needs_a_unique_name():
    frame = pd.DataFrame(X, columns=["price", "intercept"])
    assert_raises(
        lambda: regressor(shared="intercept").fit(frame, TABLE.y, clients=CLIENTS), "'intercept'", "2 columns", "rename"
    )
    model = regressor(shared="intercept", fit_intercept=False).fit(frame, TABLE.y, clients=CLIENTS)
    np.testing.assert_allclose(*model.canonical_coef_[:, 1])
    twice = pd.DataFrame(X, columns=["price", "price"])
    assert_raises(
        lambda: regressor(shared="price").fit(twice, TABLE.y, clients=CLIENTS), "'price'", "2 columns|2 times"
    )


def symmetric():
    return np.ones((12, 12))


@pytest.mark.parametrize(
    ("affinity", "words"),
    [
        ("labels", ("needs classes", "'features'")),
        (np.ones((11, 11)), ("11 rows", "12 client")),
        (sp.csr_array(np.ones((11, 11))), (re.escape("(11, 11)"), "12 clients")),
        (with_entry(symmetric(), (0, 1), 2.0), ("symmetric",)),
        (sp.csr_array(with_entry(symmetric(), (0, 1), 2.0)), ("symmetric",)),
        (with_entry(symmetric(), (0, 0), np.nan), ("finite",)),
        (with_entry(symmetric(), (0, 0), -1.0), ("non-negative",)),
        (pd.DataFrame(symmetric(), index=range(12), columns=range(1, 13)), ("other columns than rows",)),
        (pd.DataFrame(symmetric(), index=range(1, 13), columns=range(1, 13)), ("'0'", "'12'")),
        ([(0, 1), (1, 12)], ("no client '12'",)),
        ([(0, 1), 7], ("edge 7",)),
        ([(0,)], (re.escape("(0,)"),)),
    ],
)
def test_affinities_that_do_not_fit_the_clients(affinity, words):
    model = regressor(solver="profile", penalty=1e-3, affinity=affinity)
    assert_raises(lambda: model.fit(X, TABLE.y, clients=CLIENTS), *words)


@pytest.mark.parametrize("name", ["labels", "features"])
def test_choices_have_no_affinity_by_features_or_labels(name):
    model = choice(solver="profile", penalty=1e-3, affinity=name)
    assert_raises(lambda: model.fit(CHOICES.x, CHOICES.y, CHOICES.situations, CHOICES.clients), repr(name), "matrix")


# ---------------------------------------------------------------------- fits that do not converge


def test_a_fit_that_stops_early_says_what_to_do():
    with pytest.warns(ConvergenceWarning, match="after 1 of 1 iterations.*raise max_iter"):
        model = regressor(max_iter=1, tol=1e-12).fit(X, TABLE.y, clients=CLIENTS)
    assert not model.converged_
    # with the smallest tolerance a fit ends where rounding errors hide all that is left to gain
    assert regressor(tol=0.0).fit(X, TABLE.y, clients=CLIENTS).converged_


def test_targets_without_noise_have_no_best_fit():
    with pytest.warns(ConvergenceWarning, match="fits every row exactly.*fewer columns"):
        regressor(k=1).fit(X, X @ [1.0, 2.0])


# ---------------------------------------------------------------------- choices


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"situations": None}, ("situations is None",)),
        ({"situations": CHOICES.situations[:-1]}, ("situations has shape", "one situation id per row")),
        ({"situations": with_entry(CHOICES.situations, 0, 999.0)}, ("situation 999.0 has one alternative",)),
        ({"y": with_entry(CHOICES.y, slice(3, 6), 1.0)}, ("situation 1 has 3 alternatives taken", "exactly one")),
        ({"y": with_entry(CHOICES.y, slice(3, 6), 0.0)}, ("situation 1 has 0 alternatives taken", "exactly one")),
        ({"y": with_entry(CHOICES.y, 4, 2.0)}, ("y has 2.0", "1 for the alternative that was taken")),
        ({"y": np.where(CHOICES.y, "yes", "no")}, ("y has 'no'",)),
        ({"clients": with_entry(CHOICES.clients, 4, 7.0)}, ("situation 1", "two clients", "0.0 and 7.0")),
        ({"clients": CHOICES.clients[:-1]}, ("clients has shape",)),
        ({"X": with_entry(CHOICES.x, (3, 1), np.nan)}, ("X contains NaN",)),
    ],
)
def test_bad_choice_tables(change, words):
    table = {"X": CHOICES.x, **CHOICES._asdict()}
    del table["x"]
    assert_raises(lambda: choice().fit(**{**table, **change}), *words)


def test_choice_tables_are_also_checked_after_the_fit():
    model = choice().fit(CHOICES.x, CHOICES.y, CHOICES.situations, CHOICES.clients)
    for method in (model.score, model.deviance):
        assert_raises(
            lambda: method(CHOICES.x, 0 * CHOICES.y, CHOICES.situations, "new"), "situation 0 has 0 alternatives taken"
        )
        assert_raises(
            lambda: method(CHOICES.x, CHOICES.y[:-1], CHOICES.situations, "new"), f"{len(CHOICES.y) - 1} entries"
        )
    assert_raises(lambda: model.predict(CHOICES.x, None), "situations is None")
    names = CHOICES.clients.astype(str)
    assert_raises(lambda: model.predict(CHOICES.x, CHOICES.situations, names), "such as '0'")
    assert_raises(lambda: model.onboard(CHOICES.x, CHOICES.y, CHOICES.situations, None), "clients is None")


def test_a_column_that_all_alternatives_share_has_coefficient_zero():
    age = 20.1 + CHOICES.clients  # the mean over three alternatives has a rounding error
    table = CHOICES.y, CHOICES.situations, CHOICES.clients
    model, plain = choice().fit(np.c_[CHOICES.x, age], *table), choice().fit(CHOICES.x, *table)
    assert (model.canonical_coef_[:, 2] == 0).all()
    np.testing.assert_allclose(model.canonical_coef_[:, :2], plain.canonical_coef_, atol=1e-3)
