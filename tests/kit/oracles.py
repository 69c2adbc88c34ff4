"""Formulas of the paper as they stand there, to compare the code with. `penalty` is lambda."""

import torch
from torch import Tensor

from ppfl.core.affinity import Affinity


def kl(p: Tensor, q: Tensor) -> Tensor:
    """KL divergence of q from p in nats, which is D_2(p, q) of Eq. (14) on the simplex. p, q: (..., K)."""
    return (torch.xlogy(p, p) - torch.xlogy(p, q)).sum(-1)


def objective(losses: Tensor, memberships: Tensor, weights: Tensor, affinity: Affinity, penalty: float) -> Tensor:
    """Eq. (9): F = sum_i p_i f_i + lambda C'LC. losses, weights: (M,), memberships: (M, K)."""
    return weights @ losses + penalty * affinity.penalty(memberships)


def surrogate(
    losses: Tensor, memberships: Tensor, anchor: Tensor, weights: Tensor, affinity: Affinity, penalty: float
) -> Tensor:
    """Eq. (13), S_t(C): a sum over clients that is never below F and equals F at C = anchor."""
    degree, others = affinity.majorant(anchor)
    own = (degree[:, None] * memberships.square()).sum()
    tangent = (others * anchor).sum() + 2 * (others * (memberships - anchor)).sum()
    return weights @ losses + penalty * (own - tangent)
