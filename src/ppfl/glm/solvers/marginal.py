"""The marginal likelihood: memberships are random effects with a Dirichlet distribution, and are integrated out.

F = - sum_i log sum_g pi_ig exp(l_i(theta, p_ig)) / n + ridge,  pi_ig ~ Dirichlet(alpha) at p_ig,

where l_i is the client's log-likelihood and p_i1, ..., p_iG is its grid of memberships. Mixed models do the same with
normal random effects. It also determines the canonical models: with mixed weights, any larger simplex around the
clients' coefficients fits as well, but it spreads the same clients over a larger volume, where each is less likely. So
the likelihood prefers the smallest simplex that contains them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from ..client_memberships import GridMemberships
from ..likelihoods import NO_CLIENTS, Likelihood
from ..membership_grid import DirichletPrior, Grid
from .newton import best_memberships, membership_deviations
from .parameters import ParameterShape, Regularization, Vector

_NEGLIGIBLE = math.log(1e-20)  # smaller weights are raised to this, because subnormal numbers are slow
_MAX_CACHED = 1 << 26  # logarithms of memberships that are kept between calls
_ALPHA_PRECISION = 1.0  # log alpha ~ N(0, 1), because a few clients say little about it
_MEMBERSHIP_TOL = 1e-8


class Marginal:
    """The objective per sample, with its gradient.

    `client_weight` (M,) reduces the weight of clients whose memberships a coarse grid would miss; starts use it.
    """

    def __init__(
        self,
        data: Likelihood,
        shape: ParameterShape,
        grid: Grid,
        regularization: Regularization,
        client_weight: Tensor | None = None,
    ) -> None:
        self.data, self.shape, self.grid = data, shape, grid
        self.regularization, self.client_weight = regularization, client_weight
        self._n_samples = data.n_samples

    def __call__(self, vector: Vector) -> tuple[float, Vector]:
        at = torch.from_numpy(vector).clone().requires_grad_()
        coefficients, log_alpha = self.shape.unpack(at)
        penalty = self.regularization.value(coefficients) + 0.5 * _ALPHA_PRECISION * log_alpha.square().sum()
        torch.autograd.backward(penalty)
        value = penalty.item()
        for chunk in self._chunks():
            coefficients, log_alpha = self.shape.unpack(at)
            logs = chunk.data.client_log_likelihoods(coefficients, chunk.grid)
            if self.client_weight is not None:
                logs = logs * self.client_weight[chunk.clients, None]
            logs = logs + chunk.prior.log_weights(log_alpha)
            top = logs.detach().amax(1, keepdim=True)
            relative = (logs.detach() - top).clamp_(min=_NEGLIGIBLE).exp_()
            total = relative.sum(1, keepdim=True)
            value -= float((top + total.log()).sum())
            torch.autograd.backward(torch.dot(relative.div_(-total).flatten(), logs.flatten()))
        assert at.grad is not None
        return value / self._n_samples, at.grad.numpy() / self._n_samples

    def with_grid(self, grid: Grid, client_weight: Tensor | None = None) -> Marginal:
        return Marginal(self.data, self.shape, grid, self.regularization, client_weight)

    def subset(self, count: int) -> Marginal:
        """The objective of at most `count` clients, the same ones every time."""
        if self.data.n_clients <= count:
            return self
        some = torch.linspace(0, self.data.n_clients - 1, count, dtype=torch.float64).long()
        regularization = self.regularization.scaled(count / self.data.n_clients)
        return Marginal(self.data.subset(some), self.shape, self.grid.subset(some), regularization)

    def weights_for_coarse_grid(self, vector: Vector) -> Tensor:
        """Client weights (M,) with which no client determines its membership more finely than the grid."""
        k = self.shape.k
        coefficients, _ = self.shape.unpack(torch.from_numpy(vector))
        uniform = torch.full((self.data.n_clients, k), 1 / k, dtype=torch.float64)
        deviation = membership_deviations(coefficients, self.data, uniform).amin(1)
        return (deviation / self.grid.spacing).square().clamp(max=1.0)

    def _chunks(self) -> Iterable[_Chunk]:
        is_small = self.data.n_clients * self.grid.atoms.numel() <= _MAX_CACHED
        return self._cached_chunks if is_small else _make_chunks(self.data, self.grid)

    @cached_property
    def _cached_chunks(self) -> list[_Chunk]:
        return list(_make_chunks(self.data, self.grid))

    def _log_joint(self, vector: Vector, chunks: Iterable[_Chunk]) -> Tensor:
        """Log-likelihood plus log prior of every client and grid point, (M, G)."""
        coefficients, log_alpha = self.shape.unpack(torch.from_numpy(vector))
        return torch.cat([
            chunk.data.client_log_likelihoods(coefficients, chunk.grid) + chunk.prior.log_weights(log_alpha)
            for chunk in chunks
        ])  # fmt: skip

    def log_likelihood(self, vector: Vector) -> float:
        """With memberships integrated out, and without regularization."""
        return float(torch.logsumexp(self._log_joint(vector, self._chunks()), 1).sum())

    def adapted_grid(self, vector: Vector, data: Likelihood) -> Grid:
        """The grid of each client, shrunk around its best membership for these parameters and data."""
        k = self.shape.k
        full = Grid(self.grid.atoms, torch.zeros(data.n_clients, k, dtype=torch.float64))
        if k == 1:
            return full
        coefficients, _ = self.shape.unpack(torch.from_numpy(vector))
        uniform = torch.full((data.n_clients, k), 1 / k, dtype=torch.float64)
        best = best_memberships(coefficients, data, uniform, _MEMBERSHIP_TOL, None, 0.0)
        return full.shrink_around(best, membership_deviations(coefficients, data, best))

    def find_memberships(self, vector: Vector, data: Likelihood) -> GridMemberships:
        """The posterior distribution over each client's grid."""
        if data is self.data:
            return GridMemberships(self.grid, torch.softmax(self._log_joint(vector, self._chunks()), 1))
        grid = self.adapted_grid(vector, data)
        return GridMemberships(grid, torch.softmax(self._log_joint(vector, _make_chunks(data, grid)), 1))

    def without_data(self) -> Marginal:
        return Marginal(NO_CLIENTS, self.shape, self.grid.subset(slice(0)), self.regularization)

    def prior(self, vector: Vector) -> GridMemberships:
        """The distribution of memberships in the population, for one client without data."""
        _, log_alpha = self.shape.unpack(torch.from_numpy(vector))
        grid = Grid(self.grid.atoms, torch.zeros(1, self.shape.k, dtype=torch.float64))
        return GridMemberships(grid, DirichletPrior.of(grid).log_weights(log_alpha).exp())


class _Chunk(NamedTuple):
    """Clients whose data and grids fit in the cache."""

    clients: slice
    data: Likelihood
    grid: Grid
    prior: DirichletPrior


def _make_chunks(data: Likelihood, grid: Grid) -> Iterator[_Chunk]:
    first = 0
    for chunk in data.chunks(len(grid.atoms)):
        clients = slice(first, first + chunk.n_clients)
        own_grid = grid.subset(clients)
        yield _Chunk(clients, chunk, own_grid, DirichletPrior.of(own_grid))
        first = clients.stop
