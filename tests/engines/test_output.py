"""Output rules: last, best, and the random one of Algorithm 1, drawn in advance."""

import math

import pytest
import torch
from ppfl.engines import Watch, engine_by_name, fit, follow, pose
from ppfl.engines.output import draw_output_round, output_probabilities
from ppfl.engines.train import begin

from ppfl.algorithms import PPFL
from ppfl.core.errors import SettingError
from ppfl.core.population import Population
from support import make_federation, make_net


def test_the_probabilities_are_the_papers_formula() -> None:
    etas, rho, (L1, L2) = [0.1, 0.05, 0.01], 0.3, (1.0, 4.0)
    weights = [eta * min(rho * (1 - 4 * eta * L1), (1 - rho) * (1 - eta / 2 * L2)) for eta in etas]
    found = output_probabilities(etas, rho, (L1, L2)).tolist()
    assert found == pytest.approx([w / sum(weights) for w in weights])


def test_draws_follow_the_probabilities() -> None:
    probabilities = output_probabilities([4.0, 3.0, 2.0, 1.0], 0.5)
    draws = torch.tensor([draw_output_round(probabilities, seed) for seed in range(4000)])
    counts = torch.bincount(draws, minlength=5)[1:].double()
    expected = 4000 * probabilities
    assert float(((counts - expected) ** 2 / expected).sum()) < 16.3  # 99.9 %, 3 degrees of freedom


def test_steps_beyond_the_bounds_cannot_be_drawn() -> None:
    with pytest.raises(SettingError, match="smaller steps"):
        output_probabilities([1.0], 0.5, (10.0, 1.0))


@pytest.mark.parametrize("rule", ["last", "best", "random"])
def test_each_rule_returns_its_round(rule: str) -> None:
    federation = make_federation(validation_fraction=0.3)
    population = Population(make_net(), k=2)
    method = PPFL(lr=2.0, batch_size=4, schedule="constant")  # bold steps, so that the best is not the last
    problem = pose(population, federation, None, 12, seed=5)
    watch = Watch(output=rule)
    moments = list(follow(method, problem, federation, engine_by_name("stacked"), watch, begin(method, problem)))
    losses = [m.record["validation_loss"] for m in moments]
    expected = {
        "last": 12,
        "best": losses.index(min(losses)) + 1,
        "random": draw_output_round(output_probabilities([2.0] * 12, 0.5), seed=5),
    }[rule]
    assert moments[-1].kept.state.round == expected
    fitted = fit(population, federation, method, rounds=12, seed=5, watch=watch)
    assert fitted.state.round == expected


def test_best_without_validation_data_judges_by_the_objective() -> None:
    federation = make_federation()
    fitted = fit(Population(make_net(), k=2), federation, PPFL(lr=2.0), rounds=8, watch=Watch(output="best"))
    objectives = [record["objective"] for record in fitted.history]
    assert all(math.isfinite(value) for value in objectives)
    assert fitted.state.round == objectives.index(min(objectives)) + 1
