"""The paper's objective, Eq. (9), as a function of the coefficients alone: the best memberships are found for each.

F(theta) = min_C - sum_i l_i(theta, c_i) / n + lambda <C, L C>  + ridges

Where memberships are at their best, the slope of F is that of the sum with C held (the envelope theorem), so L-BFGS
sees a smooth function and no block waits for the other. F never rises.
"""

from __future__ import annotations

from copy import copy

import torch
from torch import Tensor

from ..core.affinity import Affinity
from .likelihoods import NOBODY, Coefficients, Likelihood
from .newton import best_memberships, derivatives, losses_of
from .placement import Points
from .vectors import Hold, Shape, Vector


class Profile:
    """The objective, per sample, with its gradient; the memberships of the last call are where the next one starts."""

    def __init__(
        self,
        data: Likelihood,
        shape: Shape,
        hold: Hold,
        affinity: Affinity | None,
        penalty: float,
        tol: float,
        start: Tensor,
    ) -> None:
        self.data, self.shape, self.hold, self.tol = data, shape, hold, tol
        self.affinity = affinity if penalty > 0 else None
        self.penalty = penalty
        self.memberships = start  # (M, K)

    def __call__(self, vector: Vector) -> tuple[float, Vector]:
        at = torch.from_numpy(vector).clone().requires_grad_()
        coefficients, _ = self.shape.unpack(at)
        self.memberships = self._best(Coefficients(*(t.detach() for t in coefficients)))
        value = losses_of(coefficients, self.data, self.memberships).sum()
        value = value + self.hold.value(coefficients) / self.data.n_samples
        torch.autograd.backward(value)
        assert at.grad is not None
        pull = 0.0 if self.affinity is None else self.penalty * float(self.affinity.penalty(self.memberships))
        return value.item() + pull, at.grad.numpy()

    def _best(self, coefficients: Coefficients) -> Tensor:
        return best_memberships(coefficients, self.data, self.memberships, 0.01 * self.tol, self.affinity, self.penalty)

    def log_likelihood(self, vector: Vector) -> float:
        """At the memberships found."""
        coefficients, _ = self.shape.unpack(torch.from_numpy(vector))
        return -float(losses_of(coefficients, self.data, self._best(coefficients)).sum()) * self.data.n_samples

    def place(self, vector: Vector, data: Likelihood) -> Points:
        """Clients of the fit as the penalty wants them; others by their own data alone."""
        coefficients, _ = self.shape.unpack(torch.from_numpy(vector))
        if data is self.data:
            return Points(self._best(coefficients))
        start = self.memberships.mean(0).expand(data.n_clients, -1).contiguous()
        return Points(best_memberships(coefficients, data, start, 0.01 * self.tol, None, 0.0))

    def anybody(self, vector: Vector) -> Points:
        return Points(self.memberships).middle()

    def without_data(self) -> Profile:
        kept = copy(self)
        kept.data, kept.affinity, kept.memberships = NOBODY, None, self.memberships.mean(0, keepdim=True)
        return kept

    def gap(self, vector: Vector) -> float:
        """By how much F could fall, by a first-order bound, if memberships alone moved: 0 at their best."""
        coefficients, _ = self.shape.unpack(torch.from_numpy(vector))
        slope, _ = derivatives(coefficients, self.data, self.memberships)
        if self.affinity is not None:
            slope = slope + 2 * self.penalty * self.affinity.laplacian(self.memberships)
        return float(((slope * self.memberships).sum(1) - slope.amin(1)).sum())
