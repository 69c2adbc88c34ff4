"""What travels between the server and a client: sums and rows."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ..core.ids import ClientIds
from ..core.trees import Tree
from ..io.codec import message

Who = tuple[str, ...] | None  # names; None: everyone


@message
class Sum(NamedTuple):
    """sum_i p_i weight_i ⊗ value_i: with r weights per client, one value gives r sums. Clients know their p_i."""

    weight: Tensor | None  # (C, r); None: 1, so that r = 1
    value: Tree  # leaves (C, ...)


@message
class Total(NamedTuple):
    """A `Sum` over all clients that took part."""

    weight: Tensor  # (r,): sum_i p_i weight_i
    value: Tree  # leaves (r, ...)


class Upload(NamedTuple):
    """Everything that leaves a client in a round. A tensor that stands in several places leaves once."""

    sums: dict[str, Sum] = {}
    rows: dict[str, Tensor] = {}  # leaves (C, ...)
    metrics: dict[str, Tensor] = {}  # (C,): plain sums over clients, such as the training loss


class Work(NamedTuple):
    client: Tree  # new state, stays with the client
    upload: Upload


@message
class Rows(NamedTuple):
    """Values seen client by client, with the ids they belong to."""

    ids: ClientIds | None  # None: all clients of the site, or of the server's roster, in its order
    values: dict[str, Tensor]  # leaves (len(ids), ...)

    @property
    def n_clients(self) -> int:
        """How many clients these are."""
        return len(next(iter(self.values.values()))) if self.values else len(self.ids or ())
