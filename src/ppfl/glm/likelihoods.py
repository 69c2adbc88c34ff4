"""What a likelihood is: the data of all clients, evaluated for many memberships of each client at once.

A client's log-likelihood is a sum over its own rows, which is all that it would have to send to a server.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

CHUNK_SIZE = 1 << 18  # numbers (rows x memberships x parameters) that fit in the cache


class Coefficients(NamedTuple):
    """Coefficients of the canonical models, and those that all clients share."""

    canonical: Tensor  # (K, q, m)
    shared: Tensor  # (f, m)
    nuisance: Tensor  # (r,), of the family: the log dispersion of gaussian targets

    def detach(self) -> Coefficients:
        return Coefficients(*(part.detach() for part in self))


class Chunk(NamedTuple):
    """Some clients with their data."""

    clients: Tensor  # positions
    data: Likelihood


class LikelihoodValues(NamedTuple):
    """Log-likelihoods, and their derivatives when they are needed."""

    logs: Tensor  # (M, G), detached
    expectation: Callable[[Tensor], Tensor]  # from weights (M, G) to the weighted sum of logs, which has a gradient


class Scores(NamedTuple):
    """First and second derivatives of log-likelihoods, for memberships with weights (M, G)."""

    logs: Tensor  # (M, G)
    # from the weights to derivatives (M, d, G) in the client's own coefficients, those in the nuisance parameters
    # (M, r, G), and minus the mean second derivatives (P, P) in all coefficients and nuisance parameters
    derivatives: Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]


class Likelihood(Protocol):
    """The data of M clients."""

    @property
    def n_clients(self) -> int: ...

    @property
    def n_samples(self) -> float:
        """The sum of all sample weights."""

    def chunks(self, memberships: int) -> Iterator[Chunk]:
        """All clients in chunks that fit in the cache with this number of memberships, in any order."""

    def subset(self, clients: Tensor) -> Likelihood:
        """The data of the clients at these positions, which must be increasing."""

    def client_log_likelihoods(self, coefficients: Coefficients, c: Tensor) -> Tensor:
        """(M, G) for memberships (M, K, G) of every client, or (1, K, G) if all clients have the same ones."""

    def conditional_log_likelihoods(self, coefficients: Coefficients, c: Tensor, given: Likelihood) -> Tensor:
        """The same, given other rows of the same clients, which say nothing more if rows are independent given c."""

    def evaluate(self, coefficients: Coefficients, c: Tensor) -> LikelihoodValues:
        """Log-likelihoods for gradients in the coefficients."""

    @property
    def has_scores(self) -> bool:
        """Whether `scores` works for these data."""

    def scores(self, coefficients: Coefficients, c: Tensor) -> Scores:
        """For memberships (M, K, G), with one linear predictor and mixed weights."""


class Blocks(NamedTuple):
    """The places of coefficients in a matrix of second derivatives: K canonical models, shared columns, nuisance."""

    varying: int
    shared: int
    k: int
    nuisance: int

    @property
    def n_columns(self) -> int:
        return self.k * self.varying + self.shared

    def place(self, share: int) -> tuple[slice, slice]:
        """Where the parameters with this share are, and which columns of the design they belong to."""
        if share == self.k:
            return slice(self.k * self.varying, self.n_columns), slice(self.varying, self.varying + self.shared)
        return slice(share * self.varying, (share + 1) * self.varying), slice(0, self.varying)

    def of_columns(self, block: Callable[[int, int], Tensor]) -> Tensor:
        """The whole matrix from blocks (d, d) for each pair of shares, with 0 for the nuisance parameters."""
        found = torch.zeros(self.n_columns + self.nuisance, self.n_columns + self.nuisance, dtype=torch.float64)
        for k in range(self.k + (self.shared > 0)):
            for other in range(k + 1):
                (rows, a), (columns, b) = self.place(k), self.place(other)
                part = block(k, other)[a, b]
                found[rows, columns] = part
                found[columns, rows] = part.T
        return found

    def add_cross(self, found: Tensor, nuisance: int, block: Tensor) -> None:
        """The derivatives in the coefficients and one nuisance parameter, (K + 1, d)."""
        at = self.n_columns + nuisance
        for k in range(self.k + (self.shared > 0)):
            rows, a = self.place(k)
            found[rows, at] = found[at, rows] = block[k, a]
