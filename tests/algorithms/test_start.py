"""Where memberships start: sketches of first gradients, k-means, the survey that asks clients, and those who come late,
with memberships that the server sees and with private ones."""

import itertools
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.cluster import KMeans

import ppfl
from kit.local_work import backend_for, local_data, shapes_in
from kit.problems import make_federation, make_net
from kit.training import Recording, assert_same, run
from ppfl.algorithms.contract import EVERYONE, participants
from ppfl.algorithms.local import kmeans as kmeans_module
from ppfl.algorithms.local import start, survey
from ppfl.algorithms.local.kmeans import kmeans
from ppfl.algorithms.local.start import PrivateStart, nearest_cells
from ppfl.algorithms.local.survey import Survey
from ppfl.core import simplex
from ppfl.data import digits_federation
from ppfl.sites import Train

SIZES = (7, 12, 20, 5, 9, 3)
FEDERATION = make_federation(SIZES, dtype=torch.float64)
MANY = make_federation(range(4, 34), dtype=torch.float64)  # 30 clients
NET = make_net(dtype=torch.float64)
ROUNDS = 6
both_ways = pytest.mark.parametrize("share", [True, False], ids=["open", "private"])


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def shares(count: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).softmax(0)


def names(count: int) -> tuple[str, ...]:
    return tuple(f"c{i}" for i in range(count))


# ---------------------------------------------------------------------- sketches


def test_a_sketch_keeps_inner_products_on_average_and_distances_to_about_a_tenth() -> None:
    rows = drawn(4, 2000)
    found = torch.stack([s @ s.T for s in (start.count_sketch(rows, seed) for seed in range(200))])
    error = found.std(0) / 200**0.5
    assert bool(((found.mean(0) - rows @ rows.T).abs() < 4.5 * error).all())
    rows = drawn(30, 5000, seed=1)
    ratio = torch.pdist(start.count_sketch(rows, seed=0)) / torch.pdist(rows)
    assert 0.75 < float(ratio.min()) <= float(ratio.max()) < 1.25
    assert abs(float(ratio.mean()) - 1) < 0.03


@pytest.mark.parametrize(("kind", "canonical"), [("autograd", "all"), ("autograd", "2"), ("fastest", "2")])
def test_the_sketch_is_of_the_gradient_of_a_clients_whole_loss(kind: str, canonical: str) -> None:
    population, who = ppfl.Population(NET, k=3, canonical=canonical), [2, 1, 4, 0]
    backend, models = backend_for(FEDERATION, population, kind), population.initial_models(0)
    found, losses = start.gradient_sketch(backend, models, local_data(FEDERATION, who), seed=0)
    for i, client in enumerate(who):
        own = FEDERATION.train.client(client)
        loss = torch.nn.functional.cross_entropy(NET(own.x), own.y)
        named = {name: p for name, p in NET.named_parameters() if name in population.canonical_names}
        gradients = torch.autograd.grad(loss, [named[name] for name in sorted(named)])
        torch.testing.assert_close(found[i], torch.cat([g.flatten() for g in gradients]))
        torch.testing.assert_close(losses[i], loss.detach())


@given(st.integers(0, 10_000), st.integers(1, 12), st.integers(1, 6))
def test_points_are_the_weighted_principal_components_in_blocks_and_from_sums(seed, block, count) -> None:
    rows, p = drawn(12, 7, seed=seed) * torch.arange(1, 8), shares(12, seed)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(seed))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(start, "MOST_POINTS", block)
        _, _, points = start.principal_points(rows, p[order], order, count)
    centred = rows[order] - p[order] @ rows[order]
    spread = torch.linalg.svdvals(p[order].sqrt()[:, None] * centred)
    moment = points.T @ (p[order, None] * points)
    torch.testing.assert_close(moment, torch.diag(spread[:count].square().flip(0)), atol=1e-9, rtol=0)
    torch.testing.assert_close(p[order] @ points, torch.zeros(count, dtype=torch.float64), atol=1e-9, rtol=0)
    sums = 3 * p.sum(), 3 * p @ rows, 3 * rows.T * p @ rows  # weights need not sum to 1
    private = PrivateStart.from_moments(*sums, k=count + 1, seed=0).points(rows)
    torch.testing.assert_close(private[order].abs(), points.abs(), atol=1e-8, rtol=0)  # a direction has no sign


