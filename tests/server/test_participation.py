"""Who takes part: sites that draw their own clients, transports that find every client's site, rounds that end."""

import copy

import pytest
import torch

from kit.networks import make_linear, make_net
from kit.problems import make_federation
from kit.refusals import AffinityError, DataError, SettingError, assert_refused
from kit.training import assert_same, luck, run
from kit.twins import plain as naive
from ppfl.algorithms import PPFL, FedAvg, Local, Share, Sum, Upload, Work
from ppfl.core import Population, affinity
from ppfl.server import InProcess, make_problem
from ppfl.sites import Loop, Setup, Site, Stacked, Train

SIZES = (7, 12, 20, 5, 1, 9, 8, 6)
SEED, SHARE, SMALL = 1, 0.5, {"lr": 0.3, "batch_size": 4}
BY_SIZE = {"participation": SHARE, "sampling": "size"}
SAME_BITS = {"atol": 0, "rtol": 0}


def population(k: int = 1) -> Population:
    return Population(make_net(dtype=torch.float64), k=k)


def federation_of(sizes=SIZES):
    return make_federation(sizes, dtype=torch.float64)


def drawing(method, fraction: float):
    """The same method, whose sites draw the clients of a round themselves."""

    class Drawing(type(method)):
        def plan(self, problem, server, round):
            return super().plan(problem, server, round)._replace(who=Share(fraction))

    return Drawing(**method.model_dump())


@pytest.mark.parametrize("method", [Local(**SMALL), FedAvg(**SMALL), PPFL(**SMALL, start="uniform")])
def test_sites_draw_their_own_clients_by_seed_round_and_id_however_many_sites_there_are(method):
    federation, k = federation_of(), 2 if method.name == "ppfl" else 1
    one, *others = (run(drawing(method, 0.4), population(k), federation, seed=SEED, sites=n) for n in (1, 2, 3))
    drawn = [luck(SEED, "participants", federation.ids, round) < 0.4 for round in range(4)]
    assert [report.participants for report in one.reports] == [int(who.sum()) for who in drawn]
    assert 0 < sum(report.participants for report in one.reports) < 4 * len(SIZES)
    assert {(n.problem.importance, n.problem.roster.ids) for n in (one, *others)} == {(sum(SIZES), federation.ids)}
    if method.name == "local":
        for before, after, who in zip(one.clients, one.clients[1:], drawn, strict=False):
            assert (before.values["2.bias"] != after.values["2.bias"]).any(1).equal(who)
    for other in others:
        assert_same(other.everything(), one.everything(), atol=1e-10, rtol=1e-9)
        counts = [[(r.participants, r.bytes_up, r.bytes_down) for r in found.reports] for found in (one, other)]
        assert counts[0] == counts[1]


def test_a_share_of_one_is_every_client_and_of_none_is_a_round_that_changes_nothing():
    method, federation = FedAvg(**SMALL), federation_of()
    whole, *everyone, none = (
        run(one, population(), federation)
        for one in (method, drawing(method, 1.0), FedAvg(**SMALL, sampling="size"), drawing(method, 0.0))
    )
    for one in everyone:
        assert_same(one.everything(), whole.everything(), **SAME_BITS)
    assert_same(none.server, none.states[0].server, **SAME_BITS)
    assert [(report.participants, report.lost) for report in none.reports] == [(0, 0)] * 4


def chances(sizes) -> torch.Tensor:
    return torch.tensor([min(1.0, SHARE * len(sizes) * size / sum(sizes)) for size in sizes], dtype=torch.float64)


def test_sums_over_clients_drawn_by_size_are_those_of_everyone_on_average():
    """Of 1,000 draws: what each client adds, sum_i weight_i p_i / share, is p_i on average, within 4.5 errors."""

    class Named(FedAvg):
        def work(self, backend, task, shared, own, client, data):
            return Work({}, Upload({"who": Sum(None, (data.keys[:, None] == site.keys).double())}))

    site = Site(federation_of(), population(), Stacked())
    site.answer(Setup("main", Named(), site.backend.population.initial_network(), SEED, float(sum(SIZES)), 0.0))
    requests = (Train("main", t, t + 1, t, Share(SHARE, len(SIZES)), 0.1, {}, {}, False) for t in range(1000))
    replies = [site.answer(request) for request in requests]
    found = torch.stack([reply.totals["who"].value.flatten() / SHARE for reply in replies if reply.totals])
    assert len(found) == 1000
    p, q = torch.tensor(SIZES, dtype=torch.float64) / sum(SIZES), chances(SIZES)
    assert bool((q == 1).any()) and bool((q < SHARE).any())  # clients that always come, and some that seldom do
    assert bool(((found.mean(0) - p).abs() <= 4.5 * found.std(0) / 1000**0.5 + 1e-6).all())
    came = (found > 0).double().mean(0)
    assert bool(((came - q).abs() <= 4.5 * (q * (1 - q) / 1000).sqrt()).all())


@pytest.mark.parametrize("sizes", [SIZES, (7, 9, 8, 6, 10, 9, 8, 7)], ids=["one always", "no one always"])
def test_fedavg_with_clients_drawn_by_size_is_its_naive_twin(sizes):
    """Its mean is unweighted, but for clients that are larger than a draw can make up for."""
    federation, method, net = federation_of(sizes), FedAvg(**SMALL, **BY_SIZE), make_net(dtype=torch.float64)
    found = run(method, Population(net, k=1), federation, rounds=5, seed=SEED)
    q, p, model = chances(sizes), naive.weights_of(federation), copy.deepcopy(net)
    for t in range(5):
        who = (luck(SEED, "participants", federation.ids, t) < q).nonzero()[:, 0].tolist()
        assert found.reports[t].participants == len(who)
        setting = method, SEED, t, method.step_size(t, 5)
        ends = [naive.train_network(copy.deepcopy(model), federation, i, *setting) for i in who]
        model = naive.average(ends, p[who] / q[who]) if who else model
    if bool((q < 1).all()):
        torch.testing.assert_close(p / q, (p / q)[:1].expand(len(sizes)))  # unweighted
    for name, value in model.named_parameters():  # p_i are rounded to single precision
        torch.testing.assert_close(found.server.shared[name], value.detach(), atol=1e-7, rtol=1e-6)


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
    assert_refused(lambda: problem(north(a, b), south), DataError, "'south'", "'north'", "[3]", "[4]")
    assert_refused(lambda: problem(north(a), likeness=affinity.uniform(("x",))), AffinityError, "x")
    assert_refused(lambda: problem(north(a), rounds=0), SettingError, "at least one round")
