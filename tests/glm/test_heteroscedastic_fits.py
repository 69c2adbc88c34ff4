"""Fits of clients with their own noise: recovery, coverage, limits, and what is said of each client."""

from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pytest
import scipy.sparse as sp
import torch
from scipy import stats

import ppfl.glm.gaussian_moments as gaussian_moments
import ppfl.glm.solvers.marginal as marginal
from kit.tables import make_client_table, regressor
from ppfl.core.errors import SettingError
from ppfl.glm import NEW, PopulationRegressor
from ppfl.glm.families import HeteroscedasticGaussianFamily
from ppfl.glm.inference.client_noise import nuisance_of_rows, points_of

NAME = "heteroscedastic gaussian"
FAMILY = HeteroscedasticGaussianFamily()
Array = np.ndarray[Any, Any]


def tensor(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


class NoisyTable(NamedTuple):
    x: Array  # (n, 2)
    y: Array
    clients: Array
    mean: Array  # (n,), of y
    noise: Array  # (M,), the standard deviation of each client


def draw_table(
    seed: int, clients: int, rows: int, *, shape: float | None = None, spread: float = 0.5, k: int = 2
) -> NoisyTable:
    """Variances are inverse gamma with mean inverse 1 and this shape, or log-normal with this spread of log noise."""
    random = np.random.default_rng(seed)
    client = np.repeat(np.arange(clients), rows)
    x = random.normal(size=(len(client), 2))
    theta = np.array([[1.5, 1.0], [-1.5, 0.5]])[:k]
    mean = (x * (random.dirichlet([0.5] * k, clients) @ theta)[client]).sum(1)
    log_normal = np.exp(spread * random.normal(size=clients))
    noise = log_normal if shape is None else np.sqrt(shape / random.gamma(shape, size=clients))
    return NoisyTable(x, mean + noise[client] * random.normal(size=len(client)), client, mean, noise)


# ---------------------------------------------------------------------- fits


def test_newton_and_lbfgs_find_the_same_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    table = draw_table(0, clients=30, rows=15)
    newton = regressor(family=NAME).fit(table.x, table.y, clients=table.clients)
    monkeypatch.setattr(marginal, "_MAX_NEWTON", 0)
    lbfgs = regressor(family=NAME).fit(table.x, table.y, clients=table.clients)
    assert newton.log_likelihood_ == pytest.approx(lbfgs.log_likelihood_, abs=0.1)
    means = [model.predict(table.x, table.clients) for model in (newton, lbfgs)]
    np.testing.assert_allclose(*means, atol=0.02)  # noise has a standard deviation of about 1
    np.testing.assert_allclose(newton.client_dispersion_, lbfgs.client_dispersion_, rtol=0.02)


@pytest.mark.parametrize("shape", [1.5, 6.0])
def test_the_population_of_variances_is_recovered(shape: float) -> None:
    """Estimates are as far from the truth as their standard errors say, and so are the clients' variances."""
    distances, levels = [], []
    for seed in range(4):
        table = draw_table(seed, clients=80, rows=20, shape=shape)
        model = regressor(family=NAME).fit(table.x, table.y, clients=table.clients)
        found = model.conf_int().loc[""]
        truth = FAMILY.natural_parameters(tensor(0.0, np.log(shape)))
        for name, value in truth.items():
            distances.append((found["estimate"][name] - value) / found["std_error"][name])
        clients = torch.arange(80)
        points, weights = points_of(model._memberships, clients)
        log_typical, log_shape = nuisance_of_rows(model, clients, points, model._result.coefficients.nuisance).numpy()
        variance = (table.noise / model._target_scale)[:, None] ** 2
        below = stats.invgamma.cdf(variance, np.exp(log_shape), scale=np.exp(log_typical + log_shape))
        levels.append((below * weights.numpy()).sum(1))
        expected = 2 * np.log(table.noise)
        assert np.corrcoef(np.log(model.client_dispersion_), expected)[0, 1] > 0.8
    assert np.abs(distances).max() < 3.5
    assert stats.kstest(np.concatenate(levels), "uniform").pvalue > 0.01


def test_intervals_of_new_observations_cover_for_quiet_and_for_noisy_clients() -> None:
    """One variance for all is too wide for quiet clients and too narrow for noisy ones."""
    share: dict[str, list[tuple[float, float]]] = {NAME: [], "gaussian": []}
    for seed in range(3):
        table = draw_table(seed, clients=40, rows=25, spread=0.6)
        new = table.mean + table.noise[table.clients] * np.random.default_rng(seed + 100).normal(size=len(table.y))
        quiet = (table.noise < np.median(table.noise))[table.clients]
        for name, found in share.items():
            model = regressor(family=name).fit(table.x, table.y, clients=table.clients)
            ends = model.predict(table.x, table.clients, interval=0.9)
            inside = ((ends["new_lower"] <= new) & (new <= ends["new_upper"])).to_numpy()
            found.append((inside[quiet].mean(), inside[~quiet].mean()))
    for_quiet, for_noisy = np.mean(share[NAME], 0)
    assert 0.87 < for_quiet < 0.95 and 0.85 < for_noisy < 0.93
    for_quiet, for_noisy = np.mean(share["gaussian"], 0)
    assert for_quiet > 0.96 and for_noisy < 0.86


def test_known_clients_have_their_own_t_and_new_ones_that_of_the_population() -> None:
    """With so many rows that the coefficients are known; what is left is scipy's t, computed from the rows."""
    table = draw_table(0, clients=300, rows=12, shape=2.0, k=1)
    model = regressor(k=1, family=NAME, ridge=0.0).fit(table.x, table.y, clients=table.clients)
    first = np.arange(0, len(table.y), 12)
    mean = model.predict(table.x, table.clients)
    population = model._family.given(model._result.coefficients.nuisance, tensor(0.0), tensor(0.0))[:, 0].numpy()
    typical, shape = np.exp(population) * [model._target_scale**2, 1.0]
    sums = np.bincount(table.clients, (table.y - mean) ** 2)
    scale = np.sqrt((shape * typical + sums / 2) / (shape + 6))
    known = model.predict(table.x[first], table.clients[first], interval=0.9)
    wanted = scale * (stats.t.ppf(0.95, 2 * shape + 12) - stats.t.ppf(0.05, 2 * shape + 12))
    np.testing.assert_allclose(known["new_upper"] - known["new_lower"], wanted, rtol=0.03)
    np.testing.assert_allclose(model.client_dispersion_, scale**2 * (shape + 6) / (shape + 5), rtol=1e-6)
    new = model.predict(table.x[first], NEW, interval=0.9)
    wanted = np.sqrt(typical) * 2 * stats.t.ppf(0.95, 2 * shape)
    np.testing.assert_allclose(new["new_upper"] - new["new_lower"], wanted, rtol=0.05)


def test_unequal_noise_is_not_taken_for_another_canonical_model() -> None:
    for seed in (2, 5):
        table = draw_table(seed, clients=40, rows=15, spread=0.5, k=1)
        model = PopulationRegressor("auto", family=NAME, k_max=3, n_init=4, random_state=0)
        assert model.fit(table.x, table.y, clients=table.clients).k_ == 1


def test_clients_that_do_not_differ_are_like_one_another() -> None:
    table = draw_table(1, clients=40, rows=20, spread=0.0)
    own, common = (regressor(family=f).fit(table.x, table.y, clients=table.clients) for f in (NAME, "gaussian"))
    assert own.log_likelihood_ == pytest.approx(common.log_likelihood_, abs=1.5)
    assert own.dispersion_ == pytest.approx(common.dispersion_, rel=0.05)
    assert own.client_dispersion_.std() < 0.2 * own.dispersion_
    np.testing.assert_allclose(own.predict(table.x, table.clients), common.predict(table.x, table.clients), atol=0.1)


def test_units_of_the_target_do_not_matter() -> None:
    table = draw_table(0, clients=20, rows=10)
    one, other = (regressor(family=NAME).fit(table.x, f * table.y, clients=table.clients) for f in (1.0, 250.0))
    np.testing.assert_allclose(250.0**2 * one.client_dispersion_, other.client_dispersion_, rtol=1e-4)
    factors = pd.Series({"dispersion": 250.0**2, "spread of log noise": 1.0})
    rows = [m.conf_int().loc[""].loc[factors.index] for m in (one, other)]
    np.testing.assert_allclose(rows[0].mul(factors, axis=0), rows[1], rtol=1e-3)


# ---------------------------------------------------------------------- after the fit


def test_the_summary_and_the_dispersions_say_how_clients_differ() -> None:
    table = draw_table(0, clients=30, rows=15)
    model = regressor(family="gaussian by client").fit(table.x, table.y, clients=table.clients)
    text = str(model.summary())
    assert "in the median client" in text and "spread of log noise" in text
    assert model.client_dispersion_.index.tolist() == list(range(30))
    residual = next(line for line in text.splitlines() if line.startswith("residual"))
    assert float(residual.split()[1]) == pytest.approx(model.client_dispersion_.mean(), rel=1e-3)
    plain = regressor().fit(table.x, table.y, clients=table.clients)
    assert (plain.client_dispersion_ == plain.dispersion_).all()


def test_onboarded_clients_have_the_noise_of_their_rows() -> None:
    table = draw_table(0, clients=30, rows=15)
    model = regressor(family=NAME).fit(table.x, table.y, clients=table.clients)
    before = model.client_dispersion_
    some = table.clients < 3
    model.onboard(table.x[some], table.y[some], table.clients[some] + 100)
    after = model.client_dispersion_
    np.testing.assert_allclose(after.loc[before.index], before)
    np.testing.assert_allclose(after.loc[[100, 101, 102]], before.loc[[0, 1, 2]], rtol=0.01)
    ends = [model.predict(table.x[some], table.clients[some] + add, interval=0.9) for add in (0, 100)]
    np.testing.assert_allclose(*ends, atol=0.2)


def test_points_of_the_profile_solver_have_variances_too() -> None:
    table = draw_table(0, clients=20, rows=15)
    model = regressor(family=NAME, solver="profile").fit(table.x, table.y, clients=table.clients)
    assert model.converged_
    assert np.corrcoef(np.log(model.client_dispersion_), np.log(table.noise))[0, 1] > 0.8
    assert stats.kstest(model.residuals(table.x, table.y, table.clients, kind="quantile"), "norm").statistic < 0.06


def test_what_cannot_be_fitted_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    table = make_client_table()
    given = {"y": table.y, "clients": table.clients}
    with pytest.raises(SettingError, match=r"dense table, and X is sparse; use X.toarray\(\), or 'gaussian'"):
        regressor(family=NAME).fit(sp.csr_array(table.x), **given)
    with pytest.raises(SettingError, match="'federated' has no family 'heteroscedastic gaussian'.*another solver"):
        regressor(family=NAME, solver="federated").fit(table.x, **given)
    with pytest.raises(SettingError, match="has no link 'log'; use one of identity"):
        regressor(family=NAME, link="log").fit(table.x, **given)
    monkeypatch.setattr(gaussian_moments, "_MAX_MOMENTS", 100)
    with pytest.raises(SettingError, match="3 columns of 12 clients.*fewer columns, or 'gaussian'"):
        regressor(family=NAME).fit(table.x, **given)
