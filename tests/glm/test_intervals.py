"""Intervals for memberships, clients' coefficients and predictions: laws, and coverage in simulation."""

import numpy as np
import pandas as pd
import pytest
import torch

from kit.tables import classifier, make_client_table, regressor
from ppfl.core.errors import SettingError
from ppfl.glm import NEW, PopulationRegressor
from ppfl.glm.families import REGRESSIONS, regression_family
from ppfl.glm.inference.mixture_quantiles import mixture_quantile
from ppfl.glm.inference.parameter_table import covariance_of
from ppfl.glm.inference.posterior_draws import _deviations_by_draws, _deviations_by_scores

TABLE = make_client_table()


@pytest.fixture(scope="module")
def model():
    return regressor().fit(TABLE.x, TABLE.y, clients=TABLE.clients)


def test_intervals_contain_the_estimates_and_grow_with_the_level(model):
    narrow, wide = model.membership_intervals(0.5), model.membership_intervals(0.95)
    for k in (0, 1):
        assert (wide[k]["lower"] <= narrow[k]["lower"]).all() and (narrow[k]["upper"] <= wide[k]["upper"]).all()
        assert (wide[k]["lower"] <= model.memberships_[k]).all() and (model.memberships_[k] <= wide[k]["upper"]).all()
        assert (wide[k]["lower"] >= 0).all() and (wide[k]["upper"] <= 1).all()
    shares = wide.to_numpy().reshape(-1, 2, 2)  # two memberships sum to 1, so one interval mirrors the other
    np.testing.assert_allclose(shares[:, 0], 1 - shares[:, 1, ::-1], atol=0.1)


def test_more_rows_give_narrower_intervals():
    widths = []
    for rows in (5, 80):
        table = make_client_table(rows=rows)
        found = regressor().fit(table.x, table.y, clients=table.clients).membership_intervals()
        widths.append(float((found[0]["upper"] - found[0]["lower"]).mean()))
    assert widths[1] < 0.6 * widths[0]


def test_the_coefficients_of_a_client_have_intervals(model):
    found = model.client_coef(3, interval=0.9)
    slope, intercept = model.client_coef(3)
    np.testing.assert_allclose(found["mean"], [intercept, *slope])
    assert found.index.tolist() == ["intercept", "x0", "x1"]
    assert (found["lower"] < found["mean"]).all() and (found["mean"] < found["upper"]).all()


def test_predictions_keep_the_index_of_the_table(model):
    frame = pd.DataFrame(TABLE.x, columns=["x0", "x1"], index=[f"row {i}" for i in range(len(TABLE.x))])
    named = regressor().fit(frame, TABLE.y, clients=TABLE.clients)
    found = named.predict(frame, TABLE.clients, interval=0.9)
    assert found.index.equals(frame.index)
    np.testing.assert_allclose(found["mean"], named.predict(frame, TABLE.clients))
    assert (found["new_lower"] < found["lower"]).all() and (found["upper"] < found["new_upper"]).all()
    again = named.predict(frame, TABLE.clients, interval=0.9)
    pd.testing.assert_frame_equal(found, again)
    np.testing.assert_allclose(model.predict(TABLE.x, TABLE.clients, interval=0.9), found, rtol=1e-6)


def test_a_new_client_is_less_certain_than_a_known_one(model):
    known, new = (model.predict(TABLE.x, clients, interval=0.9) for clients in (TABLE.clients, NEW))
    far = np.abs(TABLE.x[:, 0]) > 1
    assert (new["upper"] - new["lower"])[far].mean() > 2 * (known["upper"] - known["lower"])[far].mean()


def test_probabilities_have_intervals_for_every_class():
    for labels in (TABLE.labels, TABLE.counts.clip(max=2)):
        names = np.array(["no", "yes", "maybe"])[labels]
        model = classifier().fit(TABLE.x, names, clients=TABLE.clients)
        found = model.predict_proba(TABLE.x, TABLE.clients, interval=0.9)
        probability = model.predict_proba(TABLE.x, TABLE.clients)
        for at, name in enumerate(model.classes_):
            np.testing.assert_allclose(found[name]["mean"], probability[:, at])
            assert (found[name]["lower"] >= 0).all() and (found[name]["upper"] <= 1).all()
            assert (found[name]["lower"] < found[name]["upper"]).all()


