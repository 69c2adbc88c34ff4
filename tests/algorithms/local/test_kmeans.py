"""k-means with many runs side by side finds what scikit-learn's restarts find."""

import pytest
import torch
from sklearn.cluster import KMeans

from ppfl.algorithms.local import kmeans as module
from ppfl.algorithms.local.kmeans import kmeans, lloyd_step


def drawn(seed: int, count: int, k: int, noise: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Mixtures of k corners in k - 1 dimensions, with weights."""
    g = torch.Generator().manual_seed(seed)
    mixtures = (3 * torch.randn(count, k, generator=g, dtype=torch.float64)).softmax(1)
    points = mixtures @ torch.randn(k, k - 1, generator=g, dtype=torch.float64)
    points += noise * torch.randn(points.shape, generator=g, dtype=torch.float64)
    return points, (0.1 + torch.rand(count, generator=g, dtype=torch.float64)).softmax(0)


def inertia(points: torch.Tensor, p: torch.Tensor, centres: torch.Tensor) -> float:
    return float(p @ torch.cdist(points, centres).square().amin(1))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("count", "k", "noise"), [(60, 3, 0.1), (400, 8, 0.2), (400, 8, 2.0), (3000, 16, 0.3)])
def test_the_spread_is_that_of_scikit_learn_to_one_percent(seed: int, count: int, k: int, noise: float) -> None:
    points, p = drawn(seed, count, k, noise)
    expected = KMeans(k, n_init=20, random_state=0).fit(points.numpy(), sample_weight=p.numpy()).cluster_centers_
    centres, _ = kmeans(points, p, k, seed=0)
    assert inertia(points, p, centres) <= 1.01 * inertia(points, p, torch.from_numpy(expected))


def test_a_part_of_the_points_is_enough_to_start_with(monkeypatch) -> None:
    points, p = drawn(0, 4000, 4, 0.2)
    of_all = inertia(points, p, kmeans(points, p, 4, seed=0)[0])
    monkeypatch.setattr(module, "FEW_POINTS", 300)
    assert inertia(points, p, kmeans(points, p, 4, seed=0)[0]) <= 1.01 * of_all


@pytest.mark.parametrize("seed", range(3))
def test_centres_are_the_means_of_the_points_nearest_to_them_and_the_heaviest_comes_first(seed: int) -> None:
    points, p = drawn(seed, 300, 5, 0.5)
    centres, cells = kmeans(points, p, 5, seed)
    assert float((torch.cdist(points, centres).argmin(1) == cells).double().mean()) > 0.98  # one step more, at most
    for k in range(5):
        mine = cells == k
        torch.testing.assert_close(centres[k], p[mine] @ points[mine] / p[mine].sum())
    sizes = torch.bincount(cells, weights=p, minlength=5)
    assert (sizes.diff() <= 0).all()


def test_the_same_seed_gives_the_same_bits_and_no_global_state_is_used() -> None:
    points, p = drawn(0, 500, 6, 0.5)
    torch.manual_seed(1)
    before, (first, _) = torch.get_rng_state(), kmeans(points, p, 6, seed=4)
    assert before.equal(torch.get_rng_state())
    torch.manual_seed(2)
    assert kmeans(points, p, 6, seed=4)[0].equal(first)


def test_a_step_never_makes_it_worse() -> None:
    points, p = drawn(1, 200, 4, 1.0)
    centres = points[torch.arange(12).reshape(3, 4)]
    spreads = []
    for _ in range(10):
        centres, cells, spread = lloyd_step(points, p, centres)
        spreads.append(spread)
        around = [p @ (points - centres[run, cells[run]]).square().sum(1) for run in range(3)]
        torch.testing.assert_close(spread, torch.stack(around))
    assert (torch.stack(spreads).diff(dim=0) <= 1e-12).all()


@pytest.mark.parametrize("k", [1, 2, 5])
def test_points_that_are_all_alike_and_as_many_centres_as_points(k: int) -> None:
    alike = torch.ones(5, 3, dtype=torch.float64)
    centres, _ = kmeans(alike, torch.ones(5), k, seed=0)
    torch.testing.assert_close(centres, alike[:k])
    apart = torch.eye(k, dtype=torch.float64)
    centres, cells = kmeans(apart, torch.ones(k), k, seed=0)
    torch.testing.assert_close(centres[cells], apart)
