"""What the mathematics of PPFL must show."""

import itertools
import math

import pytest
import torch

from kit.problems import make_contradicting_federation, make_federation, make_linear, make_net
from kit.training import assert_same, at_start, losses_of_clients, positions_of, run
from kit.twins.ppfl import weights_of
from ppfl.algorithms import PPFL, FedAvg
from ppfl.core import affinity, simplex
from ppfl.core.backends import Autograd, Batch
from ppfl.core.errors import SettingError
from ppfl.core.population import Population

FEDERATION = make_federation(dtype=torch.float64)
W = affinity.from_labels(FEDERATION.label_counts().double(), FEDERATION.ids)
NET = make_net(dtype=torch.float64)
MIXES = ["outputs", "predictions", "weights"]
MIXES_AND_ORDERS = [*((mix, "alternating") for mix in MIXES), ("predictions", "random")]


def trained(method, population, federation=FEDERATION, rounds=4, **settings):
    return run(method, population, federation, rounds=rounds, engine="stacked", **settings)


def trained_from(method, population, rounds, *, models=None, memberships=None, affinity=None):
    """A run that begins with these models and memberships."""
    start = at_start(
        method, population, FEDERATION, rounds=rounds, affinity=affinity, models=models, memberships=memberships
    )
    return trained(method, population, rounds=rounds, affinity=affinity, resume=start)


def objective(found, penalty: float, at: int = -1) -> float:
    """F of Eq. (9)."""
    C = found.states[at].server.memberships
    return float(weights_of(FEDERATION) @ losses_of_clients(found, at) + penalty * W.penalty(C))


# ---------------------------------------------------------------------- edges at which it is another method


@pytest.mark.parametrize("mix", MIXES)
def test_one_canonical_model_is_fedavg(mix: str) -> None:
    settings = {"lr": 0.2, "weight_decay": 0.01, "batch_size": 4}
    ours = trained(PPFL(**settings, start="uniform"), Population(NET, k=1, mix=mix))
    theirs = trained(FedAvg(**settings), Population(NET, k=1))
    for name, expected in theirs.server.shared.items():
        torch.testing.assert_close(ours.server.shared[name][0], expected)


@pytest.mark.parametrize(
    ("mix", "canonical", "collapse"),
    [
        ("outputs", "all", True),
        ("outputs", "0", False),
        ("outputs", "2", True),
        ("predictions", "all", True),
        ("predictions", "2", True),
        ("weights", "all", False),
        ("weights", "2", True),
    ],
)
def test_equal_memberships_of_equal_models_are_fedavg(mix: str, canonical: str, collapse: bool) -> None:
    """Whatever K is, and over several local steps: each client's network moves as fast as it would alone."""
    settings = {"lr": 0.4, "weight_decay": 0.05, "batch_size": 3, "local_epochs": 2}
    method = PPFL(**settings, membership_steps=0, start="uniform", warmup=0, collapse=collapse)
    population = Population(NET, k=3, mix=mix, canonical=canonical)
    found = trained_from(method, population, 4, models=population.initial_models(0)).server.shared
    theirs = trained(FedAvg(**settings), Population(NET, k=1)).server.shared
    for name, value in found.items():
        torch.testing.assert_close(value, theirs[name].expand_as(value), atol=1e-10, rtol=1e-9)


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("averaging", ["members", "everyone"])
def test_frozen_one_hot_memberships_are_clustered_learning(mix: str, averaging: str) -> None:
    """Each canonical model is then FedAvg on its own clients; averaged over everyone, slowed by their share."""
    groups = torch.tensor([0, 1, 0, 1])
    one_hot = torch.nn.functional.one_hot(groups, 2).double()
    training = {"lr": 0.2, "batch_size": 4, "weight_decay": 0.05 if averaging == "members" else 0.0}
    method = PPFL(**training, membership_steps=0, start="uniform", averaging=averaging)
    found = trained_from(method, Population(NET, k=2, mix=mix), 1, memberships=one_hot)
    before, after = (state.server.shared for state in found.states)
    for k in (0, 1):
        cluster = FEDERATION.select([id for id, group in zip(FEDERATION.ids, groups, strict=True) if group == k])
        pace = 1.0 if averaging == "members" else float(weights_of(FEDERATION)[groups == k].sum())
        alone, own = Population(NET, k=1), {name: theta[k] for name, theta in before.items()}
        start = at_start(FedAvg(**training), alone, cluster, rounds=1, models=own)
        end = trained(FedAvg(**training), alone, cluster, rounds=1, resume=start).server.shared
        for name, theta in after.items():
            expected = own[name] + pace * (end[name] - own[name])
            torch.testing.assert_close(theta[k], expected, atol=1e-7, rtol=1e-6)


