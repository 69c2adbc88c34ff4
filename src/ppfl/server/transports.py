"""How requests reach sites and replies come back. A transport knows nothing of methods.

Every site gets what belongs to its own clients, and the replies of all sites become one: sums are added, rows are put
one after the other. `bytes_carried` counts the bytes of tensors that a network would have to carry.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from ..algorithms.contract import Roster, Rows
from ..core.ids import ClientIds
from ..errors import DataError
from ..io.codec import size_of
from ..sites import Describe, Reply, Request, Site, Train
from ..sites.messages import combine, part_for


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

    def look_ahead(self, following: Callable[[], Train | None]) -> None:
        """Before an evaluation: what is asked after it, and may travel with it where a message costs seconds."""


class InProcess:
    """Sites in this process."""

    def __init__(self, *sites: Site, order: Sequence[str] | None = None) -> None:
        """order: of the clients in the roster; by default site after site."""
        self.sites, self.bytes_carried = sites, 0
        self._ids = [_ids_of(self.deliver(site, [Describe()])[0]) for site in sites]
        self.roster = make_roster(self._ids, order)
        self.device = sites[0].device

    def ask(self, requests: Sequence[Request]) -> list[Reply]:
        by_site = [
            self.deliver(site, [part_for(request, ids, self.roster, site.name) for request in requests])
            for site, ids in zip(self.sites, self._ids, strict=True)
        ]
        names = [site.name for site in self.sites]
        return [
            combine([named_rows(reply, ids, self.roster) for reply, ids in zip(replies, self._ids, strict=True)], names)
            for replies in zip(*by_site, strict=True)
        ]

    def look_ahead(self, following: Callable[[], Train | None]) -> None:
        pass

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


def _ids_of(description: Reply) -> ClientIds:
    return description.rows.ids or ()


def named_rows(reply: Reply, ids: ClientIds, roster: Roster) -> Reply:
    """With the names of clients, where all of a site's are not all there are."""
    if reply.rows.ids is None and ids != roster.ids:
        return reply._replace(rows=Rows(ids, reply.rows.values))
    return reply
