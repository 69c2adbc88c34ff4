"""Bad input raises an error that names the problem, and unusual but valid input is fitted."""

import numpy as np
import pandas as pd
import pytest
from sklearn.exceptions import ConvergenceWarning

from kit.refusals import AffinityError, DataError, SettingError, assert_refused
from kit.tables import choice, fitted, fitted_choice, make_choice_table, make_client_table, make_estimator
from ppfl.glm import as_mixed_model

TABLE = make_client_table()
X, CLIENTS, N = TABLE.x, TABLE.clients, len(TABLE.x)
NAMES = np.array(["no", "yes"], dtype=object)[TABLE.labels]
CHOICES = make_choice_table()
ONES = np.ones((12, 12))


def with_entry(values, at, value):
    changed = np.array(values, dtype=float if isinstance(value, float) else object)
    changed[at] = value
    return changed


def fit(x=X, y=TABLE.y, clients=CLIENTS, weight=None, family="gaussian", **settings):
    return make_estimator(family, **settings).fit(x, y, clients=clients, sample_weight=weight)


def fit_choices(**change):
    return choice().fit(*{**CHOICES._asdict(), **change}.values())


def fit_graph(**settings):
    return fit(penalty=1e-3, max_iter=2, **settings)


SHOPS = [f"shop {client}" for client in CLIENTS]
WITHOUT_ONE = pd.Series(CLIENTS).astype("Int64").mask(np.arange(N) == 3)
NAMED_INTERCEPT = pd.DataFrame(X, columns=["price", "intercept"])
REFUSED = {
    DataError: {
        "no id": (lambda: fit(clients=with_entry(CLIENTS, 3, None)), "1 of 120 rows", "drop"),
        "NaN among names": (lambda: fit(clients=[np.nan, *SHOPS[1:]]), "1 of 120 rows", "drop"),
        "NA": (lambda: fit(clients=WITHOUT_ONE), "1 of 120 rows", "drop"),
        "fractions": (lambda: fit(clients=CLIENTS + 0.5), "client ids are fractions"),
        "too few ids": (lambda: fit(clients=CLIENTS[:-1]), "(119,)", "120 rows"),
        "name of a column": (lambda: fit(clients="shop"), "one client id per row"),
        "onboard a known client": (lambda: fitted().onboard(X, TABLE.y, CLIENTS), "client 0", "known already"),
        "coefficients of nobody": (lambda: fitted().client_coef(99), "99", "onboard"),
        "negative counts": (lambda: fit(y=TABLE.counts - 1, family="poisson"), "'poisson'", "-1"),
        "half counts": (lambda: fit(y=TABLE.counts + 0.5, family="negative binomial"), "whole"),
        "zero amounts": (lambda: fit(y=TABLE.counts, family="gamma"), "'gamma'", "smallest is 0"),
        "one class": (lambda: fit(y=np.full(N, "yes"), family="bernoulli"), "one class only", "'yes'"),
        "no label": (lambda: fit(y=with_entry(NAMES, 3, None), family="bernoulli"), "1 of 120 rows"),
        "new class": (lambda: fitted("bernoulli").onboard(X, TABLE.labels + 1, CLIENTS + 99), "class 2", "[0, 1]"),
        "no situations": (lambda: fit_choices(situations=None), "situations is None"),
        "no situation id": (lambda: fit_choices(situations=with_entry(CHOICES.situations, 3, np.nan)), "situation id"),
        "one alternative": (lambda: fit_choices(situations=with_entry(CHOICES.situations, 0, 999.0)), "alternative"),
        "two taken": (lambda: fit_choices(y=with_entry(CHOICES.y, slice(3, 6), 1.0)), "situation 1", "exactly one"),
        "two clients": (lambda: fit_choices(clients=with_entry(CHOICES.clients, 4, 7.0)), "situation 1", "0.0 and 7.0"),
        "none taken": (lambda: fitted_choice().score(CHOICES.x, 0 * CHOICES.y, *CHOICES[2:]), "situation 0"),
    },
    AffinityError: {
        "11 of 12": (lambda: fit_graph(affinity=np.ones((11, 11))), "11 rows", "12 client"),
        "one way": (lambda: fit_graph(affinity=with_entry(ONES, (0, 1), 2.0)), "symmetric"),
        "other clients": (lambda: fit_graph(affinity=pd.DataFrame(ONES, range(1, 13), range(1, 13))), "'0'", "'12'"),
        "no name": (lambda: fit_graph(affinity="friends"), "'friends'", "uniform, labels, features"),
        "labels of numbers": (lambda: fit_graph(affinity="labels"), "classes", "'features'"),
    },
    SettingError: {
        "more models than clients": (lambda: fit(k=13), "13", "12"),
        "k": (lambda: fit(k=0), "k is 0"),
        "penalty": (lambda: fit(penalty=np.inf), "penalty is inf", "at least 0"),
        "residual": (lambda: fit(residual="slopes"), "'slopes'", "auto, None, intercept, diagonal, full"),
        "residual of predictions": (lambda: fit(residual="full", mix="predictions"), "'predictions'"),
        "residual of classes": (lambda: fit(y=TABLE.counts.clip(max=2), family="multinomial", residual="full"), "None"),
        "k of a penalty": (lambda: fit(k="auto", penalty=0.1), "'auto'", "set a number"),
        "family of a penalty": (lambda: fit(y=TABLE.amounts, family="gamma", penalty=0.1), "'gamma'", "penalty = 0"),
        "family": (lambda: fit(family="tweedie"), "'tweedie'", "gaussian, poisson, gamma"),
        "shared name": (lambda: fit(shared="prise"), "'prise'", "x0, x1, intercept"),
        "all shared": (lambda: fit(shared=["x0", "x1", "intercept"]), "all columns"),
        "which intercept": (lambda: fit(NAMED_INTERCEPT, shared="intercept"), "'intercept'", "rename"),
        "no likelihood": (lambda: fit(family="quasipoisson"), "'quasipoisson'", "negative binomial"),
        "effects of predictions": (lambda: as_mixed_model(fitted("bernoulli", mix="predictions")), "'predictions'"),
    },
}


