"""Residual sums of squares of linear models, and what a density of them has to say to Newton's method."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class ResidualSums(NamedTuple):
    """The residual sum of squares of each client, as a polynomial in its membership: y'y - 2 c'f + c'Hc."""

    products: Tensor  # (M, K, K), H, of the canonical models' predictions in each client's data
    fits: Tensor  # (M, K), f, of the predictions with y
    squares: Tensor  # (M,), y'y
    size: Tensor  # (M,), the number of rows, or the sum of their weights

    def at(self, c: Tensor) -> Tensor:
        """(M, G) for memberships (M, K, G) of every client, or (1, K, G) if all clients have the same ones."""
        if len(c) == 1:
            polynomials = torch.cat([self.products.flatten(1), -2 * self.fits], 1)
            return torch.addmm(self.squares[:, None], polynomials, torch.cat([products_of(c[0]), c[0]]))
        slopes = torch.baddbmm(self.fits[..., None], self.products, c, beta=-2)
        return slopes.mul_(c).sum(1).add_(self.squares[:, None])

    def as_quadratic_form(self) -> Tensor:
        """The matrix (M, K, K) with which the sum is c'Sc, because memberships sum to 1."""
        return self.products - self.fits[:, :, None] - self.fits[:, None] + self.squares[:, None, None]

    def detach(self) -> ResidualSums:
        return ResidualSums(*(part.detach() for part in self))

    def take(self, clients: Tensor) -> ResidualSums:
        """Of the clients at these positions, in any order and also several times."""
        return ResidualSums(*(part[clients] for part in self))

    def concat(self, other: ResidualSums) -> ResidualSums:
        return ResidualSums(*(torch.cat(pair) for pair in zip(self, other, strict=True)))

    def with_new_client(self) -> ResidualSums:
        """These clients, followed by one without data."""
        return self.concat(ResidualSums(*(part.new_zeros(1, *part.shape[1:]) for part in self)))


class SumDerivatives(NamedTuple):
    """The log density of clients with these residual sums, and its derivatives, all (M, G) or of one number."""

    logs: Tensor
    precision: Tensor  # -2 times the slope in the sum: one over the variance, for given variances
    bend: Tensor | None  # 4 times the second derivative in the sum; None if it is 0
    nuisance: list[Tensor]  # slopes in the nuisance parameters
    crosses: list[Tensor]  # minus the slopes of the precision in the nuisance parameters
    seconds: list[list[Tensor]]  # minus the second derivatives in two nuisance parameters


def products_of(c: Tensor) -> Tensor:
    """All products of memberships (K, G): (K K, G)."""
    return (c[:, None] * c).flatten(0, 1)
