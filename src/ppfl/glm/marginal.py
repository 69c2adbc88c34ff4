"""Memberships as random effects: drawn from a Dirichlet distribution, and integrated out.

F = - sum_i log sum_g pi_ig exp(l_i(theta, p_ig)) / n + ridge,  pi_ig ~ Dirichlet(alpha) at p_ig,

with l_i the client's log-likelihood and p_i1, ..., p_iG the client's grid of memberships. It is what mixed models do
with their normal random effects, and it answers what point estimates leave open: with mixed weights any larger simplex
around the clients' coefficients fits as well, but it spreads the same clients over more room, so the likelihood takes
the smallest that holds them.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .grids import Grid
from .likelihoods import NOBODY, Likelihood
from .newton import best_memberships, deviations_of
from .placement import Spread
from .vectors import Hold, Shape, Vector

_NEGLIGIBLE = 1e-20  # a membership's weight in a gradient; smaller ones would only slow the processor down
_HOLD_OF_ALPHA = 1.0  # as log alpha ~ N(0, 1) would: few clients say little of it
_PLACED_TO = 1e-8


class Marginal:
    """The objective, per sample, with its gradient.

    `patience` (M,) counts a client's data for less, so that a coarse grid does not miss it: for starts.
    """

    def __init__(self, data: Likelihood, shape: Shape, grid: Grid, hold: Hold, patience: Tensor | None = None) -> None:
        self.data, self.shape, self.grid, self.hold, self.patience = data, shape, grid, hold, patience

    def __call__(self, vector: Vector) -> tuple[float, Vector]:
        at = torch.from_numpy(vector).clone().requires_grad_()
        value = 0.0
        for piece, clients in self._pieces(self.data):
            coefficients, log_alpha = self.shape.unpack(at)
            grid = self.grid.of(clients)
            logs = piece.of_clients(coefficients, grid)
            if self.patience is not None:
                logs = logs * self.patience[clients, None]
            logs = logs + grid.log_prior(log_alpha)
            value -= float(torch.logsumexp(logs.detach(), 1).sum()) / self.data.n_samples
            likely = torch.softmax(logs.detach(), 1)
            likely[likely < _NEGLIGIBLE] = 0.0
            torch.autograd.backward(-(likely * logs).sum() / self.data.n_samples)
        coefficients, log_alpha = self.shape.unpack(at)
        held = self.hold.value(coefficients) + 0.5 * _HOLD_OF_ALPHA * log_alpha.square().sum()
        torch.autograd.backward(held / self.data.n_samples)
        assert at.grad is not None
        return value + held.item() / self.data.n_samples, at.grad.numpy()

    def on(self, grid: Grid, patience: Tensor | None = None) -> Marginal:
        return Marginal(self.data, self.shape, grid, self.hold, patience)

    def patience_for(self, vector: Vector) -> Tensor:
        """(M,): so that no client is surer of its membership than the grid is fine."""
        k = self.shape.k
        coefficients, _ = self.shape.unpack(torch.from_numpy(vector))
        level = torch.full((self.data.n_clients, k), 1 / k, dtype=torch.float64)
        deviation = deviations_of(coefficients, self.data, level).amin(1)
        return (deviation / self.grid.spacing).square().clamp(max=1.0)

    def _pieces(self, data: Likelihood) -> Iterator[tuple[Likelihood, slice]]:
        first = 0
        for piece in data.pieces(len(self.grid.atoms)):
            yield piece, slice(first, first + piece.n_clients)
            first += piece.n_clients

    def _logs(self, vector: Vector, data: Likelihood, grid: Grid) -> Tensor:
        """(M, G)."""
        coefficients, log_alpha = self.shape.unpack(torch.from_numpy(vector))
        pieces = (
            piece.of_clients(coefficients, grid.of(clients)) + grid.of(clients).log_prior(log_alpha)
            for piece, clients in self._pieces(data)
        )
        return torch.cat(list(pieces))

    def log_likelihood(self, vector: Vector) -> float:
        """Memberships integrated out, nothing held."""
        return float(torch.logsumexp(self._logs(vector, self.data, self.grid), 1).sum())

    def adapted(self, vector: Vector, data: Likelihood) -> Grid:
        """The grid that these coefficients and these data ask for."""
        k = self.shape.k
        whole = Grid(self.grid.atoms, torch.zeros(data.n_clients, k, dtype=torch.float64))
        if k == 1:
            return whole
        coefficients, _ = self.shape.unpack(torch.from_numpy(vector))
        level = torch.full((data.n_clients, k), 1 / k, dtype=torch.float64)
        best = best_memberships(coefficients, data, level, _PLACED_TO, None, 0.0)
        return whole.around(best, deviations_of(coefficients, data, best))

    def place(self, vector: Vector, data: Likelihood) -> Spread:
        """How likely each membership is, client by client."""
        grid = self.grid if data is self.data else self.adapted(vector, data)
        return Spread(grid, torch.softmax(self._logs(vector, data, grid), 1))

    def without_data(self) -> Marginal:
        return Marginal(NOBODY, self.shape, self.grid.of(slice(0)), self.hold)

    def anybody(self, vector: Vector) -> Spread:
        """A client of which nothing is known: the distribution of them all."""
        _, log_alpha = self.shape.unpack(torch.from_numpy(vector))
        grid = Grid(self.grid.atoms, torch.zeros(1, self.shape.k, dtype=torch.float64))
        return Spread(grid, grid.log_prior(log_alpha).exp())
