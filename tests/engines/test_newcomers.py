"""Clients never seen in training: they gain from it, change nothing, and are drawn alike for every method."""

import pytest
from ppfl.engines import Stacked, begin, evaluate, pose, train
from ppfl.engines.newcomers import part_newcomers, welcome
from torch.utils import _pytree as pytree

from ppfl.algorithms import PPFL, FedAvg, Local
from ppfl.core.errors import SettingError
from ppfl.core.population import Population
from ppfl.data import synthetic_groups
from support import make_linear

FEDERATION = synthetic_groups(n_clients=40, groups=2, dim=3, samples=20, test_points=50, seed=0)


def trained(method, k, mix="predictions"):
    known, unknown = part_newcomers(FEDERATION, 0.3, seed=0)
    problem = pose(Population(make_linear(dim=3, classes=2), k=k, mix=mix), known, None, rounds=30, seed=0)
    *_, (state, _) = train(method, problem, known, Stacked(), begin(method, problem))
    return problem, state, unknown


def test_newcomers_and_others_are_all_clients_whatever_their_order() -> None:
    known, unknown = part_newcomers(FEDERATION, 0.3, seed=0)
    assert sorted((*known.ids, *unknown.ids)) == sorted(FEDERATION.ids)
    _, again = part_newcomers(FEDERATION.select(FEDERATION.ids[::-1]), 0.3, seed=0)
    assert set(again.ids) == set(unknown.ids)
    assert part_newcomers(FEDERATION, 0.0, seed=0) == (FEDERATION, None)


def test_a_fraction_that_leaves_nobody_is_refused() -> None:
    with pytest.raises(SettingError, match="some of both"):
        part_newcomers(FEDERATION.select(FEDERATION.ids[:1]), 0.5, seed=0)


@pytest.mark.parametrize("method", [FedAvg(lr=0.3), Local(lr=0.3), PPFL(lr=0.3, participation=0.5)])
def test_nobody_elses_models_change(method) -> None:
    problem, state, unknown = trained(method, 2 if isinstance(method, PPFL) else 1)
    kept = [leaf.clone() for leaf in pytree.tree_leaves((state.server, state.clients))]
    welcome(method, problem, state, unknown, Stacked())
    for a, b in zip(pytree.tree_leaves((state.server, state.clients)), kept, strict=True):
        assert a.equal(b)


def test_a_newcomer_finds_its_group() -> None:
    """Two groups that contradict each other: even memberships are no better than chance, adapted ones are."""
    problem, state, unknown = trained(PPFL(lr=0.3, batch_size=None), 2)
    found = welcome(PPFL(lr=0.3, batch_size=None), problem, state, unknown, Stacked())
    seen = evaluate(problem, PPFL().personal(state.server, state.clients), part_newcomers(FEDERATION, 0.3, seed=0)[0])
    assert found.after.pooled > found.before.pooled + 0.05
    assert found.after.pooled > seen.pooled - 0.05


def test_with_one_model_for_all_a_newcomer_gets_that() -> None:
    problem, state, unknown = trained(FedAvg(lr=0.3), 1)
    found = welcome(FedAvg(lr=0.3), problem, state, unknown, Stacked())
    assert found.before.pooled == found.after.pooled
