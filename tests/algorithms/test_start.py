"""The start from first gradients: what a sketch keeps, what corners find, and that lock-in is avoided."""

from itertools import combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ppfl.algorithms.batches import LocalData, id_keys
from ppfl.algorithms.start import count_sketch, gradient_sketch, memberships_from_sketches, nearest_mixtures
from ppfl.engines import Stacked, begin, pose, train
from ppfl.engines.train import returning
from torch.utils import _pytree as pytree

from ppfl.algorithms import PPFL, start
from ppfl.core.population import Population
from ppfl.core.simplex import check, match, project, total_variation
from ppfl.core.workspace import Workspace
from support import make_federation, make_net


def test_a_sketch_keeps_inner_products_on_average() -> None:
    rows = torch.randn(4, 2000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    exact = rows @ rows.T
    found = torch.stack([s @ s.T for s in (count_sketch(rows, seed) for seed in range(200))])
    error = found.std(0) / 200**0.5
    assert bool(((found.mean(0) - exact).abs() < 4.5 * error).all())


def test_a_sketch_keeps_distances_to_about_a_tenth() -> None:
    rows = torch.randn(30, 5000, generator=torch.Generator().manual_seed(1))
    ratio = torch.pdist(count_sketch(rows, seed=0)) / torch.pdist(rows)
    assert float(ratio.min()) > 0.75 and float(ratio.max()) < 1.25
    assert abs(float(ratio.mean()) - 1) < 0.03


def test_short_rows_are_sent_as_they_are() -> None:
    rows = torch.randn(3, 100)
    assert count_sketch(rows, seed=0) is rows


@pytest.mark.parametrize("by_hand", [False, True])
def test_the_sketch_is_of_the_gradient_of_a_clients_whole_loss(by_hand: bool) -> None:
    federation = make_federation(dtype=torch.float64)
    net = make_net(dtype=torch.float64)
    population = Population(net, k=3)
    keys, who = id_keys(federation.ids), federation.train.sizes.argsort(descending=True)
    data = LocalData(federation.train, federation.weights.double(), keys, who, 0, 0, Workspace() if by_hand else None)
    found = gradient_sketch(population, population.initial(0), data, seed=0)
    for i, client in enumerate(who.tolist()):
        own = federation.train.client(client)
        net.zero_grad()
        torch.nn.functional.cross_entropy(net(own.x), own.y).backward()
        named = dict(net.named_parameters())
        expected = torch.cat([named[name].grad.flatten() for name in sorted(named)])
        torch.testing.assert_close(found[i], expected)


@given(st.integers(0, 10_000), st.integers(2, 5))
def test_nearest_mixtures_are_as_near_as_projected_gradients_must_come(seed: int, k: int) -> None:
    """f(c) - f(any other) <= L |c_0 - c|^2 / (2 steps) <= L / steps for f = |c corners - point|^2 / 2."""
    g = torch.Generator().manual_seed(seed)
    points = torch.randn(6, k - 1, generator=g, dtype=torch.float64)
    corners = 2 * torch.randn(k, k - 1, generator=g, dtype=torch.float64)
    c = check(nearest_mixtures(points, corners, steps=200))
    others = project(torch.randn(500, 6, k, generator=g, dtype=torch.float64))
    L = float(torch.linalg.eigvalsh(corners @ corners.T)[-1])
    value = (c @ corners - points).square().sum(1) / 2
    assert bool(((others @ corners - points).square().sum(2) / 2 >= value - L / 200).all())


@given(st.integers(0, 10_000))
def test_a_point_that_is_a_mixture_is_its_own_nearest(seed: int) -> None:
    truth = torch.randn(5, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).softmax(1)
    corners = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.3, 0.9]], dtype=torch.float64)
    torch.testing.assert_close(nearest_mixtures(truth @ corners, corners), truth, atol=1e-6, rtol=0)


def nearest_by_faces(point: torch.Tensor, corners: torch.Tensor) -> torch.Tensor:
    """The point of the simplex's image nearest to `point`, by trying the affine hull of every set of corners."""
    best = None
    for size in range(1, len(corners) + 1):
        for face in map(list, combinations(range(len(corners)), size)):
            edges = corners[face[1:]] - corners[face[0]]
            share = torch.linalg.lstsq(edges.T, (point - corners[face[0]])[:, None]).solution.flatten()
            c = torch.zeros(len(corners), dtype=point.dtype)
            c[face] = torch.cat([1 - share.sum(0, keepdim=True), share])
            if (c >= 0).all() and (best is None or (c @ corners - point).norm() < (best @ corners - point).norm()):
                best = c
    assert best is not None
    return best