@pytest.mark.parametrize(("error", "name"), [(error, name) for error in REFUSED for name in REFUSED[error]])
def test_bad_input_is_refused(error, name):
    call, *words = REFUSED[error][name]
    assert_refused(call, error, *words)


def test_what_scikit_learn_checks_is_checked_in_every_method():
    """Missing and infinite numbers, weights, and columns of the wrong number or type; the words are scikit-learn's."""
    bad, y, negative = with_entry(X, (3, 1), np.nan), with_entry(TABLE.y, 3, np.inf), with_entry(np.ones(N), 3, -1.0)
    for call, word in (
        (lambda: fit(bad), "X contains NaN"),
        (lambda: fitted().score(X, y, CLIENTS), "y contains infinity"),
        (lambda: fitted().onboard(np.c_[X, X], TABLE.y, CLIENTS + 100), "4 features.*2 features"),
        (lambda: fit(weight=np.zeros(N)), "non-zero|is 0 for all"),
        (lambda: fit(weight=negative), "Negative"),
        (lambda: fitted().score(X, TABLE.y, CLIENTS, sample_weight=np.ones(3)), "shape"),
        (lambda: fitted().onboard(X, TABLE.y, CLIENTS + 100, sample_weight=negative), "Negative"),
    ):
        with pytest.raises(ValueError, match=word):
            call()


def test_as_many_models_as_clients_and_one_row_per_client_are_enough():
    assert fit(k=3, clients=CLIENTS % 3).memberships_.shape == (3, 3)
    model = fit(y=TABLE.labels, clients=np.arange(N), family="bernoulli")
    np.testing.assert_allclose(model.memberships_.sum(axis=1), 1)
    assert np.isfinite(model.canonical_coef_).all()


def test_a_constant_column_has_coefficient_zero_or_replaces_the_intercept():
    """A later table may have other values in this column."""
    for value in (0.1, 7e9):
        model = fit(np.c_[X, np.full(N, value)], ridge=0.0)
        assert (model.canonical_coef_[:, 2] == 0).all()
        np.testing.assert_array_equal(*(model.predict(np.c_[X, X[:, at]], CLIENTS) for at in (0, 1)))
    age = 20.1 + CHOICES.clients  # the same for all alternatives; their mean has a rounding error
    model = fit_choices(x=np.c_[CHOICES.x, age])
    assert (model.canonical_coef_[:, 2] == 0).all()
    np.testing.assert_allclose(model.canonical_coef_[:, :2], fitted_choice().canonical_coef_, atol=5e-3)
    exact, constant = {"ridge": 0.0, "tol": 1e-7}, np.c_[X, np.full(N, 2.0)]
    by_hand, model = fit(constant, TABLE.y + 5, fit_intercept=False, **exact), fit(y=TABLE.y + 5, **exact)
    np.testing.assert_allclose(by_hand.predict(constant, CLIENTS), model.predict(X, CLIENTS), atol=1e-3)


def test_a_client_with_zero_weight_has_the_prior_membership():
    counted = CLIENTS > 1
    model, without = fit(weight=counted), fit(X[counted], TABLE.y[counted], CLIENTS[counted])
    np.testing.assert_allclose(model.memberships_.loc[2:], without.memberships_, atol=1e-3)
    np.testing.assert_array_equal(model.memberships_.loc[0], model.memberships_.loc[1])


def test_targets_without_a_best_fit_are_fitted():
    """Clients with zeros alone, zeros alone, classes that a line separates, and numbers without noise."""
    some = fit(y=np.where(CLIENTS == 0, 0, TABLE.counts), family="poisson")
    assert np.isfinite(some.predict(X, CLIENTS)).all()
    assert fit(y=np.zeros(N), family="poisson").predict(X, CLIENTS).max() < 0.05
    separated = fit(y=X[:, 0] > 0.5, family="bernoulli")
    assert np.abs(separated.canonical_coef_).max() < 1e3 and np.isfinite(separated.canonical_intercept_).all()
    assert separated.score(X, X[:, 0] > 0.5, CLIENTS) == 1
    with pytest.warns(ConvergenceWarning, match="fits every row exactly.*fewer columns"):
        fit(y=X @ [1.0, 2.0], clients=None, k=1)
    # with the smallest tolerance a fit ends where rounding errors hide all that is left to gain
    assert fit(tol=0.0).converged_


def test_labels_may_be_of_any_kind_and_a_new_class_counts_as_an_error():
    plain = fitted("bernoulli")
    guess = plain.predict(X, CLIENTS)
    for kind, names in ((bool, [False, True]), (object, ["no", "yes"]), ("category", ["no", "yes"])):
        y = pd.Series(np.array(names)[TABLE.labels]).astype(kind)
        model = fit(y=y, family="bernoulli")
        assert model.classes_.tolist() == names
        np.testing.assert_array_equal(model.predict(X, CLIENTS), np.array(names)[guess])
        assert model.deviance(X, y, CLIENTS) == pytest.approx(plain.deviance(X, TABLE.labels, CLIENTS))
    right = (guess == 1) & (TABLE.labels == 1)
    assert plain.score(X, np.where(TABLE.labels, 1, 7), CLIENTS) == pytest.approx(right.mean())
