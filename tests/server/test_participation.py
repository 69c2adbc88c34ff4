"""Who takes part: sites that draw their own clients, transports that find every client's site, rounds that end."""

import copy

import pytest
import torch

from kit.problems import make_federation, make_linear, make_net
from kit.training import BytesTransport, assert_same, connect, run
from kit.twins import ppfl as naive
from ppfl.algorithms import CFL, PPFL, FedAvg, Local, Share
from ppfl.algorithms.contract import Roster
from ppfl.core import affinity
from ppfl.core.draws import name_keys, uniform
from ppfl.core.errors import AffinityError, DataError, SettingError
from ppfl.core.population import Population
from ppfl.server import InProcess, make_problem
from ppfl.sites import Loop, Setup, Site, Train

SIZES = (7, 12, 20, 5, 1, 9, 8, 6)
SEED = 1


def drawing(method, fraction: float):
    """The same method, whose sites draw the clients of a round themselves."""

    class Drawing(type(method)):
        def plan(self, problem, server, round):
            plan = super().plan(problem, server, round)
            return (
                plan if plan.who == Share(1.0) and isinstance(plan.task, tuple) else plan._replace(who=Share(fraction))
            )

    return Drawing(**method.model_dump())


def who_is_drawn(ids, fraction: float, round: int) -> list[bool]:
    return (uniform(SEED, "participants", round, name_keys(ids)) < fraction).tolist()


@pytest.mark.parametrize("sites", [1, 2, 3])
def test_every_site_draws_its_own_clients_by_seed_round_and_id(sites: int) -> None:
    federation = make_federation(SIZES, dtype=torch.float64)
    method = drawing(Local(lr=0.3, batch_size=4), 0.4)
    found = run(method, Population(make_net(dtype=torch.float64), k=1), federation, rounds=6, seed=SEED, sites=sites)
    for round, (before, after) in enumerate(zip(found.clients, found.clients[1:], strict=False)):
        drawn = who_is_drawn(federation.ids, 0.4, round)
        moved = [not before.values["2.bias"][at].equal(after.values["2.bias"][at]) for at in range(len(SIZES))]
        assert moved == drawn
        assert found.reports[round].participants == sum(drawn)
    assert 0 < sum(report.participants for report in found.reports) < 6 * len(SIZES)


@pytest.mark.parametrize("method", [FedAvg(lr=0.3, batch_size=4), PPFL(lr=0.3, batch_size=4, start="uniform")])
@pytest.mark.parametrize("sites", [2, 3])
def test_the_clients_of_a_round_do_not_depend_on_the_number_of_sites(method, sites: int) -> None:
    federation, k = make_federation(SIZES, dtype=torch.float64), 2 if method.name == "ppfl" else 1
    ended = [
        run(drawing(method, 0.4), Population(make_net(dtype=torch.float64), k=k), federation, seed=SEED, sites=n)
        for n in (1, sites)
    ]
    assert_same(ended[1].everything(), ended[0].everything(), atol=1e-10, rtol=1e-9)
    counts = [[(r.participants, r.bytes_up, r.bytes_down) for r in one.reports] for one in ended]
    assert counts[0] == counts[1]


def test_a_share_of_one_is_every_client_and_of_none_is_a_round_that_changes_nothing() -> None:
    federation, population = make_federation(SIZES), Population(make_net(), k=1)
    method = FedAvg(lr=0.3, batch_size=4)
    everyone, plain = run(drawing(method, 1.0), population, federation), run(method, population, federation)
    assert_same(everyone.everything(), plain.everything(), atol=0, rtol=0)
    none = run(drawing(method, 0.0), population, federation)
    assert_same(none.server, none.states[0].server, atol=0, rtol=0)
    assert [(report.participants, report.lost) for report in none.reports] == [(0, 0)] * 4


# ---------------------------------------------------------------------- clients drawn by their size

SHARE = 0.5
BY_SIZE = {"participation": SHARE, "sampling": "size"}


def chances(sizes, share: float) -> torch.Tensor:
    return torch.tensor([min(1.0, share * len(sizes) * size / sum(sizes)) for size in sizes], dtype=torch.float64)


def drawn_by_size(federation, sizes, round: int) -> list[int]:
    draws = uniform(SEED, "participants", round, name_keys(federation.ids))
    return (draws < chances(sizes, SHARE)).nonzero()[:, 0].tolist()