# ---------------------------------------------------------------------- k-means


def mixtures(seed: int, clients: int = 60, k: int = 3, width: int = 30, noise: float = 0.1, sharp: float = 6):
    """Sketches that are mixtures of k corners, most clients near a corner, and the memberships that made them."""
    g = torch.Generator().manual_seed(seed)
    c = (sharp * torch.randn(clients, k, generator=g, dtype=torch.float64)).softmax(1)
    corners = torch.randn(k, width, generator=g, dtype=torch.float64)
    return c @ corners + noise * torch.randn(clients, width, generator=g, dtype=torch.float64), c


def spread(points: torch.Tensor, p: torch.Tensor, centres: torch.Tensor) -> float:
    return float(p @ torch.cdist(points, centres).square().amin(1))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("count", "k", "noise"), [(60, 3, 0.1), (400, 8, 0.2), (400, 8, 2.0), (2000, 16, 0.3)])
def test_the_spread_is_that_of_scikit_learn_to_one_percent(seed, count, k, noise, monkeypatch) -> None:
    (points, _), p = mixtures(seed, count, k, k - 1, noise, sharp=3), shares(count, seed)
    expected = KMeans(k, n_init=20, random_state=0).fit(points.numpy(), sample_weight=p.numpy()).cluster_centers_
    centres, _ = kmeans(points, p, k, seed=0)
    assert spread(points, p, centres) <= 1.01 * spread(points, p, torch.from_numpy(expected))
    monkeypatch.setattr(kmeans_module, "FEW_POINTS", 300)  # a part of the points is enough to start with
    assert k > 8 or spread(points, p, kmeans(points, p, k, seed=0)[0]) <= 1.01 * spread(points, p, centres)


def test_centres_are_means_of_what_is_nearest_and_come_by_weight_and_by_the_seed_alone() -> None:
    points, p = mixtures(0, 300, 5, 4, 0.5)[0], shares(300)
    torch.manual_seed(1)
    before, (centres, cells) = torch.get_rng_state(), kmeans(points, p, 5, seed=4)
    assert before.equal(torch.get_rng_state())
    torch.manual_seed(2)
    assert kmeans(points, p, 5, seed=4)[0].equal(centres)
    assert float((torch.cdist(points, centres).argmin(1) == cells).double().mean()) > 0.98  # one step more, at most
    for k in range(5):
        torch.testing.assert_close(centres[k], p[cells == k] @ points[cells == k] / p[cells == k].sum())
    assert (torch.bincount(cells, weights=p, minlength=5).diff() <= 0).all()


@pytest.mark.parametrize("k", [1, 2, 5])
def test_points_that_are_all_alike_and_as_many_centres_as_points(k: int) -> None:
    alike, apart = torch.ones(5, 3, dtype=torch.float64), torch.eye(k, dtype=torch.float64)
    torch.testing.assert_close(kmeans(alike, torch.ones(5), k, seed=0)[0], alike[:k])
    centres, cells = kmeans(apart, torch.ones(k), k, seed=0)
    torch.testing.assert_close(centres[cells], apart)


# ---------------------------------------------------------------------- memberships from sketches


def from_rows(sketches, weights, ids, k: int, seed: int = 0) -> torch.Tensor:
    """Of the clients that the start is found from; the same as for clients that come later with these sketches."""
    found, c = start.start_from_sketches(sketches, weights, ids, k, seed)
    torch.testing.assert_close(found.memberships(sketches), c, atol=1e-6, rtol=0)
    return simplex.check(c)


def from_sums(sketches, weights, k: int) -> tuple[torch.Tensor, int]:
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
def test_mixtures_are_found_near_where_they_are_from_rows_and_from_sums(seed: int, noise: float) -> None:
    sketches, truth = mixtures(seed, noise=noise)
    weights = torch.full((60,), 1 / 60).double()
    c = from_rows(sketches, weights, names(60), 3)
    private, _ = from_sums(sketches, weights, 3)
    torch.testing.assert_close(private[:, simplex.match(c, private)], c, atol=1e-4, rtol=0)
    c = c[:, simplex.match(truth, c)]
    assert float(simplex.total_variation(c, truth).mean()) < 0.15
    assert float((c.argmax(1) == truth.argmax(1)).double().mean()) > 0.9


