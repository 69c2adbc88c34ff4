"""scikit-learn: its estimator checks, cloning, pickles, pipelines and searches; a model used without clients warns."""

import copy
import pickle
import warnings

import numpy as np
import pandas as pd
import pytest
import sklearn
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV, GroupKFold, StratifiedKFold, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import check_estimator

from kit.tables import choice, fitted, fitted_choice, make_choice_table, make_client_table, make_estimator
from ppfl.glm import NEW, MissingClientsWarning, client_scorer

TABLE = make_client_table()
GIVEN = {"clients": TABLE.clients}
CHOICES = make_choice_table()
WITHIN = list(StratifiedKFold(2, shuffle=True, random_state=0).split(TABLE.x, TABLE.clients))
ON_WEIGHTS = "check_sample_weight_equivalence_on_{}_data"
# The tables of these checks have more columns than rows, so residuals are 0 and the likelihood has no maximum.
# `test_formats.py` has the same law with a table that has one.
CHECKED = {"gaussian": {ON_WEIGHTS.format("dense")}, "bernoulli": set()}


# PopulationChoice is left out because it needs `situations`, which generic checks do not pass.
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
@pytest.mark.filterwarnings("ignore::ppfl.glm.MissingClientsWarning")  # the checks know of no clients
@pytest.mark.parametrize("family", CHECKED)
def test_scikit_learn_estimator_checks(family):
    found = check_estimator(make_estimator(family, max_iter=50), on_fail=None, on_skip=None)
    failed = {one["check_name"]: one["exception"] for one in found if one["status"] == "failed"}
    assert failed.keys() == CHECKED[family], failed
    assert sum(one["status"] == "passed" for one in found) > 30


def test_choices_are_cloned_and_say_that_they_need_a_fit():
    x, y, situations, clients = CHOICES
    model = choice(shared="x0")
    assert clone(model).get_params() == model.get_params()
    for call in (
        lambda: model.memberships_,
        lambda: model.aic_,
        lambda: model.conf_int(),
        lambda: model.predict(x, situations),
        lambda: model.score(x, y, situations),
        lambda: model.onboard(x, y, situations, clients),
    ):
        with pytest.raises(NotFittedError, match="PopulationChoice"):
            call()


@pytest.mark.parametrize(("family", "residual"), [("gaussian", "full"), ("bernoulli", None)])
def test_a_second_fit_and_a_pickled_model_predict_and_onboard_like_the_original(family, residual):
    model, y = fitted(family, residual=residual), TABLE.target(family)
    again = make_estimator(family, residual=residual).fit(TABLE.x, y, **GIVEN)
    copies = copy.deepcopy(model), pickle.loads(pickle.dumps(model)), again
    for each in copies:
        each.onboard(TABLE.x, y, TABLE.clients + 100)
        found = [each.predict(TABLE.x, TABLE.clients), model.predict(TABLE.x, TABLE.clients)]
        np.testing.assert_allclose(*found, atol=1e-9)
        pd.testing.assert_frame_equal(each.memberships_, copies[0].memberships_, atol=1e-9)


@sklearn.config_context(enable_metadata_routing=True)
def test_a_search_over_pipelines_finds_two_groups_and_unknown_clients_are_predicted_worse():
    """Splits within clients test personal predictions, splits between clients test the population's."""
    model = make_estimator().set_fit_request(clients=True).set_score_request(clients=True)
    pipeline = make_pipeline(StandardScaler(), model.set_predict_request(clients=True))
    search = GridSearchCV(pipeline, {"populationregressor__k": [1, 2]}, cv=WITHIN).fit(TABLE.x, TABLE.y, **GIVEN)
    assert search.best_params_ == {"populationregressor__k": 2}
    scaled = StandardScaler().fit_transform(TABLE.x)
    alone = make_estimator().fit(scaled, TABLE.y, **GIVEN)
    np.testing.assert_array_equal(search.best_estimator_.predict(TABLE.x, **GIVEN), alone.predict(scaled, **GIVEN))
    assert search.score(TABLE.x, TABLE.y, **GIVEN) == alone.score(scaled, TABLE.y, **GIVEN)
    between = {**GIVEN, "groups": TABLE.clients}
    unknown = cross_val_score(model, TABLE.x, TABLE.y, cv=GroupKFold(2), params=between)
    assert search.best_score_ > unknown.mean()
    asked = dict.fromkeys(("situations", "clients"), True)
    tastes = choice().set_fit_request(**asked).set_score_request(**asked)
    given = {"situations": CHOICES.situations, "clients": CHOICES.clients}
    within = list(GroupKFold(2).split(CHOICES.x, groups=CHOICES.situations))  # rows of a situation stay together
    scores = cross_val_score(tastes, CHOICES.x, CHOICES.y, cv=within, params=given)
    assert (scores > 1 / 3).all()  # better than chance


def test_without_clients_a_prediction_warns_once_at_the_line_that_asks():
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
    unknown = model.predict(TABLE.x, clients=np.full(len(TABLE.x), 999))  # asked for, so there is no warning
    np.testing.assert_array_equal(model.predict(TABLE.x, clients=NEW), unknown)


def test_a_fit_without_clients_is_a_plain_glm_and_says_so():
    with pytest.warns(MissingClientsWarning, match="plain GLM.*clients=ids"):
        model = make_estimator().fit(TABLE.x, TABLE.y)
    quiet = make_estimator(k=1).fit(TABLE.x, TABLE.y)
    np.testing.assert_array_equal(model.canonical_coef_, quiet.canonical_coef_)
    np.testing.assert_array_equal(model.predict(TABLE.x), quiet.predict(TABLE.x))


def test_scores_of_strangers_warn_and_the_advice_scores_each_client():
    scoring = "neg_root_mean_squared_error"
    with pytest.warns(MissingClientsWarning, match="enable_metadata_routing"):
        strangers = cross_val_score(make_estimator(), TABLE.x, TABLE.y, cv=WITHIN, scoring=scoring, params=GIVEN)
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
