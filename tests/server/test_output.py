"""Which state is returned: the last, the best, or the random one of Algorithm 1, drawn in advance."""

import math

import pytest
import torch

from kit.problems import make_federation, make_net
from kit.training import connect, run
from ppfl import fit
from ppfl.algorithms import PPFL, FedAvg
from ppfl.core import affinity
from ppfl.core.errors import SettingError
from ppfl.core.population import Population
from ppfl.server import Watch, begin, client_states, make_problem, train_and_measure
from ppfl.server.output import draw_output_round, output_probabilities


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


def test_an_evaluation_every_zero_rounds_is_refused() -> None:
    with pytest.raises(SettingError, match="every >= 1"):
        Watch(every=0)


BOLD = PPFL(lr=2.0, batch_size=4, schedule="constant")  # so that the best is not the last


@pytest.mark.parametrize("rule", ["last", "best", "random"])
def test_each_rule_returns_its_round_with_the_states_that_clients_had_then(rule: str) -> None:
    federation = make_federation(validation_fraction=0.3)
    population, watch = Population(make_net(), k=2), Watch(output=rule)
    transport = connect(federation, population, "stacked")
    problem = make_problem(population, transport, rounds=12, seed=5)
    ends = list(train_and_measure(BOLD, problem, transport, watch, begin(BOLD, problem, transport)))
    losses = [end.record["validation_loss"] for end in ends]
    expected = {
        "last": 12,
        "best": losses.index(min(losses)) + 1,
        "random": draw_output_round(output_probabilities([2.0] * 12, 0.5), seed=5),
    }[rule]
    assert ends[-1].kept.state.round == expected
    fitted = fit(population, federation, BOLD, rounds=12, seed=5, watch=watch)
    assert fitted.state.round == expected
    trajectory = run(BOLD, population, federation, engine="stacked", rounds=12, seed=5)
    kept = client_states(transport, ends[-1].state, "now" if rule == "last" else "kept")
    for name, leaf in trajectory.clients[expected].values.items():
        assert leaf.equal(kept.values[name]) and leaf.equal(fitted.clients.values[name])


def test_best_without_validation_data_goes_by_the_objective() -> None:
    federation = make_federation()
    fitted = fit(Population(make_net(), k=2), federation, PPFL(lr=2.0), rounds=8, watch=Watch(output="best"))
    objectives = [record["objective"] for record in fitted.history]
    assert all(math.isfinite(value) for value in objectives)
    assert fitted.state.round == objectives.index(min(objectives)) + 1


@pytest.mark.parametrize("method", [FedAvg(lr=0.3), PPFL(lr=0.3, penalty=0.5)])
def test_the_objective_does_not_depend_on_whether_clients_report_their_scores(method) -> None:
    federation = make_federation()
    likeness = affinity.from_labels(federation.label_counts(), federation.ids)
    objectives = [
        [record["objective"] for record in fit(
            Population(make_net(), k=2 if method.name == "ppfl" else 1), federation, method, rounds=3,
            affinity=likeness, watch=Watch(objective=True, report_clients=reported),
        ).history]
        for reported in (True, False)
    ]  # fmt: skip
    assert objectives[0] == pytest.approx(objectives[1])
