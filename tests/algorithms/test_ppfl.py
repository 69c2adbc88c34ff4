"""What the mathematics of PPFL must show: descent, optimality, the simplex, and who moves what."""

import itertools
import math

import pytest
import torch
from torch import nn
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
NET, LINEAR = make_net(dtype=torch.float64), make_linear(dtype=torch.float64)
MIXES = ["outputs", "predictions", "weights"]
every_mix = pytest.mark.parametrize("mix", MIXES)
every_order = pytest.mark.parametrize(("mix", "order"), [*((m, "alternating") for m in MIXES), (MIXES[1], "random")])


def trained(k=3, mix="outputs", net=NET, federation=FEDERATION, rounds=4, memberships=None, affinity=W, **settings):
    """A run of PPFL with these settings, from even memberships or from those given."""
    method, population = ppfl.PPFL(**{"lr": 0.1, "start": "uniform", **settings}), ppfl.Population(net, k=k, mix=mix)
    same = {"rounds": rounds, "affinity": affinity}
    start = None if memberships is None else at_start(method, population, federation, memberships=memberships, **same)
    return run(method, population, federation, engine="stacked", resume=start, **same)


def objective(found, penalty, at=-1):
    """F of Eq. (9)."""
    C = found.models(at).memberships
    return float(weights_of(FEDERATION) @ losses_of_clients(found, at) + penalty * W.penalty(C))


@every_order
def test_F_never_rises_on_full_gradients_with_steps_inside_the_bounds(mix, order):
    found = trained(
        mix=mix, net=LINEAR, rounds=25, order=order, lr=0.02, momentum=0, batch_size=None, local_steps=1, penalty=0.02,
        schedule="constant", membership_lr=0.1, membership_scale="weighted", averaging="everyone",
    )  # fmt: skip
    F = [objective(found, 0.02, at) for at in range(26)]
    assert all(after <= before + 1e-12 for before, after in itertools.pairwise(F))
    assert F[-1] < F[0]


def test_several_membership_steps_descend_the_surrogate():
    """More steps on kept outputs never leave a larger F: each is a descent of S_t, which lies above F."""
    one_round = {"rounds": 1, "lr": 1e-12, "batch_size": None, "penalty": 0.05, "membership_lr": 0.2}
    runs = [trained(mix="predictions", membership_steps=steps, **one_round) for steps in (1, 2, 5, 20, 200)]
    values = [objective(found, 0.05) for found in runs]
    assert all(more <= fewer + 1e-12 for fewer, more in itertools.pairwise(values))
    assert values[-1] < values[0]


def test_many_membership_steps_reach_the_optimum_of_a_convex_problem():
    """Prediction mixing is convex in c: at the end slopes are level on the support and larger off it (KKT)."""
    many = {"rounds": 1, "lr": 1e-12, "membership_lr": 5.0, "membership_steps": 3000, "batch_size": None}
    found = trained(mix="predictions", affinity=None, **many)
    backend = backend_for(FEDERATION, found.problem.population, "autograd")
    for i, c in enumerate(found.memberships):
        slope, _ = slope_and_loss(backend, found.server.shared, c, FEDERATION.train.client(i))
        assert float(c @ slope - slope.min()) < 1e-4  # the Frank-Wolfe gap, which is at least f(c) - min f


@every_mix
def test_to_first_order_the_mean_over_members_is_that_over_everyone_but_for_each_models_share(mix):
    """So it descends the same objective, along every canonical model's own gradient."""
    c = torch.tensor([[0.6, 0.4], [0.1, 0.9], [0.5, 0.5], [0.8, 0.2]]).double()
    moves = []
    for averaging in ("members", "everyone"):
        short = {"lr": 1e-7, "batch_size": 4, "membership_steps": 0, "warmup": 0, "averaging": averaging}
        found = trained(2, mix, rounds=1, memberships=c, **short)
        before, after = (found.models(at).models for at in (0, 1))
        moves.append({name: (after[name] - theta) / short["lr"] for name, theta in before.items()})
    share = weights_of(FEDERATION) @ c
    for name, move in moves[0].items():
        expected = moves[1][name] / share.reshape(-1, *(1 for _ in move.shape[1:]))
        torch.testing.assert_close(move, expected, atol=1e-5, rtol=1e-4)


@every_order
def test_memberships_stay_on_the_simplex_and_above_the_floor(mix, order):
    found = trained(mix=mix, rounds=6, lr=0.5, membership_lr=50.0, membership_steps=5, order=order, batch_size=4)
    for at in range(7):
        C = simplex.check(found.models(at).memberships, tolerance=1e-12)
        assert float(C.min()) >= simplex.FLOOR
    assert float(found.memberships.min()) == pytest.approx(simplex.FLOOR)  # it is reached