@pytest.mark.parametrize(("seed", "k"), [(0, 2), (1, 3), (2, 5), (3, 5)])
def test_on_separated_groups_both_ways_agree_in_as_many_messages_for_few_clients_and_many(seed: int, k: int) -> None:
    """Groups of unequal sizes, with clients of unequal weight."""
    messages = set()
    for clients in (80, 320):
        g = torch.Generator().manual_seed(seed)
        group = torch.cat([torch.arange(k), torch.randint(k, (clients,), generator=g)])
        sketches = 3 * drawn(k, 40, seed=seed)[group] + 0.3 * drawn(len(group), 40, seed=seed + 10)
        weights = 0.2 + torch.rand(len(group), generator=g, dtype=torch.float64)
        of_rows = from_rows(sketches, weights, names(len(group)), k)
        of_sums, count = from_sums(sketches, weights, k)
        torch.testing.assert_close(of_sums[:, simplex.match(of_rows, of_sums)], of_rows, atol=1e-4, rtol=0)
        assert (of_sums.argmax(1)[:, None] == of_sums.argmax(1)).equal(group[:, None] == group)
        messages.add(count)
    assert len(messages) == 1


@pytest.mark.parametrize("most", [20_000, 25])
def test_the_order_of_clients_does_not_matter(most: int, monkeypatch) -> None:
    monkeypatch.setattr(start, "MOST_POINTS", most)
    (sketches, _), weights, ids = mixtures(3, noise=0.2), shares(60, 4), names(60)
    turned = torch.randperm(60, generator=torch.Generator().manual_seed(5))
    other = from_rows(sketches[turned], weights[turned], tuple(ids[i] for i in turned), 3)
    torch.testing.assert_close(other, from_rows(sketches, weights, ids, 3)[turned])


def test_corners_of_some_clients_do_for_all(monkeypatch) -> None:
    (sketches, truth), weights = mixtures(0, clients=3000), torch.full((3000,), 1 / 3000)
    of_all = from_rows(sketches, weights, names(3000), 3)
    monkeypatch.setattr(start, "MOST_POINTS", 500)
    for seed in range(3):
        of_some = from_rows(sketches, weights, names(3000), 3, seed)
        assert float(simplex.total_variation(of_some[:, simplex.match(of_all, of_some)], of_all).mean()) < 0.05
        assert float(simplex.total_variation(of_some[:, simplex.match(truth, of_some)], truth).mean()) < 0.15


# ---------------------------------------------------------------------- the survey