def simplex_with_dents(k: int, g: torch.Generator) -> torch.Tensor:
    """Corners (k, k - 1) that are not nearly in one plane."""
    regular = torch.linalg.svd(torch.eye(k, dtype=torch.float64) - 1 / k).U[:, : k - 1]
    return regular + 0.2 * torch.randn(k, k - 1, generator=g, dtype=torch.float64) / k


@given(st.integers(0, 10_000), st.integers(2, 4))
def test_nearest_mixtures_are_those_of_the_best_face(seed: int, k: int) -> None:
    g = torch.Generator().manual_seed(seed)
    points, corners = torch.randn(4, k - 1, generator=g, dtype=torch.float64), simplex_with_dents(k, g)
    expected = torch.stack([nearest_by_faces(point, corners) for point in points])
    torch.testing.assert_close(nearest_mixtures(points, corners), expected, atol=1e-8, rtol=0)


@given(st.integers(0, 10_000), st.integers(2, 9))
def test_no_corner_would_bring_a_nearest_mixture_nearer(seed: int, k: int) -> None:
    """The Karush-Kuhn-Tucker conditions: the slope is least on, and equal among, the corners in use."""
    g = torch.Generator().manual_seed(seed)
    points, corners = torch.randn(50, k - 1, generator=g, dtype=torch.float64), simplex_with_dents(k, g)
    c = check(nearest_mixtures(points, corners))
    slope = (c @ corners - points) @ corners.T
    assert float(((slope * c).sum(1) - slope.amin(1)).max()) < 1e-8


def test_each_point_has_its_own_nearest_mixture_however_many_there_are() -> None:
    g = torch.Generator().manual_seed(0)
    points, corners = torch.randn(9000, 3, generator=g, dtype=torch.float64), simplex_with_dents(4, g)
    many = nearest_mixtures(points, corners)
    for at in (0, 4000, 8191, 8192, 8999):
        torch.testing.assert_close(nearest_mixtures(points[at : at + 1], corners)[0], many[at], atol=1e-10, rtol=0)


@pytest.mark.parametrize("corners", [torch.zeros(3, 2), torch.ones(3, 2), torch.eye(2)[[0, 0, 1]]])
def test_corners_may_coincide(corners: torch.Tensor) -> None:
    points = torch.tensor([[0.3, 0.7], [2.0, -1.0]], dtype=torch.float64)
    check(nearest_mixtures(points, corners.double()))


@given(st.integers(0, 10_000), st.integers(1, 12), st.integers(1, 7))
def test_points_are_the_weighted_principal_components_in_whatever_blocks(seed: int, block: int, count: int) -> None:
    g = torch.Generator().manual_seed(seed)
    rows = torch.randn(12, 7, generator=g, dtype=torch.float64) * torch.arange(1, 8)
    p, order = torch.rand(12, generator=g, dtype=torch.float64).softmax(0), torch.randperm(12, generator=g)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(start, "ASKED", block)
        points = start.principal_points(rows, p, order, count)
    centred = rows[order] - p @ rows[order]
    spread = torch.linalg.svdvals(p.sqrt()[:, None] * centred)
    moment = points.T @ (p[:, None] * points)
    torch.testing.assert_close(moment, torch.diag(spread[:count].square().flip(0)), atol=1e-9, rtol=0)
    torch.testing.assert_close(p @ points, torch.zeros(count, dtype=torch.float64), atol=1e-9, rtol=0)


def mixtures(seed: int, clients: int = 60, k: int = 3, width: int = 30, noise: float = 0.0):
    """Sketches that are mixtures of k corners, most clients near a corner, and the memberships that made them."""
    g = torch.Generator().manual_seed(seed)
    c = (6 * torch.randn(clients, k, generator=g, dtype=torch.float64)).softmax(1)
    corners = torch.randn(k, width, generator=g, dtype=torch.float64)
    return c @ corners + noise * torch.randn(clients, width, generator=g, dtype=torch.float64), c