def test_sums_over_clients_drawn_by_size_are_those_of_everyone_on_average() -> None:
    """Of 2,000 draws: the mean of sum_i weight_i p_i v_i / share is sum_i p_i v_i, for any v, within four errors."""
    federation, rounds = make_federation(SIZES, dtype=torch.float64), 2000
    site = Site(federation, Population(make_net(dtype=torch.float64), k=1), Loop())
    site.setup(Setup("main", FedAvg(), site.backend.population.initial_network(), SEED, float(sum(SIZES)), 0.0))
    p, v = torch.tensor(SIZES, dtype=torch.float64) / sum(SIZES), torch.arange(1.0, 9.0, dtype=torch.float64)
    found, counts = [], torch.zeros(len(SIZES))
    for round in range(rounds):
        request = Train("main", round, 1, 0, Share(SHARE, len(SIZES)), 0.1, {}, {})
        asked = site._asked(request, site.sessions["main"])
        found.append(float((asked.factor * p[asked.who] * v[asked.who]).sum()) / SHARE)
        counts[asked.who] += 1
    q = chances(SIZES, SHARE)
    assert bool((q == 1).any()) and bool((q < SHARE).any())  # clients that always come, and some that seldom do
    error = torch.tensor(found, dtype=torch.float64).std() / rounds**0.5
    assert abs(sum(found) / rounds - float(p @ v)) < 4 * error
    assert bool(((counts / rounds - q).abs() <= 4 * (q * (1 - q) / rounds).sqrt()).all())


@pytest.mark.parametrize("sizes", [(7, 12, 20, 5, 1, 9, 8, 6), (7, 9, 8, 6, 10, 9, 8, 7)], ids=["one-always", "none"])
def test_fedavg_with_clients_drawn_by_size_is_its_naive_twin(sizes) -> None:
    """Its mean is unweighted, but for clients that are larger than a draw can make up for."""
    federation, net = make_federation(sizes, dtype=torch.float64), make_net(dtype=torch.float64)
    method = FedAvg(lr=0.3, batch_size=4, **BY_SIZE)
    found = run(method, Population(net, k=1), federation, rounds=5, seed=SEED)
    q, p, model = chances(sizes, SHARE), naive.weights_of(federation), copy.deepcopy(net)
    for t in range(5):
        who = drawn_by_size(federation, sizes, t)
        assert found.reports[t].participants == len(who)
        ends = [
            naive.train_network(copy.deepcopy(model), federation, i, method, SEED, t, method.step_size(t, 5))
            for i in who
        ]
        model = naive.average(ends, p[who] / q[who]) if who else model
    if bool((q < 1).all()):
        torch.testing.assert_close(p / q, (p / q)[:1].expand(len(sizes)))  # unweighted
    for name, value in model.named_parameters():  # p_i are rounded to single precision
        torch.testing.assert_close(found.server.shared[name], value.detach(), atol=1e-7, rtol=1e-6)


@pytest.mark.parametrize(
    "method",
    [
        FedAvg(lr=0.3, batch_size=4, **BY_SIZE),
        PPFL(lr=0.3, batch_size=4, **BY_SIZE),
        CFL(lr=0.3, batch_size=4, **BY_SIZE),
    ],
    ids=["fedavg", "ppfl", "cfl"],
)
@pytest.mark.parametrize(("engine", "sites", "kind"), [("stacked", 1, InProcess), ("loop", 3, BytesTransport)])
def test_clients_drawn_by_size_are_the_same_everywhere(method, engine: str, sites: int, kind) -> None:
    federation, k = make_federation(SIZES, dtype=torch.float64), 1 if method.name == "fedavg" else 2
    runs = [
        run(method, Population(make_net(dtype=torch.float64), k=k), federation, rounds=5, seed=SEED, **how)
        for how in ({}, {"engine": engine, "sites": sites, "kind": kind})
    ]
    assert_same(runs[1].everything(), runs[0].everything(), atol=1e-10, rtol=1e-9)
    counts = [[report.participants for report in one.reports] for one in runs]
    drawn = [len(drawn_by_size(federation, SIZES, t)) for t in range(5)]
    if method.name == "ppfl":  # its survey asks everyone
        drawn[0] = len(SIZES)
    if method.name != "cfl":  # a cut asks everyone too
        assert counts[0] == drawn
    assert counts[0] == counts[1]


def test_clients_of_equal_sizes_are_drawn_as_by_a_share() -> None:
    federation = make_federation((6,) * 8, dtype=torch.float64)
    plain = FedAvg(lr=0.3, batch_size=4)
    by_size, alike = (
        run(method, Population(make_net(dtype=torch.float64), k=1), federation, rounds=6, seed=SEED)
        for method in (FedAvg(lr=0.3, batch_size=4, **BY_SIZE), drawing(plain, SHARE))
    )
    assert_same(by_size.everything(), alike.everything(), atol=1e-12, rtol=1e-12)
    assert [r.participants for r in by_size.reports] == [r.participants for r in alike.reports]
    everyone = FedAvg(lr=0.3, batch_size=4, sampling="size")
    all_of_them, usual = (
        run(method, Population(make_net(dtype=torch.float64), k=1), federation, rounds=3)
        for method in (everyone, plain)
    )
    assert_same(all_of_them.everything(), usual.everything(), atol=0, rtol=0)


