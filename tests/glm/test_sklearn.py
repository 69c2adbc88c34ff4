"""Compatibility with scikit-learn: its estimator checks, cloning, pickling, pipelines and searches."""

import io
import pickle

import joblib
import numpy as np
import pytest
import sklearn
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV, GroupKFold, StratifiedKFold, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

from kit.tables import choice, classifier, make_choice_table, make_client_table, regressor

TABLE = make_client_table()
QUICK = {"tol": 1e-4}
ESTIMATORS = {
    "gaussian": (regressor(**QUICK), TABLE.y),
    "heteroscedastic": (regressor(family="heteroscedastic gaussian", **QUICK), TABLE.y),
    "poisson": (regressor(family="poisson", **QUICK), TABLE.counts),
    "gamma": (regressor(family="gamma", mix="predictions", **QUICK), TABLE.amounts),
    "classes": (classifier(**QUICK), TABLE.labels),
    "profile": (regressor(solver="profile", tol=1e-3), TABLE.y),
}
every_estimator = pytest.mark.parametrize(("estimator", "y"), ESTIMATORS.values(), ids=ESTIMATORS)

NO_MAXIMUM = "the check's table has more columns than rows, so residuals are 0 and the likelihood has no maximum"


def expected_failures(estimator) -> dict[str, str]:
    if not hasattr(estimator, "family"):
        return {}
    names = ("check_sample_weight_equivalence_on_dense_data", "check_sample_weight_equivalence_on_sparse_data")
    return dict.fromkeys(names, NO_MAXIMUM)  # tested in test_table_formats.py, with a table that has a maximum


# Family "poisson" is left out because scikit-learn's targets are not whole numbers, and PopulationChoice because it
# needs `situations`, which generic checks do not pass.
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")  # see NO_MAXIMUM
@pytest.mark.filterwarnings("ignore::ppfl.glm.MissingClientsWarning")  # the checks know of no clients
@parametrize_with_checks(
    [regressor(max_iter=50), regressor(family="gamma", max_iter=50), classifier(max_iter=50)],
    expected_failed_checks=expected_failures,
)
def test_scikit_learn_estimator_checks(estimator, check):
    check(estimator)


@pytest.mark.parametrize("estimator", [*(e for e, _ in ESTIMATORS.values()), choice(shared="x0")], ids=repr)
def test_settings_survive_a_clone_and_show_in_the_repr(estimator):
    assert clone(estimator).get_params() == estimator.get_params()
    assert clone(estimator).set_params(k=5).k == 5
    assert repr(estimator).startswith(f"{type(estimator).__name__}(") and "k=2" in repr(estimator)


def test_an_unfitted_choice_model_raises():
    table = make_choice_table(clients=2)
    for method in (choice().predict, choice().predict_proba):
        with pytest.raises(NotFittedError, match="PopulationChoice"):
            method(table.x, table.situations)
    for method in (choice().score, choice().deviance):
        with pytest.raises(NotFittedError, match="PopulationChoice"):
            method(table.x, table.y, table.situations)
    with pytest.raises(NotFittedError, match="PopulationChoice"):
        choice().onboard(table.x, table.y, table.situations, table.clients)


@pytest.mark.parametrize("name", ["memberships_", "aic_", "bic_", "n_parameters_"])
def test_fitted_attributes_raise_before_the_fit(name):
    with pytest.raises(NotFittedError, match="PopulationRegressor"):
        getattr(regressor(), name)


def through_joblib(model):
    file = io.BytesIO()
    joblib.dump(model, file)
    file.seek(0)
    return joblib.load(file)


@pytest.mark.parametrize("stored", [through_joblib, lambda model: pickle.loads(pickle.dumps(model))])
@every_estimator
def test_a_pickled_model_predicts_and_onboards_like_the_original(estimator, y, stored):
    old = TABLE.clients < 10
    model = clone(estimator).fit(TABLE.x[old], y[old], clients=TABLE.clients[old])
    again = stored(model)
    for each in (model, again):
        each.onboard(TABLE.x[~old], y[~old], TABLE.clients[~old])
    np.testing.assert_array_equal(again.predict(TABLE.x, TABLE.clients), model.predict(TABLE.x, TABLE.clients))
    assert again.memberships_.equals(model.memberships_)


