"""A fit to rows that stay at three sites is that of one table with all rows; only sums over clients are carried."""

import numpy as np
import pytest

from kit.refusals import DataError, SettingError, assert_refused
from kit.tables import make_client_table, make_estimator
from ppfl.glm import NEW, GLMSite, PopulationRegressor, fit_over_sites
from ppfl.server import InProcess

TABLE = make_client_table()
PARTS = {"north": TABLE.clients < 3, "west": (TABLE.clients >= 3) & (TABLE.clients < 8), "south": TABLE.clients >= 8}


def sites_of(y, **more):
    given = {name: np.asarray(values) for name, values in more.items()}
    return [
        GLMSite(name, TABLE.x[some], y[some], TABLE.clients[some], **{key: each[some] for key, each in given.items()})
        for name, some in PARTS.items()
    ]


CASES = {
    "gaussian": {"k": 2},
    "gaussian, three models": {"k": 3, "shared": ["x1"]},
    "gaussian, a mixed model": {"k": 1, "residual": "full", "ridge": 0.0},
    "poisson": {"k": 2, "residual": "intercept"},
    "gamma": {"k": 2},
    "bernoulli": {"k": 2},
    "multinomial": {"k": 2},
    "gaussian, predictions": {"k": 2, "mix": "predictions"},
}


@pytest.mark.parametrize("case", CASES)
def test_three_sites_are_one_table(case):
    family = case.split(",")[0]
    y = TABLE.target(family)
    classes = sorted(set(y.tolist())) if family in ("bernoulli", "multinomial") else ()
    make = lambda: make_estimator(family, **{"n_init": 1, **CASES[case]})  # noqa: E731
    sites = sites_of(y)
    found = fit_over_sites(make(), InProcess(*sites), classes)
    one = make().fit(TABLE.x, y, clients=TABLE.clients)
    np.testing.assert_allclose(found.canonical_coef_, one.canonical_coef_, atol=1e-6)
    both = [model.canonical_intercept_ for model in (found, one)]
    # a number added to all classes changes nothing
    levels = [each - each.mean(-1, keepdims=True) * (family == "multinomial") for each in both]
    np.testing.assert_allclose(*levels, atol=1e-6)
    np.testing.assert_allclose(found.conf_int(), one.conf_int(), atol=1e-6, rtol=1e-6)
    assert found.log_likelihood_ == pytest.approx(one.log_likelihood_, abs=0.05)  # of the integration
    assert found.bic_ - 2 * one.log_likelihood_ == pytest.approx(one.bic_ - 2 * found.log_likelihood_, abs=1e-6)
    predict = [getattr(model, "predict_proba", model.predict) for model in (found, one)]
    np.testing.assert_allclose(predict[0](TABLE.x, NEW), predict[1](TABLE.x, NEW), atol=1e-6)
    for site, some in zip(sites, PARTS.values(), strict=True):
        own, names = site.estimator(found), np.unique(TABLE.clients[some])
        np.testing.assert_allclose(own.memberships_, one.memberships_.loc[names], atol=1e-6)
        intervals = own.membership_intervals(), one.membership_intervals().loc[names]
        assert np.abs(intervals[0].to_numpy() - intervals[1].to_numpy()).mean() < 0.05  # of draws
    assert "at their sites" in str(found.summary()) or found.k_ == 1
    assert found.exchanges_ < 100


def test_k_and_the_residual_effect_are_chosen_over_sites():
    """Two kinds of clients are told apart by folds that every site draws for itself."""
    model = PopulationRegressor(k=[1, 2], residual="intercept", random_state=0)
    found = fit_over_sites(model, InProcess(*sites_of(TABLE.y)))
    assert found.k_ == 2 and found.selection_["held_out"].notna().all()


def test_weights_and_offsets_stay_at_their_sites_too():
    more = {"sample_weight": np.arange(120) % 3 + 1.0, "offset": np.sin(np.arange(120))}
    found = fit_over_sites(make_estimator(n_init=1), InProcess(*sites_of(TABLE.y, **more)))
    one = make_estimator(n_init=1).fit(TABLE.x, TABLE.y, TABLE.clients, *more.values())
    np.testing.assert_allclose(found.canonical_coef_, one.canonical_coef_, atol=1e-6)


def test_replies_hold_sums_and_no_rows():
    sites, seen = sites_of(TABLE.y), []
    for site in sites:
        answer = site.answer
        site.answer = lambda request, answer=answer: seen.append(answer(request)) or seen[-1]
    found = fit_over_sites(make_estimator(n_init=1), InProcess(*sites))
    assert len(seen) >= 3 * found.exchanges_
    assert all(not reply.rows.values for reply in seen)
    assert max(value.numel() for reply in seen for value in reply.metrics.values()) <= found.fit_.layout.size**2


def test_what_cannot_be_fitted_over_sites_is_refused():
    sites = sites_of(TABLE.y)
    assert_refused(lambda: fit_over_sites(make_estimator(penalty=0.1), InProcess(*sites)), SettingError, "penalty = 0")
    assert_refused(lambda: sites[0].problem, SettingError, "fit_over_sites")
    few = sites_of(np.where(TABLE.clients < 3, 0, TABLE.labels))
    call = lambda: fit_over_sites(make_estimator("bernoulli"), InProcess(*few), [0, 1])  # noqa: E731
    assert_refused(call, DataError, "class")
