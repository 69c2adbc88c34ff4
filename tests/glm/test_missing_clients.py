"""A model with memberships that is used without clients warns, and the calls it names work."""

import warnings

import numpy as np
import pytest
import sklearn
from sklearn.model_selection import StratifiedKFold, cross_val_score

from kit.tables import choice, classifier, make_choice_table, make_client_table, regressor
from ppfl.glm import NEW, MissingClientsWarning, client_scorer

TABLE = make_client_table(rows=20)
WITHIN = list(StratifiedKFold(2, shuffle=True, random_state=0).split(TABLE.x, TABLE.clients))


@pytest.fixture(scope="module")
def model():
    return regressor().fit(TABLE.x, TABLE.y, clients=TABLE.clients)


def test_predictions_without_clients_warn_once_per_call(model):
    for call in (lambda: model.predict(TABLE.x), lambda: model.score(TABLE.x, TABLE.y)):
        with pytest.warns(MissingClientsWarning, match="clients=ids") as caught:
            call()
        assert len(caught) == 1
        assert caught[0].filename == __file__
    labels = classifier().fit(TABLE.x, TABLE.labels, clients=TABLE.clients)
    with pytest.warns(MissingClientsWarning):
        labels.predict_proba(TABLE.x)


def test_predictions_for_new_clients_are_quiet_when_asked_for(model):
    found = model.predict(TABLE.x, clients=NEW)
    np.testing.assert_array_equal(found, model.predict(TABLE.x, clients=np.full(len(TABLE.x), 999)))
    np.testing.assert_array_equal(found, model.predict(TABLE.x, clients="new"))
    one = regressor(k=1).fit(TABLE.x, TABLE.y, clients=TABLE.clients)
    np.testing.assert_array_equal(one.predict(TABLE.x), one.predict(TABLE.x, TABLE.clients))
    choices = make_choice_table()
    taste = choice().fit(choices.x, choices.y, choices.situations, choices.clients)
    assert taste.predict_proba(choices.x, choices.situations, clients=NEW).shape == choices.y.shape
    with pytest.warns(MissingClientsWarning):
        taste.predict(choices.x, choices.situations)


def test_a_fit_without_clients_is_a_plain_glm_and_says_so():
    with pytest.warns(MissingClientsWarning, match="k is 2 but no clients .*plain GLM.*clients=ids"):
        model = regressor().fit(TABLE.x, TABLE.y)
    assert model.canonical_coef_.shape == (1, 2)
    quiet = regressor(k=1).fit(TABLE.x, TABLE.y)
    np.testing.assert_array_equal(model.canonical_coef_, quiet.canonical_coef_)
    np.testing.assert_array_equal(model.predict(TABLE.x), quiet.predict(TABLE.x))


@pytest.mark.parametrize("scoring", [None, "neg_root_mean_squared_error"])
def test_scores_of_strangers_warn_and_the_advice_scores_each_client(scoring):
    with pytest.warns(MissingClientsWarning, match="enable_metadata_routing"):
        strangers = cross_val_score(
            regressor(), TABLE.x, TABLE.y, cv=WITHIN, scoring=scoring, params={"clients": TABLE.clients}
        )
    with sklearn.config_context(enable_metadata_routing=True), warnings.catch_warnings():
        warnings.simplefilter("error")
        model = regressor().set_fit_request(clients=True).set_score_request(clients=True)
        chosen = None if scoring is None else client_scorer(scoring)
        personal = cross_val_score(
            model, TABLE.x, TABLE.y, cv=WITHIN, scoring=chosen, params={"clients": TABLE.clients}
        )
    by_hand = []
    for train, test in WITHIN:
        model = regressor().fit(TABLE.x[train], TABLE.y[train], clients=TABLE.clients[train])
        given = TABLE.x[test], TABLE.y[test], TABLE.clients[test]
        errors = given[1] - model.predict(given[0], given[2])
        by_hand.append(model.score(*given) if scoring is None else -np.sqrt(np.mean(errors**2)))
    np.testing.assert_allclose(personal, by_hand)
    assert personal.min() > strangers.max()


def test_client_scorers_work_with_probabilities_too():
    labels = classifier().fit(TABLE.x, TABLE.labels, clients=TABLE.clients)
    probability = labels.predict_proba(TABLE.x, TABLE.clients)
    expected = np.log(probability[np.arange(len(TABLE.labels)), TABLE.labels]).mean()
    found = client_scorer("neg_log_loss")(labels, TABLE.x, TABLE.labels, clients=TABLE.clients)
    assert found == pytest.approx(expected)
