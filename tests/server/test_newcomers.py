"""Clients never seen in training: they gain from it, change nothing, and are drawn alike for every method."""

import pytest

from kit.problems import make_linear
from kit.training import connect, run, tensors
from ppfl.algorithms import PPFL, FedAvg, Local
from ppfl.core.errors import SettingError
from ppfl.core.population import Population
from ppfl.data import synthetic_groups
from ppfl.server import client_states, evaluate, part_newcomers, score_newcomers

FEDERATION = synthetic_groups(n_clients=40, groups=2, dim=3, samples=20, test_points=50, seed=0)
KNOWN, UNKNOWN = part_newcomers(FEDERATION, 0.3, seed=0)


def trained(method, k, rounds=30):
    population = Population(make_linear(dim=3, classes=2), k=k, mix="predictions")
    ended = run(method, population, KNOWN, engine="stacked", rounds=rounds, seed=0)
    newcomers = connect(UNKNOWN, Population(make_linear(dim=3, classes=2), k=k, mix="predictions"), "stacked")
    return ended, newcomers


def test_newcomers_and_others_are_all_clients_whatever_their_order() -> None:
    assert sorted((*KNOWN.ids, *UNKNOWN.ids)) == sorted(FEDERATION.ids)
    _, again = part_newcomers(FEDERATION.select(FEDERATION.ids[::-1]), 0.3, seed=0)
    assert set(again.ids) == set(UNKNOWN.ids)
    assert part_newcomers(FEDERATION, 0.0, seed=0) == (FEDERATION, None)


def test_a_fraction_that_leaves_no_client_to_train_with_is_refused() -> None:
    with pytest.raises(SettingError, match="some of both"):
        part_newcomers(FEDERATION.select(FEDERATION.ids[:1]), 0.5, seed=0)


@pytest.mark.parametrize("method", [FedAvg(lr=0.3), Local(lr=0.3), PPFL(lr=0.3, participation=0.5)])
def test_no_other_client_and_no_shared_model_changes(method) -> None:
    ended, newcomers = trained(method, 2 if method.name == "ppfl" else 1, rounds=8)
    kept = [leaf.clone() for leaf in tensors(ended.everything())]
    score_newcomers(method, ended.problem, ended.server, newcomers)
    after = ended.server, client_states(ended.transport, ended.state).values
    for a, b in zip(tensors(after), kept, strict=True):
        assert a.equal(b)


def test_a_newcomer_finds_its_group() -> None:
    """Two groups that contradict each other: even memberships are no better than chance, adapted ones are."""
    method = PPFL(lr=0.3, batch_size=None)
    ended, newcomers = trained(method, 2)
    found = score_newcomers(method, ended.problem, ended.server, newcomers)
    seen = evaluate(method, ended.problem, ended.transport, ended.server).splits["test"]
    assert found.after.pooled > found.before.pooled + 0.05
    assert found.after.pooled > seen.pooled - 0.05


def test_with_one_model_for_all_a_newcomer_gets_that() -> None:
    ended, newcomers = trained(FedAvg(lr=0.3), 1)
    found = score_newcomers(FedAvg(lr=0.3), ended.problem, ended.server, newcomers)
    assert found.before.pooled == found.after.pooled
