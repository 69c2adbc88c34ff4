"""The best membership of each client for given canonical models, by Newton steps on the simplex."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ...core.affinity import Affinity
from ...core.simplex import minimize_on_simplex, project
from ..likelihoods import Coefficients, Likelihood

_MAX_SWEEPS = 200
_MAX_HALVINGS = 30
_MAX_CONJUGATE_GRADIENTS = 50


def client_losses(coefficients: Coefficients, data: Likelihood, c: Tensor) -> Tensor:
    """-l_i / n for memberships (M, K): (M,)."""
    return -data.client_log_likelihoods(coefficients, c[..., None])[:, 0] / data.n_samples


def loss_derivatives(coefficients: Coefficients, data: Likelihood, c: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients (M, K) and Hessians (M, K, K) of the clients' losses."""
    with torch.enable_grad():
        at = c.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(client_losses(coefficients, data, at).sum(), at, create_graph=True)
        hessian = [torch.autograd.grad(gradient[:, k].sum(), at, retain_graph=True)[0] for k in range(c.shape[1])]
    return gradient.detach(), torch.stack(hessian, 1)


def best_memberships(
    coefficients: Coefficients, data: Likelihood, c: Tensor, tol: float, affinity: Affinity | None, penalty: float
) -> Tensor:
    """argmin_C of the losses + penalty <C, L C>, starting from c, to a duality gap of at most tol.

    Each sweep solves one quadratic program per client exactly, and halves the step until the client's loss falls. If a
    penalty couples the clients, each program uses the separable upper bound of Eq. (13), and each sweep starts with a
    joint Newton step of all clients.
    """
    if c.shape[1] == 1:
        return c
    for _ in range(_MAX_SWEEPS):
        gradient, hessian = loss_derivatives(coefficients, data, c)
        degree, neighbors = c.new_zeros(len(c)), torch.zeros_like(c)
        if affinity is not None:
            joint = _joint_step(c, gradient, hessian, affinity, penalty)
            before, after = (
                float(client_losses(coefficients, data, at).sum() + penalty * affinity.penalty(at)) for at in (c, joint)
            )
            if after < before:
                c = joint
                gradient, hessian = loss_derivatives(coefficients, data, c)
            degree, neighbors = affinity.majorant(c)
        gradient = gradient + 2 * penalty * (degree[:, None] * c - neighbors)
        if float(((gradient * c).sum(1) - gradient.amin(1)).sum()) <= tol:
            break
        H = _make_convex(hessian) + _times_identity(2 * penalty * degree, c.shape[1])
        target = minimize_on_simplex(H, gradient - (H @ c[..., None])[..., 0], c)

        def upper_bound(at: Tensor, degree: Tensor = degree, neighbors: Tensor = neighbors) -> Tensor:
            coupling = degree * at.square().sum(1) - 2 * (neighbors * at).sum(1)
            return client_losses(coefficients, data, at) + penalty * coupling

        c, decrease = _line_search(upper_bound, c, target)
        if decrease <= 0:
            break  # double precision allows no further improvement
    return c


def membership_deviations(coefficients: Coefficients, data: Likelihood, c: Tensor) -> Tensor:
    """Standard deviations (M, K) of the memberships given the data, from the Hessian at c."""
    _, hessian = loss_derivatives(coefficients, data, c)
    k = c.shape[1]
    basis = torch.linalg.qr(torch.eye(k, dtype=c.dtype)[:, 1:] - 1 / k)[0]  # (K, K - 1), directions that sum to 0
    information = basis.T @ (data.n_samples * hessian) @ basis
    lowest = torch.linalg.eigvalsh(information)[:, 0]
    is_known = lowest > 1  # else the deviation is larger than the simplex
    information = torch.where(is_known[:, None, None], information, torch.eye(k - 1, dtype=c.dtype))
    covariance = basis @ torch.linalg.inv(information) @ basis.T
    return torch.where(is_known[:, None], covariance.diagonal(dim1=1, dim2=2).clamp_min(0).sqrt(), 1.0)


def _joint_step(c: Tensor, gradient: Tensor, hessian: Tensor, affinity: Affinity, penalty: float) -> Tensor:
    """A Newton step of all clients together in their positive memberships, by conjugate gradients.

    Without it the sweeps converge to the same point, but slowly if the penalty is large.
    """
    free = (c > 0).to(c.dtype)
    convex = _make_convex(hessian)

    def restrict(v: Tensor) -> Tensor:
        """Onto changes of the positive memberships that sum to 0."""
        return free * (v - (free * v).sum(1, keepdim=True) / free.sum(1, keepdim=True))

    def apply_hessian(v: Tensor) -> Tensor:
        return restrict((convex @ v[..., None])[..., 0] + 2 * penalty * affinity.laplacian(v))

    step, residual = torch.zeros_like(c), -restrict(gradient + 2 * penalty * affinity.laplacian(c))
    direction, size = residual, float(residual.square().sum())
    enough = 1e-4 * size
    for _ in range(_MAX_CONJUGATE_GRADIENTS):
        if size <= enough or size == 0:
            break
        product = apply_hessian(direction)
        length = size / float((direction * product).sum())
        step, residual = step + length * direction, residual - length * product
        size, last = float(residual.square().sum()), size
        direction = residual + size / last * direction
    return project(c + step)


def _make_convex(hessian: Tensor) -> Tensor:
    """Hessians (M, K, K), shifted to be positive definite where a loss is not convex; the line search does the rest."""
    shift = (1e-12 - torch.linalg.eigvalsh(hessian)[:, 0]).clamp_min(0) + 1e-10
    return hessian + _times_identity(shift, hessian.shape[1])


def _times_identity(size: Tensor, k: int) -> Tensor:
    return size[:, None, None] * torch.eye(k, dtype=size.dtype)


def _line_search(objective: Callable[[Tensor], Tensor], c: Tensor, target: Tensor) -> tuple[Tensor, float]:
    """Halve each client's step from c to the target until its objective does not rise; also returns the decrease."""
    before = objective(c)
    step = torch.ones(len(c), 1, dtype=c.dtype)
    for _ in range(_MAX_HALVINGS):
        tried = c + step * (target - c)
        after = objective(tried)
        is_higher = after > before
        if not bool(is_higher.any()):
            break
        step = torch.where(is_higher[:, None], step / 2, step)
    decrease = torch.where(is_higher, 0.0, before - after).sum() - 1e-15 * before.abs().sum()
    return torch.where(is_higher[:, None], c, tried), float(decrease)
