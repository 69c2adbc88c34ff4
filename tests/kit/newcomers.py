"""The search for a membership, on problems with a known solution."""

import torch
from torch import Tensor

from ppfl.algorithms.local.memberships import best_memberships
from ppfl.core.simplex_program import minimize_on_simplex


def quadratic_minima(H: Tensor, f: Tensor) -> tuple[Tensor, Tensor]:
    """c'Hc / 2 + f'c on the simplex, (M,), where the search for a newcomer's membership ends, and at its minimum."""

    def loss_at(c: Tensor) -> tuple[Tensor, Tensor]:
        slope = (H @ c[:, :, None])[:, :, 0] + f
        return slope, (c * (slope + f)).sum(1) / 2

    even = torch.full_like(f, 1 / f.shape[1])
    found, loss = best_memberships(loss_at, even, 500)
    torch.testing.assert_close(loss_at(found)[1], loss)
    return loss, loss_at(minimize_on_simplex(H, f, even))[1]
