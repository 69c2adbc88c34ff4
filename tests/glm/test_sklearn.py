"""scikit-learn: its estimator checks, cloning, pickles, pipelines and searches; a model used without clients warns."""

import copy
import io
import pickle
import warnings

import joblib
import numpy as np
import pytest
import sklearn
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV, GroupKFold, StratifiedKFold, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import check_estimator

from kit.tables import (
    HETEROSCEDASTIC,
    choice,
    fitted,
    fitted_choice,
    make_choice_table,
    make_client_table,
    make_estimator,
)
from ppfl.glm import NEW, MissingClientsWarning, as_mixed_model, client_scorer

TABLE = make_client_table()
GIVEN = {"clients": TABLE.clients}
CHOICES = make_choice_table()
WITHIN = list(StratifiedKFold(2, shuffle=True, random_state=0).split(TABLE.x, TABLE.clients))
ON_WEIGHTS = "check_sample_weight_equivalence_on_{}_data"
# The tables of these checks have more columns than rows, so residuals are 0 and the likelihood has no maximum.
# `test_formats.py` has the same law with a table that has one.
CHECKED = {
    "gaussian": {ON_WEIGHTS.format("dense"), ON_WEIGHTS.format("sparse")},
    "gamma": {ON_WEIGHTS.format("sparse")},
    "bernoulli": set(),
}


# Counts are left out because scikit-learn's targets are not whole numbers, and PopulationChoice because it needs
# `situations`, which generic checks do not pass.
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
@pytest.mark.filterwarnings("ignore::ppfl.glm.MissingClientsWarning")  # the checks know of no clients
@pytest.mark.parametrize("family", CHECKED)
def test_scikit_learn_estimator_checks(family):
    found = check_estimator(make_estimator(family, max_iter=50), on_fail=None, on_skip=None)
    failed = {one["check_name"]: one["exception"] for one in found if one["status"] == "failed"}
    assert failed.keys() == CHECKED[family], failed
    assert sum(one["status"] == "passed" for one in found) > 30


def test_settings_survive_a_clone_and_show_in_the_repr():
    for estimator in (make_estimator("gamma"), make_estimator("bernoulli", tol=1e-3), choice(shared="x0")):
        assert clone(estimator).get_params() == estimator.get_params()
        assert clone(estimator).set_params(k=5).k == 5
        assert repr(estimator).startswith(f"{type(estimator).__name__}(") and "k=2" in repr(estimator)


def test_what_needs_a_fit_says_so():
    x, y, situations, clients = CHOICES
    model, tastes = make_estimator(), choice()
    for call in (
        lambda: model.predict(x),
        lambda: model.conf_int(),
        lambda: as_mixed_model(model),
        *(lambda name=name: getattr(model, name) for name in ("memberships_", "aic_", "bic_", "n_parameters_")),
        lambda: tastes.predict(x, situations),
        lambda: tastes.predict_proba(x, situations),
        lambda: tastes.score(x, y, situations),
        lambda: tastes.deviance(x, y, situations),
        lambda: tastes.onboard(x, y, situations, clients),
    ):
        with pytest.raises(NotFittedError, match="Population(Regressor|Choice)"):
            call()


@pytest.mark.parametrize(
    ("family", "solver"), [("gaussian", "profile"), (HETEROSCEDASTIC, "auto"), ("bernoulli", "auto")]
)
def test_a_pickled_model_predicts_and_onboards_like_the_original(family, solver):
    model, y = fitted(family, solver=solver), TABLE.target(family)
    file = io.BytesIO()
    joblib.dump(model, file)
    file.seek(0)
    copies = copy.deepcopy(model), joblib.load(file), pickle.loads(pickle.dumps(model))
    for each in copies:
        each.onboard(TABLE.x, y, TABLE.clients + 100)
        np.testing.assert_array_equal(each.predict(TABLE.x, TABLE.clients), model.predict(TABLE.x, TABLE.clients))
        assert each.memberships_.equals(copies[0].memberships_)


@pytest.mark.parametrize("family", ["gamma", HETEROSCEDASTIC, "bernoulli"])
def test_a_second_fit_is_the_same(family):
    model = make_estimator(family).fit(TABLE.x, TABLE.target(family), **GIVEN)
    first, again = (each.predict(TABLE.x, TABLE.clients) for each in (fitted(family), model))
    np.testing.assert_array_equal(first, again)


# ---------------------------------------------------------------------- pipelines and searches


@pytest.fixture
def routed():
    with sklearn.config_context(enable_metadata_routing=True):
        yield


def request_clients(estimator):
    estimator = estimator.set_fit_request(clients=True, sample_weight=True)
    return estimator.set_predict_request(clients=True).set_score_request(clients=True, sample_weight=True)


