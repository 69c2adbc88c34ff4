"""The objective F of Eq. (9), its surrogate of Eq. (13), the gradients and the stationarity measure.

All functions take the losses f_i or gradients of the clients as given and never see data. `penalty` is lambda.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from .affinity import Affinity
from .simplex import inside, mirror_step


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


def membership_gradient(
    loss_gradients: Tensor, memberships: Tensor, weights: Tensor, affinity: Affinity, penalty: float
) -> Tensor:
    """Eq. (15): G_i = p_i df_i/dc_i + 2 lambda (LC)_i, (M, K)."""
    return weights[:, None] * loss_gradients + 2 * penalty * affinity.laplacian(memberships)


def client_membership_gradient(
    loss_gradient: Tensor, c: Tensor, weight: Tensor, degree: Tensor, neighbours: Tensor, penalty: float
) -> Tensor:
    """G_i as computed by a client, from its own row of `Affinity.majorant(C^t)` only: the gradient of S_t at c.

    At c = c^t it is the gradient of F. Over several steps the neighbours stay as they were at the start of the round,
    so the client descends on S_t. c, neighbours: (C, K); weight, degree: (C,).
    """
    return weight[:, None] * loss_gradient + 2 * penalty * (degree[:, None] * c - neighbours)


def stationarity(theta_gradient: Iterable[Tensor], memberships: Tensor, gradient: Tensor, eta: float) -> Tensor:
    """Section 3.2: |grad_theta F|^2 + (|C - C_+|_1 / eta)^2, with C_+ the mirror step on the full gradient."""
    theta = sum((leaf.square().sum() for leaf in theta_gradient), torch.zeros((), device=memberships.device))
    moved = memberships - inside(mirror_step(memberships, gradient, eta))
    return theta + (moved.abs().sum() / eta).square()
