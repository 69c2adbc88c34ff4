"""The start from first gradients: what a sketch keeps, and which corners and mixtures are found."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kit.problems import make_federation, make_net
from ppfl.algorithms.local import start
from ppfl.algorithms.local.batches import Draws, LocalData
from ppfl.algorithms.local.start import (
    PrivateStart,
    count_sketch,
    gradient_sketch,
    nearest_cells,
    start_from_sketches,
    start_memberships,
)
from ppfl.core.backends import Autograd, make_backend
from ppfl.core.draws import name_keys
from ppfl.core.population import Population
from ppfl.core.simplex import check, match, total_variation
from ppfl.core.workspace import Workspace


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


@pytest.mark.parametrize("make", [Autograd, make_backend])
@pytest.mark.parametrize("canonical", ["all", "2"])
def test_the_sketch_is_of_the_gradient_of_a_clients_whole_loss(make, canonical: str) -> None:
    federation, net = make_federation(dtype=torch.float64), make_net(dtype=torch.float64)
    population = Population(net, k=3, canonical=canonical)
    who = federation.train.sizes.argsort(descending=True)
    data = LocalData(
        federation.train,
        federation.weights.double()[who],
        name_keys(federation.ids)[who],
        who,
        Draws(0, 0),
        Workspace(),
    )
    backend = make(population, federation.train.x[:2], federation.train.y, 3)
    found, losses = gradient_sketch(backend, population.initial_models(0), data, seed=0)
    for i, client in enumerate(who.tolist()):
        own = federation.train.client(client)
        net.zero_grad()
        loss = torch.nn.functional.cross_entropy(net(own.x), own.y)
        loss.backward()
        named = {name: p.grad.flatten() for name, p in net.named_parameters() if canonical == "all" or name[0] == "2"}
        torch.testing.assert_close(found[i], torch.cat([named[name] for name in sorted(named)]))
        torch.testing.assert_close(losses[i], loss.detach())


@given(st.integers(0, 10_000), st.integers(1, 12), st.integers(1, 7))
def test_points_are_the_weighted_principal_components_in_whatever_blocks(seed: int, block: int, count: int) -> None:
    g = torch.Generator().manual_seed(seed)
    rows = torch.randn(12, 7, generator=g, dtype=torch.float64) * torch.arange(1, 8)
    p, order = torch.rand(12, generator=g, dtype=torch.float64).softmax(0), torch.randperm(12, generator=g)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(start, "MOST_POINTS", block)
        _, _, points = start.principal_points(rows, p, order, count)
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


def memberships(sketches, weights, ids, k: int, seed: int) -> torch.Tensor:
    """Of the clients that the start is found from; the same as for clients that come later with these sketches."""
    found, c = start_from_sketches(sketches, weights, ids, k, seed)
    torch.testing.assert_close(found.memberships(sketches), c, atol=1e-6, rtol=0)
    return c


@pytest.mark.parametrize("seed", range(5))
def test_mixtures_are_found_near_where_they_are(seed: int) -> None:
    sketches, truth = mixtures(seed, noise=0.1)
    ids = tuple(f"c{i}" for i in range(60))
    c = check(memberships(sketches, torch.full((60,), 1 / 60), ids, k=3, seed=0))
    c = c[:, match(truth, c)]
    assert float(total_variation(c, truth).mean()) < 0.15
    assert float((c.argmax(1) == truth.argmax(1)).double().mean()) > 0.9


@pytest.mark.parametrize("most", [20_000, 25])
def test_the_order_of_clients_does_not_matter(most: int, monkeypatch) -> None:
    monkeypatch.setattr(start, "MOST_POINTS", most)
    sketches, _ = mixtures(3, noise=0.2)
    weights = torch.rand(60, generator=torch.Generator().manual_seed(4)).softmax(0)
    ids = tuple(f"c{i}" for i in range(60))
    turned = torch.randperm(60, generator=torch.Generator().manual_seed(5))
    straight = memberships(sketches, weights, ids, 3, seed=0)
    other = memberships(sketches[turned], weights[turned], tuple(ids[i] for i in turned), 3, seed=0)
    torch.testing.assert_close(other, straight[turned])


def test_corners_of_some_clients_do_for_all(monkeypatch) -> None:
    sketches, truth = mixtures(0, clients=3000, noise=0.1)
    ids = tuple(f"c{i}" for i in range(3000))
    weights = torch.full((3000,), 1 / 3000)
    of_all = memberships(sketches, weights, ids, 3, seed=0)
    monkeypatch.setattr(start, "MOST_POINTS", 500)
    for seed in range(3):
        of_some = memberships(sketches, weights, ids, 3, seed=seed)
        assert float(total_variation(of_some[:, match(of_all, of_some)], of_all).mean()) < 0.05
        assert float(total_variation(of_some[:, match(truth, of_some)], truth).mean()) < 0.15


# ---------------------------------------------------------------------- sketches that stay with the clients


def private_start(sketches: torch.Tensor, weights: torch.Tensor, k: int, seed: int) -> tuple[torch.Tensor, int]:
    """Memberships from sums over clients alone, and how many messages that takes; weights need not sum to 1."""
    found = PrivateStart.from_moments(weights.sum(), weights @ sketches, sketches.T * weights @ sketches, k, seed)
    points, messages = found.points(sketches), 1
    while found.corners is None:
        cells = nearest_cells(points, found.centres) * weights[:, None]
        found = found.moved(cells.sum(0), cells.T @ points, cells.T @ points.square().sum(1))
        messages += 1
    return start_memberships(points.double(), found.corners), messages + 1


@pytest.mark.parametrize("k", [2, 3, 5])
@pytest.mark.parametrize("seed", range(4))
def test_the_private_start_is_the_open_one_on_separated_groups_in_ten_messages(seed: int, k: int) -> None:
    """Groups as in clustered learning, of unequal sizes, with clients of unequal weight."""
    g = torch.Generator().manual_seed(seed)
    group = torch.cat([torch.arange(k), torch.randint(k, (80,), generator=g)])
    corners = 3 * torch.randn(k, 40, generator=g, dtype=torch.float64)
    sketches = corners[group] + 0.3 * torch.randn(len(group), 40, generator=g, dtype=torch.float64)
    weights = 0.2 + torch.rand(len(group), generator=g, dtype=torch.float64)
    ids = tuple(f"c{i}" for i in range(len(group)))
    of_rows = memberships(sketches, weights, ids, k, seed=0)
    of_sums, messages = private_start(sketches, weights, k, seed=0)
    assert messages <= 10
    torch.testing.assert_close(check(of_sums)[:, match(of_rows, of_sums)], of_rows, atol=1e-4, rtol=0)
    assert int((of_sums.argmax(1)[:, None] == of_sums.argmax(1)).eq(group[:, None] == group).all())


@pytest.mark.parametrize("noise", [0.0, 0.1])
@pytest.mark.parametrize("seed", range(3))
def test_the_private_start_is_the_open_one_on_drawn_mixtures(seed: int, noise: float) -> None:
    sketches, _ = mixtures(seed, noise=noise)
    weights, ids = torch.full((60,), 1 / 60).double(), tuple(f"c{i}" for i in range(60))
    of_rows, (of_sums, _) = (
        memberships(sketches, weights, ids, 3, 0),
        private_start(sketches, weights, 3, 0),
    )
    torch.testing.assert_close(of_sums[:, match(of_rows, of_sums)], of_rows, atol=1e-4, rtol=0)


@given(st.integers(0, 10_000))
def test_points_from_sums_are_the_principal_components(seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    rows = torch.randn(12, 7, generator=g, dtype=torch.float64) * torch.arange(1, 8)
    p = torch.rand(12, generator=g, dtype=torch.float64)
    found = PrivateStart.from_moments(p.sum(), p @ rows, rows.T * p @ rows, k=4, seed=0).points(rows)
    _, _, expected = start.principal_points(rows, p / p.sum(), torch.arange(12), 3)
    torch.testing.assert_close(found.abs(), expected.abs(), atol=1e-8, rtol=0)  # a direction has no sign


@given(st.integers(0, 10_000))
def test_a_step_of_k_means_never_raises_the_distance_to_the_nearest_centre(seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    points, p = torch.randn(30, 2, generator=g, dtype=torch.float64), torch.rand(30, generator=g, dtype=torch.float64)
    now = PrivateStart(torch.zeros(2), torch.eye(2), torch.randn(5, 3, 2, generator=g, dtype=torch.float64))
    for _ in range(3):
        cells = nearest_cells(points, now.centres) * p[:, None]
        after = now.moved(cells.sum(0), cells.T @ points, cells.T @ points.square().sum(1))
        before, then = (
            p @ torch.cdist(points, centres).amin(-1).square().T for centres in (now.centres, after.centres)
        )
        assert bool((then <= before + 1e-9).all())
        now = after
