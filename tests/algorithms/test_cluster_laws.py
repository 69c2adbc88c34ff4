"""What must hold of IFCA, FedEM and CFL whatever the numbers are."""

import itertools
import math

import pytest
import torch
from ppfl.engines import begin, engine_by_name, fit, pose, train
from ppfl.engines.evaluate import client_losses
from ppfl.engines.train import returning
from torch import nn

from ppfl.algorithms import CFL, IFCA, PPFL, FedAvg, FedEM
from ppfl.core.errors import SettingError
from ppfl.core.population import Population
from ppfl.core.simplex import harden
from ppfl.data.federation import Federation
from support import make_federation, make_linear, make_net

FEDERATION = make_federation(sizes=(7, 12, 20, 5, 9, 3), dtype=torch.float64)
NET = make_net(dtype=torch.float64)
SMALL = {"lr": 0.2, "momentum": 0.9, "weight_decay": 0.01, "batch_size": 4}
STILL = {"lr": 1e-12, "weight_decay": 0.0, "batch_size": None}  # models that do not move


def run(method, rounds, *, k=3, mix="outputs", net=NET, federation=FEDERATION, start=None, dropout=0.0):
    """The problem, all states from the first on, and the reports; `start` changes the first models."""
    problem = pose(Population(net, k=k, mix=mix), federation, None, rounds, seed=0, dropout=dropout)
    state = begin(method, problem)
    if start is not None:
        state = state._replace(server=state.server._replace(shared=state.server.shared.map(start)))
    moves = list(train(method, problem, federation, engine_by_name("stacked"), state))
    return problem, [state, *(s for s, _ in moves)], [report for _, report in moves]


def losses_of(problem, method, state, federation=FEDERATION):
    return client_losses(problem, method.personal(state.server, state.clients), federation)


