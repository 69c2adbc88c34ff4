"""All representations of the same W give the same affinity, and clients are identified by name."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import cosine_similarity

from kit.refusals import AffinityError, assert_refused
from ppfl.core import affinity

seeds, sizes = st.integers(0, 2**31), st.integers(1, 8)
close = {"rtol": 1e-6, "atol": 1e-6}  # from_graph stores float32


def random(seed, *shape):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def names(m):
    return [f"c{i}" for i in range(m)]


def pairs_of(seed, m):
    """Every representation, together with its W as a full matrix; some entries are 0, and some of the diagonal not."""
    W, H = random(seed, m, m) * (random(seed + 1, m, m) > 0.5), random(seed, m, 3)
    W = W + W.T
    pairs = W.triu().nonzero()
    edges = [(f"c{i}", f"c{j}", float(W[i, j])) for i, j in pairs.tolist()]
    return [
        (affinity.from_matrix(W, names(m)), W),
        (affinity.from_matrix(W.to_sparse(), names(m)), W),
        (affinity.from_graph(edges, names(m)), W),
        (affinity.from_factor(H, names(m)), H @ H.T),
        (affinity.uniform(names(m)), torch.ones(m, m).double()),
        (affinity.nothing(names(m)), torch.zeros(m, m).double()),
    ]


def written_out(a):
    return a.neighbours(torch.eye(len(a)).double())


@given(seeds, sizes, st.integers(1, 4))
def test_every_representation_behaves_like_its_matrix(seed, m, k):
    C, same = random(seed + 2, m, k), random(seed + 3, 1, k).expand(m, k)
    squares = (C[:, None] - C[None]).square().sum(-1)
    for a, W in pairs_of(seed, m):
        torch.testing.assert_close(a.degree.double(), W.sum(1), **close)
        torch.testing.assert_close(a.neighbours(C), W @ C, **close)
        torch.testing.assert_close(a.laplacian(C), (torch.diag(W.sum(1)) - W) @ C, **close)
        torch.testing.assert_close(a.penalty(C), (W * squares).sum() / 2, **close)
        torch.testing.assert_close(torch.func.grad(a.penalty)(C), 2 * a.laplacian(C), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(a.laplacian(same), torch.zeros_like(same), rtol=0, atol=1e-6)
        assert float(a.penalty(same)) == pytest.approx(0, abs=1e-12)
        L = a.laplacian(torch.eye(m).double())
        assert torch.linalg.eigvalsh((L + L.T) / 2).amin() >= -1e-6
        if a.factored:  # what the surrogate of Eq. (13) needs
            assert torch.linalg.eigvalsh(written_out(a)).amin() >= -1e-9


@given(seeds, sizes, st.randoms(), st.data())
def test_clients_are_selected_by_name_and_their_order_does_not_matter(seed, m, random_, data):
    C, order = random(seed + 2, m, 3), random_.sample(range(m), m)
    some = order[: data.draw(st.integers(1, m))]
    for a, W in pairs_of(seed, m):
        part = a.select([f"c{i}" for i in some])
        assert part.matrix.layout == a.matrix.layout and part.ids == tuple(f"c{i}" for i in some)
        torch.testing.assert_close(written_out(part), W[some][:, some], **close)
        there = a.check([f"c{i}" for i in order])
        torch.testing.assert_close(there.penalty(C[order]), a.penalty(C), **close)
        torch.testing.assert_close(written_out(there.check(a.ids)), written_out(a))
        assert a.check(names(m)) is a


def test_large_populations_need_no_square_matrix_and_every_tensor_moves():
    m = 200_000  # a square matrix would be 160 GB
    ids, C = names(m), random(0, m, 2).float()
    ring = affinity.from_graph(zip(ids, [*ids[1:], ids[0]], strict=True), ids)
    for a in (affinity.from_factor(random(1, m, 3), ids), ring, affinity.uniform(ids)):
        assert a.laplacian(C).shape == C.shape and a.penalty(C) > 0
    assert affinity.nothing(ids).penalty(C) == 0
    for a, _ in pairs_of(0, 5):
        found = a.neighbours(C[:5]), a.laplacian(C[:5]), a.penalty(C[:5])
        assert {value.dtype for value in found} == {torch.float32}  # the type of the memberships
        tensors = [value for value in vars(a.to("meta")).values() if isinstance(value, Tensor)]
        assert tensors and all(t.device.type == "meta" for t in tensors)


@given(seeds, st.integers(2, 8))
def test_builders_do_not_depend_on_the_order_of_clients_and_from_labels_is_the_cosine_similarity(seed, m):
    x, order = random(seed, m, 4), list(range(m))[::-1]
    for build in (affinity.from_labels, affinity.from_features, lambda x, ids: affinity.nearest(x, ids, k=1)):
        again = build(x[order], [f"c{i}" for i in order]).check(names(m))
        torch.testing.assert_close(written_out(again), written_out(build(x, names(m))))
    counts = (50 * x).long() + 1
    cosines = cosine_similarity(counts[:, None].double(), counts[None].double(), dim=-1)
    for given_counts in (counts, counts.numpy()):
        W = written_out(affinity.from_labels(given_counts, names(m)))
        torch.testing.assert_close(W, cosines, rtol=1e-5, atol=1e-5)


@given(seeds, st.integers(2, 8), st.floats(1e-3, 1e3), st.floats(-100, 100))
def test_from_features_depends_on_relative_distances_only(seed, m, scale, shift):
    x = random(seed, m, 3)
    W = affinity.from_features(x, names(m)).matrix
    assert ((W > 0) & (W <= 1)).all()
    torch.testing.assert_close(affinity.from_features(scale * (x + shift), names(m)).matrix, W, rtol=1e-5, atol=1e-8)
    distance, others = torch.cdist(x, x), ~torch.eye(m, dtype=torch.bool)
    assert torch.equal(distance[others].argsort(stable=True), (-W[others]).argsort(stable=True))
    at_median = math.exp(-0.5)  # the kernel at the median distance
    assert (W[others] >= at_median - 1e-9).double().mean() >= 0.5
    assert (W[others] <= at_median + 1e-9).double().mean() >= 0.5


@given(seeds, st.integers(2, 12), st.data())
def test_nearest_connects_clients_if_either_is_a_neighbour_of_the_other(seed, m, data):
    k, block = data.draw(st.integers(1, m - 1)), data.draw(st.integers(1, m + 2))
    x = random(seed, m, 3)
    distance = torch.cdist(x, x).fill_diagonal_(torch.inf)
    near = torch.zeros(m, m).double().scatter(1, distance.argsort(1)[:, :k], 1.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(affinity, "BLOCK", block)
        W = written_out(affinity.nearest(x, names(m), k))
    assert torch.equal(W, torch.maximum(near, near.T))


def test_equal_clients_far_origins_and_edges_in_both_directions():
    mostly = affinity.from_features(torch.tensor([[0.0], [0.0], [0.0], [0.0], [1.0]]), names(5)).matrix
    assert (mostly[:4, :4] == 1).all() and (mostly[4, :4] < 1).all()  # though most distances are 0
    W = written_out(affinity.nearest(torch.tensor([[0.0], [0.0], [5.0], [5.0]]), names(4), k=1))
    assert torch.equal(W, torch.block_diag(*[1 - torch.eye(2)] * 2).double())  # the other one of two equal clients
    x = torch.arange(60.0).cumsum(0)[:, None]  # every gap is different
    here, there = (written_out(affinity.nearest(at, names(60), k=1)) for at in (x, x + 2**20))
    assert torch.equal(here, there)
    once = affinity.from_graph([("a", "b", 0.5), ("b", "c")], "abc")
    both = affinity.from_graph([("b", "a", 0.5), ("a", "b", 0.5), ("b", "c"), ("c", "b")], "abc")
    assert torch.equal(written_out(once), written_out(both))
    a = affinity.from_matrix(torch.tensor([[1.0, 0.3 + 1e-7], [0.3, 1.0]]), "ab")  # rounding is not asymmetry
    assert torch.equal(a.matrix, a.matrix.T)


BAD = torch.ones(3, 3)
BAD[1, 2] = BAD[2, 1] = -0.5  # of the clients b and c
REFUSED = {
    "asymmetric": (lambda: affinity.from_matrix([[0.0, 0.3], [0.5, 0.0]], "ab"), "['a', 'b']", "by 0.2", "W + W.T"),
    "asymmetric and sparse": (
        lambda: affinity.from_matrix(torch.eye(3).cumsum(0).to_sparse(), "abc"),
        "'a', 'b'",
        "by 1",
    ),
    "not square": (lambda: affinity.from_matrix(torch.ones(2, 3), "ab"), "(2, 3)"),
    "rows of others": (lambda: affinity.from_matrix(torch.ones(3, 3), "ab"), "3 rows", "2 client ids"),
    "negative": (lambda: affinity.from_matrix(BAD, "abc"), "['b', 'c'] is -0.5", "non-negative"),
    "bad feature": (lambda: affinity.from_features(BAD.sqrt(), "abc"), "feature 2", "'b'"),
    "unknown client of an edge": (lambda: affinity.from_graph([("a", "x")], "abc"), "'x'", "spelling"),
    "edges that disagree": (
        lambda: affinity.from_graph([("a", "b", 0.5), ("b", "a", 0.7)], "ab"),
        "'a', 'b'",
        "by 0.2",
    ),
    "an edge of one client": (lambda: affinity.from_graph([("a",)], "ab"), "an edge is ('a',)", "(id, id)"),
    "no labels": (
        lambda: affinity.from_labels(torch.eye(2)[[0, 0]] * torch.tensor([[1], [0]]), "ab"),
        "'b'",
        "uniform",
    ),
    "numbers for ids": (lambda: affinity.uniform([1, 2]), "expected strings", "str(id)"),
    "too many neighbours": (lambda: affinity.nearest(torch.ones(3, 2), "abc", 3), "k is 3", "2 others"),
    "missing clients": (lambda: affinity.uniform("ab").check("abcd"), "missing: 'c', 'd'; extra: none", "build"),
    "one client twice": (lambda: affinity.uniform("aba"), "'a'", "more than once"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_name_clients_and_remedy(case):
    call, *words = REFUSED[case]
    assert_refused(call, AffinityError, *words)
