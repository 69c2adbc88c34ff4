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


class ScoreSums(NamedTuple):
    """What Newton's method needs of the derivatives at all points."""

    mean: Tensor  # (M, P), of each client's scores
    products: Tensor  # (P, P), the sum over clients of the mean products of scores
    information: Tensor  # minus the mean second derivatives in all coefficients and nuisance parameters


class Scores(NamedTuple):
    """First and second derivatives of log-likelihoods, for memberships with weights (M, G)."""

    logs: Tensor  # (M, G)
    # from the weights to derivatives (M, d, G) in the client's own coefficients, those in the nuisance parameters
    # (M, r, G), and minus the mean second derivatives (P, P) in all coefficients and nuisance parameters
    derivatives: Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]
    c: Tensor  # (M, K, G)
    varying: int  # the number of columns with one coefficient per canonical model
    own_sums: Callable[[Tensor, Tensor, Tensor | None], ScoreSums] | None = None  # a faster way to the same sums

    def sums(self, weights: Tensor, others: Tensor, client_weight: Tensor | None = None) -> ScoreSums:
        """Also of other scores (M, E, G). Client weights (M, 1) multiply the log-likelihoods."""
        if self.own_sums is not None:
            return self.own_sums(weights, others, client_weight)
        columns, nuisance, information = self.derivatives(weights if client_weight is None else weights * client_weight)
        if client_weight is not None:
            columns, nuisance = columns * client_weight[:, None], nuisance * client_weight[:, None]
        canonical = (self.c[:, :, None] * columns[:, None, : self.varying]).flatten(1, 2)
        each = torch.cat([canonical, columns[:, self.varying :], nuisance, others.expand(len(columns), -1, -1)], 1)
        products = torch.bmm(each * weights[:, None], each.mT).sum(0)  # each: (M, P, G)
        return ScoreSums(torch.bmm(each, weights[..., None])[..., 0], products, information)


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
