"""Bad input raises an error that names the problem, and unusual but valid input is fitted."""

import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
from sklearn.exceptions import ConvergenceWarning

from kit.refusals import AffinityError, DataError, SettingError, assert_refused
from kit.tables import (
    HETEROSCEDASTIC,
    choice,
    classifier,
    fitted,
    fitted_choice,
    make_choice_table,
    make_client_table,
    make_family,
    regressor,
    to_double,
)
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


def fit(x=X, y=TABLE.y, clients=CLIENTS, **settings):
    return regressor(**settings).fit(x, y, clients=clients)


def fit_labels(y, **settings):
    return classifier(**settings).fit(X, y, clients=CLIENTS)


def fit_affinity(affinity):
    return fit(solver="profile", penalty=1e-3, affinity=affinity)


def fit_choices(model=None, **change):
    return (model or choice()).fit(*{**CHOICES._asdict(), **change}.values())


# ---------------------------------------------------------------------- refusals


MISSING_IDS = {
    "None": with_entry(CLIENTS, 3, None),
    "NaN": with_entry(CLIENTS, 3, np.nan),
    "NA": with_entry(CLIENTS, 3, pd.NA),
    "NaN among names": [np.nan if at == 3 else f"shop {client}" for at, client in enumerate(CLIENTS)],
    "Int64": pd.Series(CLIENTS).astype("Int64").mask(np.arange(N) == 3),
    "string": pd.Series(CLIENTS).astype(str).astype("string").mask(np.arange(N) == 3),
    "categories": pd.Series(pd.Categorical(CLIENTS.astype(str))).mask(np.arange(N) == 3),
}
SEVERAL_KINDS = [client if client < 6 else f"shop {client}" for client in CLIENTS.tolist()]
OF_CLIENTS = {
    **{f"no id: {k}": (lambda ids=ids: fit(clients=ids), "1 of 120 rows", "drop") for k, ids in MISSING_IDS.items()},
    "no situation id": (lambda: fit_choices(situations=with_entry(CHOICES.situations, 3, np.nan)), "no situation id"),
    "several kinds": (lambda: fit(clients=SEVERAL_KINDS), "number, str", "strings"),
    "too few ids": (lambda: fit(clients=CLIENTS[:-1]), "(119,)", "120 rows"),
    "one word": (lambda: fit(clients="shop"), "()", "one client id per row"),
    "dates": (lambda: fit(clients=pd.to_datetime(CLIENTS)), "datetime64", "strings"),
    "predict by name": (lambda: fitted().predict(X, CLIENTS.astype(str)), "'0'", "as the fit did"),
    "onboard by name": (lambda: fitted().onboard(X, TABLE.y, CLIENTS.astype(str)), "'0'", "as the fit did"),
    "onboard a known client": (lambda: fitted().onboard(X, TABLE.y, CLIENTS), "client 0", "known already"),
    "onboard nobody": (lambda: fitted().onboard(X, TABLE.y, None), "clients is None"),
    "onboard without clients": (lambda: fit(k=1, clients=None).onboard(X, TABLE.y, CLIENTS), "without clients"),
    "coefficients of nobody": (lambda: fitted().client_coef(99), "99", "onboard"),
}
OF_TARGETS = {
    "below 0": (lambda: fit(y=TABLE.counts - 1, family="poisson"), "'poisson'", "-1"),
    "halves": (lambda: fit(y=TABLE.counts + 0.5, family="poisson"), "'poisson'", "whole"),
    "no amount": (lambda: fit(y=TABLE.counts, family="gamma"), "'gamma'", "smallest is 0"),
    **{
        name: (lambda name=name: make_family(name).check(to_double([0.5, 1.0])), name, "whole")
        for name in ("negative binomial", "zero-inflated poisson", "quasipoisson")
    },
    "halves to score": (lambda: fitted("poisson").score(X, TABLE.counts + 0.5, CLIENTS), "whole"),
    "onboard below 0": (lambda: fitted("poisson").onboard(X, TABLE.counts - 1, CLIENTS + 100), "-1"),
    "one class": (lambda: fit_labels(np.full(N, "yes")), "one class only", "'yes'"),
    "no label": (lambda: fit_labels(with_entry(NAMES, 3, None)), "missing in 1 of 120 rows"),
    "judge new class": (lambda: fitted("bernoulli").deviance(X, TABLE.labels + 1, CLIENTS), "class 2"),
    "onboard new class": (lambda: fitted("bernoulli").onboard(X, TABLE.labels + 1, CLIENTS + 99), "class 2", "[0, 1]"),
    "no situations": (lambda: fit_choices(situations=None), "situations is None"),
    "one alternative": (lambda: fit_choices(situations=with_entry(CHOICES.situations, 0, 999.0)), "one alternative"),
    "all taken": (lambda: fit_choices(y=with_entry(CHOICES.y, slice(3, 6), 1.0)), "situation 1", "exactly one"),
    "none taken": (lambda: fit_choices(y=with_entry(CHOICES.y, slice(3, 6), 0.0)), "situation 1", "exactly one"),
    "taken twice": (lambda: fit_choices(y=with_entry(CHOICES.y, 4, 2.0)), "2.0"),
    "two clients": (lambda: fit_choices(clients=with_entry(CHOICES.clients, 4, 7.0)), "situation 1", "0.0 and 7.0"),
    "predict no situations": (lambda: fitted_choice().predict(CHOICES.x, None), "situations is None"),
    "onboard no clients": (lambda: fitted_choice().onboard(*CHOICES[:3], None), "clients is None"),
    "score none taken": (lambda: fitted_choice().score(CHOICES.x, 0 * CHOICES.y, *CHOICES[2:]), "situation 0"),
    "judge too few": (lambda: fitted_choice().deviance(CHOICES.x, CHOICES.y[:-1], *CHOICES[2:]), "287 entries"),
}  # fmt: skip
by_features = choice(solver="profile", penalty=1e-3, affinity="features")
OF_AFFINITIES = {
    "11 of 12": (lambda: fit_affinity(np.ones((11, 11))), "11 rows", "12 client"),
    "sparse 11 of 12": (lambda: fit_affinity(sp.csr_array(np.ones((11, 11)))), "(11, 11)", "12 clients"),
    "one way": (lambda: fit_affinity(with_entry(ONES, (0, 1), 2.0)), "symmetric"),
    "sparse one way": (lambda: fit_affinity(sp.csr_array(with_entry(ONES, (0, 1), 2.0))), "symmetric"),
    "NaN": (lambda: fit_affinity(with_entry(ONES, (0, 0), np.nan)), "finite"),
    "negative": (lambda: fit_affinity(with_entry(ONES, (0, 0), -1.0)), "non-negative"),
    "other columns": (lambda: fit_affinity(pd.DataFrame(ONES, range(12), range(1, 13))), "other columns than rows"),
    "other clients": (lambda: fit_affinity(pd.DataFrame(ONES, range(1, 13), range(1, 13))), "'0'", "'12'"),
    "edge to nobody": (lambda: fit_affinity([(0, 1), (1, 12)]), "'12'"),
    "no edge": (lambda: fit_affinity([(0, 1), 7]), "edge 7"),
    "no kind": (lambda: fit_affinity(3), "int", "DataFrame"),
    "no name": (lambda: fit_affinity("friends"), "'friends'", "uniform, labels, features"),
    "labels of numbers": (lambda: fit_affinity("labels"), "classes", "'features'"),
    "features of choices": (lambda: fit_choices(by_features), "'features'", "matrix"),
}
NAMED_INTERCEPT = pd.DataFrame(X, columns=["price", "intercept"])
OF_SETTINGS = {
    "more models than clients": (lambda: fit(k=13), "13", "12"),
    "mix": (lambda: fit(mix="outputs"), "'outputs'", "weights, predictions"),
    "solver": (lambda: fit(solver="newton"), "'newton'", "marginal, profile, federated"),
    "family": (lambda: fit(family="tweedie"), "'tweedie'", "gaussian, poisson, gamma"),
    "family of classes": (lambda: fit(family="quasibinomial"), "PopulationClassifier"),
    "link": (lambda: fit(link="cloglog"), "'cloglog'", "identity, log"),
    "shared name": (lambda: fit(shared="prise"), "'prise'", "x0, x1, intercept"),
    "shared number": (lambda: fit(shared=[2]), "2", "x0, x1, intercept"),
    "all shared": (lambda: fit(shared=["x0", "x1", "intercept"]), "all columns"),
    "which intercept": (lambda: fit(NAMED_INTERCEPT, shared="intercept"), "'intercept'", "rename"),
    "penalty": (lambda: fit(penalty=np.inf), "penalty is inf", "at least 0"),
    "tol": (lambda: fit(tol=np.nan), "tol is nan"),
    "k": (lambda: fit(k=0), "k is 0"),
    "max_iter": (lambda: fit(max_iter=None), "max_iter is None"),
    "fit_intercept": (lambda: fit(fit_intercept="no"), "fit_intercept is 'no'"),
    "own noise of a sparse table": (lambda: fit(sp.csr_array(X), family=HETEROSCEDASTIC), "toarray()", "'gaussian'"),
    "own noise, federated": (lambda: fit(family=HETEROSCEDASTIC, solver="federated"), "another solver"),
    "own noise, log link": (lambda: fit(family=HETEROSCEDASTIC, link="log"), "'log'", "identity"),
    "k by a federated solver": (lambda: fit(k=[1, 2], solver="federated"), "one k only"),
    "effects of predictions": (lambda: as_mixed_model(fitted("bernoulli", mix="predictions")), "'predictions'"),
    "effects of three classes": (lambda: as_mixed_model(fitted("multinomial")), "three or more classes"),
}  # fmt: skip
REFUSED = {
    f"{of}: {name}": (error, *row)
    for of, error, table in (
        ("clients", DataError, OF_CLIENTS),
        ("targets", DataError, OF_TARGETS),
        ("affinity", AffinityError, OF_AFFINITIES),
        ("settings", SettingError, OF_SETTINGS),
    )
    for name, row in table.items()
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_input_is_refused(name):
    error, call, *words = REFUSED[name]
    assert_refused(call, error, *words)


def test_own_noise_of_too_many_columns_is_refused(monkeypatch):
    monkeypatch.setattr("ppfl.glm.gaussian_moments._MAX_MOMENTS", 100)
    assert_refused(lambda: fit(family=HETEROSCEDASTIC), SettingError, "3 columns of 12 clients", "'gaussian'")


def test_what_scikit_learn_checks_is_checked_in_every_method():
    """Missing and infinite numbers, weights, and columns of the wrong number or type; the words are scikit-learn's."""
    town = pd.DataFrame({"price": X[:, 0], "town": np.where(CLIENTS % 2, "Rome", "Oslo")})
    bad, y = with_entry(X, (3, 1), np.nan), with_entry(TABLE.y, 3, np.inf)
    calls = [
        (lambda: fit(bad), "X contains NaN"),
        (lambda: fit(sp.csr_array(bad)), "X contains NaN"),
        (
            lambda: classifier().fit(with_entry(X, (3, 1), -np.inf), TABLE.labels, clients=CLIENTS),
            "X contains infinity",
        ),
        (lambda: fit_choices(x=with_entry(CHOICES.x, (3, 1), np.nan)), "X contains NaN"),
        (lambda: fit(y=y), "y contains infinity"),
        (lambda: fitted().predict(bad, CLIENTS), "X contains NaN"),
        (lambda: fitted().score(X, y, CLIENTS), "y contains infinity"),
        (lambda: fitted().predict(X[:, :1], CLIENTS), "1 features.*2 features"),
        (lambda: fitted().onboard(np.c_[X, X], TABLE.y, CLIENTS + 100), "4 features.*2 features"),
        (lambda: fit(town), "could not convert string"),
        (lambda: fit(y=NAMES), "could not convert string"),
        (lambda: fit(y=np.c_[TABLE.y, TABLE.y]), "1d array"),
        (lambda: fit_labels(TABLE.y), "continuous"),
        (lambda: fitted("bernoulli").score(X, NAMES.astype(str), CLIENTS), "string and number"),
        (lambda: fit(random_state="seed"), "'seed'"),
        (lambda: fit(pd.DataFrame(X, columns=["price", "price"]), shared="price"), "price"),
    ]
    for weight, word in (
        (np.zeros(N), "non-zero|is 0 for all"),
        (with_entry(np.ones(N), 3, -1.0), "Negative"),
        (with_entry(np.ones(N), 3, np.nan), "NaN"),
        (np.ones(3), "shape"),
    ):
        calls += [
            (lambda weight=weight: regressor().fit(X, TABLE.y, clients=CLIENTS, sample_weight=weight), word),
            (lambda weight=weight: fitted().score(X, TABLE.y, CLIENTS, sample_weight=weight), word),
            (lambda weight=weight: fitted().onboard(X, TABLE.y, CLIENTS + 100, sample_weight=weight), word),
        ]
    for call, word in calls:
        with pytest.raises(ValueError, match=word):
            call()


# ---------------------------------------------------------------------- unusual but valid


def test_as_many_models_as_clients_and_one_row_per_client_are_enough():
    assert fit(k=1, clients=np.zeros(N)).memberships_.shape == (1, 1)
    assert fit(k=3, clients=CLIENTS % 3).memberships_.shape == (3, 3)
    alone = fit(k=1, clients=None)
    np.testing.assert_array_equal(alone.predict(X, CLIENTS.astype(str)), alone.predict(X))
    model = fitted("bernoulli")
    np.testing.assert_array_equal(model.predict(X, CLIENTS.astype(float)), model.predict(X, CLIENTS))
    for solver in ("marginal", "profile"):
        model = classifier(solver=solver).fit(X, TABLE.labels, clients=np.arange(N))
        np.testing.assert_allclose(model.memberships_.sum(axis=1), 1)
        assert np.isfinite(model.canonical_coef_).all()


def test_a_constant_column_has_coefficient_zero():
    """The data do not determine its coefficient, and a later table may have other values in this column."""
    for value, kind in ((0.1, sp.csr_array), (7e9, np.asarray)):
        model = fit(kind(np.c_[X, np.full(N, value)]), ridge=0.0)
        assert (model.canonical_coef_[:, 2] == 0).all()
        found = [model.predict(np.c_[X, X[:, at]], CLIENTS) for at in (0, 1)]
        np.testing.assert_array_equal(*found)
    age = 20.1 + CHOICES.clients  # the same for all alternatives; their mean has a rounding error
    model = fit_choices(x=np.c_[CHOICES.x, age])
    assert (model.canonical_coef_[:, 2] == 0).all()
    np.testing.assert_allclose(model.canonical_coef_[:, :2], fitted_choice().canonical_coef_, atol=1e-3)


def test_a_constant_column_replaces_the_intercept_and_may_have_its_name():
    exact, constant = {"ridge": 0.0, "tol": 1e-7}, np.c_[X, np.full(N, 2.0)]
    by_hand, model = fit(constant, TABLE.y + 5, fit_intercept=False, **exact), fit(y=TABLE.y + 5, **exact)
    np.testing.assert_allclose(by_hand.predict(constant, CLIENTS), model.predict(X, CLIENTS), atol=1e-3)
    named = fit(NAMED_INTERCEPT, shared="intercept", fit_intercept=False)
    assert np.ptp(named.canonical_coef_[:, 1]) == 0


def test_a_client_with_zero_weight_has_the_prior_membership():
    counted = CLIENTS > 1
    model = regressor().fit(X, TABLE.y, clients=CLIENTS, sample_weight=counted)
    without = fit(X[counted], TABLE.y[counted], CLIENTS[counted])
    np.testing.assert_allclose(model.memberships_.loc[2:], without.memberships_, atol=1e-3)
    np.testing.assert_array_equal(model.memberships_.loc[0], model.memberships_.loc[1])


def test_targets_without_a_best_fit_are_fitted():
    """Clients with zeros alone, zeros alone, classes that a line separates, and numbers without noise."""
    some = fit(y=np.where(CLIENTS == 0, 0, TABLE.counts), family="poisson")
    assert np.isfinite(some.predict(X, CLIENTS)).all()
    assert fit(y=np.zeros(N), family="poisson").predict(X, CLIENTS).max() < 0.05
    for solver in ("marginal", "profile"):
        separated = fit_labels(X[:, 0] > 0.5, solver=solver)
        assert np.abs(separated.canonical_coef_).max() < 1e3 and np.isfinite(separated.canonical_intercept_).all()
        assert separated.score(X, X[:, 0] > 0.5, CLIENTS) == 1
    with pytest.warns(ConvergenceWarning, match="fits every row exactly.*fewer columns"):
        regressor(k=1).fit(X, X @ [1.0, 2.0])
    # with the smallest tolerance a fit ends where rounding errors hide all that is left to gain
    assert fit(tol=0.0).converged_


@pytest.mark.parametrize("kind", [str, bool, object, "string", "category"])
def test_labels_may_be_of_any_kind(kind):
    names, plain = np.array([False, True] if kind is bool else ["no", "yes"]), fitted("bernoulli")
    y = names[TABLE.labels]
    y = pd.Series(y).astype(kind) if isinstance(kind, str) else y.astype(kind)
    model = fit_labels(y)
    assert model.classes_.tolist() == names.tolist()
    np.testing.assert_array_equal(model.predict(X, CLIENTS), names[plain.predict(X, CLIENTS)])
    assert model.score(X, y, CLIENTS) == plain.score(X, TABLE.labels, CLIENTS)
    assert model.deviance(X, y, CLIENTS) == pytest.approx(plain.deviance(X, TABLE.labels, CLIENTS))


def test_a_class_the_fit_did_not_have_counts_as_an_error():
    model = fitted("bernoulli")
    right = (model.predict(X, CLIENTS) == 1) & (TABLE.labels == 1)
    assert model.score(X, np.where(TABLE.labels, 1, 7), CLIENTS) == pytest.approx(right.mean())
