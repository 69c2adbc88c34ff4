"""What the mathematics of PPFL must show: descent, optimality, the simplex, and who moves what."""

import itertools
import math

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import ppfl
from kit.local_work import backend_for, slope_and_loss
from kit.problems import make_contradicting_federation, make_federation, make_linear, make_net
from kit.training import assert_same, at_start, losses_of_clients, run
from kit.twins.plain import weights_of
from ppfl.core import simplex
from ppfl.server import evaluate

FEDERATION = make_federation(dtype=torch.float64)
W = ppfl.affinity.from_labels(FEDERATION.label_counts().double(), FEDERATION.ids)
NET = make_net(dtype=torch.float64)
MIXES = ["outputs", "predictions", "weights"]
MIXES_AND_ORDERS = [*((mix, "alternating") for mix in MIXES), ("predictions", "random")]


def trained(method, k=3, mix="outputs", net=NET, federation=FEDERATION, rounds=4, memberships=None, **settings):
    """A run, with memberships to begin with if these are given."""
    population = ppfl.Population(net, k=k, mix=mix)
    if memberships is not None:
        of_start = {"rounds": rounds, "affinity": settings.get("affinity"), "memberships": memberships}
        settings["resume"] = at_start(method, population, federation, **of_start)
    return run(method, population, federation, rounds=rounds, engine="stacked", **settings)


def objective(found, penalty: float, at: int = -1) -> float:
    """F of Eq. (9)."""
    C = found.models(at).memberships
    return float(weights_of(FEDERATION) @ losses_of_clients(found, at) + penalty * W.penalty(C))


# ---------------------------------------------------------------------- the objective


@pytest.mark.parametrize(("mix", "order"), MIXES_AND_ORDERS)
def test_F_never_rises_on_full_gradients_with_steps_inside_the_bounds(mix: str, order: str) -> None:
    method = ppfl.PPFL(
        lr=0.02, momentum=0, batch_size=None, local_steps=1, schedule="constant", penalty=0.02, order=order,
        membership_lr=0.1, membership_scale="weighted", start="uniform", averaging="everyone",
    )  # fmt: skip
    found = trained(method, mix=mix, net=make_linear(dtype=torch.float64), rounds=25, affinity=W)
    F = [objective(found, 0.02, at) for at in range(26)]
    assert all(after <= before + 1e-12 for before, after in itertools.pairwise(F))
    assert F[-1] < F[0]


def test_several_membership_steps_descend_the_surrogate() -> None:
    """More steps on kept outputs never leave a larger F: each is a descent of S_t, which lies above F."""
    one_round = {"lr": 1e-12, "batch_size": None, "penalty": 0.05, "membership_lr": 0.2, "start": "uniform"}
    values = []
    for steps in (1, 2, 5, 20, 200):
        found = trained(ppfl.PPFL(**one_round, membership_steps=steps), mix="predictions", rounds=1, affinity=W)
        values.append(objective(found, 0.05))
    assert all(more <= fewer + 1e-12 for fewer, more in itertools.pairwise(values))
    assert values[-1] < values[0]


def test_many_membership_steps_reach_the_optimum_of_a_convex_problem() -> None:
    """Prediction mixing is convex in c: at the end slopes are level on the support and larger off it (KKT)."""
    method = ppfl.PPFL(lr=1e-12, membership_lr=5.0, membership_steps=3000, batch_size=None, start="uniform")
    found = trained(method, mix="predictions", rounds=1)
    backend = backend_for(FEDERATION, found.problem.population, "autograd")
    for i, c in enumerate(found.memberships):
        slope, _ = slope_and_loss(backend, found.server.shared, c, FEDERATION.train.client(i))
        assert float(c @ slope - slope.min()) < 1e-4  # the Frank-Wolfe gap, which is at least f(c) - min f


@pytest.mark.parametrize("mix", MIXES)
def test_to_first_order_the_mean_over_members_is_that_over_everyone_but_for_each_models_share(mix: str) -> None:
    """So it descends the same objective, along every canonical model's own gradient."""
    c = torch.tensor([[0.6, 0.4], [0.1, 0.9], [0.5, 0.5], [0.8, 0.2]]).double()
    short = {"lr": 1e-7, "batch_size": 4, "membership_steps": 0, "start": "uniform", "warmup": 0}
    moves = []
    for averaging in ("members", "everyone"):
        found = trained(ppfl.PPFL(**short, averaging=averaging), 2, mix, rounds=1, memberships=c)
        before, after = (found.models(at).models for at in (0, 1))
        moves.append({name: (after[name] - theta) / short["lr"] for name, theta in before.items()})
    share = weights_of(FEDERATION) @ c
    for name, move in moves[0].items():
        expected = moves[1][name] / share.reshape(-1, *(1 for _ in move.shape[1:]))
        torch.testing.assert_close(move, expected, atol=1e-5, rtol=1e-4)


# ---------------------------------------------------------------------- memberships


@pytest.mark.parametrize(("mix", "order"), MIXES_AND_ORDERS)
def test_memberships_stay_on_the_simplex_and_above_the_floor(mix: str, order: str) -> None:
    method = ppfl.PPFL(lr=0.5, membership_lr=50.0, membership_steps=5, order=order, batch_size=4, start="uniform")
    found = trained(method, mix=mix, rounds=6, affinity=W)
    for at in range(7):
        C = simplex.check(found.models(at).memberships, tolerance=1e-12)
        assert float(C.min()) >= simplex.FLOOR
    assert float(found.memberships.min()) == pytest.approx(simplex.FLOOR)  # it is reached