@pytest.mark.parametrize("mix", MIXES)
def test_to_first_order_the_mean_over_members_is_that_over_everyone_but_for_each_models_share(mix: str) -> None:
    """So it descends the same objective, along every canonical model's own gradient."""
    c = torch.tensor([[0.6, 0.4], [0.1, 0.9], [0.5, 0.5], [0.8, 0.2]]).double()
    short = {"lr": 1e-7, "batch_size": 4, "membership_steps": 0, "start": "uniform", "warmup": 0}
    moves = []
    for averaging in ("members", "everyone"):
        found = trained_from(PPFL(**short, averaging=averaging), Population(NET, k=2, mix=mix), 1, memberships=c)
        before, after = (state.server.shared for state in found.states)
        moves.append({name: (after[name] - theta) / short["lr"] for name, theta in before.items()})
    share = weights_of(FEDERATION) @ c
    for name, move in moves[0].items():
        expected = moves[1][name] / share.reshape(-1, *(1 for _ in move.shape[1:]))
        torch.testing.assert_close(move, expected, atol=1e-5, rtol=1e-4)


# ---------------------------------------------------------------------- the short cut for mixed weights


@pytest.mark.parametrize(
    ("mix", "canonical", "averaging"),
    [
        ("weights", "all", "members"),
        ("weights", "all", "everyone"),
        ("weights", "2", "members"),
        ("outputs", "2", "everyone"),
        ("outputs", "0", "members"),
        ("outputs", ("0", "2"), "members"),
    ],
)
def test_the_collapse_of_mixed_weights_and_of_affine_outputs_is_exact(mix: str, canonical, averaging: str) -> None:
    """Short cut 1, against the run of K models, with momentum, weight decay and several local steps."""
    settings = {"lr": 0.3, "momentum": 0.9, "weight_decay": 0.05, "batch_size": 3, "local_epochs": 2, "penalty": 0.05}
    fast, slow = (
        trained(
            PPFL(**settings, collapse=collapse, start="uniform", averaging=averaging),
            Population(NET, k=4, mix=mix, canonical=canonical),
            affinity=W,
        )
        for collapse in (True, False)
    )
    assert_same(fast.server, slow.server, atol=1e-11, rtol=1e-9)
    assert fast.reports[0].bytes_up < slow.reports[0].bytes_up


@pytest.mark.parametrize("k", [2, 8])
@pytest.mark.parametrize(("mix", "net"), [("weights", make_net()), ("outputs", make_linear())])
def test_what_collapses_uploads_one_model_and_k_numbers_whatever_k_is(mix: str, net, k: int) -> None:
    federation = make_federation(sizes=(9,) * 10)
    found = trained(PPFL(lr=0.1, start="uniform"), Population(net, k=k, mix=mix), federation, rounds=1)
    one_model = sum(p.numel() for p in net.parameters())
    assert found.reports[0].bytes_up == 10 * 4 * (one_model + k)


# ---------------------------------------------------------------------- memberships and the objective


@pytest.mark.parametrize(("mix", "order"), MIXES_AND_ORDERS)
def test_memberships_stay_on_the_simplex_and_above_the_floor(mix: str, order: str) -> None:
    method = PPFL(lr=0.5, membership_lr=50.0, membership_steps=5, order=order, batch_size=4, start="uniform")
    found = trained(method, Population(NET, k=3, mix=mix), rounds=6, affinity=W)
    for state in found.states:
        simplex.check(state.server.memberships, tolerance=1e-12)
        assert float(state.server.memberships.min()) >= simplex.FLOOR
    assert float(found.memberships.min()) == pytest.approx(simplex.FLOOR)  # it is reached


@pytest.mark.parametrize(("mix", "order"), MIXES_AND_ORDERS)
def test_F_never_rises_on_full_gradients_with_steps_inside_the_bounds(mix: str, order: str) -> None:
    method = PPFL(
        lr=0.02, momentum=0, batch_size=None, local_steps=1, schedule="constant", penalty=0.02, order=order,
        membership_lr=0.1, membership_scale="weighted", start="uniform", averaging="everyone",
    )  # fmt: skip
    found = trained(method, Population(make_linear(dtype=torch.float64), k=3, mix=mix), rounds=25, affinity=W)
    F = [objective(found, 0.02, at) for at in range(26)]
    assert all(after <= before + 1e-12 for before, after in itertools.pairwise(F))
    assert F[-1] < F[0]


def test_several_membership_steps_descend_the_surrogate() -> None:
    """More steps on kept outputs never leave a larger F: each is a descent of S_t, which lies above F."""
    one_round = {"lr": 1e-12, "batch_size": None, "penalty": 0.05, "membership_lr": 0.2, "start": "uniform"}
    values = []
    for steps in (1, 2, 5, 20, 200):
        method = PPFL(**one_round, membership_steps=steps)
        found = trained(method, Population(NET, k=3, mix="predictions"), rounds=1, affinity=W)
        values.append(objective(found, 0.05))
    assert all(more <= fewer + 1e-12 for fewer, more in itertools.pairwise(values))
    assert values[-1] < values[0]


