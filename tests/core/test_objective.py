"""The objective, its surrogate and its gradients satisfy Section 3 and Theorem 1 of the paper."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ppfl.core import affinity
from ppfl.core.objective import (
    client_membership_gradient,
    membership_gradient,
    objective,
    stationarity,
    surrogate,
)

M, K = 6, 3
IDS = tuple(f"c{i}" for i in range(M))


def draw(seed: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {
        "H": torch.rand(M, 4, generator=g, dtype=torch.float64),
        "C": torch.rand(M, K, generator=g, dtype=torch.float64).softmax(1),
        "anchor": (3 * torch.rand(M, K, generator=g, dtype=torch.float64)).softmax(1),
        "p": torch.rand(M, generator=g, dtype=torch.float64).softmax(0),
        "slopes": torch.randn(M, K, generator=g, dtype=torch.float64),
    }


def affinity_of(kind: str, H: torch.Tensor) -> affinity.Affinity:
    W = (H @ H.T).fill_diagonal_(0)  # without its diagonal it is not positive semi-definite
    if kind == "graph":
        return affinity.from_graph([(IDS[i], IDS[j], float(W[i, j])) for i in range(M) for j in range(i)], IDS)
    return affinity.from_matrix(W, IDS) if kind == "matrix" else affinity.Factored(H, IDS)


@pytest.mark.parametrize("kind", ["factored", "matrix", "graph"])
@given(seed=st.integers(0, 10_000), penalty=st.floats(0, 2))
def test_the_surrogate_is_never_below_F_and_equals_it_at_the_anchor(kind: str, seed: int, penalty: float) -> None:
    d = draw(seed)
    W = affinity_of(kind, d["H"])
    losses = (d["slopes"] * d["C"]).sum(1)
    F = objective(losses, d["C"], d["p"], W, penalty)
    assert surrogate(losses, d["C"], d["anchor"], d["p"], W, penalty) >= F - 1e-9
    touching = surrogate(losses, d["C"], d["C"], d["p"], W, penalty)
    torch.testing.assert_close(touching, F, rtol=1e-6, atol=1e-6)  # graph weights have single precision


@given(st.integers(0, 10_000))
def test_the_membership_gradient_is_the_gradient_of_F(seed: int) -> None:
    d = draw(seed)
    W = affinity.Factored(d["H"], IDS)
    C = d["C"].clone().requires_grad_()
    (expected,) = torch.autograd.grad(objective((d["slopes"] * C).sum(1), C, d["p"], W, 0.7), C)
    torch.testing.assert_close(membership_gradient(d["slopes"], d["C"], d["p"], W, 0.7), expected)


@given(st.integers(0, 10_000))
def test_a_client_computes_the_gradient_of_the_surrogate(seed: int) -> None:
    d = draw(seed)
    W = affinity_of("matrix", d["H"])
    C = d["C"].clone().requires_grad_()
    S = surrogate((d["slopes"] * C).sum(1), C, d["anchor"], d["p"], W, 0.7)
    (expected,) = torch.autograd.grad(S, C)
    found = client_membership_gradient(d["slopes"], d["C"], d["p"], *W.majorant(d["anchor"]), 0.7)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("seed", range(5))
def test_with_W_all_ones_the_objective_is_that_of_a_glmm(seed: int) -> None:
    """Theorem 1: b_i = theta c_i, G = theta theta' (through its pseudo-inverse), lambda = 1/M."""
    g = torch.Generator().manual_seed(seed)
    d, n = 5, 8
    theta = torch.randn(d, K, generator=g, dtype=torch.float64)  # columns are canonical models
    C = torch.rand(M, K, generator=g, dtype=torch.float64).softmax(1)
    x = torch.randn(M, n, d, generator=g, dtype=torch.float64)
    y = torch.randn(M, n, generator=g, dtype=torch.float64)
    b = C @ theta.T  # (M, d)
    losses = (torch.einsum("mnd,md->mn", x, b) - y).square().mean(1) / 2
    p = torch.full((M,), 1 / M, dtype=torch.float64)
    ours = objective(losses, C, p, affinity.uniform(IDS), penalty=1 / M)
    deviation = b - b.mean(0)
    inverse = torch.linalg.pinv(theta @ theta.T)
    glmm = p @ losses + torch.einsum("md,de,me->", deviation, inverse, deviation)
    torch.testing.assert_close(ours, glmm)


def test_stationarity_is_zero_at_a_stationary_point_and_positive_elsewhere() -> None:
    inner = torch.full((M, K), 1 / K, dtype=torch.float64)
    level = torch.ones(M, K, dtype=torch.float64)  # equal slopes do not change memberships
    assert float(stationarity([torch.zeros(4, dtype=torch.float64)], inner, level, eta=0.5)) < 1e-20
    corner = torch.tensor([[1 - 2e-6, 1e-6, 1e-6]], dtype=torch.float64)
    outward = torch.tensor([[0.0, 1.0, 1.0]], dtype=torch.float64)
    assert float(stationarity([], corner, outward, eta=0.5)) < 1e-9
    assert float(stationarity([], corner, -outward, eta=0.5)) > 1e-12
    assert float(stationarity([torch.ones(4, dtype=torch.float64)], inner, level, eta=0.5)) == pytest.approx(4)


@given(st.integers(0, 1000))
def test_stationarity_approaches_the_gradient_mapping_as_the_step_shrinks(seed: int) -> None:
    d = draw(seed)
    # derivative of the mirror step at step size 0
    limit = d["C"] * (d["slopes"] - (d["C"] * d["slopes"]).sum(1, keepdim=True))
    found = stationarity([], d["C"], d["slopes"], eta=1e-5)
    torch.testing.assert_close(found, limit.abs().sum().square(), rtol=1e-3, atol=1e-8)
