"""What every method owes on every engine."""

import math

import pytest
import torch
from torch.utils import _pytree as pytree

from ppfl.algorithms import (
    CFL,
    IFCA,
    PPFL,
    Centralized,
    Ditto,
    FedAlt,
    FedAvg,
    FedEM,
    FedPer,
    FedRep,
    FedSim,
    FineTune,
    LGFedAvg,
    Local,
    PFedMe,
)
from ppfl.algorithms.contract import Plan
from ppfl.core import affinity
from ppfl.core.errors import SettingError
from ppfl.core.population import Population
from ppfl.engines import Loop, Stacked, begin, pose, train
from ppfl.engines.train import returning
from support import make_federation, make_net

SIZES = (7, 12, 20, 5, 1, 9)
SMALL = {"lr": 0.3, "batch_size": 4, "weight_decay": 0.01}
CASES = {
    "local": (Local(**SMALL), 1, "outputs"),
    "fedavg": (FedAvg(**SMALL), 1, "outputs"),
    "fedavg-some": (FedAvg(**SMALL, participation=0.5, local_steps=3), 1, "outputs"),
    "lg-fedavg": (LGFedAvg(**SMALL), 1, "outputs"),
    "fedper-some": (FedPer(**SMALL, participation=0.5), 1, "outputs"),
    "fedrep": (FedRep(**SMALL, head_epochs=2), 1, "outputs"),
    "fedalt-some": (FedAlt(**SMALL, personal_part="input", participation=0.5, local_steps=3), 1, "outputs"),
    "fedsim": (FedSim(**SMALL, local_epochs=2), 1, "outputs"),
    "fedsim-all-personal": (FedSim(**SMALL, personal_part=("0", "2")), 1, "outputs"),
    "ppfl-outputs": (PPFL(**SMALL, penalty=0.02), 3, "outputs"),
    "ppfl-predictions": (PPFL(**SMALL, penalty=0.02, membership_steps=4), 3, "predictions"),
    "ppfl-weights": (PPFL(**SMALL, penalty=0.02), 3, "weights"),
    "ppfl-random-some": (PPFL(**SMALL, order="random", participation=0.5, membership_batch=3), 3, "predictions"),
    "ppfl-uniform": (PPFL(**SMALL, start="uniform"), 3, "outputs"),
    "centralized": (Centralized(**SMALL), 1, "outputs"),
    "centralized-some": (Centralized(**SMALL, participation=0.5), 1, "weights"),
    "ditto": (Ditto(**SMALL), 1, "outputs"),
    "ditto-some": (Ditto(**SMALL, participation=0.5, local_steps=3), 1, "outputs"),
    "pfedme": (PFedMe(**SMALL, mu=1.0, outer_lr=0.2), 1, "outputs"),
    "pfedme-some": (PFedMe(**SMALL, mu=1.0, outer_lr=0.2, beta=1.5, participation=0.5), 1, "outputs"),
    "finetune": (FineTune(method=FedAvg(**SMALL), steps=3), 1, "outputs"),
    "finetune-ppfl": (FineTune(method=PPFL(**SMALL, penalty=0.02, participation=0.5), epochs=2), 3, "weights"),
    "finetune-ditto": (FineTune(method=Ditto(**SMALL, participation=0.5), lr=0.1), 1, "outputs"),
    "ifca": (IFCA(**SMALL), 3, "outputs"),
    "ifca-some": (IFCA(**SMALL, participation=0.5, local_steps=3, momentum=0.9), 2, "weights"),
    "fedem": (FedEM(**SMALL), 3, "predictions"),
    "fedem-some": (FedEM(**SMALL, participation=0.5, local_steps=3), 2, "predictions"),
    "cfl": (CFL(**SMALL, eps1=10, eps2=0), 3, "outputs"),  # cuts whatever it can
    "cfl-some": (CFL(**SMALL, eps1=10, eps2=0, participation=0.5, local_steps=3), 2, "predictions"),
}
DROPOUTS = (0.0, 0.4)  # with SIZES and seed 1: all but one come back, then one alone, two, three
ALL_LOST = 1 - 1e-9
ENGINES = {"loop": Loop(), "stacked": Stacked(), "chunks-of-2": Stacked(2), "threads": Stacked(2, threads=2)}


@pytest.fixture(params=CASES)
def case(request):
    return CASES[request.param]


