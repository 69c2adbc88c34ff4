"""The personal models of a chunk of C clients, as a method gives them for prediction, evaluation and export."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from .simplex import harden
from .trees import Params, first_clients


class OneNetwork(NamedTuple):
    """The same network for all clients."""

    values: Params

    def first(self, clients: int) -> OneNetwork:
        """The models of the first so many clients."""
        return self

    def hardened(self) -> OneNetwork:
        """By the max rule, which changes nothing here."""
        return self


class Networks(NamedTuple):
    """One network per client."""

    values: Params  # leaves (C, ...)

    def first(self, clients: int) -> Networks:
        """The models of the first so many clients."""
        return Networks(first_clients(self.values, clients))

    def hardened(self) -> Networks:
        """By the max rule, which changes nothing here."""
        return self


class Mixture(NamedTuple):
    """K models that all clients share, mixed by each client's membership."""

    models: Params  # canonical leaves (K, ...)
    memberships: Tensor  # (C, K)

    def first(self, clients: int) -> Mixture:
        """The models of the first so many clients."""
        return self._replace(memberships=self.memberships[:clients])

    def hardened(self) -> Mixture:
        """By the max rule, Section O3.1: every client wholly in its largest membership."""
        return self._replace(memberships=harden(self.memberships))


Models = OneNetwork | Networks | Mixture