def test_memberships_move_with_the_parameters_as_far_as_the_delta_method_says():
    """Against memberships that are found again for parameters that are drawn."""
    table = make_client_table(clients=30, rows=20)
    for settings, y in (({"shared": ["x1"]}, table.y), ({"family": "poisson"}, table.counts)):
        model = regressor(**settings).fit(table.x, y, clients=table.clients)
        covariance = covariance_of(model).matrix
        exact, drawn = _deviations_by_scores(model, covariance), _deviations_by_draws(model, covariance)
        np.testing.assert_allclose(exact.mean(), drawn.mean(), rtol=0.4)  # of 20 draws
        assert np.corrcoef(exact.ravel(), drawn.ravel())[0, 1] > 0.8


@pytest.mark.parametrize("name", sorted(REGRESSIONS))
def test_the_quantile_of_a_mixture_splits_its_probability(name):
    random = np.random.default_rng(0)
    family = regression_family(name, None)
    eta = torch.from_numpy(random.uniform(-1.0, 3.0, size=(30, 7, 1)))
    parameters = family.mean_parameters(eta)
    nuisance = torch.from_numpy(random.normal(size=(len(family.nuisance), 7)) - 1)
    for level in (0.05, 0.5, 0.95):
        found = mixture_quantile(family, level, parameters, nuisance)
        at = family.cdf(found, parameters, nuisance).mean(1)
        if (family.cdf_below(found, parameters, nuisance) != family.cdf(found, parameters, nuisance)).any():
            assert (at >= level).all() and (found == found.round()).all()
            assert (family.cdf_below(found, parameters, nuisance).mean(1) < level).all()
        else:
            np.testing.assert_allclose(at, level, atol=1e-6)


def test_ninety_percent_intervals_cover():
    theta = np.array([[-1.0, 1.5], [1.0, -1.0]])  # intercept and slope
    hits: dict[str, list[float]] = {"memberships": [], "coefficients": [], "mean": [], "new": []}
    for seed in range(6):
        random = np.random.default_rng(seed)
        clients = np.repeat(np.arange(30), 15)
        c = random.dirichlet([0.5, 0.5], 30)
        own = (c @ theta)[clients]
        x = random.normal(size=(450, 1))
        mean = own[:, 0] + own[:, 1] * x[:, 0]
        y = mean + random.normal(size=450)
        model = PopulationRegressor(2, n_init=2, random_state=0).fit(x, y, clients=clients)
        order = np.argsort(model.canonical_intercept_)
        memberships = model.membership_intervals(0.9)
        for k, truth in zip(order, c.T, strict=True):
            inside = (memberships[k]["lower"] - 1e-3 <= truth) & (truth <= memberships[k]["upper"] + 1e-3)
            hits["memberships"].append(inside.mean())
        for client in range(0, 30, 5):
            found = model.client_coef(client, interval=0.9)
            truth = c[client] @ theta
            hits["coefficients"].append(((found["lower"] <= truth) & (truth <= found["upper"])).mean())
        found = model.predict(x, clients, interval=0.9)
        new = mean + random.normal(size=450)
        hits["mean"].append(((found["lower"] <= mean) & (mean <= found["upper"])).mean())
        hits["new"].append(((found["new_lower"] <= new) & (new <= found["new_upper"])).mean())
    for name, shares in hits.items():
        assert 0.82 <= np.mean(shares) <= 0.98, name  # experiments/glm_coverage.py has more


def test_what_has_no_intervals_says_why(model):
    points = regressor(solver="profile").fit(TABLE.x, TABLE.y, clients=TABLE.clients)
    for call in (
        points.membership_intervals,
        lambda: points.client_coef(3, interval=0.9),
        lambda: points.predict(TABLE.x, TABLE.clients, interval=0.9),
    ):
        with pytest.raises(SettingError, match="solver = 'profile' .*'marginal'"):
            call()
    with pytest.raises(SettingError, match="level of an interval is 90"):
        model.predict(TABLE.x, TABLE.clients, interval=90)