def memberships_alone(federation: ppfl.Federation, mix: str, **settings) -> dict[str, Tensor]:
    """Each client's membership by name after some rounds in which theta never moved."""
    method = ppfl.PPFL(lr=0.1, order="random", block_probability=1e-9, start="uniform", **settings)
    likeness = ppfl.affinity.from_labels(federation.label_counts().double(), federation.ids)
    found = trained(method, 2, mix, federation=federation, rounds=3, affinity=likeness)
    assert_same(found.models().models, found.models(0).models, atol=0, rtol=0)
    return dict(zip(federation.ids, found.memberships, strict=True))


@pytest.mark.parametrize(
    ("mix", "settings"),
    [
        ("outputs", {"membership_batch": 3}),
        ("predictions", {}),
        ("predictions", {"membership_batch": 3}),
        ("weights", {}),
        ("outputs", {"penalty": 0.1}),
    ],
)
def test_a_membership_depends_on_other_clients_by_the_penalty_alone(mix: str, settings: dict) -> None:
    everyone = memberships_alone(FEDERATION, mix, **settings)
    some = memberships_alone(FEDERATION.select(FEDERATION.ids[1:3]), mix, **settings)
    same = [torch.allclose(c, everyone[client], atol=1e-9, rtol=1e-9) for client, c in some.items()]
    assert all(same) == ("penalty" not in settings)
    assert all(not torch.allclose(c, torch.full((2,), 0.5).double(), atol=1e-3) for c in some.values())


def test_a_strong_penalty_pulls_everybody_together() -> None:
    method = ppfl.PPFL(
        lr=0.1, membership_lr=0.02, membership_steps=50, penalty=10.0, membership_scale="weighted", batch_size=4,
        start="uniform",
    )  # fmt: skip
    apart = torch.tensor([[0.8, 0.1, 0.1], [0.1, 0.8, 0.1], [0.1, 0.1, 0.8], [0.4, 0.3, 0.3]]).double()
    found = trained(method, rounds=10, affinity=ppfl.affinity.uniform(FEDERATION.ids), memberships=apart)
    before, after = (float(torch.cdist(C, C).max()) for C in (apart, found.memberships))
    assert after < 0.05 * before


def test_mini_batch_membership_gradients_are_unbiased() -> None:
    """The mean of small steps on batches is the step on all data: many clients with the same data draw their own."""
    clients = 400
    federation = make_contradicting_federation((0,) * clients)
    linear = make_linear(classes=2, dtype=torch.float64)
    tiny = {"lr": 1e-12, "membership_lr": 1e-4, "membership_steps": 1, "batch_size": 4, "start": "uniform"}
    full, batches = (
        trained(
            ppfl.PPFL(**tiny, membership_batch=batch), mix="predictions", net=linear, federation=federation, rounds=1
        ).memberships
        - 1 / 3
        for batch in (None, 2)
    )
    error = batches.std(0) / math.sqrt(clients)
    assert bool(((batches.mean(0) - full[0]).abs() < 4.5 * error + 1e-12).all())
    assert float(error.max()) < 0.2 * float(full.abs().max())


@pytest.mark.parametrize("mix", MIXES)
def test_by_the_max_rule_a_clients_loss_is_that_of_its_first_choice_alone(mix: str) -> None:
    """As in clustered learning, whichever way canonical models were mixed before."""
    found = trained(ppfl.PPFL(lr=0.2, batch_size=4), 2, mix, rounds=3)
    shared, best = found.models().models, found.memberships.argmax(1)
    hard = evaluate(found.method, found.problem, found.transport, found.server, ("train",), hard=True)
    for i, loss in enumerate(hard.splits["train"].loss):
        own = FEDERATION.train.client(i)
        output = functional_call(NET, {name: theta[best[i]] for name, theta in shared.items()}, (own.x,))
        torch.testing.assert_close(loss, nn.functional.cross_entropy(output, own.y).detach(), atol=1e-9, rtol=1e-9)


# ---------------------------------------------------------------------- what is sent, and when


def test_in_the_warm_up_lr_rises_and_memberships_wait() -> None:
    method = ppfl.PPFL(lr=0.2, start="uniform", warmup=3, schedule="constant")
    found = trained(method, 2, rounds=30, until=4)
    tasks = [method.plan(found.problem, found.server, t).task for t in range(5)]
    assert [task.lr for task in tasks] == pytest.approx([0.05, 0.1, 0.15, 0.2, 0.2])
    moved = [not found.models(at).memberships.equal(found.models(0).memberships) for at in range(5)]
    assert moved == [False, False, False, False, True]


@pytest.mark.parametrize(("mix", "net"), [("weights", make_net()), ("outputs", make_linear())])
def test_what_collapses_uploads_one_model_and_k_numbers_whatever_k_is(mix: str, net: nn.Module) -> None:
    federation, one_model = make_federation(sizes=(9,) * 10), sum(p.numel() for p in net.parameters())
    for k in (2, 8):
        found = trained(ppfl.PPFL(lr=0.1, start="uniform"), k, mix, net, federation, rounds=1)
        assert found.reports[0].bytes_up == 10 * 4 * (one_model + k)
