"""Quadratic programs over the simplex, one per row, solved exactly and all at the same time.

The solver is a primal active-set method. Each step minimises over the free coordinates. If one of them would become
negative, the step stops there and that coordinate is fixed at 0. Otherwise the fixed coordinate that lowers the
objective fastest becomes free. A row is done when no coordinate does, usually after a few steps.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .simplex import project

MAX_STEPS = 20  # per coordinate; rounding errors could make the method cycle
PROXIMAL_PASSES = 3
PROXIMAL_WEIGHT = 1e-12  # relative to H: far above rounding errors, far below any curvature that matters
BLOCK = 1 << 20  # numbers in one tensor when all rows share H, so that memory does not grow with the rows
MANY_CORNERS = 12  # from here on, gradient steps first are faster
GRADIENT_STEPS = 20


def minimize_on_simplex(H: Tensor, f: Tensor, start: Tensor) -> Tensor:
    """argmin over c on the simplex of c'Hc / 2 + f'c, one problem per row: (M, K).

    H: positive semi-definite, (M, K, K) or one (K, K) for all rows; f: (M, K); start: (M, K), rows on the simplex.

    >>> minimize_on_simplex(torch.eye(2), torch.tensor([[0.0, 0.5]]), torch.tensor([[0.5, 0.5]]))
    tensor([[0.7500, 0.2500]])
    """
    weight = _proximal_weight(H)
    if not bool((weight > 0).any()):
        return _minimize_convex(H, f, start)
    # Where H is singular, a face can have many minima. A small proximal term makes the one nearest to the previous
    # pass the only one, so that every system of equations has a solution; its effect vanishes over the passes.
    convex = H + weight[..., None, None] * torch.eye(f.shape[1], dtype=H.dtype, device=H.device)
    c = start
    for _ in range(PROXIMAL_PASSES):
        c = _minimize_convex(convex, f - weight[..., None] * c, c)
    return c


def nearest_mixtures(points: Tensor, corners: Tensor) -> Tensor:
    """argmin over c on the simplex of |c corners - point|^2, one row per point: (M, K).

    points: (M, d); corners: (K, d), which may coincide or be affinely dependent.

    >>> nearest_mixtures(torch.tensor([[0.25, 9.0]]), torch.tensor([[0.0, 0.0], [1.0, 0.0]]))
    tensor([[0.7500, 0.2500]])
    """
    center = corners.double().mean(0)  # moving everything changes no distance, and saves digits
    A = corners.double() - center
    H, inverse = A @ A.T, torch.linalg.pinv(A)
    found = []
    for block in torch.split(points, max(1, BLOCK // len(A))):
        b = block.double() - center
        f = -b @ A.T
        # the nearest point in the plane through all corners, projected onto the simplex
        start = project(b @ inverse + 1 / len(A))
        if len(A) >= MANY_CORNERS:
            start = _gradient_steps(H, f, start)
        found.append(minimize_on_simplex(H, f, start))
    return torch.cat(found).to(points)


def _gradient_steps(H: Tensor, f: Tensor, start: Tensor) -> Tensor:
    """Accelerated projected gradient with one H for all rows: most coordinates that end at 0 are at 0 afterwards."""
    step_size = 1 / torch.linalg.eigvalsh(H)[-1].clamp_min(torch.finfo(H.dtype).tiny)
    c = ahead = start
    for t in range(GRADIENT_STEPS):
        before, c = c, project(ahead - step_size * (ahead @ H + f))
        ahead = c + t / (t + 3) * (c - before)
    return c


def _proximal_weight(H: Tensor) -> Tensor:
    """0 where H is positive definite along the simplex, else a small number: (M,), or () for a shared H."""
    k = H.shape[-1]
    size = H.diagonal(dim1=-2, dim2=-1).amax(-1)
    size = torch.where(size > 0, size, 1.0)  # H = 0 makes it a linear program
    weight = max(PROXIMAL_WEIGHT, 4 * k * torch.finfo(H.dtype).eps) * size
    # adding a constant to H adds a constant on the simplex, so only directions along the simplex matter
    shifted = H + size[..., None, None] - weight[..., None, None] * torch.eye(k, dtype=H.dtype, device=H.device)
    is_singular = torch.linalg.cholesky_ex(shifted).info > 0
    return torch.where(is_singular, weight, 0.0)


def _minimize_convex(H: Tensor, f: Tensor, start: Tensor) -> Tensor:
    """Like minimize_on_simplex, for H that is positive definite along the simplex."""
    if H.dim() == 3:
        return _active_set(H, f, start)
    rows = max(1, BLOCK // (f.shape[1] + 1) ** 2)
    blocks = zip(torch.split(f, rows), torch.split(start, rows), strict=True)
    return torch.cat([_active_set(H, *block) for block in blocks])


def _active_set(H: Tensor, f: Tensor, start: Tensor) -> Tensor:
    c, free = start, start > 0
    found, left = torch.empty_like(start), torch.arange(len(start), device=start.device)  # left: rows not done yet
    for _ in range(MAX_STEPS * f.shape[1]):
        target, multiplier = _minimize_free(H, f, free)
        step = target - c
        steps_to_zero = torch.where(free & (step < 0), c / -step, torch.inf)
        length, blocking = steps_to_zero.min(1)
        blocked = length < 1
        c = torch.where(blocked[:, None], c + length.clamp(max=1)[:, None] * step, target).clamp_min(0)
        c[blocked, blocking[blocked]] = 0.0
        free[blocked, blocking[blocked]] = False
        gradient = (H @ c[..., None])[..., 0] + f
        gain = torch.where(free, 0.0, multiplier[:, None] - gradient)
        largest, which = gain.max(1)
        rounding = 4 * torch.finfo(f.dtype).eps * f.abs().amax(1)
        improves = ~blocked & (largest > 1e-12 * gradient.abs().amax(1)) & (largest > rounding)
        free[improves, which[improves]] = True
        found[left] = c
        go_on = (blocked | improves).nonzero()[:, 0]
        if len(go_on) == 0:
            break
        left, c, f, free = left[go_on], c[go_on], f[go_on], free[go_on]
        H = H[go_on] if H.dim() == 3 else H
    return found / found.sum(1, keepdim=True)


def _minimize_free(H: Tensor, f: Tensor, free: Tensor) -> tuple[Tensor, Tensor]:
    """The minimum on the plane sum c = 1 with all other coordinates at 0, and the multiplier of the plane."""
    m, k = f.shape
    both_free = free[:, :, None] & free[:, None]
    system = H.new_zeros(m, k + 1, k + 1)
    system[:, :k, :k] = torch.where(both_free, H, torch.eye(k, dtype=H.dtype, device=H.device) * ~free[:, :, None])
    system[:, :k, k] = -free.to(H.dtype)
    system[:, k, :k] = free.to(H.dtype)
    right = torch.cat([torch.where(free, -f, 0.0), f.new_ones(m, 1)], 1)
    found = torch.linalg.solve(system, right)
    return torch.where(free, found[:, :k], 0.0), found[:, k]
