"""Where memberships start, seen or private: sketches of first gradients, k-means, the survey, and who comes late."""

import itertools
from functools import partial

import numpy as np
import pytest
import torch
from sklearn.cluster import KMeans
from threadpoolctl import threadpool_limits

import ppfl
from kit.local_work import backend_for, local_data, shapes_in
from kit.problems import make_federation, make_net
from kit.training import Recording, assert_same, run
from ppfl.algorithms import ppfl_start as start
from ppfl.algorithms.contract import participants
from ppfl.algorithms.ppfl_start import PrivateStart, Survey, nearest_cells
from ppfl.core import simplex
from ppfl.data import digits_federation
from ppfl.sites import Train

SIZES = (7, 12, 20, 5, 9, 3)
FEDERATION = make_federation(SIZES, dtype=torch.float64)
MANY = make_federation(range(4, 34), dtype=torch.float64)  # 30 clients
NET = make_net(dtype=torch.float64)
ROUNDS = 6
both_ways = pytest.mark.parametrize("share", [True, False], ids=["open", "private"])


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def mixtures(seed, clients=60, k=3, width=30, noise=0.1, sharp=6):
    """Sketches that are mixtures of k corners, most clients near a corner, and the memberships that made them."""
    c = (sharp * drawn(clients, k, seed=seed)).softmax(1)
    return c @ drawn(k, width, seed=seed + 100) + noise * drawn(clients, width, seed=seed + 200), c


def test_a_sketch_keeps_inner_products_on_average_and_distances_to_about_a_tenth():
    rows = drawn(4, 2000)
    found = torch.stack([s @ s.T for s in (start.count_sketch(rows, seed) for seed in range(200))])
    assert bool(((found.mean(0) - rows @ rows.T).abs() < 4.5 * found.std(0) / 200**0.5).all())
    rows = drawn(30, 5000, seed=1)
    ratio = torch.pdist(start.count_sketch(rows, seed=0)) / torch.pdist(rows)
    assert 0.75 < float(ratio.min()) <= float(ratio.max()) < 1.25
    assert abs(float(ratio.mean()) - 1) < 0.03


@pytest.mark.parametrize(("kind", "canonical"), [("autograd", "all"), ("fastest", "2")])
def test_the_sketch_is_of_the_gradient_of_a_clients_whole_loss(kind, canonical):
    population, who = ppfl.Population(NET, k=3, canonical=canonical), [2, 1, 4, 0]
    backend, models = backend_for(FEDERATION, population, kind), population.initial_models(0)
    found, losses = start.gradient_sketch(models, local_data(FEDERATION, who, backend))
    for i, client in enumerate(who):
        own = FEDERATION.train.client(client)
        loss = torch.nn.functional.cross_entropy(NET(own.x), own.y)
        parts = [NET.get_parameter(name) for name in sorted(population.canonical_names)]
        gradient = torch.cat([g.flatten() for g in torch.autograd.grad(loss, parts)])
        torch.testing.assert_close((found[i], losses[i]), (gradient, loss.detach()))


def spread(points, p, centres):
    """What k-means makes small."""
    return float(p @ torch.cdist(points, centres).square().amin(1))


def least_spread(points, p, k):
    """By trying every way to put the points into k groups."""
    ways = torch.tensor(list(itertools.product(range(k), repeat=len(points))))
    members = torch.nn.functional.one_hot(ways, k).double() * p[:, None]  # (W, N, K)
    weight = members.sum(1)
    means = members.transpose(1, 2) @ points / weight.clamp_min(1e-300)[..., None]
    return float(p @ points.square().sum(1)) - float((weight * means.square().sum(-1)).sum(1).max())


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("noise", [0.1, 0.5])
def test_corners_of_few_clients_are_the_best_there_are(seed, noise):
    for k, count in ((2, 9), (3, 6), (3, 8)):
        points, p = mixtures(seed, count, k, k - 1, noise)[0], 0.2 + drawn(count, seed=seed + 300).sigmoid()
        assert spread(points, p, start.find_corners(points, p, k, seed=0)) <= 1.001 * least_spread(points, p, k)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("count", "k", "noise", "worse"), [(40, 4, 0.3, 0.001), (60, 3, 0.1, 0.001), (400, 8, 2.0, 0.015)]
)
def test_corners_of_many_clients_are_as_good_as_those_of_many_more_runs(seed, count, k, noise, worse):
    points, p = mixtures(seed, count, k, k - 1, noise, sharp=3)[0], drawn(count, seed=seed).softmax(0)
    best = KMeans(k, n_init=300, init="random", random_state=0).fit(points.numpy(), sample_weight=p.numpy())
    found = spread(points, p, start.find_corners(points, p, k, seed=0))
    assert found <= (1 + worse) * spread(points, p, torch.from_numpy(best.cluster_centers_))