@pytest.mark.usefixtures("routed")
@pytest.mark.parametrize("family", ["poisson", "bernoulli"])
def test_a_pipeline_passes_clients_on(family):
    y, scaled = TABLE.target(family), StandardScaler().fit_transform(TABLE.x)
    weighted = {**GIVEN, "sample_weight": 1.0 + TABLE.clients % 3}
    pipeline = make_pipeline(
        StandardScaler().set_fit_request(sample_weight=False), request_clients(make_estimator(family))
    ).fit(TABLE.x, y, **weighted)
    alone = make_estimator(family).fit(scaled, y, **weighted)
    np.testing.assert_array_equal(pipeline.predict(TABLE.x, **GIVEN), alone.predict(scaled, **GIVEN))
    assert pipeline.score(TABLE.x, y, **weighted) == alone.score(scaled, y, **weighted)


@pytest.mark.usefixtures("routed")
def test_a_search_finds_two_groups_and_unknown_clients_are_predicted_worse():
    """Splits within clients test personal predictions, splits between clients test the population's."""
    search = GridSearchCV(request_clients(make_estimator()), {"k": [1, 2]}, cv=WITHIN).fit(TABLE.x, TABLE.y, **GIVEN)
    assert search.best_params_ == {"k": 2}
    assert search.score(TABLE.x, TABLE.y, **GIVEN) == fitted().score(TABLE.x, TABLE.y, **GIVEN)
    between = {**GIVEN, "groups": TABLE.clients}
    unknown = cross_val_score(request_clients(make_estimator()), TABLE.x, TABLE.y, cv=GroupKFold(2), params=between)
    assert search.best_score_ > unknown.mean()


@pytest.mark.usefixtures("routed")
def test_situations_are_passed_on_as_well():
    asked = dict.fromkeys(("situations", "clients"), True)
    model = choice().set_fit_request(**asked).set_score_request(**asked)
    given = {"situations": CHOICES.situations, "clients": CHOICES.clients}
    within = list(GroupKFold(2).split(CHOICES.x, groups=CHOICES.situations))  # rows of a situation stay together
    scores = cross_val_score(model, CHOICES.x, CHOICES.y, cv=within, params=given)
    assert (scores > 1 / 3).all()  # better than chance


# ---------------------------------------------------------------------- without clients


def test_predictions_without_clients_warn_once_at_the_line_that_asks():
    model, labels = fitted(), fitted("bernoulli")
    for call in (
        lambda: model.predict(TABLE.x),
        lambda: model.score(TABLE.x, TABLE.y),
        lambda: labels.predict_proba(TABLE.x),
        lambda: fitted_choice().predict(CHOICES.x, CHOICES.situations),
    ):
        with pytest.warns(MissingClientsWarning, match="clients=ids") as caught:
            call()
        assert [one.filename for one in caught] == [__file__]


def test_predictions_for_new_clients_are_quiet_when_asked_for():
    unknown = fitted().predict(TABLE.x, clients=np.full(len(TABLE.x), 999))
    np.testing.assert_array_equal(fitted().predict(TABLE.x, clients=NEW), unknown)
    chances = fitted_choice().predict_proba(CHOICES.x, CHOICES.situations, clients=NEW)
    np.testing.assert_allclose(np.bincount(CHOICES.situations, chances), 1)
    one = fitted(k=1)  # has no memberships, so nothing is missing
    np.testing.assert_array_equal(one.predict(TABLE.x), one.predict(TABLE.x, TABLE.clients))


def test_a_fit_without_clients_is_a_plain_glm_and_says_so():
    with pytest.warns(MissingClientsWarning, match="plain GLM.*clients=ids"):
        model = make_estimator().fit(TABLE.x, TABLE.y)
    quiet = make_estimator(k=1).fit(TABLE.x, TABLE.y)
    np.testing.assert_array_equal(model.canonical_coef_, quiet.canonical_coef_)
    np.testing.assert_array_equal(model.predict(TABLE.x), quiet.predict(TABLE.x))


def test_scores_of_strangers_warn_and_the_advice_scores_each_client():
    scoring = "neg_root_mean_squared_error"
    for name in (None, scoring):
        with pytest.warns(MissingClientsWarning, match="enable_metadata_routing"):
            strangers = cross_val_score(make_estimator(), TABLE.x, TABLE.y, cv=WITHIN, scoring=name, params=GIVEN)
    with sklearn.config_context(enable_metadata_routing=True), warnings.catch_warnings():
        warnings.simplefilter("error")
        model, chosen = make_estimator().set_fit_request(clients=True), client_scorer(scoring)
        personal = cross_val_score(model, TABLE.x, TABLE.y, cv=WITHIN, scoring=chosen, params=GIVEN)
    by_hand = []
    for train, test in WITHIN:
        model = make_estimator().fit(TABLE.x[train], TABLE.y[train], clients=TABLE.clients[train])
        errors = TABLE.y[test] - model.predict(TABLE.x[test], TABLE.clients[test])
        by_hand.append(-np.sqrt(np.mean(errors**2)))
    np.testing.assert_allclose(personal, by_hand)
    assert personal.min() > strangers.max()
    labels = fitted("bernoulli")  # and with probabilities
    probability = labels.predict_proba(TABLE.x, TABLE.clients)
    expected = np.log(probability[np.arange(len(TABLE.labels)), TABLE.labels]).mean()
    found = client_scorer("neg_log_loss")(labels, TABLE.x, TABLE.labels, **GIVEN)
    assert found == pytest.approx(expected)