# ---------------------------------------------------------------------- rounds end


class Patience(InProcess):
    """Fails after more requests than a run can need."""

    asked = 0

    def ask(self, requests):
        self.asked += 1
        assert self.asked < 200, "the server asks again and again"
        return super().ask(requests)


@pytest.mark.parametrize(
    "method",
    [
        PPFL(lr=0.3, batch_size=4),
        PPFL(lr=0.3, batch_size=4, share_memberships=False),
    ],
)
def test_a_start_for_which_too_few_clients_come_back_waits_for_the_next_round(method) -> None:
    """Four models want four clients; in the first round three of six come back, later there are more."""
    federation, population = make_federation((7, 12, 20, 5, 1, 9)), Population(make_net(), k=4)
    found = run(method, population, federation, dropout=0.4, seed=few_first(federation), rounds=4, kind=Patience)
    counts = [report.participants for report in found.reports]
    assert counts[0] < 4 <= max(counts)
    assert not bool(found.states[1].server.started) and bool(found.server.started)


def few_first(federation) -> int:
    """A seed that loses three of six clients in the first round, and at most two in the second."""

    def lost(seed: int, round: int) -> int:
        return int((uniform(seed, "dropout", round, name_keys(federation.ids)) < 0.4).sum())

    return next(seed for seed in range(100) if lost(seed, 0) == 3 and lost(seed, 1) <= 2)


# ---------------------------------------------------------------------- rosters and sites


def test_rows_of_a_roster_are_found_by_name_and_newcomers_get_the_default() -> None:
    roster, table = Roster(("a", "b", "c")), torch.tensor([[1.0], [2.0], [3.0]])
    assert roster.rows(table, ("c", "a"), default=0).flatten().tolist() == [3, 1]
    assert roster.rows(table, ("x", "b", "y"), default=-1).flatten().tolist() == [-1, 2, -1]
    assert roster.rows(table, None, default=0) is not None and roster.rows(table, None, default=0).equal(table)
    assert roster.positions(("a", "b", "c")) == slice(None) == roster.positions(None)


def part(ids, federation, **settings) -> Site:
    return Site(federation.select(ids), Population(make_net(**settings), k=1), Loop(), name=f"site of {ids[0]}")


def test_a_client_at_two_sites_is_refused_by_its_name() -> None:
    federation = make_federation()
    with pytest.raises(DataError, match="client 'client-1' is at two sites"):
        InProcess(part(("client-0", "client-1"), federation), part(("client-1", "client-2"), federation))


def test_an_order_that_does_not_name_every_client_once_is_refused() -> None:
    federation = make_federation()
    with pytest.raises(DataError, match="4 clients, the order names 3"):
        InProcess(part(federation.ids, federation), order=federation.ids[:3])


def test_sites_whose_data_do_not_fit_together_are_refused_by_name() -> None:
    one, other = make_federation((5, 6)), make_federation((5, 6), dim=3)
    renamed = type(other).from_arrays(
        other.train.x, other.train.y, [f"other-{i}" for i in other.train.client_of().tolist()], test_fraction=0
    )
    sites = (
        Site(one, Population(make_linear(), k=1), Loop(), name="north"),
        Site(renamed, Population(make_linear(dim=3), k=1), Loop(), name="south"),
    )
    transport = InProcess(*sites)
    with pytest.raises(DataError, match=r"site 'south' has sample_shape \[3\] but site 'north' has \[4\]"):
        make_problem(Population(make_linear(), k=1), transport, rounds=1)


def test_an_affinity_of_other_clients_and_rounds_below_one_are_refused() -> None:
    federation, population = make_federation(), Population(make_net(), k=1)
    transport = connect(federation, population)
    with pytest.raises(AffinityError):
        make_problem(population, transport, affinity.uniform(("a", "b", "c", "d")), rounds=1)
    with pytest.raises(SettingError, match="at least one round"):
        make_problem(population, transport, rounds=0)


def test_the_importance_of_clients_is_that_of_all_sites_together() -> None:
    federation = make_federation(SIZES)
    one, three = (
        make_problem(Population(make_net(), k=1), connect(federation, Population(make_net(), k=1), sites=n), rounds=1)
        for n in (1, 3)
    )
    assert one.importance == three.importance == sum(SIZES)
    found = connect(federation, Population(make_net(), k=1), sites=3, kind=BytesTransport)
    assert found.roster.ids == federation.ids
