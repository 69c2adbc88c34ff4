"""What the mathematics of PPFL must show."""

import itertools
import math

import pytest
import torch
from ppfl.engines import Watch, begin, engine_by_name, fit, pose, train
from torch.utils import _pytree as pytree

from ppfl.algorithms import PPFL, FedAvg
from ppfl.core import affinity, simplex
from ppfl.core.errors import SettingError
from ppfl.core.population import Population
from support import make_federation, make_linear, make_net

FEDERATION = make_federation(dtype=torch.float64)
W = affinity.from_labels(FEDERATION.label_counts().double(), FEDERATION.ids)
NET = make_net(dtype=torch.float64)


def states(population, method, rounds, *, affinity=None, memberships=None, seed=0):
    """All states of a run, from given memberships if any."""
    problem = pose(population, FEDERATION, affinity, rounds, seed)
    state = begin(method, problem)
    if memberships is not None:
        known = torch.ones_like(problem.weights)
        clients = state.clients._replace(membership=memberships, rounds=known)
        state = state._replace(server=state.server._replace(memberships=memberships), clients=clients)
    return [state, *(s for s, _ in train(method, problem, FEDERATION, engine_by_name("stacked"), state))]


@pytest.mark.parametrize("mix", ["outputs", "predictions", "weights"])
def test_one_canonical_model_is_fedavg(mix: str) -> None:
    settings = {"lr": 0.2, "weight_decay": 0.01, "batch_size": 4}
    ours = fit(Population(NET, k=1, mix=mix), FEDERATION, PPFL(**settings, start="uniform"), rounds=4)
    theirs = fit(Population(NET, k=1), FEDERATION, FedAvg(**settings), rounds=4)
    for name, expected in theirs.state.server.shared.canonical.items():
        torch.testing.assert_close(ours.state.server.shared.canonical[name], expected)


@pytest.mark.parametrize("collapse", [True, False])
@pytest.mark.parametrize("canonical", ["all", "0", "2"])
@pytest.mark.parametrize("mix", ["outputs", "predictions", "weights"])
def test_equal_memberships_of_equal_models_are_fedavg(mix: str, canonical: str, collapse: bool) -> None:
    """Whatever K is, and over several local steps: each client's network moves as fast as it would alone."""
    settings = {"lr": 0.4, "weight_decay": 0.05, "batch_size": 3, "local_epochs": 2}
    method = PPFL(**settings, membership_steps=0, start="uniform", warmup=0, collapse=collapse)
    population = Population(NET, k=3, mix=mix, canonical=canonical)
    problem = pose(population, FEDERATION, None, 4, seed=0)
    state = begin(method, problem)
    state = state._replace(server=state.server._replace(shared=population.initial(0)))
    *_, (state, _) = train(method, problem, FEDERATION, engine_by_name("stacked"), state)
    theirs = fit(Population(NET, k=1), FEDERATION, FedAvg(**settings), rounds=4).state.server.shared.canonical
    for name, value in state.server.shared.common.items():
        torch.testing.assert_close(value, theirs[name][0], atol=1e-10, rtol=1e-9)
    for name, theta in state.server.shared.canonical.items():
        torch.testing.assert_close(theta, theirs[name].expand_as(theta), atol=1e-10, rtol=1e-9)