@every_estimator
def test_a_second_fit_is_the_same(estimator, y):
    model = clone(estimator).fit(TABLE.x, y, clients=TABLE.clients)
    first = model.predict(TABLE.x, TABLE.clients)
    np.testing.assert_array_equal(model.fit(TABLE.x, y, clients=TABLE.clients).predict(TABLE.x, TABLE.clients), first)


# ---------------------------------------------------------------------- pipelines and searches


@pytest.fixture
def routed():
    with sklearn.config_context(enable_metadata_routing=True):
        yield


def request_clients(estimator):
    estimator = clone(estimator).set_fit_request(clients=True, sample_weight=True)
    return estimator.set_predict_request(clients=True).set_score_request(clients=True, sample_weight=True)


@pytest.mark.usefixtures("routed")
@every_estimator
def test_a_pipeline_passes_clients_on(estimator, y):
    pipeline = make_pipeline(StandardScaler().set_fit_request(sample_weight=False), request_clients(estimator))
    weight = 1.0 + TABLE.clients % 3
    pipeline.fit(TABLE.x, y, clients=TABLE.clients, sample_weight=weight)
    scaled = StandardScaler().fit_transform(TABLE.x)
    alone = clone(estimator).fit(scaled, y, clients=TABLE.clients, sample_weight=weight)
    np.testing.assert_array_equal(
        pipeline.predict(TABLE.x, clients=TABLE.clients), alone.predict(scaled, clients=TABLE.clients)
    )
    by_hand = alone.score(scaled, y, clients=TABLE.clients, sample_weight=weight)
    assert pipeline.score(TABLE.x, y, clients=TABLE.clients, sample_weight=weight) == by_hand


@pytest.mark.usefixtures("routed")
@every_estimator
def test_unknown_clients_are_predicted_worse_than_new_rows_of_known_clients(estimator, y):
    """Splits within clients test personal predictions, splits between clients test the population's."""
    given = {"clients": TABLE.clients}
    within = list(StratifiedKFold(2, shuffle=True, random_state=0).split(TABLE.x, TABLE.clients))
    model = request_clients(estimator)
    personal = cross_val_score(model, TABLE.x, y, cv=within, params=given)
    unknown = cross_val_score(model, TABLE.x, y, cv=GroupKFold(2), params={**given, "groups": TABLE.clients})
    assert personal.mean() > unknown.mean()


@pytest.mark.usefixtures("routed")
def test_a_search_finds_that_there_are_two_groups():
    within = list(StratifiedKFold(2, shuffle=True, random_state=0).split(TABLE.x, TABLE.clients))
    search = GridSearchCV(request_clients(regressor(**QUICK)), {"k": [1, 2]}, cv=within)
    search.fit(TABLE.x, TABLE.y, clients=TABLE.clients)
    assert search.best_params_ == {"k": 2}
    assert search.best_estimator_.memberships_.shape == (12, 2)
    alone = regressor(**QUICK).fit(TABLE.x, TABLE.y, clients=TABLE.clients)
    assert search.score(TABLE.x, TABLE.y, clients=TABLE.clients) == alone.score(TABLE.x, TABLE.y, clients=TABLE.clients)


@pytest.mark.usefixtures("routed")
def test_situations_are_passed_on_as_well():
    table = make_choice_table()
    asked = dict.fromkeys(("situations", "clients"), True)
    model = choice().set_fit_request(**asked).set_score_request(**asked)
    given = {"situations": table.situations, "clients": table.clients}
    within = list(GroupKFold(2).split(table.x, groups=table.situations))  # all rows of a situation are in the same part
    scores = cross_val_score(model, table.x, table.y, cv=within, params=given)
    assert (scores > 1 / 3).all()  # better than chance
