"""The start from first gradients: what a sketch keeps, what corners find, and that lock-in is avoided."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ppfl.algorithms import PPFL
from ppfl.algorithms.batches import LocalData, id_keys
from ppfl.algorithms.start import count_sketch, gradient_sketch, memberships_from_sketches, nearest_mixtures
from ppfl.core.population import Population
from ppfl.core.simplex import check, match, project, total_variation
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


def test_the_sketch_is_of_the_gradient_of_a_clients_whole_loss() -> None:
    federation = make_federation(dtype=torch.float64)
    net = make_net(dtype=torch.float64)
    population = Population(net, k=3)
    keys, who = id_keys(federation.ids), torch.arange(4)
    data = LocalData(federation.train, federation.weights.double(), keys, who, seed=0, round=0)
    found = gradient_sketch(population, population.initial(0), data, seed=0)
    for i, client in enumerate(federation.ids):
        own = federation.client(client)["train"]
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


def test_the_order_of_clients_does_not_matter() -> None:
    sketches, _ = mixtures(3, noise=0.2)
    weights = torch.rand(60, generator=torch.Generator().manual_seed(4)).softmax(0)
    ids = tuple(f"c{i}" for i in range(60))
    turned = torch.randperm(60, generator=torch.Generator().manual_seed(5))
    straight = memberships_from_sketches(sketches, weights, ids, 3, seed=0)
    other = memberships_from_sketches(sketches[turned], weights[turned], tuple(ids[i] for i in turned), 3, seed=0)
    torch.testing.assert_close(other, straight[turned])


def test_the_survey_asks_everyone_once_and_only_where_there_is_a_choice() -> None:
    from ppfl.engines import begin, pose

    federation = make_federation()
    for k, start, surveys in ((2, "gradients", True), (2, "uniform", False), (1, "gradients", False)):
        method = PPFL(lr=0.1, participation=0.5, start=start)
        problem = pose(Population(make_net(), k=k), federation, None, 5, seed=0)
        server = begin(method, problem).server
        plans = [method.plan(problem, server, t) for t in range(3)]
        assert [plan.task.sketch_seed is not None for plan in plans] == [surveys, False, False]
        assert len(plans[0].who) == (4 if surveys else 2)