@pytest.mark.parametrize("mix", ["outputs", "predictions", "weights"])
def test_to_first_order_the_mean_over_members_is_that_over_everyone_but_for_each_models_share(mix: str) -> None:
    """So it descends the same objective, along every canonical model's own gradient."""
    c = torch.tensor([[0.6, 0.4], [0.1, 0.9], [0.5, 0.5], [0.8, 0.2]]).double()
    short = {"lr": 1e-7, "batch_size": 4, "membership_steps": 0, "start": "uniform", "warmup": 0}
    population = Population(NET, k=2, mix=mix)
    moves = []
    for averaging in ("members", "everyone"):
        start, end = states(population, PPFL(**short, averaging=averaging), 1, memberships=c)
        before, after = start.server.shared.canonical, end.server.shared.canonical
        moves.append({name: (after[name] - theta) / short["lr"] for name, theta in before.items()})
    share = FEDERATION.weights.double() @ c
    for name, move in moves[0].items():
        expected = moves[1][name] / share.reshape(-1, *(1 for _ in move.shape[1:]))
        torch.testing.assert_close(move, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("mix", ["outputs", "predictions", "weights"])
@pytest.mark.parametrize("averaging", ["members", "everyone"])
def test_frozen_one_hot_memberships_are_clustered_learning(mix: str, averaging: str) -> None:
    """Each canonical model is then FedAvg on its own clients; averaged over everyone, slowed by their share."""
    groups = torch.tensor([0, 1, 0, 1])
    one_hot = torch.nn.functional.one_hot(groups, 2).double()
    training = {"lr": 0.2, "batch_size": 4, "weight_decay": 0.05 if averaging == "members" else 0.0}
    method = PPFL(**training, membership_steps=0, start="uniform", averaging=averaging)
    population = Population(NET, k=2, mix=mix)
    start, *_, end = states(population, method, 1, memberships=one_hot)
    for k in (0, 1):
        ids = [client for client, group in zip(FEDERATION.ids, groups, strict=True) if group == k]
        cluster = FEDERATION.select(ids)
        pace = 1.0 if averaging == "members" else float(FEDERATION.weights[groups == k].double().sum())
        alone = Population(NET, k=1)
        problem = pose(alone, cluster, None, 1, seed=0)
        state = begin(FedAvg(**training), problem)
        own = {name: theta[k : k + 1] for name, theta in start.server.shared.canonical.items()}
        state = state._replace(server=state.server._replace(shared=state.server.shared._replace(canonical=own)))
        ((after, _),) = train(FedAvg(**training), problem, cluster, engine_by_name("loop"), state)
        for name, theta in after.server.shared.canonical.items():
            expected = own[name] + pace * (theta - own[name])
            torch.testing.assert_close(end.server.shared.canonical[name][k : k + 1], expected, atol=1e-7, rtol=1e-6)


@pytest.mark.parametrize(
    ("mix", "canonical"),
    [("weights", "all"), ("weights", "2"), ("outputs", "2"), ("outputs", "0"), ("outputs", ("0", "2"))],
)
def test_the_collapse_of_mixed_weights_and_of_affine_outputs_is_exact(mix: str, canonical: str) -> None:
    """Short cut 1, against the run of K models, with momentum, weight decay and several local steps."""
    settings = {"lr": 0.3, "momentum": 0.9, "weight_decay": 0.05, "batch_size": 3, "local_epochs": 2, "penalty": 0.05}
    fast, slow = (
        fit(
            Population(NET, k=4, mix=mix, canonical=canonical),
            FEDERATION,
            PPFL(**settings, collapse=collapse, start="uniform"),
            rounds=5,
            affinity=W,
        )
        for collapse in (True, False)
    )
    for a, b in zip(pytree.tree_leaves(fast.state.server), pytree.tree_leaves(slow.state.server), strict=True):
        torch.testing.assert_close(a, b, atol=1e-11, rtol=1e-9)


@pytest.mark.parametrize("k", [2, 8])
@pytest.mark.parametrize(("mix", "net"), [("weights", make_net()), ("outputs", make_linear())])
def test_what_collapses_uploads_one_model_and_k_numbers_whatever_k_is(mix: str, net, k: int) -> None:
    federation = make_federation(sizes=(9,) * 10)
    fitted = fit(Population(net, k=k, mix=mix), federation, PPFL(start="uniform"), rounds=1)
    one_model = sum(p.numel() for p in net.parameters())
    assert fitted.history[0]["bytes_up"] == 10 * 4 * (one_model + k)


@pytest.mark.parametrize("mix", ["outputs", "predictions", "weights"])
@pytest.mark.parametrize("order", ["alternating", "random"])
def test_memberships_stay_on_the_simplex_and_above_the_floor(mix: str, order: str) -> None:
    method = PPFL(lr=0.5, membership_lr=50.0, membership_steps=5, order=order, batch_size=4, start="uniform")
    for state in states(Population(make_net(dtype=torch.float64), k=3, mix=mix), method, 8, affinity=W):
        simplex.check(state.server.memberships, tolerance=1e-12)
        assert float(state.server.memberships.min()) >= simplex.FLOOR


@pytest.mark.parametrize("mix", ["outputs", "predictions", "weights"])
@pytest.mark.parametrize("order", ["alternating", "random"])
def test_F_never_rises_on_full_gradients_with_steps_inside_the_bounds(mix: str, order: str) -> None:
    method = PPFL(
        lr=0.02, momentum=0, batch_size=None, local_steps=1, schedule="constant", penalty=0.02, order=order,
        membership_lr=0.1, membership_scale="weighted", start="uniform", averaging="everyone",
    )  # fmt: skip
    population = Population(make_linear(dtype=torch.float64), k=3, mix=mix)
    fitted = fit(population, FEDERATION, method, rounds=60, affinity=W, watch=Watch(objective=True))
    F = [record["objective"] for record in fitted.history]
    assert all(after <= before + 1e-12 for before, after in itertools.pairwise(F))
    assert F[-1] < F[0]


def test_stationarity_falls_as_one_over_T_without_noise() -> None:
    """Corollary O1: with full gradients and like clients the smallest measure so far is at most const / T."""
    method = PPFL(
        lr=0.05, momentum=0, batch_size=None, local_steps=1, schedule="constant", penalty=0.0, order="random",
        membership_lr=0.05, membership_scale="weighted", start="uniform", averaging="everyone",
    )  # fmt: skip
    population = Population(make_linear(dtype=torch.float64), k=2, mix="predictions")
    fitted = fit(population, FEDERATION, method, rounds=400, watch=Watch(stationarity=True, objective=True))
    G = torch.tensor([record["stationarity"] for record in fitted.history])
    running = G.cumsum(0) / torch.arange(1, 401)
    drop = fitted.history[0]["objective"]  # F >= 0, so Delta_F is at most this
    eta = 0.05
    for T in (50, 100, 200, 400):
        assert float(running[T - 1]) <= 8 * drop / (eta * T)


def test_several_membership_steps_descend_the_surrogate() -> None:
    """More steps on kept outputs never leave a larger F: each is a descent of S_t, which lies above F."""
    one_round = {"lr": 1e-12, "batch_size": None, "penalty": 0.05, "membership_lr": 0.2, "start": "uniform"}
    values = []
    for steps in (1, 2, 5, 20, 200):
        method = PPFL(**one_round, membership_steps=steps)
        population = Population(NET, k=3, mix="predictions")
        fitted = fit(population, FEDERATION, method, rounds=1, affinity=W, watch=Watch(objective=True))
        values.append(fitted.history[0]["objective"])
    assert all(more <= fewer + 1e-12 for fewer, more in itertools.pairwise(values))


def test_many_membership_steps_reach_the_optimum_of_a_convex_problem() -> None:
    """Prediction mixing is convex in c: at the end slopes are level on the support and larger off it (KKT)."""
    method = PPFL(lr=1e-12, membership_lr=5.0, membership_steps=3000, penalty=0.0, batch_size=None, start="uniform")
    population = Population(NET, k=3, mix="predictions")
    fitted = fit(population, FEDERATION, method, rounds=1)
    c = fitted.memberships
    for i, client in enumerate(FEDERATION.ids):
        own = FEDERATION.client(client)["train"]
        slope, _ = population.membership_gradients(
            fitted.state.server.shared, c[i : i + 1], own.x[None], own.y[None], torch.ones_like(own.x[None, :, 0])
        )
        gap = (c[i] @ slope[0] - slope[0].min()).item()  # Frank-Wolfe gap: bounds f(c) - min f
        assert gap < 1e-4


def test_strong_penalty_pulls_everybody_together() -> None:
    method = PPFL(lr=0.1, membership_lr=0.02, membership_steps=50, penalty=10.0, membership_scale="weighted",
                  batch_size=4, start="uniform")  # fmt: skip
    spread_out = torch.tensor([[0.8, 0.1, 0.1], [0.1, 0.8, 0.1], [0.1, 0.1, 0.8], [0.4, 0.3, 0.3]]).double()
    start, *_, end = states(
        Population(NET, k=3), method, 10, affinity=affinity.uniform(FEDERATION.ids), memberships=spread_out
    )
    distance = [torch.cdist(s.server.memberships, s.server.memberships).max().item() for s in (start, end)]
    assert distance[1] < 0.05 * distance[0]


def test_only_participants_are_averaged_and_the_others_keep_their_memberships() -> None:
    """theta moves by the p-weighted mean over the round's clients: as if they were the whole federation."""
    method = PPFL(lr=0.2, batch_size=4, participation=0.5, start="uniform")
    population = Population(NET, k=2)
    problem = pose(population, FEDERATION, None, 3, seed=0)
    plan = method.plan(problem, begin(method, problem).server, 0)
    assert len(plan.who) == 2
    before, after, *_ = states(population, method, 3)
    everyone = set(range(4))
    for i in everyone - set(plan.who.tolist()):
        assert after.server.memberships[i].equal(before.server.memberships[i])
    chosen = FEDERATION.select([FEDERATION.ids[i] for i in plan.who])
    full = method.model_copy(update={"participation": 1.0})
    problem = pose(population, chosen, None, 3, seed=0)
    ((alone, _), *_) = train(full, problem, chosen, engine_by_name("loop"), begin(full, problem))
    torch.testing.assert_close(after.server.memberships[plan.who], alone.server.memberships)
    for a, b in zip(pytree.tree_leaves(after.server.shared), pytree.tree_leaves(alone.server.shared), strict=True):
        torch.testing.assert_close(a, b)


def test_mini_batch_membership_gradients_are_unbiased() -> None:
    population = Population(NET, k=3, mix="predictions")
    tiny = {"lr": 1e-12, "membership_lr": 1e-4, "penalty": 0.0, "batch_size": 4, "start": "uniform"}
    full = fit(population, FEDERATION, PPFL(**tiny), rounds=1, seed=0).memberships - 1 / 3
    problem = pose(population, FEDERATION, None, 1, seed=0)
    start = begin(PPFL(**tiny), problem)
    moves = []
    for seed in range(300):
        drawn = problem._replace(seed=seed)
        method = PPFL(**tiny, membership_batch=2)
        ((state, _),) = train(method, drawn, FEDERATION, engine_by_name("stacked"), start)
        moves.append(state.server.memberships - 1 / 3)
    mean, error = torch.stack(moves).mean(0), torch.stack(moves).std(0) / math.sqrt(300)
    assert bool(((mean - full).abs() < 4.5 * error + 1e-9).all())


def test_more_canonical_models_than_clients_are_refused() -> None:
    with pytest.raises(SettingError, match="k <= 4"):
        fit(Population(NET, k=5), FEDERATION, PPFL(start="uniform"), rounds=1)


def test_one_model_methods_refuse_more() -> None:
    with pytest.raises(SettingError, match="set k = 1"):
        fit(Population(NET, k=2), FEDERATION, FedAvg(), rounds=1)