@pytest.fixture(scope="module", autouse=True)
def _three_per_model():
    """A survey asks three clients per canonical model, so that not all of thirty are asked."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(survey, "SURVEYED", 3)
        survey._arrivals.cache_clear()
        yield
    survey._arrivals.cache_clear()


def trained(method: ppfl.PPFL, k: int, federation=FEDERATION, net=NET, rounds: int = ROUNDS, **settings):
    settings = {"engine": "stacked", "kind": Recording, **settings}
    return run(method, ppfl.Population(net, k=k), federation, rounds=rounds, **settings)


def is_survey(found, round: int) -> bool:
    return isinstance(found.transport.exchanges(round)[0][0].task, Survey)


@both_ways
@pytest.mark.parametrize(
    ("k", "begins", "surveys"), [(2, "gradients", True), (2, "uniform", False), (1, "gradients", False)]
)
def test_a_survey_of_few_clients_asks_everyone_once_and_only_where_there_is_a_choice(k, begins, surveys, share) -> None:
    found = trained(ppfl.PPFL(lr=0.1, participation=0.5, start=begins, share_memberships=share), k)
    assert [is_survey(found, round) for round in range(ROUNDS)] == [surveys, *5 * [False]]
    assert found.reports[0].participants == (6 if surveys else 3)
    assert all(request.who == EVERYONE for request, _ in found.transport.exchanges(0)) == surveys
    assert (len(found.transport.exchanges(0)) == 1) == (share or not surveys)


def test_a_client_lost_in_the_survey_starts_evenly_and_the_others_as_if_they_were_all() -> None:
    method, k = ppfl.PPFL(lr=0.1), 3
    found = trained(method, k, dropout=0.4)
    ((_, reply),) = found.transport.exchanges(0)
    back = found.problem.roster.positions(reply.rows.ids)
    lost = [i for i in range(6) if i not in back.tolist()]
    assert len(back) >= k and lost
    before, after = (found.models(at).memberships for at in (0, 1))
    assert after[lost].equal(before[lost])
    alone = trained(method, k, FEDERATION.select(reply.rows.ids))
    torch.testing.assert_close(after[back], alone.models(1).memberships)


@both_ways
def test_the_survey_is_repeated_until_as_many_answer_as_there_are_models(share: bool) -> None:
    """Else nothing would ever tell the models apart. What a survey of too few has found is forgotten."""
    k = 3
    found = trained(ppfl.PPFL(lr=0.1, share_memberships=share), k, dropout=0.6)
    first = [report.participants >= k for report in found.reports].index(True)
    assert 0 < first < ROUNDS - 1
    assert [is_survey(found, round) for round in range(ROUNDS)] == [round <= first for round in range(ROUNDS)]
    for at in range(first + 1):
        assert at == first or len(found.transport.exchanges(at)) == 1
        assert_same(found.states[at].server, found.states[0].server, atol=0, rtol=0)
        assert_same(found.models(at), found.models(0), atol=0, rtol=0)
    assert len(found.memberships.unique(dim=0)) >= k


class Losing(Recording):
    """Loses all clients of the exchanges that a rule names."""

    def __init__(self, rule, *sites, order=None):
        self.rule = rule
        super().__init__(*sites, order=order)

    def deliver(self, site, requests):
        lost = [isinstance(request, Train) and self.rule(request) for request in requests]
        left = [request._replace(who=()) if gone else request for request, gone in zip(requests, lost, strict=True)]
        return super().deliver(site, left)


def test_a_private_survey_that_all_clients_leave_in_the_middle_begins_again() -> None:
    """The round is as if it had never been, and the next one starts from the moments."""
    method = ppfl.PPFL(lr=0.1, share_memberships=False)
    expected, found = (
        trained(method, 3, kind=kind) for kind in (Recording, partial(Losing, lambda request: request.exchange == 3))
    )
    stages = [[request.task.stage for request, _ in found.transport.exchanges(round)] for round in (0, 1)]
    assert stages[0] == ["moments", "assign", "assign"]
    assert stages[1] == [request.task.stage for request, _ in expected.transport.exchanges(0)]
    assert_same(found.states[1].server, found.states[0].server, atol=0, rtol=0)
    assert_same(found.models(2).memberships, expected.models(1).memberships, atol=1e-9, rtol=0)


# ---------------------------------------------------------------------- clients that come after the survey


def some(share: bool = True, **settings) -> ppfl.PPFL:
    return ppfl.PPFL(**{"lr": 0.1, "participation": 0.2, "share_memberships": share, **settings})


@both_ways
def test_a_survey_asks_its_rounds_clients_and_every_other_one_when_it_first_comes(share: bool) -> None:
    k = 2
    found = trained(some(share), k, MANY)
    roster, seen = found.problem.roster, set()
    for round in range(ROUNDS):
        in_round = set(participants(found.problem, 0.2, round))
        exchanges = [(set(request.who), request.task) for request, _ in found.transport.exchanges(round)]
        if round == 0:
            assert in_round == set.union(*(who for who, _ in exchanges)) and len(in_round) == 3 * k
        else:
            late = [who for who, task in exchanges if isinstance(task, Survey)]
            assert late == ([in_round - seen] if in_round - seen else [])
            assert exchanges[-1][0] == in_round and not isinstance(exchanges[-1][1], Survey)
            assert found.reports[round].participants == len(in_round)
        seen |= in_round
        even = (found.models(round + 1).memberships == 1 / k).all(1).tolist()
        assert {client for client, is_even in zip(roster.ids, even, strict=True) if not is_even} == seen
        assert torch.isfinite(torch.tensor(found.reports[round].loss))
    (request, _), *_ = trained(some(share), 4, MANY, rounds=2).transport.exchanges(0)
    assert len(request.who) == 3 * 4 > len(participants(found.problem, 0.2, 0))  # more models need more clients


def test_groups_are_found_whichever_way_clients_are_asked_and_whenever_they_come() -> None:
    """On groups that are told apart whoever is asked: the same corners."""
    federation, net, fixed = digits_federation(), make_net(64, 16, 10), {"membership_steps": 0, "warmup": 0}
    found = {
        (share, p): trained(some(share, participation=p, **fixed), 4, federation, net, rounds=9).memberships
        for share in (True, False)
        for p in (1.0, 0.3)
    }
    expected, private = found[True, 1.0], found[False, 1.0]
    torch.testing.assert_close(private[:, simplex.match(expected, private)], expected, atol=1e-4, rtol=0)
    truth, group = federation.truth.memberships.argmax(1), expected.argmax(1)
    assert (group[:, None] == group).equal(truth[:, None] == truth)
    for share in (True, False):
        late = found[share, 0.3]
        came = (late != 1 / 4).any(1)
        assert 25 < int(came.sum()) < 40  # the rest has never come
        assert late[:, simplex.match(expected[came], late[came])].argmax(1)[came].equal(group[came])


@both_ways
def test_a_run_with_late_clients_is_the_same_resumed_and_on_every_engine(share: bool) -> None:
    settings = {"dropout": 0.5, "seed": 3}
    whole = trained(some(share), 2, MANY, **settings)
    for until in (1, 2, 4):
        half = trained(some(share), 2, MANY, until=until, **settings)
        survey._arrivals.cache_clear()  # as in another process
        resumed = trained(some(share), 2, MANY, resume=half, **settings)
        assert_same(resumed.everything(), whole.everything(), atol=0, rtol=0)
    loop = trained(some(share), 2, MANY, engine="loop", **settings)
    assert_same(loop.everything(), whole.everything(), atol=1e-10, rtol=1e-9)


def test_a_round_goes_on_when_all_its_newcomers_are_lost() -> None:
    late = partial(Losing, lambda request: getattr(request.task, "stage", "") == "late")
    found = trained(some(), 2, MANY, kind=late)
    assert {report.participants for report in found.reports} == {6}
    models = [found.models(at).models["0.weight"] for at in range(ROUNDS + 1)]
    assert [not a.equal(b) for a, b in itertools.pairwise(models)] == [False, *[True] * (ROUNDS - 1)]


def test_bytes_are_counted_for_those_who_are_asked() -> None:
    """One network goes to each client of a survey, whatever K is, and to each newcomer; a sketch comes back."""
    found = trained(some(), 2, MANY)
    model = sum(p.numel() for p in NET.parameters()) * 8  # which is shorter than a sketch, and sent as it is
    first, second, *_ = found.reports
    assert (first.bytes_down, first.bytes_up) == (6 * model, 6 * (model + 8))
    late = [len(request.who) for request, _ in found.transport.exchanges(1) if isinstance(request.task, Survey)]
    assert second.bytes_down == 6 * (2 * model + 2 * 8) + sum(late) * model


# ---------------------------------------------------------------------- private memberships


def seen_by_the_server(clients: int, **settings) -> list[tuple[str, tuple[int, ...]]]:
    """Names and shapes of all that the server sends, receives and holds; no client uploads a row."""
    method, federation = some(share=False, **settings), make_federation(SIZES * (clients // 6), dtype=torch.float64)
    found = trained(method, 3, federation, rounds=2)
    assert method.visible_rows == ()
    seen = [shape for state in found.states for shape in shapes_in(state.server)]
    for request, reply in found.transport.exchanges():
        assert request.own == {} and reply.rows.values == {} and not reply.rows.ids
        for tree in (request.shared, reply.totals, reply.metrics):
            seen += shapes_in(tree)
    return seen


def test_nothing_that_the_server_has_grows_with_the_number_of_clients() -> None:
    for settings in ({"participation": 1.0}, {"participation": 1.0, "start": "uniform"}):
        assert seen_by_the_server(6, **settings) == seen_by_the_server(24, **settings)
    few, many = (dict(seen_by_the_server(clients)) for clients in (60, 120))  # with clients that come late
    assert few == many
    assert any("centres" in name for name, _ in seen_by_the_server(6, participation=1.0))  # it looks between messages
