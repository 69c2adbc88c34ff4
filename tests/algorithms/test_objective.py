"""The objective, its surrogate and its gradients satisfy Section 3 and Theorem 1 of the paper."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kit.oracles import objective, surrogate
from ppfl.algorithms.ppfl_client import client_membership_gradient
from ppfl.core import affinity

M, K = 6, 3
IDS = tuple(f"c{i}" for i in range(M))
seeds = st.integers(0, 10_000)


def draw(seed):
    g = torch.Generator().manual_seed(seed)
    H, C, anchor, p = (torch.rand(*shape, generator=g, dtype=torch.float64) for shape in ((M, 4), (M, K), (M, K), (M,)))
    slopes = torch.randn(M, K, generator=g, dtype=torch.float64)
    return SimpleNamespace(H=H, C=C.softmax(1), anchor=(3 * anchor).softmax(1), p=p.softmax(0), slopes=slopes)


def affinity_of(kind, H):
    W = (H @ H.T).fill_diagonal_(0)  # without its diagonal it is not positive semi-definite
    if kind == "graph":
        return affinity.from_graph([(IDS[i], IDS[j], float(W[i, j])) for i in range(M) for j in range(i)], IDS)
    return affinity.from_matrix(W, IDS) if kind == "matrix" else affinity.from_factor(H, IDS)


@pytest.mark.parametrize("kind", ["factored", "matrix", "graph"])
@given(seed=seeds, penalty=st.floats(0, 2))
def test_the_surrogate_is_never_below_F_and_equals_it_at_the_anchor(kind, seed, penalty):
    d = draw(seed)
    W, losses = affinity_of(kind, d.H), (d.slopes * d.C).sum(1)
    F = objective(losses, d.C, d.p, W, penalty)
    assert surrogate(losses, d.C, d.anchor, d.p, W, penalty) >= F - 1e-9
    touching = surrogate(losses, d.C, d.C, d.p, W, penalty)
    torch.testing.assert_close(touching, F, rtol=1e-6, atol=1e-6)  # graph weights have single precision


@given(seeds)
def test_clients_use_the_gradient_of_the_surrogate_which_at_the_anchor_is_that_of_F(seed):
    d = draw(seed)
    C = d.C.clone().requires_grad_()
    losses = (d.slopes * C).sum(1)
    for W in (affinity_of("factored", d.H), affinity_of("matrix", d.H)):
        both = (d.anchor, surrogate(losses, C, d.anchor, d.p, W, 0.7)), (d.C, objective(losses, C, d.p, W, 0.7))
        for anchor, value in both:
            (expected,) = torch.autograd.grad(value, C, retain_graph=True)
            found = client_membership_gradient(d.slopes, d.C, d.p, *W.majorant(anchor), 0.7)
            torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("seed", range(3))
def test_with_W_all_ones_the_objective_is_that_of_a_glmm(seed):
    """Theorem 1: b_i = theta c_i, G = theta theta' (through its pseudo-inverse), lambda = 1/M."""
    g = torch.Generator().manual_seed(seed)
    theta = torch.randn(5, K, generator=g, dtype=torch.float64)  # columns are canonical models
    C = torch.rand(M, K, generator=g, dtype=torch.float64).softmax(1)
    x, y = (torch.randn(*shape, generator=g, dtype=torch.float64) for shape in ((M, 8, 5), (M, 8)))
    b = C @ theta.T  # (M, 5)
    losses = (torch.einsum("mnd,md->mn", x, b) - y).square().mean(1) / 2
    p = torch.full((M,), 1 / M, dtype=torch.float64)
    ours = objective(losses, C, p, affinity.uniform(IDS), penalty=1 / M)
    deviation, inverse = b - b.mean(0), torch.linalg.pinv(theta @ theta.T)
    torch.testing.assert_close(ours, p @ losses + torch.einsum("md,de,me->", deviation, inverse, deviation))
