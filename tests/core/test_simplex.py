"""Rows stay on the simplex, mirror steps and projections are optimal, and columns are matched optimally."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ppfl.core import simplex
from ppfl.core.errors import ModelError
from ppfl.core.simplex import FLOOR

law = settings(deadline=None, max_examples=40)
seeds = st.integers(0, 2**31)
widths = st.integers(1, 7)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=generator(seed), dtype=dtype)


def memberships(seed: int, *shape: int, spread: float = 2.0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Rows on the simplex; a large spread puts them near the boundary."""
    return torch.softmax(spread * normal(seed, *shape, dtype=dtype), -1)


def on_simplex(c: Tensor) -> bool:
    slack = 8 * c.shape[-1] * torch.finfo(c.dtype).eps
    return bool((c >= 0).all() and ((c.sum(-1) - 1).abs() <= slack).all())


@law
@given(seeds, widths, st.floats(0, 1e4), st.sampled_from([torch.float32, torch.float64]))
def test_many_steps_stay_on_the_simplex_and_above_the_floor(seed, k, eta, dtype):
    c = simplex.inside(memberships(seed, 5, k, spread=20.0, dtype=dtype))
    for turn in range(5):
        c = simplex.inside(simplex.mirror_step(c, normal(seed + turn, 5, k, dtype=dtype), eta))
        assert on_simplex(c)
        assert (c >= FLOOR).all()


def test_the_floor_lets_a_membership_grow_again():
    pure, wrong = torch.tensor([1.0, 0.0]), torch.tensor([1.0, 0.0])  # the gradient favours the second entry
    stuck, free = pure, pure
    for _ in range(100):
        stuck = simplex.mirror_step(stuck, wrong, 1.0)
        free = simplex.inside(simplex.mirror_step(simplex.inside(free), wrong, 1.0))
    assert stuck[1] == 0
    assert free[1] > 0.99


@law
@given(seeds, widths, st.floats(-1e3, 1e3))
def test_mirror_step_ignores_a_constant_added_to_the_gradient(seed, k, constant):
    c, g = memberships(seed, 4, k), normal(seed + 1, 4, k)
    torch.testing.assert_close(simplex.mirror_step(c, g + constant, 0.7), simplex.mirror_step(c, g, 0.7))


@law
@given(seeds, widths, st.floats(1e-2, 10))
def test_mirror_step_solves_its_argmin_problem(seed, k, eta):
    c, g = memberships(seed, k), normal(seed + 1, k)

    def objective(point: Tensor) -> Tensor:
        return ((point - c) * g).sum(-1) + simplex.kl(point, c) / eta

    step = simplex.mirror_step(c, g, eta)
    others = torch.cat([memberships(seed + 2, 40, k), torch.eye(k).double(), c[None]])
    gaps = objective(others) - objective(step)
    assert (gaps >= -1e-12).all()
    # for an entropic step the gap is exactly a divergence (the three-point identity)
    torch.testing.assert_close(gaps, simplex.kl(others, step) / eta, rtol=1e-8, atol=1e-9)


@law
@given(seeds, widths)
def test_mirror_step_accepts_one_step_size_per_row(seed, k):
    c, g = memberships(seed, 3, k), normal(seed + 1, 3, k)
    etas = torch.tensor([0.0, 0.3, 2.0], dtype=torch.float64)
    together = simplex.mirror_step(c, g, etas[:, None])
    apart = torch.stack([simplex.mirror_step(c[i], g[i], float(etas[i])) for i in range(3)])
    torch.testing.assert_close(together, apart)
    torch.testing.assert_close(together[0], c[0])


@law
@given(seeds, widths)
def test_inside_changes_nothing_in_the_interior(seed, k):
    c = memberships(seed, 6, k, spread=1.0)
    assert (c > FLOOR).all()
    torch.testing.assert_close(simplex.inside(c), c, rtol=1e-12, atol=1e-15)


@law
@given(seeds, st.integers(2, 7), st.floats(1e-6, 0.1))
def test_inside_keeps_the_order_and_sets_entries_below_the_floor_to_the_floor(seed, k, floor):
    c = memberships(seed, 6, k, spread=10.0)
    moved = simplex.inside(c, floor)
    assert on_simplex(moved)
    assert (moved >= floor).all()
    assert (moved[c <= floor] == floor).all()
    order = c.argsort(-1)
    assert (moved.gather(-1, order).diff(dim=-1) >= -1e-15).all()


@pytest.mark.parametrize("floor", [0.25, 1.0, -1e-3])
def test_a_floor_that_does_not_fit_is_refused(floor):
    with pytest.raises(ModelError, match=r"4 memberships.*\[0, 1/4\)"):
        simplex.inside(simplex.uniform(1, 4), floor)


