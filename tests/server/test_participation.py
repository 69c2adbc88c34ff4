"""Who takes part: rounds of some clients, transports that find every client's site, sites that fit together."""

import pytest
import torch

from kit.networks import make_linear, make_net
from kit.problems import make_federation
from kit.refusals import AffinityError, DataError, SettingError, assert_refused
from kit.training import assert_same, run
from ppfl.algorithms import PPFL, FedAvg, Local
from ppfl.core import Population, affinity
from ppfl.server import InProcess, make_problem
from ppfl.sites import Loop, Site

SIZES = (7, 12, 20, 5, 1, 9, 8, 6)
SMALL = {"lr": 0.3, "batch_size": 4}
SAME_BITS = {"atol": 0, "rtol": 0}


def population(k: int = 1) -> Population:
    return Population(make_net(dtype=torch.float64), k=k)


def asking(method, who):
    """The same method, whose rounds ask the clients that `who` makes of the roster's ids."""

    class Asking(type(method)):
        def plan(self, problem, server, round):
            return super().plan(problem, server, round)._replace(who=who(problem.roster.ids))

    return Asking(**method.model_dump())


@pytest.mark.parametrize("method", [Local(**SMALL), FedAvg(**SMALL), PPFL(**SMALL, start="uniform")])
def test_clients_are_drawn_by_seed_round_and_id_however_many_sites_there_are(method):
    federation, k = make_federation(SIZES, dtype=torch.float64), 2 if method.name == "ppfl" else 1
    some = method.model_copy(update={"participation": 0.4})
    one, *others = (run(some, population(k), federation, seed=1, sites=n) for n in (1, 2, 3))
    assert [report.participants for report in one.reports] == [3] * 4
    assert {(n.problem.importance, n.problem.roster.ids) for n in (one, *others)} == {(sum(SIZES), federation.ids)}
    for other in others:
        assert_same(other.everything(), one.everything(), atol=1e-10, rtol=1e-9)
        counts = [[(r.participants, r.bytes_up, r.bytes_down) for r in found.reports] for found in (one, other)]
        assert counts[0] == counts[1]


def test_naming_every_client_is_asking_everyone_and_a_round_of_nobody_changes_nothing():
    method, federation = FedAvg(**SMALL), make_federation(SIZES, dtype=torch.float64)
    whole, named, none = (
        run(one, population(), federation) for one in (method, asking(method, tuple), asking(method, lambda _: ()))
    )
    assert_same(named.everything(), whole.everything(), **SAME_BITS)
    assert_same(none.server, none.states[0].server, **SAME_BITS)
    assert [(report.participants, report.lost) for report in none.reports] == [(0, 0)] * 4


def test_sites_that_do_not_fit_together_are_refused():
    federation, other, linear = make_federation(), make_federation((5, 6), dim=3), Population(make_linear(), k=1)
    a, b, c, d = federation.ids
    other = type(other).from_arrays(other.train.x, other.train.y, [d] * 11, test_fraction=0)
    south = Site(other, Population(make_linear(dim=3), k=1), Loop(), name="south")

    def north(*ids):
        return Site(federation.select(ids), linear, Loop(), name="north")

    def problem(*sites, likeness=None, rounds=1):
        return make_problem(linear, InProcess(*sites), likeness, rounds=rounds)

    assert_refused(lambda: InProcess(north(a, b), north(b, c)), DataError, b, "two sites")
    assert_refused(lambda: InProcess(north(a, b), order=(a,)), DataError, "2 clients", "the order names 1")
    assert_refused(lambda: problem(north(a, b), south), DataError, "'south'", "'north'", "[3]", "[4]")
    assert_refused(lambda: problem(north(a), likeness=affinity.uniform(("x",))), AffinityError, "x")
    assert_refused(lambda: problem(north(a), rounds=0), SettingError, "at least one round")
