"""One call to each site, and the answers that come in time.

A call is sent again on evidence alone: where its carrier says that it was not delivered, or where a site was started
anew. A site answers the same call with the same bytes. Whatever comes after the deadline, twice, or cannot be used is
counted, logged in one line and dropped.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, NamedTuple, Protocol

from pydantic import Field

from ..core.settings import Count, Settings
from ..errors import PPFLError
from ..io.codec import size_of
from .ledger import Ledger, fields_of
from .messages import CODES, MOST_BYTES, Answer, Call, Packed, Refused, pack, unpack_answer

log = logging.getLogger("ppfl.federation")
FIRST_POLL = 0.05  # seconds

Requests = list[Any]
Check = Callable[[str, Requests, list[Any]], None]  # of a site's replies to requests; raises PPFLError with the reason
Seconds = Annotated[float, Field(gt=0, le=1e8)]


class Delivery(NamedTuple):
    """What came back for a message."""

    message: str  # the one it answers
    data: bytes | None  # None: it was not delivered, and may be sent again
    reason: str = ""  # then, why


class Channel(Protocol):
    """Carries calls to sites: Flower's Grid, or one in memory that loses, delays and changes."""

    def online(self) -> Mapping[str, str]:
        """The sites that can be reached, and when each was last started: another value means that it lost its call."""

    def push(self, calls: Mapping[str, Packed]) -> Mapping[str, str]:
        """Send to sites; the id of each message."""

    def pull(self, messages: Collection[str]) -> Sequence[Delivery]:
        """What has come back for these messages since the last time; may be nothing. Each is handed out once."""


class Timeouts(Settings):
    """How long a server waits, and for whom.

    >>> Timeouts(deadline=60).resend
    30.0
    """

    deadline: Seconds = 600.0  # for one exchange
    at_least: Count | None = None  # sites that must answer, or the run stops; None: more than half
    resend: Seconds = 30.0  # after a call was not delivered
    away: Seconds = 180.0  # in which a site that goes away in an exchange is waited for
    poll: Seconds = 0.5  # at most between looks at what came back
    look_around: Seconds = 3.0  # between looks at who is online


class Times(NamedTuple):
    """Seconds so far."""

    waiting: float = 0.0  # from the first byte sent to the last one received
    work: float = 0.0  # of these, what the slowest site of each exchange worked


@dataclass
class _Pending:
    """A call that a site has not answered."""

    requests: Requests
    packed: Packed
    since: str = ""  # when the site had been started, as it was sent
    openings: int = 0  # how many of the requests are there only because the site did not know the run
    message: str | None = None  # that is on its way
    not_before: float = 0.0  # when it may be sent again
    sent: int = 0
    last: str = ""  # what was wrong last
    gone: float | None = None  # since when the site is offline
    older: set[str] = field(default_factory=set)  # messages that were given up for a newer one