@pytest.mark.parametrize("seed", range(5))
def test_mixtures_are_found_near_where_they_are(seed: int) -> None:
    sketches, truth = mixtures(seed, noise=0.1)
    ids = tuple(f"c{i}" for i in range(60))
    c = check(memberships_from_sketches(sketches, torch.full((60,), 1 / 60), ids, k=3, seed=0))
    c = c[:, match(truth, c)]
    assert float(total_variation(c, truth).mean()) < 0.15
    assert float((c.argmax(1) == truth.argmax(1)).double().mean()) > 0.9


@pytest.mark.parametrize("asked", [20_000, 25])
def test_the_order_of_clients_does_not_matter(asked: int, monkeypatch) -> None:
    monkeypatch.setattr(start, "ASKED", asked)
    sketches, _ = mixtures(3, noise=0.2)
    weights = torch.rand(60, generator=torch.Generator().manual_seed(4)).softmax(0)
    ids = tuple(f"c{i}" for i in range(60))
    turned = torch.randperm(60, generator=torch.Generator().manual_seed(5))
    straight = memberships_from_sketches(sketches, weights, ids, 3, seed=0)
    other = memberships_from_sketches(sketches[turned], weights[turned], tuple(ids[i] for i in turned), 3, seed=0)
    torch.testing.assert_close(other, straight[turned])


def test_corners_of_some_clients_do_for_all(monkeypatch) -> None:
    sketches, truth = mixtures(0, clients=3000, noise=0.1)
    ids = tuple(f"c{i}" for i in range(3000))
    weights = torch.full((3000,), 1 / 3000)
    of_all = memberships_from_sketches(sketches, weights, ids, 3, seed=0)
    monkeypatch.setattr(start, "ASKED", 500)
    for seed in range(3):
        of_some = memberships_from_sketches(sketches, weights, ids, 3, seed=seed)
        assert float(total_variation(of_some[:, match(of_all, of_some)], of_all).mean()) < 0.05
        assert float(total_variation(of_some[:, match(truth, of_some)], truth).mean()) < 0.15


def states_of(method: PPFL, k: int, **settings):
    """The problem and all states of a short run, with what each round was asked to do."""
    federation = make_federation((7, 12, 20, 5, 9, 3), dtype=torch.float64)
    problem = pose(Population(make_net(dtype=torch.float64), k=k), federation, None, 6, seed=1, **settings)
    first = begin(method, problem)
    states = [first, *(state for state, _ in train(method, problem, federation, Stacked(), first))]
    return problem, states, [method.plan(problem, state.server, state.round) for state in states[:-1]]


def test_the_survey_asks_everyone_once_and_only_where_there_is_a_choice() -> None:
    for k, begins, surveys in ((2, "gradients", True), (2, "uniform", False), (1, "gradients", False)):
        _, _, plans = states_of(PPFL(lr=0.1, participation=0.5, start=begins), k)
        assert [plan.task.sketch_seed is not None for plan in plans] == [surveys, *5 * [False]]
        assert len(plans[0].who) == (6 if surveys else 3)


def test_whoever_is_lost_in_the_survey_starts_evenly_and_the_others_as_if_they_were_all() -> None:
    method, k = PPFL(lr=0.1), 3
    problem, (before, after, *_), (asked, *_) = states_of(method, k, dropout=0.4)
    back = returning(problem, asked, 0).who.tolist()
    lost = [i for i in range(6) if i not in back]
    assert len(back) >= k and lost
    assert after.server.memberships[lost].equal(before.server.memberships[lost])
    alone = make_federation((7, 12, 20, 5, 9, 3), dtype=torch.float64).select([problem.ids[i] for i in back])
    theirs = pose(problem.population, alone, None, 6, seed=1)
    (expected, _), *_ = train(method, theirs, alone, Stacked(), begin(method, theirs))
    torch.testing.assert_close(after.server.memberships[back], expected.server.memberships)


def test_the_survey_is_repeated_until_as_many_answer_as_there_are_models() -> None:
    """Else nothing would ever tell the models apart."""
    k = 3
    problem, states, plans = states_of(PPFL(lr=0.1), k, dropout=0.6)
    enough = [len(returning(problem, plan, t).who) >= k for t, plan in enumerate(plans)]
    first = enough.index(True)
    assert first > 0
    assert [plan.task.sketch_seed is not None for plan in plans] == [t <= first for t in range(6)]
    for state in states[: first + 1]:
        pairs = zip(pytree.tree_leaves(state.server), pytree.tree_leaves(states[0].server), strict=True)
        assert all(now.equal(start) for now, start in pairs)
