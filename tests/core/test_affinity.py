"""All representations of the same W give the same affinity, and clients are identified by name."""

import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ppfl.core import affinity
from ppfl.core.affinity import Affinity, Dense, Factored, Sparse
from ppfl.core.errors import AffinityError

law = settings(deadline=None, max_examples=30)
seeds = st.integers(0, 2**31)
sizes = st.integers(1, 8)


def random(seed: int, *shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def names(m: int) -> list[str]:
    return [f"c{i}" for i in range(m)]


def holes(seed: int, m: int) -> Tensor:
    """A symmetric W with a nonzero diagonal and some zeros."""
    W = random(seed, m, m) * (random(seed + 1, m, m) > 0.5)
    return W + W.T


def as_edges(W: Tensor) -> Sparse:
    pairs = W.triu().nonzero()
    return Sparse(pairs, W[pairs[:, 0], pairs[:, 1]], names(len(W)))


def pairs_of(seed: int, m: int) -> list[tuple[Affinity, Tensor]]:
    """Every representation, together with its W as a full matrix."""
    W, H = holes(seed, m), random(seed, m, 3)
    edges = [(f"c{i}", f"c{j}", float(W[i, j])) for i, j in W.triu().nonzero().tolist()]
    return [
        (Dense(W, names(m)), W),
        (as_edges(W), W),
        (affinity.from_graph(edges, names(m)), W),
        (Factored(H, names(m)), H @ H.T),
        (affinity.uniform(names(m)), torch.ones(m, m).double()),
        (affinity.nothing(names(m)), torch.zeros(m, m).double()),
    ]


def written_out(a: Affinity) -> Tensor:
    return a.neighbours(torch.eye(len(a)).double())


@law
@given(seeds, sizes, st.integers(1, 4))
def test_every_representation_behaves_like_its_matrix(seed, m, k):
    C = random(seed + 2, m, k)
    for a, W in pairs_of(seed, m):
        close = {"rtol": 1e-6, "atol": 1e-6}  # from_graph stores float32
        torch.testing.assert_close(a.degree.double(), W.sum(1), **close)
        torch.testing.assert_close(a.neighbours(C), W @ C, **close)
        torch.testing.assert_close(a.laplacian(C), (torch.diag(W.sum(1)) - W) @ C, **close)


@law
@given(seeds, sizes, st.integers(1, 4))
def test_penalty_is_half_the_sum_over_pairs(seed, m, k):
    C = random(seed + 2, m, k)
    squares = (C[:, None] - C[None]).square().sum(-1)
    for a, W in pairs_of(seed, m):
        torch.testing.assert_close(a.penalty(C), (W * squares).sum() / 2, rtol=1e-6, atol=1e-6)


@law
@given(seeds, sizes)
def test_equal_memberships_have_no_penalty_and_no_gradient(seed, m):
    C = random(seed + 2, 1, 3).expand(m, 3)
    for a, _ in pairs_of(seed, m):
        torch.testing.assert_close(a.laplacian(C), torch.zeros_like(C), rtol=0, atol=1e-6)
        assert float(a.penalty(C)) == pytest.approx(0, abs=1e-12)


@law
@given(seeds, sizes)
def test_gradient_of_the_penalty_is_twice_the_laplacian(seed, m):
    C = random(seed + 2, m, 3)
    for a, _ in pairs_of(seed, m):
        torch.testing.assert_close(torch.func.grad(a.penalty)(C), 2 * a.laplacian(C), rtol=1e-5, atol=1e-5)


@law
@given(seeds, sizes)
def test_laplacian_is_positive_semidefinite_and_so_is_a_factored_affinity(seed, m):
    for a, _ in pairs_of(seed, m):
        L = a.laplacian(torch.eye(m).double())
        assert torch.linalg.eigvalsh((L + L.T) / 2).amin() >= -1e-6
        if isinstance(a, Factored):  # what the surrogate of Eq. (13) needs
            assert torch.linalg.eigvalsh(written_out(a)).amin() >= -1e-9


@law
@given(seeds, sizes, st.randoms(), st.data())
def test_clients_are_selected_by_name_in_any_order(seed, m, random_, data):
    order = random_.sample(range(m), data.draw(st.integers(1, m)))
    for a, W in pairs_of(seed, m):
        part = a.select([f"c{i}" for i in order])
        assert type(part) is type(a)
        assert part.ids == tuple(f"c{i}" for i in order)
        torch.testing.assert_close(written_out(part), W[order][:, order], rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(part.degree.double(), W[order][:, order].sum(1), rtol=1e-6, atol=1e-6)


@law
@given(seeds, sizes, st.randoms())
def test_penalty_does_not_depend_on_the_order_of_clients(seed, m, random_):
    C = random(seed + 2, m, 3)
    order = random_.sample(range(m), m)
    for a, _ in pairs_of(seed, m):
        there = a.check([f"c{i}" for i in order])
        torch.testing.assert_close(there.penalty(C[order]), a.penalty(C), rtol=1e-6, atol=1e-6)
        back = there.check(a.ids)
        torch.testing.assert_close(written_out(back), written_out(a))


def test_check_returns_the_same_object_for_the_same_order():
    for a, _ in pairs_of(0, 4):
        assert a.check(names(4)) is a


@law
@given(seeds, st.integers(2, 8))
def test_builders_do_not_depend_on_the_order_of_clients(seed, m):
    x, order = random(seed, m, 4), list(range(m))[::-1]
    reversed_names = [f"c{i}" for i in order]
    for build in (affinity.from_labels, affinity.from_features, lambda x, ids: affinity.nearest(x, ids, k=1)):
        again = build(x[order], reversed_names).check(names(m))
        torch.testing.assert_close(written_out(again), written_out(build(x, names(m))))


def test_large_populations_need_no_square_matrix():
    m = 200_000  # a square matrix would be 160 GB
    ids, C = names(m), torch.rand(m, 2)
    ring = torch.stack([torch.arange(m), torch.arange(1, m + 1) % m], dim=1)
    for a in (Factored(torch.rand(m, 3), ids), Sparse(ring, torch.ones(m), ids), affinity.uniform(ids)):
        assert a.laplacian(C).shape == C.shape
        assert a.penalty(C) > 0
    assert affinity.nothing(ids).penalty(C) == 0


def test_results_have_the_type_of_the_memberships():
    for a, _ in pairs_of(0, 5):
        for dtype in (torch.float32, torch.float64):
            C = random(1, 5, 2).to(dtype)
            assert {a.neighbours(C).dtype, a.laplacian(C).dtype, a.penalty(C).dtype} == {dtype}


def test_to_moves_every_tensor_and_leaves_the_original():
    for a, _ in pairs_of(0, 5):
        moved = a.to("meta")
        tensors = [value for value in vars(moved).values() if isinstance(value, Tensor)]
        assert tensors
        assert all(t.device.type == "meta" for t in tensors)
        assert a.degree.device.type == "cpu"
        assert moved.ids == a.ids


# ── builders ───────────────────────────────────────────────────────────────────────────────────────────────


@law
@given(seeds, sizes)
def test_from_labels_is_the_cosine_similarity(seed, m):
    counts = (random(seed, m, 4) * 50).long() + 1
    W = written_out(affinity.from_labels(counts, names(m)))
    x = counts.double()
    torch.testing.assert_close(
        W, torch.nn.functional.cosine_similarity(x[:, None], x[None], dim=-1), rtol=1e-5, atol=1e-5
    )
    torch.testing.assert_close(
        affinity.from_labels(counts.numpy(), names(m)).degree.double(), W.sum(1), rtol=1e-5, atol=0
    )


@law
@given(seeds, st.integers(2, 8), st.floats(1e-3, 1e3), st.floats(-100, 100))
def test_from_features_depends_on_relative_distances_only(seed, m, scale, shift):
    x = random(seed, m, 3)
    W = affinity.from_features(x, names(m)).W
    assert ((W > 0) & (W <= 1)).all()
    torch.testing.assert_close(W.diagonal(), torch.ones(m).double())
    torch.testing.assert_close(affinity.from_features(scale * (x + shift), names(m)).W, W, rtol=1e-5, atol=1e-8)
    distance = torch.cdist(x, x)
    others = ~torch.eye(m, dtype=torch.bool)
    assert torch.equal(distance[others].argsort(stable=True), (-W[others]).argsort(stable=True))
    at_median = np.exp(-0.5)  # the kernel at the median distance
    assert (W[others] >= at_median - 1e-9).double().mean() >= 0.5
    assert (W[others] <= at_median + 1e-9).double().mean() >= 0.5


def test_clients_with_the_same_features_have_affinity_one():
    assert (affinity.from_features(torch.ones(4, 2), names(4)).W == 1).all()
    mostly = torch.tensor([[0.0], [0.0], [0.0], [0.0], [1.0]])  # most distances are 0
    W = affinity.from_features(mostly, names(5)).W
    assert (W[:4, :4] == 1).all()
    assert (W[4, :4] < 1).all()


@law
@given(seeds, st.integers(2, 12), st.data())
def test_nearest_connects_clients_if_either_is_a_neighbour_of_the_other(seed, m, data):
    k, block = data.draw(st.integers(1, m - 1)), data.draw(st.integers(1, m + 2))
    x = random(seed, m, 3)
    distance = torch.cdist(x, x).fill_diagonal_(torch.inf)
    near = torch.zeros(m, m).double().scatter(1, distance.argsort(1)[:, :k], 1.0)
    W = written_out(affinity.nearest(x, names(m), k, block=block))
    assert torch.equal(W, torch.maximum(near, near.T))


def test_the_nearest_of_two_equal_clients_is_the_other_one():
    pairs_of_equals = torch.tensor([[0.0], [0.0], [5.0], [5.0]])
    W = written_out(affinity.nearest(pairs_of_equals, names(4), k=1))
    assert torch.equal(W, torch.block_diag(*[1 - torch.eye(2)] * 2).double())


def test_nearest_is_the_same_far_from_the_origin():
    x = torch.arange(60.0).cumsum(0)[:, None]  # every gap is different
    here, there = (written_out(affinity.nearest(at, names(60), k=1)) for at in (x, x + 2**20))
    assert torch.equal(here, there)


def test_nearest_processes_one_block_at_a_time(monkeypatch):
    seen, whole = [], torch.cdist
    monkeypatch.setattr(torch, "cdist", lambda a, b: seen.append(len(a)) or whole(a, b))
    affinity.nearest(torch.rand(50, 2), names(50), k=3, block=8)
    assert sum(seen) == 50
    assert max(seen) == 8


def test_an_edge_listed_in_both_directions_counts_once():
    once = affinity.from_graph([("a", "b", 0.5), ("b", "c")], "abc")
    both = affinity.from_graph([("b", "a", 0.5), ("a", "b", 0.5), ("b", "c"), ("c", "b")], "abc")
    assert torch.equal(written_out(once), written_out(both))


def test_a_graph_without_edges_has_no_affinity():
    assert torch.equal(affinity.from_graph([], "abc").degree, affinity.nothing("abc").degree)


# ── error messages ───────────────────────────────────────────────────────────────────────────────


def refuses(message: str):
    return pytest.raises(AffinityError, match=re.escape(message))


def test_the_error_about_asymmetry_names_the_clients():
    W = torch.tensor([[0.0, 0.3], [0.5, 0.0]])
    remedy = "W must be symmetric: use (W + W.T) / 2"
    with refuses(f"affinity['a', 'b'] is 0.3 but affinity['b', 'a'] is 0.5; {remedy}"):
        affinity.from_matrix(W, ["a", "b"])
    with refuses("affinity['b', 'a'] is 0.5 but affinity['a', 'b'] is 0.3"):
        affinity.from_graph([("a", "b", 0.3), ("b", "a", 0.5)], ["a", "b"])


def test_rounding_errors_are_not_asymmetry():
    W = torch.tensor([[1.0, 0.3 + 1e-7], [0.3, 1.0]])
    a = affinity.from_matrix(W, "ab")
    assert torch.equal(a.W, a.W.T)


@pytest.mark.parametrize(("value", "need"), [(torch.nan, "finite"), (torch.inf, "finite"), (-0.5, "non-negative")])
def test_errors_about_bad_values_name_the_clients(value, need):
    W = torch.ones(3, 3)
    W[1, 2] = W[2, 1] = value
    entry = f"affinity['b', 'c'] is {value:g}; it must be {need}"
    with refuses(entry):
        affinity.from_matrix(W, "abc")
    with refuses(entry):
        affinity.from_graph([("a", "b"), ("b", "c", value)], "abc")
    with refuses(f"factor of client 'b', column 2, is {value:g}; it must be {need}: use affinity.nearest"):
        Factored(W, "abc")
    with refuses(f"count of label 2 of client 'b' is {value:g}"):
        affinity.from_labels(W, "abc")
    if need == "finite":
        for build in (affinity.from_features, lambda x, ids: affinity.nearest(x, ids, 1)):
            with refuses("feature 2 of client 'b'"):
                build(W, "abc")


def test_a_client_without_labels_is_refused():
    with refuses("'b' has no labels, so no cosine similarity; leave it out"):
        affinity.from_labels(torch.tensor([[1, 2], [0, 0]]), "ab")


def test_sizes_must_agree():
    with refuses("affinity has 2 rows but there are 3 client ids"):
        affinity.from_matrix(torch.ones(2, 2), "abc")
    with refuses("affinity has shape (3, 2); W needs one row and one column"):
        affinity.from_matrix(torch.ones(3, 2), "abc")
    with refuses("affinity has shape (3,)"):
        affinity.from_labels(torch.ones(3), "abc")
    for k in (0, 3):
        with refuses(f"k is {k}, but each client has only 2 others"):
            affinity.nearest(torch.rand(3, 2), "abc", k)
    for pairs in (torch.tensor([[0, 3]]), torch.tensor([[-1, 0]]), torch.tensor([0, 1])):
        with refuses("affinity.from_graph takes edges by client id"):
            Sparse(pairs, torch.ones(1), "abc")


def test_the_federation_must_be_covered_exactly():
    a = affinity.uniform(names(40)).select([f"c{i}" for i in range(40) if i not in (17, 22)])
    with refuses("affinity has 38 rows but the federation has 40 clients (missing: 'c17', 'c22'; extra: none); build"):
        a.check(names(40))
    with refuses("(missing: none; extra: 'c37', 'c38', 'c39'); use affinity.select(ids)"):
        affinity.uniform(names(40)).check(names(37))
    with refuses("missing: 'd0', 'd1', 'd2', 'd3', 'd4' and 2 more"):
        a.check([f"d{i}" for i in range(7)])


def test_names_must_be_known_unique_strings():
    with refuses("'a' is listed more than once"):
        affinity.uniform(["a", "b", "a"])
    with refuses("no client 'x', 'z' among its 3"):
        affinity.uniform("abc").select("azx")
    with refuses("no client 'x' among its 3; check the spelling"):
        affinity.from_graph([("a", "x")], "abc")
    with refuses("an edge is ('a',); expected (id, id)"):
        affinity.from_graph([("a",)], "abc")
    with refuses("use str(id)"):
        affinity.uniform([1, 2])
    with refuses("expected at least one"):
        affinity.uniform([])
