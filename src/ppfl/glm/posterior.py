"""Where clients are, given their rows: weighted points of memberships and residual scores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .likelihood import Parameters


@dataclass(frozen=True)
class Posterior:
    """Weighted points for each of M clients. A fit with `penalty > 0` has one point per client.

    For gaussian targets z is normal given c, so points are memberships with the mean of z and its covariance. For
    other targets points are pairs (c, z).
    """

    weights: Tensor  # (M, G), which sum to 1 for every client

    @property
    def mean(self) -> Tensor:
        """Memberships (M, K)."""
        raise NotImplementedError

    @property
    def residual_mean(self) -> Tensor:
        """The mean residual scores z (M, s)."""
        raise NotImplementedError

    @property
    def residual_covariance(self) -> Tensor | None:
        """Of z given c (M, s, s) for gaussian targets; None where z is part of the points."""
        raise NotImplementedError

    def points(self, clients: Tensor) -> Tensor:
        """(m, G, K) memberships of the clients at these positions."""
        raise NotImplementedError

    def shares(self, clients: Tensor) -> Tensor:
        """(m, K + s, G): memberships, followed by z, or by its mean given c for gaussian targets."""
        raise NotImplementedError

    def concat(self, other: Posterior) -> Posterior:
        """These clients, followed by the others."""
        raise NotImplementedError

    def reorder(self, order: Tensor) -> Posterior:
        """The same clients with the canonical models in another order."""
        raise NotImplementedError

    def predict(self, rows: Any, at: Parameters, client: Tensor) -> Tensor:
        """Means (n,) or class probabilities (n, m) of rows (`RowLikelihood`) whose clients have these positions (n,)."""
        raise NotImplementedError

    @classmethod
    def of_points(cls, memberships: Tensor) -> Posterior:
        """One membership (M, K) per client."""
        raise NotImplementedError