def test_corners_are_means_of_what_is_nearest_and_come_by_weight_and_by_the_seed_alone():
    points, p = mixtures(0, 300, 5, 4, 0.5)[0], drawn(300).softmax(0)
    corners = start.find_corners(points, p, 5, seed=4)
    torch.manual_seed(2), np.random.seed(2)
    assert start.find_corners(points, p, 5, seed=4).equal(corners)
    cells = torch.cdist(points, corners).argmin(1)
    for k in range(5):
        torch.testing.assert_close(corners[k], p[cells == k] @ points[cells == k] / p[cells == k].sum())
    assert (torch.bincount(cells, weights=p, minlength=5).diff() <= 0).all()
    for k in (1, 2, 5):  # points that are all alike, and as many corners as points
        alike, apart = torch.ones(5, 3, dtype=torch.float64), torch.eye(k, dtype=torch.float64)
        torch.testing.assert_close(start.find_corners(alike, torch.ones(5), k, seed=0), alike[:k])
        torch.testing.assert_close(start.find_corners(apart, torch.ones(k), k, seed=0), apart)


def test_corners_of_groups_of_equal_weight_come_by_their_first_client():
    """By no last bits of sums or distances: two runs would give canonical models other numbers."""
    centres = 5 * torch.eye(4, dtype=torch.float64)
    group = torch.arange(40) % 4
    p = torch.full((40,), 1 / 40, dtype=torch.float64)
    for noise in (0.0, 1e-13, 0.3):
        for seed in range(5):
            points = centres[group] + noise * drawn(40, 4, seed=seed)
            found = start.find_corners(points, p * (1 + 1e-14 * drawn(40, seed=seed)), 4, seed)
            assert torch.cdist(points, found).argmin(1).equal(group)


def test_corners_have_the_same_bits_on_any_number_of_threads():
    (points, _), p, found = mixtures(1, 3000, 4, 3, 2.0), drawn(3000).softmax(0), []
    for threads in (1, 2, 2):
        with threadpool_limits(threads, user_api="openmp"):
            found.append(start.find_corners(points, p, 4, seed=0))
    assert found[0].equal(found[1]) and found[1].equal(found[2])


def from_rows(sketches, weights, k, order=None):
    """Of the clients that the start is found from; the same as for clients that come later with these sketches."""
    order = torch.arange(len(sketches)) if order is None else order
    found, c = start.start_from_sketches(sketches[order], weights[order], tuple(f"c{i}" for i in order), k, 0)
    torch.testing.assert_close(found.memberships(sketches[order]), c, atol=1e-6, rtol=0)
    return simplex.check(c)


def from_sums(sketches, weights, k):
    """The same from sums over clients alone, and how many messages that takes; no step makes the fit worse."""
    found = PrivateStart.from_moments(weights.sum(), weights @ sketches, sketches.T * weights @ sketches, k, seed=0)
    points, messages, last = found.points(sketches), 2, None
    while found.corners is None:
        now = weights @ torch.cdist(points, found.centres).amin(-1).square().T
        assert last is None or len(now) != len(last) or bool((now <= last + 1e-9).all())
        cells = nearest_cells(points, found.centres) * weights[:, None]
        found = found.moved(cells.sum(0), cells.T @ points, cells.T @ points.square().sum(1))
        messages, last = messages + 1, now
    return simplex.check(start.start_memberships(points.double(), found.corners)), messages


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_mixtures_are_found_from_rows_and_from_sums_in_ten_messages_for_few_clients_and_many(seed, noise):
    messages = set()
    for clients in (60, 240):
        sketches, truth = mixtures(seed, clients, noise=noise)
        weights = 0.2 + drawn(clients, seed=seed + 300).sigmoid()
        c, (private, count) = from_rows(sketches, weights, 3), from_sums(sketches, weights, 3)
        torch.testing.assert_close(private[:, simplex.match(c, private)], c, atol=1e-4, rtol=0)
        assert float(simplex.total_variation(c[:, simplex.match(truth, c)], truth).mean()) < 0.15
        messages.add(count)
    assert messages == {10}


