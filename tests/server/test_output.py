"""Which state is returned: the last, the best, or the random one of Algorithm 1; and what it is worth to newcomers."""

import pytest
import torch

from kit.networks import make_linear, make_net
from kit.problems import make_federation
from kit.refusals import SettingError, assert_refused
from kit.training import assert_same, connect, run, tensors
from ppfl import fit
from ppfl.algorithms import PPFL, FedAvg, Local
from ppfl.core import Population
from ppfl.data import synthetic_groups
from ppfl.server import Watch, client_states, evaluate, part_newcomers, score_newcomers
from ppfl.server.training import draw_output_round, output_probabilities


def test_the_probabilities_are_the_papers_formula_and_draws_follow_them():
    etas, rho, (L1, L2) = [0.1, 0.05, 0.01], 0.3, (1.0, 4.0)
    weights = [eta * min(rho * (1 - 4 * eta * L1), (1 - rho) * (1 - eta / 2 * L2)) for eta in etas]
    found = output_probabilities(etas, rho, (L1, L2)).tolist()
    assert found == pytest.approx([w / sum(weights) for w in weights])
    assert_refused(lambda: output_probabilities([1.0], 0.5, (10.0, 1.0)), SettingError, "smaller steps")
    probabilities = output_probabilities([4.0, 3.0, 2.0, 1.0], 0.5)
    draws = torch.tensor([draw_output_round(probabilities, seed) for seed in range(4000)])
    counts, expected = torch.bincount(draws, minlength=5)[1:].double(), 4000 * probabilities
    assert float(((counts - expected) ** 2 / expected).sum()) < 16.3  # 99.9 %, 3 degrees of freedom


BOLD = PPFL(lr=2.0, batch_size=4, schedule="constant")  # so that the best is not the last


@pytest.mark.parametrize(("rule", "validation"), [("last", 0.3), ("random", 0.3), ("best", 0.3), ("best", 0.0)])
def test_each_rule_returns_its_round_with_the_states_that_clients_had_then(rule: str, validation: float):
    """Without validation data the best round is that of the smallest objective."""
    federation, population = make_federation(validation_fraction=validation), Population(make_net(), k=2)
    fitted = fit(population, federation, BOLD, rounds=12, seed=5, watch=Watch(output=rule))
    losses = [record["validation_loss" if validation else "objective"] for record in fitted.history]
    expected = {
        "last": 12,
        "best": losses.index(min(losses)) + 1,
        "random": draw_output_round(output_probabilities([2.0] * 12, 0.5), seed=5),
    }[rule]
    assert fitted.state.round == expected and (rule == "last" or expected < 12)
    trajectory = run(BOLD, population, federation, engine="stacked", rounds=12, seed=5)
    assert_same(fitted.clients.rows.values, trajectory.clients[expected].values, atol=0, rtol=0)
    assert_same(fitted.state.server, trajectory.states[expected].server, atol=0, rtol=0)


FEDERATION = synthetic_groups(n_clients=40, groups=2, dim=3, samples=20, test_points=50, seed=0)
KNOWN, UNKNOWN = part_newcomers(FEDERATION, 0.3, seed=0)


def test_newcomers_and_others_are_all_clients_whatever_their_order():
    assert sorted((*KNOWN.ids, *UNKNOWN.ids)) == sorted(FEDERATION.ids)
    _, again = part_newcomers(FEDERATION.select(FEDERATION.ids[::-1]), 0.3, seed=0)
    assert set(again.ids) == set(UNKNOWN.ids)
    assert part_newcomers(FEDERATION, 0.0, seed=0) == (FEDERATION, None)
    alone = FEDERATION.select(FEDERATION.ids[:1])
    assert_refused(lambda: part_newcomers(alone, 0.5, seed=0), SettingError, "some of both")


@pytest.mark.parametrize("method", [FedAvg(lr=0.3), Local(lr=0.3), PPFL(lr=0.3, batch_size=None)])
def test_a_newcomer_finds_its_group_or_gets_the_one_model_and_nobody_else_changes(method):
    """Two groups that contradict each other: even memberships are no better than chance, adapted ones are."""
    k = 2 if method.name == "ppfl" else 1
    population = Population(make_linear(dim=3, classes=2), k=k, mix="predictions")
    ended = run(method, population, KNOWN, engine="stacked", rounds=30, seed=0)
    kept = [leaf.clone() for leaf in tensors(ended.everything())]
    found = score_newcomers(method, ended.problem, ended.server, connect(UNKNOWN, population, "stacked"))
    assert_same((ended.server, client_states(ended.transport, ended.state).rows.values), kept, atol=0, rtol=0)
    if method.name == "fedavg":
        assert found.before.pooled == found.after.pooled
    if method.name == "ppfl":
        seen = evaluate(method, ended.problem, ended.transport, ended.server).splits["test"]
        assert found.after.pooled > found.before.pooled + 0.05
        assert found.after.pooled > seen.pooled - 0.05
