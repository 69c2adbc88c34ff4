"""Rows stay on the simplex; mirror steps, projections, matchings and minima over the simplex are optimal."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kit.oracles import kl
from kit.refusals import ModelError, assert_refused
from ppfl.core import simplex
from ppfl.core.simplex import FLOOR, MANY_CORNERS, minimize_on_simplex, nearest_mixtures

seeds, widths = st.integers(0, 2**31), st.integers(1, 7)


def normal(seed, *shape, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def memberships(seed, *shape, spread=2.0, dtype=torch.float64):
    """Rows on the simplex; a large spread puts them near the boundary."""
    return torch.softmax(spread * normal(seed, *shape, dtype=dtype), -1)


def on_simplex(c, slack=8.0):
    sums = (c.sum(-1) - 1).abs()
    return bool((c >= 0).all() and (sums <= slack * c.shape[-1] * torch.finfo(c.dtype).eps).all())


@given(seeds, widths, st.floats(0, 1e4), st.sampled_from([torch.float32, torch.float64]))
def test_many_steps_stay_on_the_simplex_and_above_the_floor(seed, k, eta, dtype):
    c = simplex.raise_to_floor(memberships(seed, 5, k, spread=20.0, dtype=dtype))
    for turn in range(5):
        c = simplex.raise_to_floor(simplex.mirror_step(c, normal(seed + turn, 5, k, dtype=dtype), eta))
        assert on_simplex(c) and (c >= FLOOR).all() and simplex.check(c) is c


def test_the_floor_lets_a_membership_grow_again():
    stuck = free = wrong = torch.tensor([1.0, 0.0])  # as a gradient it favours the second entry
    for _ in range(100):
        stuck = simplex.mirror_step(stuck, wrong, 1.0)
        free = simplex.raise_to_floor(simplex.mirror_step(simplex.raise_to_floor(free), wrong, 1.0))
    assert stuck[1] == 0 and free[1] > 0.99


@given(seeds, widths, st.floats(1e-2, 10), st.floats(-1e3, 1e3))
def test_a_mirror_step_solves_its_problem_row_by_row_and_ignores_constants(seed, k, eta, constant):
    c, g = memberships(seed, 3, k), normal(seed + 1, 3, k)

    def objective(point):
        return ((point - c[1]) * g[1]).sum(-1) + kl(point, c[1]) / eta

    steps = simplex.mirror_step(c, g, torch.tensor([0.0, eta, 2.0], dtype=torch.float64)[:, None])
    step = simplex.mirror_step(c[1], g[1], eta)
    torch.testing.assert_close(steps[:2], torch.stack([c[0], step]))
    torch.testing.assert_close(simplex.mirror_step(c[1], g[1] + constant, eta), step)
    others = torch.cat([memberships(seed + 2, 40, k), torch.eye(k).double(), c])
    gaps = objective(others) - objective(step)
    assert (gaps >= -1e-12).all()
    # for an entropic step the gap is exactly a divergence (the three-point identity)
    torch.testing.assert_close(gaps, kl(others, step) / eta, rtol=1e-8, atol=1e-9)


@given(seeds, st.integers(2, 7))
def test_raise_to_floor_keeps_the_order_and_moves_nothing_but_entries_below_the_floor(seed, k):
    c, inner = memberships(seed, 6, k, spread=10.0), memberships(seed, 6, k, spread=1.0)
    moved = simplex.raise_to_floor(c)
    assert on_simplex(moved) and (moved >= FLOOR).all() and (moved[c <= FLOOR] == FLOOR).all()
    assert (moved.gather(-1, c.argsort(-1)).diff(dim=-1) >= -1e-15).all()
    assert (inner > FLOOR).all()
    torch.testing.assert_close(simplex.raise_to_floor(inner), inner, rtol=1e-12, atol=1e-15)


@given(seeds, widths, st.floats(0.1, 100), st.floats(-100, 100))
def test_a_projection_is_the_nearest_point(seed, k, scale, constant):
    v = scale * normal(seed, 5, k)
    p = simplex.project(v)
    assert on_simplex(p)
    # p is the nearest point of a convex set if and only if <v - p, x - p> <= 0 for all x; the corners suffice
    angles = torch.einsum("mk,mjk->mj", v - p, torch.eye(k).double() - p[:, None])
    assert (angles <= 1e-10 * scale).all()
    torch.testing.assert_close(simplex.project(v[None] + constant)[0], p)


@given(seeds, widths)
def test_divergences_and_the_nearest_corner(seed, k):
    p, q = memberships(seed, 8, k), memberships(seed + 1, 8, k)
    tv, divergence = simplex.total_variation(p, q), kl(p, q)
    assert ((tv >= 0) & (tv <= 1)).all()
    assert (divergence >= 2 * tv**2 - 1e-12).all()  # Pinsker's inequality
    torch.testing.assert_close(kl(p, p), torch.zeros(8).double())
    flat = simplex.uniform(8, k, dtype=torch.float64)
    torch.testing.assert_close(simplex.entropy(p), math.log(k) - kl(p, flat))  # log k if uniform
    hard, corners = simplex.harden(p), torch.eye(k).double()
    assert on_simplex(hard) and (simplex.entropy(hard) == 0).all()
    torch.testing.assert_close(simplex.total_variation(p, hard), simplex.total_variation(p[:, None], corners).amin(-1))
    assert kl(corners[0], corners[-1]) == (torch.inf if k > 1 else 0)


@given(seeds, st.integers(1, 4), st.integers(0, 2), st.randoms())
def test_a_match_is_the_best_of_all_assignments_and_undoes_a_relabelling(seed, k, more, random):
    a, b = memberships(seed, 6, k), memberships(seed + 1, 6, k + more)
    columns = simplex.match(a, b).tolist()

    def cost(choice):
        return float((a - b[:, list(choice)]).abs().sum())

    assert len(set(columns)) == k
    assert cost(columns) == pytest.approx(min(map(cost, itertools.permutations(range(k + more), k))))
    order = random.sample(range(k), k)
    assert torch.equal(a[:, order][:, simplex.match(a, a[:, order])], a)


REFUSED = {
    "too few columns": (lambda: simplex.match(simplex.uniform(5, 3), simplex.uniform(5, 2)), "3", "2"),
    "other clients": (lambda: simplex.match(simplex.uniform(5, 2), simplex.uniform(4, 2)), "(5, 2)", "(4, 2)"),
    "a match of nan": (lambda: simplex.match(torch.full((2, 2), torch.nan), simplex.uniform(2, 2)), "not finite"),
    "whole numbers": (lambda: simplex.check(torch.ones(2, 2).long(), name="w"), "w", "torch.int64"),
    "nan": (lambda: simplex.check(torch.tensor([[0.5, 0.5], [1.0, torch.nan]]), name="w"), "w[1]", "finite"),
    "negative": (lambda: simplex.check(torch.tensor([[0.5, 0.5], [1.3, -0.3]])), "[1]", "negative"),
    "another sum": (lambda: simplex.check(torch.tensor([0.5, 0.3, 0.3]), name="w"), "w is [0.5", "sum"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_on_the_simplex_is_refused(case):
    call, *words = REFUSED[case]
    assert_refused(call, ModelError, *words)


def duality_gap(H, f, c):
    """(M,): 0 at a minimum, where gradients are equal for positive coordinates and no smaller for the others."""
    gradient = (H @ c[..., None])[..., 0] + f
    return (c * gradient).sum(1) - gradient.amin(1)


@given(seeds, st.integers(1, 8), st.integers(0, 8))
def test_the_minimum_meets_the_optimality_conditions_from_any_start(seed, k, rank):
    """Also where H is singular or 0, or the same for all rows."""
    root, f = normal(seed, 8, k, rank), 3 * normal(seed + 1, 8, k)
    start = memberships(seed + 2, 8, k)
    start[::2] = torch.eye(k, dtype=torch.float64)[0]
    for H in (root @ root.mT, (root @ root.mT)[0]):
        for first in (start, torch.full_like(start, 1 / k)):
            c = minimize_on_simplex(H, f, first)
            assert on_simplex(c, slack=1e3)
            assert float(duality_gap(H, f, c).max()) < 1e-8 * (1 + float(f.abs().max()))


def distances(c, points, corners):
    return (c @ corners - points).norm(dim=1)


def smallest_distances(points, corners):
    """The nearest point in the plane through any set of corners, among those that are mixtures of its corners."""
    best = torch.cdist(points, corners).amin(1)
    for size in range(2, len(corners) + 1):
        for face in itertools.combinations(range(len(corners)), size):
            edges = corners[list(face[1:])] - corners[face[0]]
            shares = (points - corners[face[0]]) @ torch.linalg.pinv(edges, rtol=1e-10)
            shares = torch.cat([1 - shares.sum(1, keepdim=True), shares], 1)
            reached = distances(shares, points, corners[list(face)])
            best = torch.where((shares >= 0).all(1), torch.minimum(best, reached), best)
    return best


@given(seeds, st.integers(1, 5), st.integers(1, 5), st.sampled_from(["free", "twins", "line", "same"]))
def test_nearest_mixtures_are_as_near_as_any_face_gets(seed, k, d, kind):
    """Corners may coincide, lie on a line, or be more than their dimension allows."""
    corners, points = normal(seed, k, d), 1.5 * normal(seed + 1, 20, d)
    if kind == "twins":
        corners[-1] = corners[0]
    elif kind != "free":
        corners = (corners[:, :1] if kind == "line" else corners[:1]).expand(k, d).contiguous()
    points[0], points[1] = corners[0], corners.mean(0)
    c = nearest_mixtures(points, corners)
    assert on_simplex(c, slack=1e3)
    assert float((distances(c, points, corners) - smallest_distances(points, corners)).max()) < 1e-9


@pytest.mark.parametrize("k", [MANY_CORNERS - 1, MANY_CORNERS, 32])
def test_many_corners_are_mixed_optimally_and_independent_ones_are_found_again(k):
    for d in (5, 40):
        corners, points = normal(k, k, d), normal(k + 1, 500, d)
        c = nearest_mixtures(points, corners)
        assert on_simplex(c, slack=1e3)
        assert float(duality_gap(corners @ corners.T, -points @ corners.T, c).max()) < 1e-10
    corners, c = normal(k, k, k + 2), memberships(0, 200, k, spread=4.0)
    c[:k] = torch.eye(k, dtype=torch.float64)
    torch.testing.assert_close(nearest_mixtures(c @ corners, corners), c, rtol=1e-9, atol=1e-9)


def test_units_origin_and_blocks_do_not_matter(monkeypatch):
    corners, points = normal(1, 5, 3), normal(2, 100, 3)
    best = distances(nearest_mixtures(points, corners), points, corners)
    monkeypatch.setattr("ppfl.core.simplex.BLOCK", 7 * 25)
    for size, origin in ((1.0, 0.0), (1e-6, 7.0), (1e6, 7.0)):
        moved = nearest_mixtures(size * (points + origin), size * (corners + origin))
        torch.testing.assert_close(distances(moved, points, corners), best, rtol=1e-9, atol=1e-9)
    assert nearest_mixtures(torch.zeros(0, 2), torch.eye(2)).shape == (0, 2)