def test_many_membership_steps_reach_the_optimum_of_a_convex_problem() -> None:
    """Prediction mixing is convex in c: at the end slopes are level on the support and larger off it (KKT)."""
    method = PPFL(lr=1e-12, membership_lr=5.0, membership_steps=3000, batch_size=None, start="uniform")
    found = trained(method, Population(NET, k=3, mix="predictions"), rounds=1)
    for i, c in enumerate(found.memberships):
        assert float(c @ (slope := slope_of_loss(found, i)) - slope.min()) < 1e-4  # Frank-Wolfe gap: >= f(c) - min f


def slope_of_loss(found, client: int) -> torch.Tensor:
    """df_i/dc_i of a client on all of its data."""
    own, population = FEDERATION.train.client(client), found.problem.population
    even = torch.full_like(own.x[None, :, 0], 1 / len(own))
    batch = Batch(own.x[None], own.y[None], even, torch.tensor([len(own)]), torch.arange(len(own))[None], None)
    backend = Autograd(population, own.x[:2], own.y, 3)
    return backend.membership_gradients(found.server.shared, found.memberships[client : client + 1], batch)[0][0]


def test_a_strong_penalty_pulls_everybody_together() -> None:
    method = PPFL(lr=0.1, membership_lr=0.02, membership_steps=50, penalty=10.0, membership_scale="weighted",
                  batch_size=4, start="uniform")  # fmt: skip
    apart = torch.tensor([[0.8, 0.1, 0.1], [0.1, 0.8, 0.1], [0.1, 0.1, 0.8], [0.4, 0.3, 0.3]]).double()
    found = trained_from(method, Population(NET, k=3), 10, affinity=affinity.uniform(FEDERATION.ids), memberships=apart)
    assert float(torch.cdist(found.memberships, found.memberships).max()) < 0.05 * float(
        torch.cdist(apart, apart).max()
    )


def test_mini_batch_membership_gradients_are_unbiased() -> None:
    """The mean of small steps on batches is the step on all data: many clients with the same data draw their own."""
    clients = 400
    federation = make_contradicting_federation((0,) * clients)
    population = Population(make_linear(classes=2, dtype=torch.float64), k=3, mix="predictions")
    tiny = {"lr": 1e-12, "membership_lr": 1e-4, "membership_steps": 1, "batch_size": 4, "start": "uniform"}
    full, batches = (
        trained(PPFL(**tiny, membership_batch=batch), population, federation, rounds=1).memberships - 1 / 3
        for batch in (None, 2)
    )
    error = batches.std(0) / math.sqrt(clients)
    assert bool(((batches.mean(0) - full[0]).abs() < 4.5 * error + 1e-12).all())
    assert float(error.max()) < 0.2 * float(full.abs().max())


# ---------------------------------------------------------------------- who takes part


def test_only_participants_are_averaged_and_the_others_keep_their_memberships() -> None:
    """theta moves by the p-weighted mean over the round's clients: as if they were the whole federation."""
    method, population = PPFL(lr=0.2, batch_size=4, participation=0.5, start="uniform"), Population(NET, k=2)
    found = trained(method, population, rounds=1)
    who = positions_of(found.problem, method, 0)
    absent = [i for i in range(4) if i not in who]
    assert len(who) == 2
    before, after = (state.server.memberships for state in found.states)
    assert after[absent].equal(before[absent])
    chosen = FEDERATION.select([FEDERATION.ids[i] for i in who])
    alone = trained(method.with_everyone(), population, chosen, rounds=1)
    torch.testing.assert_close(after[who], alone.server.memberships)
    assert_same(found.server.shared, alone.server.shared)


def test_in_the_warm_up_lr_rises_and_memberships_wait() -> None:
    method = PPFL(lr=0.2, start="uniform", warmup=3, schedule="constant")
    found = trained(method, Population(NET, k=2), rounds=30, until=4)
    tasks = [method.plan(found.problem, found.server, t).task for t in range(5)]
    assert [task.memberships for task in tasks] == [False, False, False, True, True]
    assert [task.lr for task in tasks] == pytest.approx([0.05, 0.1, 0.15, 0.2, 0.2])
    for at in range(1, 4):
        assert found.states[at].server.memberships.equal(found.states[0].server.memberships)
    assert not found.memberships.equal(found.states[0].server.memberships)


def test_more_canonical_models_than_clients_are_refused() -> None:
    with pytest.raises(SettingError, match="k <= 4"):
        trained(PPFL(lr=0.1, start="uniform"), Population(NET, k=5))