def run(case, federation, engine, rounds=4, seed=1, state=None, until=None, dropout=0.0):
    method, k, mix = case
    population = Population(make_net(dtype=federation.train.x.dtype), k=k, mix=mix)
    likeness = affinity.from_labels(federation.label_counts().to(federation.train.x.dtype), federation.ids)
    problem = pose(population, federation, likeness, rounds, seed, dropout)
    state = state or begin(method, problem)
    for state, _ in train(method, problem, federation, engine, state):
        if state.round == until:
            break
    return method, state


def leaves_by_client(method, state, ids):
    """Every client's personal model and membership, by name."""
    personal = method.personal(state.server, state.clients)
    shared = pytree.tree_leaves(personal.shared)
    rows = {}
    for i, client in enumerate(ids):
        own = [leaf[i] for leaf in shared] if personal.own else shared
        rows[client] = [*own, *([] if personal.memberships is None else [personal.memberships[i]])]
    return rows


def tensors(tree):
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def assert_same(a, b, **tolerance):
    for one, other in zip(tensors(a), tensors(b), strict=True):
        torch.testing.assert_close(one, other, **tolerance)


@pytest.mark.parametrize("dropout", DROPOUTS)
@pytest.mark.parametrize("engine", ["stacked", "chunks-of-2", "threads"])
def test_engines_give_the_same_trajectory(case, engine: str, dropout: float) -> None:
    federation = make_federation(SIZES, dtype=torch.float64)
    _, reference = run(case, federation, ENGINES["loop"], dropout=dropout)
    _, state = run(case, federation, ENGINES[engine], dropout=dropout)
    assert_same(state, reference, atol=1e-10, rtol=1e-9)


def test_single_precision_engines_agree_to_rounding_error(case) -> None:
    federation = make_federation(SIZES)
    _, reference = run(case, federation, ENGINES["loop"])
    _, state = run(case, federation, ENGINES["stacked"])
    assert_same(state, reference, atol=2e-5, rtol=2e-4)


@pytest.mark.parametrize("dropout", DROPOUTS)
def test_the_order_of_clients_is_irrelevant(case, dropout: float) -> None:
    federation = make_federation(SIZES, dtype=torch.float64)
    turned = federation.select(federation.ids[::-1])
    method, state = run(case, federation, ENGINES["stacked"], dropout=dropout)
    _, other = run(case, turned, ENGINES["stacked"], dropout=dropout)
    expected, found = (leaves_by_client(method, s, f.ids) for s, f in ((state, federation), (other, turned)))
    for client in federation.ids:
        assert_same(found[client], expected[client], atol=1e-9, rtol=1e-8)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_round_leaves_its_inputs_untouched(case, engine: str) -> None:
    federation = make_federation(SIZES)
    _, state = run(case, federation, ENGINES["loop"], until=2)
    kept = [leaf.clone() for leaf in tensors((state, federation.train.x, federation.train.y, federation.weights))]
    run(case, federation, ENGINES[engine], state=state)
    assert_same((state, federation.train.x, federation.train.y, federation.weights), kept, atol=0, rtol=0)


@pytest.mark.parametrize("dropout", DROPOUTS)
@pytest.mark.parametrize("engine", ENGINES)
def test_a_run_taken_up_again_ends_with_the_same_bits(case, engine: str, dropout: float) -> None:
    federation = make_federation(SIZES)
    _, whole = run(case, federation, ENGINES[engine], dropout=dropout)
    _, half = run(case, federation, ENGINES[engine], until=2, dropout=dropout)
    _, resumed = run(case, federation, ENGINES[engine], state=half, dropout=dropout)
    assert_same(resumed, whole, atol=0, rtol=0)


@pytest.mark.parametrize("engine", ENGINES)
def test_the_same_seed_gives_the_same_bits_and_another_does_not(case, engine: str) -> None:
    federation = make_federation(SIZES)
    _, a = run(case, federation, ENGINES[engine], seed=1)
    _, b = run(case, federation, ENGINES[engine], seed=1)
    _, c = run(case, federation, ENGINES[engine], seed=2)
    assert_same(a, b, atol=0, rtol=0)
    assert any(not x.equal(y) for x, y in zip(tensors(a), tensors(c), strict=True))


@pytest.mark.parametrize("engine", ENGINES)
def test_clients_with_one_sample_each(case, engine: str) -> None:
    federation = make_federation((1, 1, 1))
    _, state = run(case, federation, ENGINES[engine])
    assert all(bool(leaf.isfinite().all()) for leaf in tensors(state))


@pytest.mark.parametrize("engine", ENGINES)
def test_one_client_alone(case, engine: str) -> None:
    method, _, mix = case
    _, state = run((method, 1, mix), make_federation((15,)), ENGINES[engine])
    assert all(bool(leaf.isfinite().all()) for leaf in tensors(state))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("dropout", DROPOUTS)
