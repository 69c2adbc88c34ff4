"""Choosing the number of canonical models by rows that are held out."""

import numpy as np
import pytest
import torch

from kit.tables import draw_population, make_family, make_rows
from ppfl.glm import PopulationRegressor
from ppfl.glm.gaussian_moments import fastest_form
from ppfl.glm.solvers.held_out import Fold, held_out_log_likelihoods, make_folds
from ppfl.glm.solvers.parameters import ParameterShape, Regularization
from ppfl.glm.solvers.problem import GLMProblem
from ppfl.glm.solvers.solve import SearchSettings


def fitted_folds(name: str, k: int, rows: int) -> list[Fold]:
    data = make_rows(draw_population(name, clients=8, rows=rows), make_family(name), "weights")
    shape = ParameterShape(k, data.varying.columns, 0, 1, len(data.family.nuisance))
    samples = data.n_samples * data.family.has_dispersion
    regularization = Regularization(1.0, 0.0, torch.ones(shape.varying).double(), torch.ones(0).double(), samples)
    problem = GLMProblem(data, fastest_form(data), shape, regularization)
    folds = make_folds(problem, 3, np.random.default_rng(0))
    for fold in folds:
        fold.fit(k, SearchSettings(1, 1e-6, 200, np.random.default_rng(0), 0.5))
    return folds


@pytest.mark.parametrize("k", [1, 3])
def test_held_out_rows_are_scored_with_the_dispersion_that_suits_them_best(k: int) -> None:
    """Few rows and many parameters: the dispersion of the fit is too small for rows that it has not seen."""
    folds = fitted_folds("gaussian", k, rows=6)
    found = float(held_out_log_likelihoods(folds).sum())
    totals = [float(sum(fold.log_likelihoods(wider).sum() for fold in folds)) for wider in np.linspace(0, 3, 61)]
    assert found == pytest.approx(max(totals), abs=0.15)
    if k > 1:
        assert found > totals[0] + 1


def test_families_without_a_dispersion_are_scored_as_they_are() -> None:
    folds = fitted_folds("poisson", 2, rows=6)
    total = torch.stack([fold.log_likelihoods() for fold in folds]).sum(0)
    torch.testing.assert_close(held_out_log_likelihoods(folds), total)


def test_better_means_count_where_clients_have_few_rows() -> None:
    """Six workers at three machines, three rows each: every worker has its own difference between machines.

    With the dispersion of the fit, rows that are held out would look less likely under better means.
    """
    random = np.random.default_rng(4)
    workers, machines = np.repeat(np.arange(6), 9), np.tile(np.repeat(np.arange(3), 3), 6)
    y = random.normal(0, 5, (6, 3))[workers, machines] + random.normal(0, 1, 54)
    x = (machines[:, None] == [1, 2]).astype(float)
    model = PopulationRegressor(k="auto", choose="prediction", random_state=0).fit(x, y, clients=workers)
    assert np.asarray(model.memberships_).shape[1] >= 3


def test_only_predictions_count_if_asked_for() -> None:
    drawn = draw_population("gaussian", clients=20, rows=8)
    fits = {
        choose: PopulationRegressor(k="auto", choose=choose, random_state=0).fit(
            drawn.x, drawn.y, clients=drawn.clients
        )
        for choose in ("held_out", "prediction")
    }
    chosen = {choose: np.asarray(model.memberships_).shape[1] for choose, model in fits.items()}
    records = fits["prediction"].selection_
    assert chosen["prediction"] == max(records, key=lambda record: record.held_out or -np.inf).k
    assert chosen["held_out"] <= chosen["prediction"]
