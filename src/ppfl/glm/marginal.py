"""Memberships as random effects: drawn from a Dirichlet distribution, and integrated out.

F = - sum_i log sum_g pi_ig exp(l_i(theta, p_ig)) / n + ridge,  pi_ig ~ Dirichlet(alpha) at p_ig,

with l_i the client's log-likelihood and p_i1, ..., p_iG the client's grid of memberships. It is what mixed models do
with their normal random effects, and it answers what point estimates leave open: with mixed weights any larger simplex
around the clients' coefficients fits as well, but it spreads the same clients over more room, so the likelihood takes
the smallest that holds them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from .grids import Grid, Prior
from .likelihoods import NOBODY, Likelihood
from .newton import best_memberships, deviations_of
from .placement import Spread
from .vectors import Hold, Shape, Vector

_NEGLIGIBLE = math.log(1e-20)  # of a membership's weight; numbers that small would only slow the processor down
_NUMBERS_KEPT = 1 << 26  # of the memberships' logarithms
_HOLD_OF_ALPHA = 1.0  # as log alpha ~ N(0, 1) would: few clients say little of it
_PLACED_TO = 1e-8


class Marginal:
    """The objective, per sample, with its gradient.

    `patience` (M,) counts a client's data for less, so that a coarse grid does not miss it: for starts.
    """

    def __init__(self, data: Likelihood, shape: Shape, grid: Grid, hold: Hold, patience: Tensor | None = None) -> None:
        self.data, self.shape, self.grid, self.hold, self.patience = data, shape, grid, hold, patience
        self._n_samples = data.n_samples

    def __call__(self, vector: Vector) -> tuple[float, Vector]:
        at = torch.from_numpy(vector).clone().requires_grad_()
        coefficients, log_alpha = self.shape.unpack(at)
        held = self.hold.value(coefficients) + 0.5 * _HOLD_OF_ALPHA * log_alpha.square().sum()
        torch.autograd.backward(held)
        value = held.item()
        for piece in self._pieces():
            coefficients, log_alpha = self.shape.unpack(at)
            logs = piece.data.of_clients(coefficients, piece.grid)
            if self.patience is not None:
                logs = logs * self.patience[piece.clients, None]
            logs = logs + piece.prior.log_weights(log_alpha)
            top = logs.detach().amax(1, keepdim=True)
            likely = (logs.detach() - top).clamp_(min=_NEGLIGIBLE).exp_()
            total = likely.sum(1, keepdim=True)
            value -= float((top + total.log()).sum())
            torch.autograd.backward(torch.dot(likely.div_(-total).flatten(), logs.flatten()))
        assert at.grad is not None
        return value / self._n_samples, at.grad.numpy() / self._n_samples

    def on(self, grid: Grid, patience: Tensor | None = None) -> Marginal:
        return Marginal(self.data, self.shape, grid, self.hold, patience)

    def of_some(self, count: int) -> Marginal:
        """Of so many clients at most, the same ones every time."""
        if self.data.n_clients <= count:
            return self
        some = torch.linspace(0, self.data.n_clients - 1, count, dtype=torch.float64).long()
        hold = self.hold.share(count / self.data.n_clients)
        return Marginal(self.data.of_some(some), self.shape, self.grid.of(some), hold)

    def patience_for(self, vector: Vector) -> Tensor:
        """(M,): so that no client is surer of its membership than the grid is fine."""
        k = self.shape.k
        coefficients, _ = self.shape.unpack(torch.from_numpy(vector))
        level = torch.full((self.data.n_clients, k), 1 / k, dtype=torch.float64)
        deviation = deviations_of(coefficients, self.data, level).amin(1)
        return (deviation / self.grid.spacing).square().clamp(max=1.0)

    def _pieces(self) -> Iterable[_Piece]:
        is_small = self.data.n_clients * self.grid.atoms.numel() <= _NUMBERS_KEPT
        return self._kept if is_small else _pieces(self.data, self.grid)

    @cached_property
    def _kept(self) -> list[_Piece]:
        return list(_pieces(self.data, self.grid))

    def _logs(self, vector: Vector, pieces: Iterable[_Piece]) -> Tensor:
        """(M, G)."""
        coefficients, log_alpha = self.shape.unpack(torch.from_numpy(vector))
        return torch.cat([
            piece.data.of_clients(coefficients, piece.grid) + piece.prior.log_weights(log_alpha) for piece in pieces
        ])  # fmt: skip

    def log_likelihood(self, vector: Vector) -> float:
        """Memberships integrated out, nothing held."""
        return float(torch.logsumexp(self._logs(vector, self._pieces()), 1).sum())

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
        if data is self.data:
            return Spread(self.grid, torch.softmax(self._logs(vector, self._pieces()), 1))
        grid = self.adapted(vector, data)
        return Spread(grid, torch.softmax(self._logs(vector, _pieces(data, grid)), 1))

    def without_data(self) -> Marginal:
        return Marginal(NOBODY, self.shape, self.grid.of(slice(0)), self.hold)

    def anybody(self, vector: Vector) -> Spread:
        """A client of which nothing is known: the distribution of them all."""
        _, log_alpha = self.shape.unpack(torch.from_numpy(vector))
        grid = Grid(self.grid.atoms, torch.zeros(1, self.shape.k, dtype=torch.float64))
        return Spread(grid, Prior.of(grid).log_weights(log_alpha).exp())


class _Piece(NamedTuple):
    """Clients whose data and memberships fit a cache."""

    clients: slice
    data: Likelihood
    grid: Grid
    prior: Prior


def _pieces(data: Likelihood, grid: Grid) -> Iterator[_Piece]:
    first = 0
    for piece in data.pieces(len(grid.atoms)):
        clients = slice(first, first + piece.n_clients)
        own = grid.of(clients)
        yield _Piece(clients, piece, own, Prior.of(own))
        first = clients.stop