@law
@given(seeds, widths, st.floats(0.1, 100))
def test_projection_is_the_nearest_point(seed, k, scale):
    v = scale * normal(seed, 5, k)
    p = simplex.project(v)
    assert on_simplex(p)
    # p is the nearest point of a convex set if and only if <v - p, x - p> <= 0 for all x; the corners suffice
    angles = torch.einsum("mk,mjk->mj", v - p, torch.eye(k).double() - p[:, None])
    assert (angles <= 1e-10 * scale).all()


@law
@given(seeds, widths, st.floats(-100, 100))
def test_projection_is_idempotent_and_ignores_a_constant(seed, k, constant):
    v = normal(seed, 2, 3, k)
    p = simplex.project(v)
    torch.testing.assert_close(simplex.project(p), p)
    torch.testing.assert_close(simplex.project(v + constant), p)
    torch.testing.assert_close(simplex.project(memberships(seed, 4, k)), memberships(seed, 4, k))


@law
@given(seeds, widths)
def test_divergences(seed, k):
    p, q = memberships(seed, 8, k), memberships(seed + 1, 8, k)
    tv, kl = simplex.total_variation(p, q), simplex.kl(p, q)
    assert ((tv >= 0) & (tv <= 1)).all()
    assert (kl >= 2 * tv**2 - 1e-12).all()  # Pinsker's inequality
    torch.testing.assert_close(simplex.kl(p, p), torch.zeros(8).double())
    flat = simplex.uniform(8, k, dtype=torch.float64)
    torch.testing.assert_close(simplex.entropy(p), math.log(k) - simplex.kl(p, flat))  # log k if uniform


def test_divergences_at_corners():
    corners = torch.eye(3)
    assert (simplex.entropy(corners) == 0).all()
    assert simplex.kl(corners[0], corners[1]) == torch.inf
    assert simplex.kl(corners[0], corners[0]) == 0
    assert simplex.total_variation(corners[0], corners[1]) == 1


@law
@given(seeds, widths)
def test_harden_is_the_nearest_corner(seed, k):
    c = memberships(seed, 4, k)
    hard = simplex.harden(c)
    assert on_simplex(hard)
    assert (simplex.entropy(hard) == 0).all()
    distances = simplex.total_variation(c[:, None], torch.eye(k).double())
    torch.testing.assert_close(simplex.total_variation(c, hard), distances.amin(-1))


@law
@given(seeds, st.integers(1, 4), st.integers(0, 2))
def test_match_is_the_best_of_all_assignments(seed, k, more):
    a, b = memberships(seed, 6, k), memberships(seed + 1, 6, k + more)
    columns = simplex.match(a, b)

    def cost(choice) -> float:
        return float((a - b[:, list(choice)]).abs().sum())

    best = min(map(cost, itertools.permutations(range(k + more), k)))
    assert len(set(columns.tolist())) == k
    assert cost(columns.tolist()) == pytest.approx(best)


@law
@given(seeds, st.integers(1, 6), st.randoms())
def test_match_undoes_a_relabelling(seed, k, random):
    a = memberships(seed, 9, k)
    order = random.sample(range(k), k)
    assert torch.equal(a[:, order][:, simplex.match(a, a[:, order])], a)


@pytest.mark.parametrize(
    ("a", "b", "found"),
    [
        ((5, 3), (5, 2), "3 canonical models with 2"),
        ((5, 3), (4, 3), r"\(5, 3\) and \(4, 3\)"),
    ],
)
def test_match_refuses_shapes_that_cannot_be_matched(a, b, found):
    with pytest.raises(ModelError, match=found):
        simplex.match(simplex.uniform(*a), simplex.uniform(*b))


def test_match_refuses_nan():
    with pytest.raises(ModelError, match="not finite"):
        simplex.match(simplex.uniform(2, 2), torch.full((2, 2), torch.nan))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_check_returns_rows_on_the_simplex(dtype):
    c = memberships(0, 4, 3, 7).to(dtype)
    assert simplex.check(c) is c


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ([0.5, torch.nan, 0.5], "finite"),
        ([0.5, torch.inf, 0.5], "finite"),
        ([0.8, -0.3, 0.5], "no negative"),
        ([0.5, 0.3, 0.3], "a sum of 1"),
        ([0.0, 0.0, 0.0], "a sum of 1"),
    ],
)
def test_check_names_the_row_and_what_it_found(row, expected):
    c = simplex.uniform(5, 3)
    c[3] = torch.tensor(row)
    with pytest.raises(ModelError, match=rf"weights\[3\] is \[{row[0]:g}, .*{expected}"):
        simplex.check(c, name="weights")
    with pytest.raises(ModelError, match=r"weights\[1, 3\]"):
        simplex.check(torch.stack([simplex.uniform(5, 3), c]), name="weights")
    with pytest.raises(ModelError, match=r"weights is \["):
        simplex.check(c[3], name="weights")


@pytest.mark.parametrize("c", [torch.tensor(1.0), torch.ones(3, 0), torch.ones(3, 1, dtype=torch.long)])
def test_check_refuses_other_shapes_and_types(c):
    with pytest.raises(ModelError, match="expected real rows"):
        simplex.check(c)