def test_clients_that_take_no_part_or_are_lost_stay_as_they_are(case, engine: str, dropout: float) -> None:
    method, *_ = case
    federation = make_federation(SIZES)
    problem = pose(Population(make_net(), k=case[1], mix=case[2]), federation, None, 4, 1, dropout)
    state = begin(method, problem)
    for now, report in train(method, problem, federation, ENGINES[engine], state):
        asked = method.plan(problem, state.server, state.round)
        back = returning(problem, asked, state.round).who.tolist()
        assert (report.participants, report.lost) == (len(back), len(asked.who) - len(back))
        absent = [i for i in range(len(SIZES)) if i not in back]
        for before, after in zip(pytree.tree_leaves(state.clients), pytree.tree_leaves(now.clients), strict=True):
            assert before[absent].equal(after[absent])
        state = now


@pytest.mark.parametrize("engine", ENGINES)
def test_a_round_in_which_all_are_lost_changes_nothing(case, engine: str) -> None:
    method, k, mix = case
    federation = make_federation(SIZES)
    problem = pose(Population(make_net(), k=k, mix=mix), federation, None, 4, 1)
    state, hopeless = begin(method, problem), problem._replace(dropout=ALL_LOST)
    while state.round < problem.rounds:
        asked = method.plan(problem, state.server, state.round)
        lost, report = next(train(method, hopeless, federation, ENGINES[engine], state))
        assert_same(lost._replace(round=state.round), state, atol=0, rtol=0)
        assert (report.round, report.participants, report.lost) == (state.round + 1, 0, len(asked.who))
        assert report.bytes_up == 0 and math.isnan(report.loss)
        state, whole = next(train(method, problem, federation, ENGINES[engine], state))
        assert report.bytes_down == whole.bytes_down  # they were all sent what they were to work on


def test_where_nobody_happens_to_be_lost_the_bits_are_those_of_no_dropout(case) -> None:
    federation = make_federation(SIZES)
    _, without = run(case, federation, ENGINES["stacked"])
    _, with_luck = run(case, federation, ENGINES["stacked"], dropout=1 - ALL_LOST)
    assert_same(with_luck, without, atol=0, rtol=0)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_round_with_lost_clients_is_the_round_of_the_others(engine: str) -> None:
    method, federation = FedAvg(**SMALL), make_federation(SIZES, dtype=torch.float64)
    problem = pose(Population(make_net(dtype=torch.float64), k=1), federation, None, 4, 1, dropout=0.4)
    state = begin(method, problem)
    for now, report in train(method, problem, federation, ENGINES[engine], state):
        back = returning(problem, method.plan(problem, state.server, state.round), state.round).who
        assert 0 < len(back) < len(SIZES)
        others = federation.select([federation.ids[i] for i in back])
        theirs = pose(problem.population, others, None, 4, 1)._replace(weights=problem.weights[back])
        expected, alone = next(train(method, theirs, others, ENGINES[engine], state))
        assert_same(now, expected, atol=1e-12, rtol=1e-12)
        assert report.loss == pytest.approx(alone.loss)
        assert report.bytes_up == alone.bytes_up
        assert report.bytes_down * len(back) == alone.bytes_down * len(SIZES)
        state = now


def test_clients_are_lost_independently_in_every_round_at_the_rate_asked_for() -> None:
    clients, rounds, dropout = 500, 20, 0.3
    federation = make_federation((1,) * clients)
    problem = pose(Population(make_net(), k=1), federation, None, rounds, 0, dropout)
    plan = Plan(torch.arange(clients), None, {}, {})
    lost = torch.ones(rounds, clients, dtype=torch.float64)
    for t in range(rounds):
        lost[t, returning(problem, plan, t).who] = 0
    spread = (dropout * (1 - dropout)) ** 0.5
    assert abs(float(lost.mean()) - dropout) < 4.5 * spread / (clients * rounds) ** 0.5
    both = (lost - dropout) @ (lost - dropout).T / clients / spread**2  # correlations between rounds
    assert float(both.fill_diagonal_(0).abs().max()) < 4.5 / clients**0.5


@pytest.mark.parametrize("dropout", [-0.1, 1.0, math.nan])
def test_a_share_that_is_none_is_refused(dropout: float) -> None:
    with pytest.raises(SettingError, match="0 <= dropout < 1"):
        pose(Population(make_net(), k=1), make_federation(), None, 2, 0, dropout)