def test_corners_of_some_clients_do_for_all_in_any_order(monkeypatch):
    (sketches, _), weights = mixtures(0, clients=3000), drawn(3000).softmax(0)
    turned, found = torch.randperm(3000, generator=torch.Generator().manual_seed(5)), []
    for most in (start.MOST_POINTS, 500):
        monkeypatch.setattr(start, "MOST_POINTS", most)
        found.append(from_rows(sketches, weights, 3))
        torch.testing.assert_close(from_rows(sketches, weights, 3, turned), found[-1][turned])
    of_all, of_some = found
    assert float(simplex.total_variation(of_some[:, simplex.match(of_all, of_some)], of_all).mean()) < 0.05


@pytest.fixture(scope="module", autouse=True)
def _three_per_model():
    """A survey asks three clients per canonical model, so that not all of thirty are asked."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(start, "SURVEYED", 3)
        yield


def trained(k, federation=FEDERATION, net=NET, share=True, method=None, **settings):
    method = ppfl.PPFL(**{"lr": 0.1, "share_memberships": share, **(method or {})})
    settings = {"engine": "stacked", "kind": Recording, "rounds": ROUNDS, **settings}
    return run(method, ppfl.Population(net, k=k), federation, **settings)


trained_on_many = partial(trained, federation=MANY, method={"participation": 0.2})


def losing(rule):
    """A transport that loses all clients of the exchanges that a rule names."""

    class Losing(Recording):
        def deliver(self, site, requests):
            lost = [isinstance(one, Train) and rule(one) for one in requests]
            left = [one._replace(who=()) if gone else one for one, gone in zip(requests, lost, strict=True)]
            return super().deliver(site, left)

    return Losing


def surveys(found):
    """Of each round, if it begins with a survey."""
    return [isinstance(found.transport.exchanges(round)[0][0].task, Survey) for round in range(ROUNDS)]


@both_ways
@pytest.mark.parametrize(("k", "begins", "asks"), [(2, "gradients", 1), (2, "uniform", 0), (1, "gradients", 0)])
def test_a_survey_of_few_clients_asks_everyone_once_and_only_where_there_is_a_choice(k, begins, asks, share):
    found = trained(k, share=share, method={"participation": 0.5, "start": begins})
    assert surveys(found) == [bool(asks), *5 * [False]]
    assert found.reports[0].participants == (6 if asks else 3)
    assert all((request.who is None) == bool(asks) for request, _ in found.transport.exchanges(0))


@both_ways
def test_the_survey_is_repeated_until_as_many_answer_as_there_are_models(share):
    """A survey of too few is forgotten. Who is lost in the last one starts evenly, the others as if they were all."""
    found = trained(3, share=share, dropout=0.6)
    first = [report.participants >= 3 for report in found.reports].index(True)
    assert 0 < first < ROUNDS - 1
    assert surveys(found) == [round <= first for round in range(ROUNDS)]
    for at in range(first + 1):
        assert_same(found.states[at].server, found.states[0].server, atol=0, rtol=0)
        assert_same(found.models(at), found.models(0), atol=0, rtol=0)
    assert len(found.memberships.unique(dim=0)) >= 3
    if share:
        ((_, reply),), after = found.transport.exchanges(first), found.models(first + 1).memberships
        back = found.problem.roster.positions(reply.rows.ids).tolist()
        lost = [i for i in range(6) if i not in back]
        assert lost and after[lost].equal(found.models(0).memberships[lost])
        alone = trained(3, FEDERATION.select(reply.rows.ids))
        torch.testing.assert_close(after[back], alone.models(1).memberships)


def test_a_private_survey_that_all_clients_leave_in_the_middle_begins_again():
    kinds = Recording, losing(lambda request: request.exchange == 3)
    expected, found = (trained(3, share=False, kind=kind) for kind in kinds)
    assert surveys(found)[:3] == [True, True, False]
    assert_same(found.states[1].server, found.states[0].server, atol=0, rtol=0)
    assert_same(found.models(2).memberships, expected.models(1).memberships, atol=1e-9, rtol=0)


@both_ways
def test_a_survey_asks_its_rounds_clients_and_every_other_one_places_itself_when_it_first_comes(share):
    found, model = trained_on_many(2, share=share), 8 * sum(p.numel() for p in NET.parameters())
    seen = set()
    for round, report in enumerate(found.reports):
        in_round = set(participants(found.problem, 0.2, round))
        requests = [request for request, _ in found.transport.exchanges(round)]
        asked = [(set(request.who), isinstance(request.task, Survey)) for request in requests]
        if round == 0:
            assert len(in_round) == 3 * 2 and asked == [(in_round, True)] * len(asked)
            # one network goes to each client whatever K is; a sketch comes back, which here is the gradient, and a loss
            assert not share or (report.bytes_down, report.bytes_up) == (6 * model, 6 * (model + 8))
        else:
            assert asked == [(in_round, False)] and report.participants == len(in_round)
        seen |= in_round
        moved = (found.models(round + 1).memberships != 1 / 2).any(1)
        assert {found.problem.roster.ids[i] for i in moved.nonzero().flatten()} == seen
    (request, _), *_ = trained_on_many(4, share=share, rounds=2).transport.exchanges(0)
    assert len(request.who) == 3 * 4 > len(participants(found.problem, 0.2, 0))  # more models need more clients


@both_ways
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_whenever_a_client_comes_its_start_is_the_nearest_mixture_of_the_surveys_corners(share, dropout):
    """By the gradient of its whole loss at the network that all models start from, also if it was lost before."""
    method = {"participation": 0.3, "membership_steps": 0, "warmup": 0, "lr": 1.0}
    found = trained(3, MANY, share=share, method=method, dropout=dropout)
    mean, directions, corners = found.server.placement.start
    came = (found.memberships != 1 / 3).any(1)
    assert 10 < int(came.sum()) < 30 and len(found.memberships[came].unique(dim=0)) > 5
    for i in range(30):
        own = MANY.train.client(i)
        loss = torch.nn.functional.cross_entropy(NET(own.x), own.y)
        parts = [p for _, p in sorted(NET.named_parameters())]
        sketch = torch.cat([g.flatten() for g in torch.autograd.grad(loss, parts)])
        expected = start.start_memberships(((sketch - mean) @ directions)[None], corners)[0]
        torch.testing.assert_close(found.memberships[i], expected if came[i] else torch.full_like(expected, 1 / 3))


def test_groups_are_found_whichever_way_clients_are_asked_and_whenever_they_come():
    federation, net, found = digits_federation(), make_net(64, 16, 10), {}
    for share, p in itertools.product((True, False), (1.0, 0.3)):
        method = {"membership_steps": 0, "warmup": 0, "participation": p}
        found[share, p] = trained(4, federation, net, share, method, rounds=9).memberships
    expected, private = found[True, 1.0], found[False, 1.0]
    torch.testing.assert_close(private[:, simplex.match(expected, private)], expected, atol=1e-4, rtol=0)
    truth, group = federation.truth.memberships.argmax(1), expected.argmax(1)
    assert (group[:, None] == group).equal(truth[:, None] == truth)
    for late in (found[True, 0.3], found[False, 0.3]):
        came = (late != 1 / 4).any(1)
        assert 25 < int(came.sum()) < 40  # the rest has never come
        assert late[:, simplex.match(expected[came], late[came])].argmax(1)[came].equal(group[came])


@both_ways
def test_a_run_with_late_clients_is_the_same_resumed_and_on_every_engine(share):
    again = partial(trained_on_many, 2, share=share, dropout=0.5, seed=3)
    whole = again()
    for until in (1, 3):
        assert_same(again(resume=again(until=until)).everything(), whole.everything(), atol=0, rtol=0)
    assert_same(again(engine="loop").everything(), whole.everything(), atol=1e-10, rtol=1e-9)


def seen_by_the_server(clients, **method):
    """Names and shapes of all that the server sends, receives and holds; no client uploads a row."""
    federation = make_federation(SIZES * (clients // 6), dtype=torch.float64)
    found = trained(3, federation, rounds=2, share=False, method=method)
    assert found.method.shows == ()
    seen = [shape for state in found.states for shape in shapes_in(state.server)]
    for request, reply in found.transport.exchanges():
        assert request.own == {} and reply.rows.values == {} and not reply.rows.ids
        seen += shapes_in((request.shared, reply.totals, reply.metrics))
    return seen


def test_nothing_that_the_server_has_grows_with_the_number_of_clients():
    for settings in ({}, {"start": "uniform"}):
        assert seen_by_the_server(6, **settings) == seen_by_the_server(24, **settings)
    few, many = (dict(seen_by_the_server(clients, participation=0.2)) for clients in (60, 120))
    assert few == many  # with clients that come late
    assert any("centres" in name for name, _ in seen_by_the_server(6))  # it looks between messages