class Exchange:
    """Sends calls of one run and reads the answers."""

    def __init__(
        self,
        channel: Channel,
        run: str,
        *,
        start: int = 1,
        timeouts: Timeouts | None = None,
        ledger: Ledger | None = None,
        most_bytes: int = MOST_BYTES,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """start: how often the server of this run was started, so that its calls are newer than all before."""
        self.channel, self.run, self.start, self.ledger = channel, run, start, ledger
        self.timeouts = Timeouts() if timeouts is None else timeouts
        self.most_bytes, self.now, self.sleep = most_bytes, now, sleep
        self.counts: Counter[str] = Counter()  # of what went wrong: lost, refused, late, resent
        self.absent: dict[str, str] = {}  # of the last exchange: sites without an answer that counts, and why
        self.codes: dict[str, str] = {}  # of the last exchange: what sites refused with
        self.times, self.bytes_carried, self.number = Times(), 0, 0
        self._late: dict[str, str] = {}  # messages that nobody waits for any more, and the site they went to

    def ask(
        self,
        to_send: Mapping[str, Requests],
        check: Check,
        opening: Callable[[str], Requests] = lambda site: [],
        required: Callable[[Collection[str]], bool] = bool,
    ) -> dict[str, list[Any]]:
        """Replies by site, of those that answered in time.

        Args:
            to_send: The requests of each site.
            check: Raises PPFLError for replies that are not to be used.
            opening: The requests that come first for a site that does not know the run.
            required: Whether so many answers are enough to go on without sites that are offline.
        """
        self.number += 1
        began, look_again = self.now(), self.now()
        work, online = 0.0, dict[str, str]()
        pending = self._pack_all(to_send)
        found: dict[str, list[Any]] = {}
        self.absent, self.codes = {}, {}
        while (
            waiting := to_send.keys() - found.keys() - self.absent.keys()
        ) and self.now() - began < self.timeouts.deadline:
            if self.now() >= look_again:
                online, look_again = dict(self.channel.online()), self.now() + self.timeouts.look_around
            self._send({name: pending[name] for name in sorted(waiting & online.keys())}, online)
            looked = self.now()
            for name, delivery in self._deliveries(pending, waiting):
                try:
                    answer = self._read(name, pending[name], delivery, check)
                    work, found[name] = max(work, answer.seconds), answer.replies[pending[name].openings :]
                except Refused as error:
                    self._handle(name, error, pending, opening)
                except PPFLError as error:
                    self.refuse(name, str(error))
            left = to_send.keys() - found.keys() - self.absent.keys()
            if found and required(found) and not any(self._is_awaited(pending[name], name in online) for name in left):
                break  # the others are not there
            if left:  # seldom after a long time, and where a look takes long, as looks keep others from their work
                pause = max(FIRST_POLL + (self.now() - began) / 10, 2 * (self.now() - looked))
                self.sleep(min(self.timeouts.poll, pause))
        for name in sorted(to_send.keys() - found.keys() - self.absent.keys()):
            self.counts["lost"] += 1
            why = pending[name].last or ("it is offline" if name not in online else "no answer")
            self._leave_out(name, f"{why}, for {self.now() - began:.0f} s")
        self._late |= {m: name for name, one in pending.items() for m in {one.message, *one.older} if m is not None}
        self.times = Times(self.times.waiting + self.now() - began, self.times.work + work)
        return {name: found[name] for name in to_send if name in found}

    def _is_awaited(self, one: _Pending, is_online: bool) -> bool:
        """Whether to wait for a site: not for one that was away all the time, and for one that went away a while."""
        one.gone = None if is_online else one.gone or self.now()
        return one.gone is None or (one.sent > 0 and self.now() - one.gone < self.timeouts.away)

    def refuse(self, name: str, reason: str) -> None:
        """Count and log an answer that is not taken."""
        self.counts["refused"] += 1
        self._leave_out(name, reason)

    def _leave_out(self, name: str, reason: str) -> None:
        self.absent[name] = printable(reason)
        log.warning("site %r is left out of call %d: %s", name, self.number, self.absent[name])
        if self.ledger is not None:
            self.ledger.append(site=name, start=self.start, number=self.number, refused=self.absent[name])

    def _pack_all(self, to_send: Mapping[str, Requests]) -> dict[str, _Pending]:
        known: dict[tuple[int, ...], bytes] = {}
        return {name: self._pack(name, list(requests), 0, known) for name, requests in to_send.items()}

    def _pack(
        self, name: str, requests: Requests, openings: int, known: dict[tuple[int, ...], bytes] | None = None
    ) -> _Pending:
        self.bytes_carried += size_of(requests)
        call = Call(self.run, name, self.start, self.number, requests)
        return _Pending(requests, pack(call, known), openings=openings)

    def _send(self, waiting: Mapping[str, _Pending], online: Mapping[str, str]) -> None:
        """Send sites their calls: for the first time, or again where there is evidence that they were lost."""
        due: dict[str, Packed] = {}
        for name, one in waiting.items():
            if one.message is not None and one.since != online[name]:
                one.older.add(one.message)
                one.message = None
            if one.message is None and self.now() >= one.not_before:
                due[name] = one.packed
                self.counts["resent"] += one.sent > 0
                if one.sent:
                    log.info("site %r is sent call %d again", name, self.number)
        for name, message in (self.channel.push(due) if due else {}).items():
            one = waiting[name]
            one.message, one.since, one.sent = message, online[name], one.sent + 1
            one.not_before = self.now() + self.timeouts.resend  # also where nothing could be sent

    def _deliveries(self, pending: Mapping[str, _Pending], names: Collection[str]) -> list[tuple[str, Delivery]]:
        waiting = {m: name for name in names for m in {pending[name].message, *pending[name].older} if m is not None}
        arrived = self.channel.pull([*waiting, *self._late]) if waiting or self._late else ()
        found: dict[str, Delivery] = {}
        for delivery in arrived:
            if (name := self._late.pop(delivery.message, None)) is not None:
                self.counts["late"] += 1
                log.warning("a late answer of site %r is not counted", name)
            elif (name := waiting.get(delivery.message)) is not None and delivery.message in pending[name].older:
                pending[name].older.discard(delivery.message)
                if delivery.data is not None:
                    found[name] = delivery
            elif name is not None:
                found.setdefault(name, delivery)
        return [*found.items()]

    def _read(self, name: str, one: _Pending, delivery: Delivery, check: Check) -> Answer:
        if delivery.message == one.message:
            one.message = None
        if delivery.data is None:
            raise Refused("not-delivered", delivery.reason)
        answer = unpack_answer(delivery.data, self.most_bytes)
        there = answer.run, answer.site, answer.start, answer.number
        if answer.code:
            raise Refused(answer.code if answer.code in CODES else "failed", CODES.get(answer.code, CODES["failed"]))
        if there != (self.run, name, self.start, self.number):
            raise Refused("invalid", f"its answer is of another call, {there!r:.200}")
        self.bytes_carried += size_of(answer.replies)
        if len(answer.replies) != len(one.requests):
            raise Refused("invalid", f"{len(answer.replies)} replies to {len(one.requests)} requests")
        try:
            check(name, one.requests, answer.replies)
        except PPFLError:
            raise
        except Exception as error:  # whatever a site sends, the run goes on
            raise Refused("invalid", f"its reply cannot be read ({error!r:.200})") from None
        if self.ledger is not None:
            self.ledger.append(
                site=name, start=self.start, number=self.number, bytes=len(delivery.data),
                requests=[type(request).__name__ for request in one.requests], fields=fields_of(answer.replies),
            )  # fmt: skip
        return answer

    def _handle(
        self, name: str, error: Refused, pending: dict[str, _Pending], opening: Callable[[str], Requests]
    ) -> None:
        """What an error of a site leads to: the call is sent again later, with an opening, or the site is left out."""
        one = pending[name]
        if error.code in ("not-delivered", "no-answer"):
            if one.last != str(error):
                log.info("site %r did not get call %d: %s", name, self.number, printable(str(error)))
            one.last, one.message = printable(str(error)), None
        elif error.code == "unknown-run" and not one.openings and (first := opening(name)):
            log.warning("site %r does not know the run; its clients begin anew", name)
            pending[name] = self._pack(name, [*first, *one.requests], len(first))
        else:
            self.refuse(name, f"{error.code}: {error}")
            self.codes[name] = error.code


def printable(text: str) -> str:
    """Text of another machine in one line, without anything that a terminal would take for a command."""
    return " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())[:500]
