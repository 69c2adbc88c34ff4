"""One message to each site, and the replies that come back in time.

A message is sent again where a site was started anew or is silent for long: a site answers the same message with the
same reply. Whatever comes after the deadline, twice, or cannot be used is counted, logged in one line and dropped.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..core.settings import Count, Settings
from ..errors import PPFLError
from ..io.codec import size_of
from ..sites import Reply
from ..sites.messages import decode, encode
from .carrier import Carrier, Delivery, OnlineSite
from .envelope import ERROR, MOST_BYTES, REPLIES, REQUESTS, Envelope, seal, unseal
from .federation_errors import FederationError
from .ledger import Ledger
from .site_sessions import NOT_OPEN

log = logging.getLogger("ppfl.federation")
FIRST_POLL = 0.05  # seconds

Requests = list[Any]
Check = Callable[[str, Requests, Any], None]  # of a site's replies to requests; raises PPFLError with the reason


class Patience(Settings):
    """How long a server waits, and for whom.

    >>> Patience(deadline=60, at_least=2).resend
    30.0
    """

    deadline: float = 600.0  # seconds for one exchange
    at_least: Count = 1  # sites that must answer, or the run stops; it can be resumed
    resend: float = 30.0  # seconds after which a message is sent again; twice as long each time
    poll: float = 0.5  # most seconds between looks at what came back
    look_around: float = 3.0  # seconds between looks at who is online


class Times(NamedTuple):
    """Seconds so far."""

    waiting: float = 0.0  # from the first byte sent to the last one received
    work: float = 0.0  # of these, what the slowest site of each exchange worked


@dataclass
class _Pending:
    """A message that a site has not answered."""

    requests: Requests
    data: bytes
    since: str  # when the site had come online
    opening: int = 0  # how many of the requests are there only because the site did not know the run
    messages: dict[str, float] = field(default_factory=dict)  # ids, and when they were sent
    not_before: float = 0.0  # where the carrier gave up: when to try again


class SiteMail:
    """Sends messages of one run and reads the replies."""

    def __init__(
        self,
        carrier: Carrier,
        run: str,
        *,
        start: int = 1,
        patience: Patience | None = None,
        ledger: Ledger | None = None,
        most_bytes: int = MOST_BYTES,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """start: how often the server of this run was started, so that its messages are newer than all before."""
        self.carrier, self.run, self.start, self.ledger = carrier, run, start, ledger
        self.patience = Patience() if patience is None else patience
        self.most_bytes, self.now, self.sleep = most_bytes, now, sleep
        self.counts: Counter[str] = Counter()  # of what went wrong: lost, refused, late, duplicate, resent
        self.times, self.bytes_carried, self.number = Times(), 0, 0
        self._late: dict[str, str] = {}  # messages that nobody waits for any more, and the site they went to

    def exchange(
        self, to_send: Mapping[str, Requests], check: Check, opening: Callable[[str], Requests]
    ) -> dict[str, list[Reply]]:
        """Replies by site, of those that answered in time.

        opening: the requests that come first for a site that does not know the run.
        """
        self.number += 1
        began, work = self.now(), 0.0
        look_again: float = began
        online: Mapping[str, OnlineSite] = {}
        pending: dict[str, _Pending] = {}
        found: dict[str, list[Reply]] = {}
        refused: set[str] = set()
        while (waiting := to_send.keys() - found.keys() - refused) and self.now() - began < self.patience.deadline:
            if self.now() >= look_again:
                online, look_again = self.carrier.online(), self.now() + self.patience.look_around
            self._send({name: to_send[name] for name in sorted(waiting & online.keys())}, pending, online)
            looked = self.now()
            for name, delivery in self._deliveries(pending):
                if name in found or name in refused:
                    self.counts["duplicate"] += 1
                    continue
                try:
                    envelope, found[name] = self._read(name, pending[name], delivery, check)
                    work = max(work, envelope.seconds)
                except _NotDeliveredError as error:
                    log.info("site %r did not get message %d: %s", name, self.number, error)
                    pending[name].not_before = self.now() + self.patience.look_around
                except _UnknownRunError:
                    self._prepare(name, to_send[name], pending, online[name], opening(name))
                except PPFLError as error:
                    self.refuse(name, str(error))
                    refused.add(name)
            if len(found) >= self.patience.at_least and not (to_send.keys() - found.keys() - refused) & online.keys():
                break  # the SuperLink says that the others are gone
            if waiting - found.keys() - refused:
                # seldom after a long time, and where a look takes long, as looks keep the SuperLink from its work
                pause = max(FIRST_POLL + (self.now() - began) / 10, 2 * (self.now() - looked))
                self.sleep(min(self.patience.poll, pause))
        for name in sorted(to_send.keys() - found.keys() - refused):
            self.counts["lost"] += 1
            log.warning("site %r did not answer in %.0f s; the round goes on without it", name, self.now() - began)
        self._late |= {message: name for name, one in pending.items() for message in one.messages}
        self.times = Times(self.times.waiting + self.now() - began, self.times.work + work)
        return {name: found[name] for name in to_send if name in found}

    def refuse(self, name: str, reason: str) -> None:
        """Count and log a reply that is not taken."""
        self.counts["refused"] += 1
        log.warning("the reply of site %r is refused: %s; the round goes on without it", name, reason)
        if self.ledger is not None:
            self.ledger.note(refused=reason, site=name, run=self.run, number=self.number)

    def _send(
        self, to_send: Mapping[str, Requests], pending: dict[str, _Pending], online: Mapping[str, OnlineSite]
    ) -> None:
        """Send sites their messages: for the first time, or again where they were started anew or are silent."""
        due = {}
        for name, requests in to_send.items():
            if name not in pending:
                self._prepare(name, requests, pending, online[name])
            if self._is_due(name, pending[name], online[name]):
                due[online[name].address] = name
        pushed = self.carrier.push({address: pending[name].data for address, name in due.items()}) if due else {}
        for address, message in pushed.items():
            pending[due[address]].messages[message] = self.now()

    def _is_due(self, name: str, one: _Pending, place: OnlineSite) -> bool:
        if not one.messages:
            due = self.now() >= one.not_before
            self.counts["resent"] += due and one.not_before > 0
            return due
        silent, bearable = self.now() - max(one.messages.values()), self.patience.resend * 2 ** (len(one.messages) - 1)
        if place.since == one.since and silent < bearable:
            return False
        one.since = place.since
        self.counts["resent"] += 1
        log.info("site %r is sent message %d again", name, self.number)
        return True

    def _prepare(
        self,
        name: str,
        requests: Requests,
        pending: dict[str, _Pending],
        place: OnlineSite,
        opening: Sequence[Any] = (),
    ) -> None:
        together = [*opening, *requests]
        envelope = Envelope(REQUESTS, self.run, name, self.start, self.number, encode(together))
        pending[name] = _Pending(together, seal(envelope), place.since, len(opening))
        self.bytes_carried += size_of(together)
        if self.ledger is not None:
            self.ledger.write("to site", envelope, together)

    def _deliveries(self, pending: Mapping[str, _Pending]) -> list[tuple[str, Delivery]]:
        waiting = {message: name for name, one in pending.items() for message in one.messages}
        arrived = self.carrier.pull([*waiting, *self._late]) if waiting or self._late else ()
        for delivery in arrived:
            if (name := self._late.pop(delivery.message, None)) is not None:
                self.counts["late"] += 1
                log.warning("a late reply of site %r is not counted", name)
        return [(waiting[delivery.message], delivery) for delivery in arrived if delivery.message in waiting]

    def _read(self, name: str, one: _Pending, delivery: Delivery, check: Check) -> tuple[Envelope, list[Reply]]:
        one.messages.pop(delivery.message, None)
        if delivery.data is None:
            raise _NotDeliveredError(delivery.reason)
        if delivery.reason:
            raise FederationError(delivery.reason)
        envelope = unseal(delivery.data, self.most_bytes)
        if (envelope.run, envelope.site, envelope.order) != (self.run, name, (self.start, self.number)):
            raise FederationError(
                f"it is of run {envelope.run!r:.60}, site {envelope.site!r:.60}, message {envelope.order}; expected "
                f"{self.run!r}, {name!r}, {(self.start, self.number)}"
            )
        if envelope.kind != REPLIES:
            said = envelope.payload[:2000].decode(errors="replace")
            if envelope.kind == ERROR and said.startswith(NOT_OPEN) and not one.opening:
                raise _UnknownRunError(said)
            raise FederationError(f"it says: {said}")
        replies = decode(envelope.payload)
        self.bytes_carried += size_of(replies)
        check(name, one.requests, replies)
        if self.ledger is not None:
            self.ledger.write("to server", envelope, replies)
        return envelope, replies[one.opening :]


class _NotDeliveredError(PPFLError):
    """The carrier gave up on a message: the site was gone."""


class _UnknownRunError(PPFLError):
    """A site that does not know the run: it is new, or lost its store."""
