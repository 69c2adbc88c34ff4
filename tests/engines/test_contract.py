"""What every method owes on every engine."""

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
from ppfl.core import affinity
from ppfl.core.population import Population
from ppfl.engines import Loop, Stacked, begin, pose, train
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
ENGINES = {"loop": Loop(), "stacked": Stacked(), "chunks-of-2": Stacked(2), "threads": Stacked(2, threads=2)}


@pytest.fixture(params=CASES)
def case(request):
    return CASES[request.param]


def run(case, federation, engine, rounds=4, seed=1, state=None, until=None):
    method, k, mix = case
    population = Population(make_net(dtype=federation.train.x.dtype), k=k, mix=mix)
    likeness = affinity.from_labels(federation.label_counts().to(federation.train.x.dtype), federation.ids)
    problem = pose(population, federation, likeness, rounds, seed)
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


@pytest.mark.parametrize("engine", ["stacked", "chunks-of-2", "threads"])
def test_engines_give_the_same_trajectory(case, engine: str) -> None:
    federation = make_federation(SIZES, dtype=torch.float64)
    _, reference = run(case, federation, ENGINES["loop"])
    _, state = run(case, federation, ENGINES[engine])
    assert_same(state, reference, atol=1e-10, rtol=1e-9)


def test_single_precision_engines_agree_to_rounding_error(case) -> None:
    federation = make_federation(SIZES)
    _, reference = run(case, federation, ENGINES["loop"])
    _, state = run(case, federation, ENGINES["stacked"])
    assert_same(state, reference, atol=2e-5, rtol=2e-4)


def test_the_order_of_clients_is_irrelevant(case) -> None:
    federation = make_federation(SIZES, dtype=torch.float64)
    turned = federation.select(federation.ids[::-1])
    method, state = run(case, federation, ENGINES["stacked"])
    _, other = run(case, turned, ENGINES["stacked"])
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


@pytest.mark.parametrize("engine", ENGINES)
def test_a_run_taken_up_again_ends_with_the_same_bits(case, engine: str) -> None:
    federation = make_federation(SIZES)
    _, whole = run(case, federation, ENGINES[engine])
    _, half = run(case, federation, ENGINES[engine], until=2)
    _, resumed = run(case, federation, ENGINES[engine], state=half)
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


def test_clients_that_never_take_part_cost_nothing(case) -> None:
    method, *_ = case
    federation = make_federation(SIZES)
    problem = pose(Population(make_net(), k=case[1], mix=case[2]), federation, None, 3, seed=0)
    state = begin(method, problem)
    for now, report in train(method, problem, federation, Stacked(), state):
        plan = method.plan(problem, state.server, state.round)
        assert report.participants == len(plan.who)
        absent = [i for i in range(len(SIZES)) if i not in plan.who.tolist()]
        for before, after in zip(pytree.tree_leaves(state.clients), pytree.tree_leaves(now.clients), strict=True):
            assert before[absent].equal(after[absent])
        state = now
