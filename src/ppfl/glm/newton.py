"""The best membership of each client where canonical models are given: Newton steps on the simplex."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..core.affinity import Affinity
from ..core.simplex import project
from ..core.simplex_program import minimize_on_simplex
from .likelihoods import Coefficients, Likelihood

_SWEEPS = 200
_HALVINGS = 30
_CONJUGATE = 50


def losses_of(coefficients: Coefficients, data: Likelihood, c: Tensor) -> Tensor:
    """-l_i / n, (M,), of memberships (M, K)."""
    return -data.of_clients(coefficients, c[:, None])[:, 0] / data.n_samples


def derivatives(coefficients: Coefficients, data: Likelihood, c: Tensor) -> tuple[Tensor, Tensor]:
    """Slopes (M, K) and curvatures (M, K, K) of the clients' losses."""
    with torch.enable_grad():
        at = c.detach().requires_grad_()
        (slope,) = torch.autograd.grad(losses_of(coefficients, data, at).sum(), at, create_graph=True)
        curvature = [torch.autograd.grad(slope[:, k].sum(), at, retain_graph=True)[0] for k in range(c.shape[1])]
    return slope.detach(), torch.stack(curvature, 1)


def best_memberships(
    coefficients: Coefficients, data: Likelihood, c: Tensor, tol: float, affinity: Affinity | None, penalty: float
) -> Tensor:
    """argmin_C of the losses + penalty <C, L C>, from c; the tolerance bounds what is left to gain.

    A quadratic program for each client, solved exactly, halved until the client's part falls; clients are coupled
    through the surrogate of Eq. (13), which lies above the penalty, and through Newton steps of all of them.
    """
    if c.shape[1] == 1:
        return c
    for _ in range(_SWEEPS):
        slope, curvature = derivatives(coefficients, data, c)
        degree, others = c.new_zeros(len(c)), torch.zeros_like(c)
        if affinity is not None:
            ahead = _joint_step(c, slope, curvature, affinity, penalty)
            before, after = (
                float(losses_of(coefficients, data, at).sum() + penalty * affinity.penalty(at)) for at in (c, ahead)
            )
            if after < before:
                c = ahead
                slope, curvature = derivatives(coefficients, data, c)
            degree, others = affinity.majorant(c)
        slope = slope + 2 * penalty * (degree[:, None] * c - others)
        if float(((slope * c).sum(1) - slope.amin(1)).sum()) <= tol:
            break
        metric = _convex(curvature) + _times_identity(2 * penalty * degree, c.shape[1])
        target = minimize_on_simplex(metric, slope - (metric @ c[..., None])[..., 0], c)

        def parts(at: Tensor, degree: Tensor = degree, others: Tensor = others) -> Tensor:
            pull = degree * at.square().sum(1) - 2 * (others * at).sum(1)
            return losses_of(coefficients, data, at) + penalty * pull

        c, fall = _halved_until_lower(parts, c, target)
        if fall <= 0:
            break  # all that double precision gives
    return c


def deviations_of(coefficients: Coefficients, data: Likelihood, c: Tensor) -> Tensor:
    """How well a client's data fix its membership: standard deviations (M, K), by the curvature at c."""
    _, curvature = derivatives(coefficients, data, c)
    k = c.shape[1]
    basis = torch.linalg.qr(torch.eye(k, dtype=c.dtype)[:, 1:] - 1 / k)[0]  # (K, K - 1), of changes that sum to 0
    inside = basis.T @ (data.n_samples * curvature) @ basis
    lowest = torch.linalg.eigvalsh(inside)[:, 0]
    known = lowest > 1  # else by more than the simplex is wide
    inside = torch.where(known[:, None, None], inside, torch.eye(k - 1, dtype=c.dtype))
    covariance = basis @ torch.linalg.inv(inside) @ basis.T
    return torch.where(known[:, None], covariance.diagonal(dim1=1, dim2=2).clamp_min(0).sqrt(), 1.0)


def _joint_step(c: Tensor, slope: Tensor, curvature: Tensor, affinity: Affinity, penalty: float) -> Tensor:
    """All clients together, within the memberships that are not 0, by conjugate gradients.

    The surrogate alone ends at the same point, but slowly where the penalty is large.
    """
    free = (c > 0).to(c.dtype)
    convex = _convex(curvature)

    def kept(v: Tensor) -> Tensor:
        return free * (v - (free * v).sum(1, keepdim=True) / free.sum(1, keepdim=True))

    def times(v: Tensor) -> Tensor:
        return kept((convex @ v[..., None])[..., 0] + 2 * penalty * affinity.laplacian(v))

    step, residual = torch.zeros_like(c), -kept(slope + 2 * penalty * affinity.laplacian(c))
    direction, size = residual, float(residual.square().sum())
    enough = 1e-4 * size
    for _ in range(_CONJUGATE):
        if size <= enough or size == 0:
            break
        curved = times(direction)
        length = size / float((direction * curved).sum())
        step, residual = step + length * direction, residual - length * curved
        size, last = float(residual.square().sum()), size
        direction = residual + size / last * direction
    return project(c + step)


def _convex(curvature: Tensor) -> Tensor:
    """Curvatures (M, K, K), made positive where a loss is not convex; step halving does the rest."""
    lift = (1e-12 - torch.linalg.eigvalsh(curvature)[:, 0]).clamp_min(0) + 1e-10
    return curvature + _times_identity(lift, curvature.shape[1])


def _times_identity(size: Tensor, k: int) -> Tensor:
    return size[:, None, None] * torch.eye(k, dtype=size.dtype)


def _halved_until_lower(parts: Callable[[Tensor], Tensor], c: Tensor, target: Tensor) -> tuple[Tensor, float]:
    """From c toward the target, client by client as far as its own part does not rise; and by how much all fell."""
    before = parts(c)
    step = torch.ones(len(c), 1, dtype=c.dtype)
    for _ in range(_HALVINGS):
        tried = c + step * (target - c)
        after = parts(tried)
        higher = after > before
        if not bool(higher.any()):
            break
        step = torch.where(higher[:, None], step / 2, step)
    fall = torch.where(higher, 0.0, before - after).sum() - 1e-15 * before.abs().sum()
    return torch.where(higher[:, None], c, tried), float(fall)
