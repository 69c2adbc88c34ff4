"""Clients that the server of a run knows, and those of them that are still here.

A client that was forgotten in the middle of a run stays in the server's list. The site leaves it out of what it is
asked to do, and answers for it with nothing: no samples, no score, and an even membership, which replaces the last one
that the server had.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from ..algorithms.contract import Rows
from ..core.ids import ClientIds, positions_of
from ..data import Federation
from ..errors import DataError
from ..sites import Evaluate, Reply, Train

MEMBERSHIP = "membership"
AnyRequest = TypeVar("AnyRequest", Train, Evaluate)


class RunClients(NamedTuple):
    """Of one site in one run."""

    known: ClientIds  # to the server
    present: ClientIds  # those that take part

    @property
    def left(self) -> list[str]:
        """Known to the server, and forgotten here."""
        here = set(self.present)
        return [client for client in self.known if client not in here]

    def for_present(self, request: AnyRequest) -> AnyRequest:
        """The part of a request that is for clients that are here."""
        if not self.left:
            return request
        here = set(self.present)
        asked = request.who if isinstance(request, Train) else None
        named = self.known if asked is None else asked
        at = torch.tensor([at for at, client in enumerate(named) if client in here], dtype=torch.long)
        own = {name: leaf[at] for name, leaf in request.own.items()}
        if isinstance(request, Train) and asked is not None:
            return request._replace(who=tuple(named[at] for at in at.tolist()), own=own)
        return request._replace(own=own)

    def trained(self, request: Train, reply: Reply) -> Reply:
        """The reply to the whole request: the membership of a client that left becomes even."""
        if not self.left:
            return reply
        asked = self.left if request.who is None else [one for one in self.left if one in set(request.who)]
        rows = reply.rows._replace(ids=self.present if reply.rows.ids is None else reply.rows.ids)
        only = rows.values.get(MEMBERSHIP) if len(rows.values) == 1 else None
        return reply._replace(rows=rows if only is None else _more_rows(rows, asked, {MEMBERSHIP: even(only)}))

    def evaluated(self, reply: Reply) -> Reply:
        """The reply with rows for clients that left: they have no samples."""
        if not self.left or not reply.rows.values:
            return reply
        rows = reply.rows._replace(ids=self.present if reply.rows.ids is None else reply.rows.ids)
        return reply._replace(
            rows=_more_rows(rows, self.left, {name: _nothing(name, v) for name, v in rows.values.items()})
        )

    def table(self, rows: Rows) -> Rows:
        """A table of clients, in which those that left look like the mean of the others."""
        means = {name: leaf.double().mean(0).to(leaf.dtype) for name, leaf in rows.values.items()}
        return _more_rows(rows, self.left, means) if self.left else rows


def without_clients(federation: Federation, importance: Tensor, forgotten: Sequence[str]) -> tuple[Federation, Tensor]:
    """The other clients, and their importance."""
    left = set(forgotten) & set(federation.ids) if forgotten else set()
    if not left:
        return federation, importance
    rest = [client for client in federation.ids if client not in left]
    if not rest:
        raise DataError(f"all {len(left)} clients of the site are forgotten; it has nobody who could take part")
    where = positions_of(federation.ids)
    return federation.select(rest), importance[[where[client] for client in rest]]


def even(memberships: Tensor) -> Tensor:
    """A membership (K,) that says nothing."""
    return torch.full_like(memberships[0], 1 / memberships.shape[1])


def _nothing(name: str, leaf: Tensor) -> Tensor:
    """What a client without samples has in a row of scores."""
    if name == MEMBERSHIP:
        return even(leaf)
    return torch.full_like(leaf[0], float("nan"))


def _more_rows(rows: Rows, ids: Sequence[str], row: dict[str, Tensor]) -> Rows:
    """With the same row for each of these clients."""
    values = {
        name: torch.cat([leaf, row[name].expand(len(ids), *leaf.shape[1:])]) for name, leaf in rows.values.items()
    }
    return Rows((*(rows.ids or ()), *ids), values)
