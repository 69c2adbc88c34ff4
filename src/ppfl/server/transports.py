"""How requests reach sites and replies come back. A transport knows nothing of methods.

Every site gets what belongs to its own clients, and the replies of all sites become one: sums are added, rows are put
one after the other. `bytes_carried` counts the bytes of tensors that a network would have to carry.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from ..algorithms.contract import Roster, Rows
from ..core.ids import ClientIds
from ..errors import DataError
from ..io.codec import size_of
from ..sites import Describe, Evaluate, Reply, Request, Site, Train
from ..sites.messages import Masked, Unmask, combine


class Transport(Protocol):
    """A way to all sites."""

    @property
    def roster(self) -> Roster:
        """All clients of all sites, by name."""

    @property
    def device(self) -> torch.device:
        """Where the server computes."""

    @property
    def bytes_carried(self) -> int:
        """Since the transport was made."""

    def ask(self, requests: Sequence[Request]) -> list[Reply]:
        """One reply of all sites together for each request. One message to a site carries them all."""


class InProcess:
    """Sites in this process."""

    def __init__(self, *sites: Site, order: Sequence[str] | None = None) -> None:
        """order: of the clients in the roster; by default site after site."""
        self.sites, self.bytes_carried = sites, 0
        self._ids = [_ids_of(self.deliver(site, [Describe()])[0]) for site in sites]
        self.roster = make_roster(self._ids, order)
        self.device = sites[0].federation.train.x.device

    def ask(self, requests: Sequence[Request]) -> list[Reply]:
        by_site = [
            self.deliver(site, [route(request, self.roster, ids, site.name) for request in requests])
            for site, ids in zip(self.sites, self._ids, strict=True)
        ]
        names = [site.name for site in self.sites]
        return [
            combine([named_rows(reply, ids, self.roster) for reply, ids in zip(replies, self._ids, strict=True)], names)
            for replies in zip(*by_site, strict=True)
        ]

    def deliver(self, site: Site, requests: Sequence[Request]) -> list[Reply]:
        """One message to a site and back."""
        replies = [site.answer(request) for request in requests]
        self.bytes_carried += size_of(list(requests)) + size_of(replies)
        return replies


def make_roster(ids_of_sites: Sequence[ClientIds], order: Sequence[str] | None) -> Roster:
    """All clients, each of one site only."""
    if len(ids_of_sites) == 1 and order is None:  # a federation has checked its own
        return Roster(ids_of_sites[0])
    together = tuple(client for ids in ids_of_sites for client in ids)
    if len(set(together)) < len(together):
        twice = next(client for client in together if together.count(client) > 1)
        raise DataError(f"client {twice!r} is at two sites; give every client an id of its own")
    if order is not None and sorted(order) != sorted(together):
        raise DataError(f"the sites have {len(together)} clients, the order names {len(order)}; name each of them once")
    return Roster(together if order is None else order)


def route(request: Request, roster: Roster, ids: ClientIds, site: str | None = None) -> Request:
    """The part of a request that is for the site with these clients and, where it is known, this name."""
    if isinstance(request, Masked):
        return request._replace(request=route(request.request, roster, ids))
    if isinstance(request, Unmask) and site is not None:  # packets for others are many where sites are
        packets = {
            name: {to: text for to, text in sent.items() if to == site} for name, sent in request.packets.items()
        }
        return request._replace(packets=packets)
    if not isinstance(request, Train | Evaluate) or ids == roster.ids:
        return request
    if isinstance(request, Evaluate) or request.who is None:
        at = roster.positions(ids)
        return request._replace(own=_rows_at(request.own, at))
    mine = set(ids)
    here = [at for at, client in enumerate(request.who) if client in mine]
    who = tuple(request.who[at] for at in here)
    return request._replace(who=who, own=_rows_at(request.own, torch.tensor(here, dtype=torch.long)))


def _rows_at(own: dict[str, Tensor], at: Tensor | slice) -> dict[str, Tensor]:
    return {name: leaf[at.to(leaf.device) if isinstance(at, Tensor) else at] for name, leaf in own.items()}


def _ids_of(description: Reply) -> ClientIds:
    return description.rows.ids or ()


def named_rows(reply: Reply, ids: ClientIds, roster: Roster) -> Reply:
    """With the names of clients, where all of a site's are not all there are."""
    if reply.rows.ids is None and ids != roster.ids:
        return reply._replace(rows=Rows(ids, reply.rows.values))
    return reply