@pytest.mark.parametrize(
    ("mix", "settings"),
    [("outputs", {"membership_batch": 3}), ("predictions", {}), ("weights", {}), ("outputs", {"penalty": 0.1})],
)
def test_a_membership_depends_on_other_clients_by_the_penalty_alone(mix, settings):
    def memberships_alone(ids):
        """After some rounds in which theta never moved."""
        federation = FEDERATION.select(ids)
        likeness = ppfl.affinity.from_labels(federation.label_counts().double(), federation.ids)
        method = ppfl.PPFL(lr=0.1, order="random", block_probability=1e-9, start="uniform", **settings)
        found = run(method, ppfl.Population(NET, k=2, mix=mix), federation, rounds=3, affinity=likeness)
        assert_same(found.models().models, found.models(0).models, atol=0, rtol=0)
        return found.memberships

    everyone, some = memberships_alone(FEDERATION.ids)[1:3], memberships_alone(FEDERATION.ids[1:3])
    same = torch.isclose(some, everyone, atol=1e-9, rtol=1e-9)
    assert bool(same.all()) == ("penalty" not in settings)
    assert float((some - 0.5).abs().amax(1).min()) > 1e-3


def test_a_strong_penalty_pulls_everybody_together():
    strong = {"membership_lr": 0.02, "membership_steps": 50, "penalty": 10.0, "membership_scale": "weighted"}
    apart = torch.tensor([[0.8, 0.1, 0.1], [0.1, 0.8, 0.1], [0.1, 0.1, 0.8], [0.4, 0.3, 0.3]]).double()
    everybody = ppfl.affinity.uniform(FEDERATION.ids)
    found = trained(rounds=10, memberships=apart, affinity=everybody, batch_size=4, **strong)
    before, after = (float(torch.cdist(C, C).max()) for C in (apart, found.memberships))
    assert after < 0.05 * before


def test_mini_batch_membership_gradients_are_unbiased():
    """The mean of small steps on batches is the step on all data: many clients with the same data draw their own."""
    federation, net = make_contradicting_federation([0] * 400), make_linear(classes=2, dtype=torch.float64)
    tiny = {"rounds": 1, "lr": 1e-12, "membership_lr": 1e-4, "membership_steps": 1, "batch_size": 4, "affinity": None}
    runs = [trained(3, "predictions", net, federation, **tiny, membership_batch=batch) for batch in (None, 2)]
    full, batches = (found.memberships - 1 / 3 for found in runs)
    error = batches.std(0) / math.sqrt(400)
    assert bool(((batches.mean(0) - full[0]).abs() < 4.5 * error + 1e-12).all())
    assert float(error.max()) < 0.2 * float(full.abs().max())


@every_mix
def test_by_the_max_rule_a_clients_loss_is_that_of_its_first_choice_alone(mix):
    """As in clustered learning, whichever way canonical models were mixed before."""
    found = trained(2, mix, rounds=3, lr=0.2, batch_size=4, start="gradients")
    shared, best = found.models().models, found.memberships.argmax(1)
    hard = evaluate(found.method, found.problem, found.transport, found.server, ("train",), hard=True)
    for i, loss in enumerate(hard.splits["train"].loss.values):
        own = FEDERATION.train.client(i)
        output = functional_call(NET, {name: theta[best[i]] for name, theta in shared.items()}, (own.x,))
        torch.testing.assert_close(loss, nn.functional.cross_entropy(output, own.y).detach(), atol=1e-9, rtol=1e-9)


def test_in_the_warm_up_lr_rises_and_memberships_wait():
    found = trained(2, rounds=30, lr=0.2, warmup=3, schedule="constant")
    tasks = [found.method.plan(found.problem, found.server, t).task for t in range(5)]
    assert [task.lr for task in tasks] == pytest.approx([0.05, 0.1, 0.15, 0.2, 0.2])
    moved = [not found.models(at).memberships.equal(found.models(0).memberships) for at in range(5)]
    assert moved == [False, False, False, False, True]


@pytest.mark.parametrize(("mix", "net"), [("weights", NET), ("outputs", LINEAR)])
def test_what_collapses_uploads_one_model_and_k_numbers_whatever_k_is(mix, net):
    for k in (2, 4):
        found = trained(k, mix, net, rounds=1)
        assert found.reports[0].bytes_up == 4 * 8 * (sum(p.numel() for p in net.parameters()) + k)
