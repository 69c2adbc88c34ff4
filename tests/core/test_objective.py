"""The objective, its surrogate and its gradients satisfy Section 3 and Theorem 1 of the paper."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ppfl.core import affinity
from ppfl.core.objective import client_membership_gradient, membership_gradient, objective, stationarity, surrogate

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
    return affinity.from_matrix(W, IDS) if kind == "matrix" else affinity.Factored(H, IDS)


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
def test_membership_gradients_are_those_of_F_and_of_the_surrogate_that_clients_use(seed):
    d = draw(seed)
    C = d.C.clone().requires_grad_()
    losses, factored, matrix = (d.slopes * C).sum(1), affinity_of("factored", d.H), affinity_of("matrix", d.H)
    (expected,) = torch.autograd.grad(objective(losses, C, d.p, factored, 0.7), C, retain_graph=True)
    torch.testing.assert_close(membership_gradient(d.slopes, d.C, d.p, factored, 0.7), expected)
    (expected,) = torch.autograd.grad(surrogate(losses, C, d.anchor, d.p, matrix, 0.7), C)
    found = client_membership_gradient(d.slopes, d.C, d.p, *matrix.majorant(d.anchor), 0.7)
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


@given(seeds)
def test_stationarity_is_zero_at_a_stationary_point_and_the_gradient_mapping_for_small_steps(seed):
    d, outward = draw(seed), torch.tensor([[0.0, 1.0, 1.0]], dtype=torch.float64)
    corner = torch.tensor([[1 - 2e-6, 1e-6, 1e-6]], dtype=torch.float64)
    level = torch.ones(M, K, dtype=torch.float64)  # equal slopes do not change memberships
    assert float(stationarity([torch.zeros(4)], d.C, level, eta=0.5)) < 1e-20
    assert float(stationarity([torch.ones(4)], d.C, level, eta=0.5)) == pytest.approx(4)
    assert float(stationarity([], corner, outward, eta=0.5)) < 1e-9
    assert float(stationarity([], corner, -outward, eta=0.5)) > 1e-12
    limit = d.C * (d.slopes - (d.C * d.slopes).sum(1, keepdim=True))  # derivative of the mirror step at step size 0
    found = stationarity([], d.C, d.slopes, eta=1e-5)
    torch.testing.assert_close(found, limit.abs().sum().square(), rtol=1e-3, atol=1e-8)
