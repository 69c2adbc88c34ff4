"""The paper's objective, Eq. (9), as a function of the coefficients, with the best memberships for each.

F(theta) = min_C - sum_i l_i(theta, c_i) / n + lambda <C, L C>  + ridges

At the best memberships the gradient of F is that of the sum with C fixed (the envelope theorem), so L-BFGS can minimise
it as a smooth function of theta.
"""

from __future__ import annotations

from copy import copy

import torch
from torch import Tensor

from ...core.affinity import Affinity
from ..client_memberships import PointMemberships
from ..gaussian_moments import NO_CLIENTS
from ..likelihoods import Coefficients, Likelihood
from .newton import best_memberships, client_losses, loss_derivatives
from .parameters import ParameterShape, Regularization, Vector


class Profile:
    """The objective per sample, with its gradient. Each call starts from the memberships of the previous one."""

    def __init__(
        self,
        data: Likelihood,
        shape: ParameterShape,
        regularization: Regularization,
        affinity: Affinity | None,
        penalty: float,
        tol: float,
        start: Tensor,
    ) -> None:
        self.data, self.shape, self.regularization, self.tol = data, shape, regularization, tol
        self.affinity = affinity if penalty > 0 else None
        self.penalty = penalty
        self.memberships = start  # (M, K)

    def __call__(self, vector: Vector) -> tuple[float, Vector]:
        at = torch.from_numpy(vector).clone().requires_grad_()
        coefficients, _ = self.shape.unpack(at)
        self.memberships = self._best_memberships(Coefficients(*(t.detach() for t in coefficients)))
        value = client_losses(coefficients, self.data, self.memberships).sum()
        value = value + self.regularization.value(coefficients) / self.data.n_samples
        torch.autograd.backward(value)
        assert at.grad is not None
        penalty = 0.0 if self.affinity is None else self.penalty * float(self.affinity.penalty(self.memberships))
        return value.item() + penalty, at.grad.numpy()

    def _best_memberships(self, coefficients: Coefficients) -> Tensor:
        return best_memberships(coefficients, self.data, self.memberships, 0.01 * self.tol, self.affinity, self.penalty)

    def log_likelihood(self, vector: Vector) -> float:
        """At the best memberships."""
        coefficients, _ = self.shape.unpack(torch.from_numpy(vector))
        losses = client_losses(coefficients, self.data, self._best_memberships(coefficients))
        return -float(losses.sum()) * self.data.n_samples

    def find_memberships(self, vector: Vector, data: Likelihood) -> PointMemberships:
        """With the penalty for the clients of the fit, and without it for others."""
        coefficients, _ = self.shape.unpack(torch.from_numpy(vector))
        if data is self.data:
            return PointMemberships(self._best_memberships(coefficients))
        start = self.memberships.mean(0).expand(data.n_clients, -1).contiguous()
        return PointMemberships(best_memberships(coefficients, data, start, 0.01 * self.tol, None, 0.0))

    def prior(self, vector: Vector) -> PointMemberships:
        return PointMemberships(self.memberships).average()

    def without_data(self) -> Profile:
        copied = copy(self)
        copied.data, copied.affinity, copied.memberships = NO_CLIENTS, None, self.memberships.mean(0, keepdim=True)
        return copied

    def membership_gap(self, vector: Vector) -> float:
        """A first-order bound on how much F could fall if only the memberships changed: 0 at the best ones."""
        coefficients, _ = self.shape.unpack(torch.from_numpy(vector))
        gradient, _ = loss_derivatives(coefficients, self.data, self.memberships)
        if self.affinity is not None:
            gradient = gradient + 2 * self.penalty * self.affinity.laplacian(self.memberships)
        return float(((gradient * self.memberships).sum(1) - gradient.amin(1)).sum())
