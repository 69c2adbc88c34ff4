"""Who takes part: sites that draw their own clients, transports that find every client's site, rounds that end."""

import pytest
import torch

from ppfl.algorithms import PPFL, FedAvg, Local, Share
from ppfl.algorithms.contract import Roster
from ppfl.core import affinity
from ppfl.core.draws import name_keys, uniform
from ppfl.core.errors import AffinityError, DataError, SettingError
from ppfl.core.population import Population
from ppfl.server import InProcess, make_problem
from ppfl.sites import Loop, Site
from support import make_federation, make_linear, make_net
from training import BytesTransport, assert_same, connect, run

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
