"""Secure sums of sites on machines of their own: what a site sends is masked, all but the description of its data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..algorithms.contract import Roster
from ..sites import Reply, Train
from .flower_transport import FlowerTransport
from .provisioning import SecureSumsFile
from .secure_sums import SecureSums
from .secure_sums.messages import Masked, MaskedNote
from .site_mail import SiteMail
from .site_records import SiteRecord


class SecureFlowerTransport(FlowerTransport):
    """A `FlowerTransport` by which the server reads totals over sites."""

    def __init__(self, mail: SiteMail, device: str, secure: SecureSumsFile, run: str) -> None:
        super().__init__(mail, device)
        self._answered: set[str] = set()  # the sites whose sums are in the last total of a round
        self.secure = SecureSums(_MaskedExchange(self), secure.settings, secure.public_keys, run)

    def _ask_now(self, requests: Sequence[Any]) -> list[Reply]:
        replies = self.secure.ask(requests)
        return [
            self._count_lost(request, reply, self._answered) if isinstance(request, Train) else reply
            for request, reply in zip(requests, replies, strict=True)
        ]

    def exchange(self, requests: Sequence[Any]) -> list[Reply]:
        """Carry requests that are masked already."""
        replies = super()._ask_now(requests)
        for request, reply in zip(requests, replies, strict=True):
            work = request.request if isinstance(request, Masked) else None
            if isinstance(work, Train):
                self._answered = {name for name, note in reply.by_site.items() if isinstance(note, MaskedNote)}
                for name in self._answered if work.keep_states else ():
                    self.sites[name].merged[work.session] = work.exchange
        return replies

    def _in_step(self, request: Any, site: SiteRecord) -> Any:
        if isinstance(request, Masked):
            return request._replace(request=super()._in_step(request.request, site))
        return super()._in_step(request, site)


class _MaskedExchange:
    """The transport below secure sums."""

    durable = True

    def __init__(self, transport: SecureFlowerTransport) -> None:
        self._transport = transport

    @property
    def roster(self) -> Roster:
        return self._transport.roster

    @property
    def device(self) -> torch.device:
        return self._transport.device

    @property
    def bytes_carried(self) -> int:
        return self._transport.bytes_carried

    def ask(self, requests: Sequence[Any]) -> list[Reply]:
        return self._transport.exchange(requests)

    def look_ahead(self, following: Callable[[], Train | None]) -> None:
        self._transport.look_ahead(following)
