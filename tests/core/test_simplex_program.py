"""Minima over the simplex: optimality conditions, brute force over all faces, and corners that are not independent."""

from itertools import combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ppfl.core.simplex_program import MANY_CORNERS, minimize_on_simplex, nearest_mixtures

ROWS = 8


def duality_gap(H: Tensor, f: Tensor, c: Tensor) -> Tensor:
    """(M,): 0 at a minimum, where gradients are equal for positive coordinates and no smaller for the others."""
    gradient = (H @ c[..., None])[..., 0] + f
    return (c * gradient).sum(1) - gradient.amin(1)


def random_problem(seed: int, k: int, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """H (M, K, K) of this rank, f and feasible starts, half of them corners."""
    g = torch.Generator().manual_seed(seed)
    root = torch.randn(ROWS, k, rank, generator=g, dtype=torch.float64)
    f = 3 * torch.randn(ROWS, k, generator=g, dtype=torch.float64)
    start = torch.rand(ROWS, k, generator=g, dtype=torch.float64).softmax(1)
    start[::2] = torch.eye(k, dtype=torch.float64)[0]
    return root @ root.mT, f, start


def assert_on_simplex(c: Tensor) -> None:
    assert bool((c >= 0).all())
    torch.testing.assert_close(c.sum(1), torch.ones(len(c), dtype=c.dtype))


@given(st.integers(0, 10_000), st.integers(1, 8), st.integers(0, 8))
def test_the_minimum_meets_the_optimality_conditions(seed: int, k: int, rank: int) -> None:
    """Also where H is singular or 0."""
    H, f, start = random_problem(seed, k, rank)
    c = minimize_on_simplex(H, f, start)
    assert_on_simplex(c)
    assert float(duality_gap(H, f, c).max()) < 1e-8 * (1 + float(f.abs().max()))


@given(st.integers(0, 10_000), st.integers(1, 8), st.integers(0, 8))
def test_a_shared_H_is_the_same_H_in_every_row(seed: int, k: int, rank: int) -> None:
    H, f, start = random_problem(seed, k, rank)
    together = minimize_on_simplex(H[0], f, start)
    repeated = minimize_on_simplex(H[:1].expand(ROWS, k, k), f, start)
    torch.testing.assert_close(together, repeated, rtol=1e-9, atol=1e-9)


@given(st.integers(0, 10_000), st.integers(2, 6))
def test_the_start_does_not_matter(seed: int, k: int) -> None:
    H, f, start = random_problem(seed, k, k)
    H = H + 1e-3 * torch.eye(k, dtype=torch.float64)
    uniform = torch.full_like(start, 1 / k)
    torch.testing.assert_close(
        minimize_on_simplex(H, f, start), minimize_on_simplex(H, f, uniform), rtol=1e-8, atol=1e-8
    )


def distances(c: Tensor, points: Tensor, corners: Tensor) -> Tensor:
    return (c @ corners - points).norm(dim=1)


def smallest_distances(points: Tensor, corners: Tensor) -> Tensor:
    """The nearest point in the plane through any set of corners, among those that are mixtures of its corners."""
    best = torch.cdist(points, corners).amin(1)
    for size in range(2, len(corners) + 1):
        for face in combinations(range(len(corners)), size):
            edges = corners[list(face[1:])] - corners[face[0]]
            shares = (points - corners[face[0]]) @ torch.linalg.pinv(edges, rtol=1e-10)
            shares = torch.cat([1 - shares.sum(1, keepdim=True), shares], 1)
            reached = distances(shares, points, corners[list(face)])
            best = torch.where((shares >= 0).all(1), torch.minimum(best, reached), best)
    return best


@given(st.integers(0, 10_000), st.integers(1, 5), st.integers(1, 5), st.sampled_from(["free", "twins", "line", "same"]))
def test_nearest_mixtures_are_as_near_as_any_face_gets(seed: int, k: int, d: int, kind: str) -> None:
    """Corners may coincide, lie on a line, or be more than their dimension allows."""
    g = torch.Generator().manual_seed(seed)
    corners = torch.randn(k, d, generator=g, dtype=torch.float64)
    if kind == "twins":
        corners[-1] = corners[0]
    elif kind == "line":
        corners = corners[:, :1].expand(k, d).contiguous()
    elif kind == "same":
        corners = corners[:1].expand(k, d).contiguous()
    points = 1.5 * torch.randn(20, d, generator=g, dtype=torch.float64)
    points[0], points[1] = corners[0], corners.mean(0)
    c = nearest_mixtures(points, corners)
    assert_on_simplex(c)
    reached, best = distances(c, points, corners), smallest_distances(points, corners)
    assert float((reached - best).max()) < 1e-9


@pytest.mark.parametrize("k", [MANY_CORNERS - 1, MANY_CORNERS, 32])
@pytest.mark.parametrize("d", [5, 40])
def test_many_corners(k: int, d: int) -> None:
    g = torch.Generator().manual_seed(k)
    corners, points = (torch.randn(n, d, generator=g, dtype=torch.float64) for n in (k, 500))
    c = nearest_mixtures(points, corners)
    assert_on_simplex(c)
    gap = duality_gap(corners @ corners.T, -points @ corners.T, c)
    assert float(gap.max()) < 1e-10


@pytest.mark.parametrize("k", [3, MANY_CORNERS])
def test_mixtures_of_independent_corners_are_found_again(k: int) -> None:
    g = torch.Generator().manual_seed(0)
    corners = torch.randn(k, k + 2, generator=g, dtype=torch.float64)
    c = torch.rand(200, k, generator=g, dtype=torch.float64).pow(4)
    c = c / c.sum(1, keepdim=True)
    c[:k] = torch.eye(k, dtype=torch.float64)
    torch.testing.assert_close(nearest_mixtures(c @ corners, corners), c, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("size", [1e-6, 1.0, 1e6])
def test_units_and_origin_do_not_matter(size: float) -> None:
    g = torch.Generator().manual_seed(1)
    corners, points = (torch.randn(n, 3, generator=g, dtype=torch.float64) for n in (5, 100))
    plain, moved = nearest_mixtures(points, corners), nearest_mixtures(size * (points + 7), size * (corners + 7))
    best = distances(plain, points, corners)
    torch.testing.assert_close(distances(moved, points, corners), best, rtol=1e-9, atol=1e-9)


def test_blocks_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    g = torch.Generator().manual_seed(2)
    corners, points = (torch.randn(n, 3, generator=g, dtype=torch.float64) for n in (4, 100))
    whole = nearest_mixtures(points, corners)
    monkeypatch.setattr("ppfl.core.simplex_program.BLOCK", 7 * 25)
    torch.testing.assert_close(nearest_mixtures(points, corners), whole, rtol=1e-12, atol=1e-12)


def test_no_points() -> None:
    assert nearest_mixtures(torch.zeros(0, 2), torch.eye(2)).shape == (0, 2)
