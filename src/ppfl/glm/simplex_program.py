"""Quadratic programs on the simplex, one for each client, solved exactly and together."""

from __future__ import annotations

import torch
from torch import Tensor


def simplex_minimum(H: Tensor, f: Tensor, start: Tensor) -> Tensor:
    """argmin_c c'Hc / 2 + f'c over the simplex: H (M, K, K) positive definite, f (M, K), start (M, K) feasible.

    A primal active-set method: minimise over the memberships that are free, stop where one would become negative and
    fix it there; where none would, free the one whose multiplier says it would help most. It ends after a few steps.

    >>> simplex_minimum(torch.eye(2)[None], torch.tensor([[0.0, 0.5]]), torch.tensor([[0.5, 0.5]]))
    tensor([[0.7500, 0.2500]])
    """
    k = f.shape[1]
    c, free = start.clone(), start > 0
    for _ in range(20 * k):
        target, multiplier = _minimum_over(H, f, free)
        step = target - c
        room = torch.where(free & (step < 0), c / -step, torch.inf)  # how far until it becomes 0
        length, blocking = room.min(1)
        stopped = length < 1
        c = torch.where(stopped[:, None], c + length.clamp(max=1)[:, None] * step, target).clamp_min(0)
        c[stopped, blocking[stopped]] = 0.0
        free[stopped, blocking[stopped]] = False
        slope = (H @ c[..., None])[..., 0] + f
        gain = torch.where(free, 0.0, multiplier[:, None] - slope)
        most, which = gain.max(1)
        wanted = ~stopped & (most > 1e-12 * slope.abs().amax(1))
        if not bool((stopped | wanted).any()):
            break
        free[wanted, which[wanted]] = True
    return c / c.sum(1, keepdim=True)


def _minimum_over(H: Tensor, f: Tensor, free: Tensor) -> tuple[Tensor, Tensor]:
    """The minimum on the plane sum c = 1 with all that is not free at 0, and the multiplier of the plane."""
    m, k = f.shape
    both = free[:, :, None] & free[:, None]
    system = H.new_zeros(m, k + 1, k + 1)
    system[:, :k, :k] = torch.where(both, H, torch.eye(k, dtype=H.dtype) * ~free[:, :, None])
    system[:, :k, k] = -free.to(H.dtype)
    system[:, k, :k] = free.to(H.dtype)
    right = torch.cat([torch.where(free, -f, 0.0), f.new_ones(m, 1)], 1)
    found = torch.linalg.solve(system, right)
    return torch.where(free, found[:, :k], 0.0), found[:, k]