def contradicting(groups=(0, 1, 0, 0, 1), size=12) -> Federation:
    """Clients with the same x; those of group 1 have the two labels the other way round."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(size, 4, generator=generator)
    y = (x[:, 0] > 0).long()
    ids = [f"client-{i}" for i in range(len(groups)) for _ in range(size)]
    labels = torch.cat([1 - y if group else y for group in groups])
    return Federation.from_arrays(x.repeat(len(groups), 1), labels, ids, test_fraction=0.0).to(dtype=torch.float64)


# ---------------------------------------------------------------------- all are FedAvg where there is one model


@pytest.mark.parametrize(
    ("method", "k", "mix"),
    [
        (IFCA(**SMALL), 1, "outputs"),
        (FedEM(**SMALL), 1, "predictions"),
        (CFL(**SMALL, eps1=10, eps2=0), 1, "outputs"),
        (CFL(**SMALL, eps1=0), 3, "outputs"),
        (CFL(**SMALL, participation=0.5, eps1=0), 3, "weights"),
    ],
    ids=["ifca", "fedem", "cfl", "cfl-without-cuts", "cfl-some"],
)
def test_one_model_is_fedavg(method, k: int, mix: str) -> None:
    _, (*_, ours), reports = run(method, 4, k=k, mix=mix)
    _, (*_, theirs), expected = run(FedAvg(**SMALL, participation=method.participation), 4, k=1)
    for name, theta in theirs.server.shared.canonical.items():
        torch.testing.assert_close(ours.server.shared.canonical[name][:1], theta)
    assert [r.loss for r in reports] == pytest.approx([r.loss for r in expected])


# ---------------------------------------------------------------------- IFCA


@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_ifca_chooses_the_least_loss_on_all_training_data(participation: float) -> None:
    method = IFCA(**SMALL, participation=participation)
    problem, states, _ = run(method, 5)
    for round, (before, after) in enumerate(itertools.pairwise(states)):
        for i in method.plan(problem, before.server, round).who.tolist():
            own = FEDERATION.client(FEDERATION.ids[i])["train"]
            found = []
            for k in range(3):
                model = {name: theta[k] for name, theta in before.server.shared.canonical.items()}
                output = torch.func.functional_call(NET, model, (own.x,))
                found.append(float(nn.functional.cross_entropy(output, own.y)))
            assert after.clients.membership[i].tolist() == [float(k == found.index(min(found))) for k in range(3)]


def test_ifca_is_fedavg_within_its_clusters_and_leaves_the_others_alone() -> None:
    method = IFCA(**SMALL)

    def one_hopeless(theta):
        return torch.cat([theta[:2], 1000 * theta[2:]])

    _, (before, after), _ = run(method, 1, start=one_hopeless)
    choice = after.clients.membership.argmax(1)
    assert set(choice.tolist()) == {0, 1}
    for name, theta in before.server.shared.canonical.items():
        assert after.server.shared.canonical[name][2].equal(theta[2])
    for k in (0, 1):
        cluster = FEDERATION.select([client for client, of in zip(FEDERATION.ids, choice, strict=True) if of == k])
        own = {name: theta[k : k + 1] for name, theta in before.server.shared.canonical.items()}
        problem = pose(Population(NET, k=1), cluster, None, 1, seed=0)
        state = begin(FedAvg(**SMALL), problem)
        state = state._replace(server=state.server._replace(shared=state.server.shared._replace(canonical=own)))
        ((alone, _),) = train(FedAvg(**SMALL), problem, cluster, engine_by_name("loop"), state)
        for name, expected in alone.server.shared.canonical.items():
            torch.testing.assert_close(after.server.shared.canonical[name][k : k + 1], expected)


@pytest.mark.parametrize("k", [1, 4])
def test_ifca_uploads_one_model_and_k_numbers(k: int) -> None:
    net = make_net()
    fitted = fit(Population(net, k=k), make_federation(), IFCA(lr=0.1), rounds=1)
    assert fitted.history[0]["bytes_up"] == 4 * 4 * (sum(p.numel() for p in net.parameters()) + k)


def test_ifca_refuses_more_clusters_than_clients() -> None:
    with pytest.raises(SettingError, match="k <= 6"):
        run(IFCA(**SMALL), 1, k=7)


@pytest.mark.parametrize("mix", ["outputs", "predictions", "weights"])
def test_ifca_chooses_what_ppfl_comes_to_where_one_model_is_right_about_every_sample(mix: str) -> None:
    """Section O3.1: memberships then move to corners, and the max rule finds the model with the least loss."""
    federation, net = contradicting(), make_linear(classes=2, dtype=torch.float64)

    def opposite(theta):  # the first column decides, in one model for and in the other against label 1
        weight = torch.zeros_like(theta)
        if theta.dim() == 3:
            weight[:, 1, 0] = torch.tensor([3.0, -3.0], dtype=theta.dtype)
        return weight

    method = IFCA(lr=1e-12, batch_size=None)
    _, (*_, chosen), _ = run(method, 1, k=2, mix=mix, net=net, federation=federation, start=opposite)
    still = PPFL(lr=1e-12, batch_size=None, start="uniform", membership_steps=100, membership_lr=1.0, warmup=0)
    _, (*_, moved), _ = run(still, 3, k=2, mix=mix, net=net, federation=federation, start=opposite)
    c = moved.server.memberships
    assert float(c.amax(1).min()) > 0.99
    assert harden(c).equal(chosen.clients.membership)
    assert chosen.clients.membership.argmax(1).tolist() == [0, 1, 0, 0, 1]


# ---------------------------------------------------------------------- FedEM


def test_em_never_raises_a_clients_loss_while_models_stay() -> None:
    method = FedEM(**STILL)
    problem, states, reports = run(method, 20, mix="predictions")
    losses = [losses_of(problem, method, state) for state in states]
    for before, after in itertools.pairwise(losses):
        assert bool((after <= before + 1e-10).all())
    assert bool((losses[-1] < losses[0]).all())
    sizes = FEDERATION.train.sizes.double()
    pooled = [float(loss @ sizes / sizes.sum()) for loss in losses]
    for (before, after), report in zip(itertools.pairwise(pooled), reports, strict=True):
        assert after - 1e-9 <= report.loss <= before + 1e-9  # the bound lies between: it touches f at the start


def test_em_ends_where_the_mixture_weights_are_optimal() -> None:
    """-log sum_k pi_k p_k is convex in pi: the Frank-Wolfe gap bounds what is left to gain."""
    method = FedEM(**STILL)
    problem, (*_, state), _ = run(method, 400, mix="predictions")
    for i, client in enumerate(FEDERATION.ids):
        own, pi = FEDERATION.client(client)["train"], state.clients.membership[i : i + 1]
        share = torch.full_like(own.x[None, :, 0], 1 / len(own.x))
        slope, _ = problem.population.membership_gradients(state.server.shared, pi, own.x[None], own.y[None], share)
        assert float(pi[0] @ slope[0] - slope.min()) < 1e-2


def test_mixture_weights_are_shares_and_stay_with_absent_clients() -> None:
    method = FedEM(**SMALL, participation=0.5)
    problem, states, _ = run(method, 4, mix="predictions")
    for round, (before, after) in enumerate(itertools.pairwise(states)):
        who = method.plan(problem, before.server, round).who
        absent = [i for i in range(6) if i not in who.tolist()]
        assert after.clients.membership[absent].equal(before.clients.membership[absent])
        torch.testing.assert_close(after.clients.membership.sum(1), torch.ones(6, dtype=torch.float64))


@pytest.mark.parametrize("mix", ["outputs", "weights"])
def test_fedem_asks_for_mixed_predictions(mix: str) -> None:
    with pytest.raises(SettingError, match='set mix = "predictions"'):
        run(FedEM(**SMALL), 1, mix=mix)


# ---------------------------------------------------------------------- CFL


@pytest.mark.parametrize("linkage", ["complete", "single"])
@pytest.mark.parametrize("settings", [{"batch_size": None}, {"batch_size": 5}, {"participation": 0.6}])
def test_contradicting_clients_are_told_apart_exactly(linkage: str, settings: dict) -> None:
    groups, net = (0, 1, 0, 0, 1), make_linear(classes=2, dtype=torch.float64)
    method = CFL(lr=0.1, schedule="constant", linkage=linkage, eps1=0.5, eps2=0.3, **settings)
    _, (*_, state), _ = run(method, 60, k=2, net=net, federation=contradicting(groups))
    assert state.server.cluster.tolist() == list(groups)


def test_with_its_defaults_too_and_no_group_is_cut_again() -> None:
    groups, net = (0, 1, 0, 1), make_linear(classes=2, dtype=torch.float64)
    method = CFL(lr=0.1, batch_size=None)
    problem, (*_, state), _ = run(method, 40, k=4, net=net, federation=contradicting(groups))
    assert state.server.cluster.tolist() == list(groups)
    losses = losses_of(problem, method, state, contradicting(groups))
    assert float(losses.max()) < math.log(2)  # what one model for all is at least above, on the mean


def test_clusters_never_merge_and_never_outnumber_the_models() -> None:
    _, states, _ = run(CFL(**SMALL, eps1=10, eps2=0), 8, k=4)
    together = [s.server.cluster[:, None] == s.server.cluster for s in states]
    for before, after in itertools.pairwise(together):
        assert not bool((after & ~before).any())
    used = [int(s.server.used) for s in states]
    assert used == sorted(used)
    assert used[-1] == 4
    assert all(s.server.cluster.unique().tolist() == list(range(int(s.server.used))) for s in states)


def test_changes_leave_one_by_one_in_rounds_of_cuts_alone() -> None:
    """A client then uploads its change once, not twice; and everybody takes part."""
    method = CFL(**SMALL, eps1=10, eps2=0, participation=0.5)
    _, states, reports = run(method, 8, k=4)
    model = sum(p.numel() for p in NET.parameters())
    for before, report in zip(states, reports, strict=False):
        assert report.bytes_up == 8 * report.participants * (model + 4 + 1)
        assert report.participants == (6 if bool(before.server.cut) else 3)
    cuts = [bool(s.server.cut) for s in states[:-1]]
    assert any(cuts)
    for cut, (before, after) in zip(cuts, itertools.pairwise(states), strict=True):
        assert cut or before.server.cluster.equal(after.server.cluster)


@pytest.mark.parametrize("groups", [(0, 1, 0, 0, 1, 0, 0), (0, 1, 1, 0, 1, 1, 1), (0, 0, 1, 1, 1, 1, 1, 1)])
def test_clients_lost_in_the_round_of_a_cut_go_with_the_larger_side(groups: tuple[int, ...]) -> None:
    net, federation = make_linear(classes=2, dtype=torch.float64), contradicting(groups)
    method = CFL(lr=0.1, schedule="constant", batch_size=None, eps1=0.9, eps2=0.3)
    problem, states, _ = run(method, 60, k=2, net=net, federation=federation, dropout=0.3)
    (before, after), *more = (pair for pair in itertools.pairwise(states) if pair[1].server.used > pair[0].server.used)
    assert not more
    back = returning(problem, method.plan(problem, before.server, before.round), before.round).who.tolist()
    assert 2 < len(back) < len(groups)
    here = [groups[i] for i in back]
    first = groups[min(back)]  # ids are in order, and who is first by name stays in cluster 0, with the lost in a tie
    larger = max((first, 1 - first), key=here.count)
    assert {groups[i] for i in range(len(groups)) if i not in back} - {larger}  # the rule decides, not the data
    expected = [int((groups[i] if i in back else larger) != first) for i in range(len(groups))]
    assert after.server.cluster.tolist() == expected


def test_a_cut_in_whose_round_all_are_lost_is_still_due() -> None:
    method = CFL(**SMALL, eps1=10, eps2=0)
    problem, states, _ = run(method, 8, k=4)
    before = next(state for state in states if bool(state.server.cut))
    hopeless = problem._replace(dropout=1 - 1e-9)
    after, _ = next(train(method, hopeless, FEDERATION, engine_by_name("stacked"), before))
    assert method.plan(problem, after.server, after.round).task.cut


def test_sides_must_be_unlike_enough() -> None:
    """Opposite changes have sqrt((1 - cos) / 2) = 1; what is not quite opposite does not reach it."""
    _, (*_, state), _ = run(CFL(**SMALL, eps1=10, eps2=0, gamma=0.9999), 6)
    assert int(state.server.used) == 1
