"""The server loop's transport to sites on machines of their own. It knows nothing of methods.

Every site gets one message per `ask`, with all its requests. A site that does not answer in time, or whose reply is
refused, is left out of this exchange: its clients count as lost, and the next request tells it which exchange was
merged last, so that it undoes what the server does not know.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch

from ..algorithms.contract import Roster
from ..errors import DataError
from ..server.transports import make_roster, named_rows
from ..sites import Close, Describe, Evaluate, Keep, Reply, Request, Setup, Train
from ..sites.messages import combine, part_for
from .federation_errors import FederationError
from .last_memberships import LastMemberships
from .reply_checks import ReplyChecks
from .site_mail import SiteMail
from .site_records import SiteRecord, check_description, refuse_different_data
from .site_requests import DescribeData, OpenRun

CONNECT_SECONDS = 180.0
WITHOUT_ANSWER = OpenRun | Setup | Keep | Close  # the reply to them is empty


class _Ahead(NamedTuple):
    """What travelled with an evaluation."""

    request: Train
    reply: Reply
    counts: Counter[str]  # of what had gone wrong before


class FlowerTransport:
    """Sites that a carrier reaches. First `connect`, then it is a `Transport`."""

    durable = True

    def __init__(self, mail: SiteMail, device: str = "cpu") -> None:
        self.mail, self.device = mail, torch.device(device)
        self.sites: dict[str, SiteRecord] = {}
        self.roster = Roster(())
        self.importance: float | None = None  # of all clients when the run began; None: of those there are now
        self._checks = ReplyChecks()
        self._turned_away: set[str] = set()
        self._open: OpenRun | None = None
        self.describe = DescribeData()  # how sites are asked what their data look like
        self._queued: list[Any] = []  # requests that travel with the next ones, as a message costs seconds
        self._setups: dict[str, Setup] = {}
        self._memberships = LastMemberships()
        self.saved: dict[str, int] = {}  # of each session, the exchange of the last checkpoint
        self._next: Train | None = None  # what is to travel with the next evaluation
        self._ahead: _Ahead | None = None  # what has travelled with the last one

    @property
    def bytes_carried(self) -> int:
        return self.mail.bytes_carried

    # ------------------------------------------------------------------ before the first round

    def connect(
        self,
        expected: Sequence[str] | None = None,
        known: Mapping[str, Reply] | None = None,
        seconds: float = CONNECT_SECONDS,
    ) -> None:
        """Wait for the sites, ask what their data look like, and refuse one that does not fit.

        expected: their names; None: all that are online once there are enough of them. known: those of a run that
        is resumed, in the order of its roster, with what they said of their data; they may be away.
        """
        expected = expected if known is None else list(known)
        mail, at_least = self.mail, self.mail.patience.at_least
        end = mail.now() + seconds
        while True:
            online = mail.carrier.online()
            missing = [name for name in expected or () if name not in online]
            names = sorted(name for name in online if expected is None or name in expected)
            if (not missing and len(names) >= at_least) or mail.now() > end:
                break
            mail.sleep(mail.patience.poll)
        if len(names) < at_least:
            said = f"; missing: {', '.join(map(repr, missing))}" if missing else ""
            raise FederationError(
                f"{len(names)} sites are online after {seconds:.0f} s, at least {at_least} are needed{said}; start "
                f"them, and look at their logs"
            )
        self.add_sites(names, known)

    def add_sites(self, names: Sequence[str], known: Mapping[str, Reply] | None = None) -> None:
        """Describe sites and take them into the roster, after those that are there."""
        self._next = self._ahead = None  # what the others have done ahead is done again, with all
        found = self.mail.exchange({name: [self.describe] for name in names}, check_description, lambda name: [])
        for name in names if known is None else known:
            before = None if known is None else known[name]
            if name not in found and before is None:
                raise FederationError(f"site {name!r} did not say what its data look like; look at its log")
            record = SiteRecord(name, found[name][0] if name in found else cast(Reply, before))
            for other in self.sites.values():
                refuse_different_data(other, record)
            if before is not None and record.described.facts != before.facts:
                raise DataError(f"the data of site {name!r} changed since the run began; bring the old ones back")
            self.sites[name] = record
        self.roster = make_roster([site.ids for site in self.sites.values()], None)

    def newcomers(self) -> list[str]:
        """Sites that came online and are not part of the run yet."""
        return sorted(self.mail.carrier.online().keys() - self.sites.keys() - self._turned_away)

    def turn_away(self, name: str, reason: str) -> None:
        """Go on without a site that came later and does not fit."""
        self._turned_away.add(name)
        self.mail.refuse(name, reason)
        if self.sites.pop(name, None) is not None:
            self.roster = make_roster([site.ids for site in self.sites.values()], None)

    @property
    def facts(self) -> dict[str, Any]:
        """What all sites agree on."""
        return next(iter(self.sites.values())).facts

    def described_total(self, metric: str) -> float:
        """The sum over sites of something that they described."""
        return sum(float(site.described.metrics[metric]) for site in self.sites.values())

    def resume(self, setup: Setup, merged: Mapping[str, int]) -> None:
        """Go on with a session that the sites have. merged: of each site, the last exchange that was counted."""
        self._setups[setup.session] = setup
        for name, site in self.sites.items():
            site.merged[setup.session] = merged.get(name, 0)

    def merged(self, session: str) -> dict[str, int]:
        """Of each site, the last exchange of a session that was counted."""
        return {name: site.merged.get(session, 0) for name, site in self.sites.items()}

    # ------------------------------------------------------------------ exchanges

    def look_ahead(self, following: Callable[[], Train | None]) -> None:
        """Say what is asked after the next evaluation: the two then travel in one message."""
        self._next, self._ahead = following(), None

    def ask(self, requests: Sequence[Any]) -> list[Reply]:
        if all(isinstance(request, Describe) for request in requests):  # they have said it
            importance = self.described_total("importance") if self.importance is None else self.importance
            return [Reply(metrics={"importance": torch.tensor(importance)}, facts=self.facts)] * len(requests)
        if (found := self._found_ahead(requests)) is not None:
            return [found]
        if self._next is None or not all(isinstance(request, Evaluate) for request in requests):
            return self._ask_now(requests)
        following, self._next, before = self._next, None, self.mail.counts.copy()
        *replies, last = self._ask_now([*requests, following])
        self._ahead = _Ahead(following, last, before)
        return replies

    @property
    def counts(self) -> Counter[str]:
        """What went wrong in the rounds that are done; what did so ahead is part of the next one."""
        return self.mail.counts if self._ahead is None else self._ahead.counts

    def _found_ahead(self, requests: Sequence[Any]) -> Reply | None:
        """The reply that came with the last evaluation, where this is what was asked then."""
        ahead, self._ahead = self._ahead, None
        if ahead is None or len(requests) != 1 or not isinstance(request := requests[0], Train):
            return None
        asked = ahead.request
        same = (request.session, request.exchange, request.who) == (asked.session, asked.exchange, asked.who)
        return ahead.reply if same else None

    def _ask_now(self, requests: Sequence[Any]) -> list[Reply]:
        for request in requests:
            if isinstance(request, OpenRun):
                self._open = request
            if isinstance(request, Setup):
                self.resume(request, {})
        if all(isinstance(request, WITHOUT_ANSWER) for request in requests):
            self._queued += requests
            return [Reply()] * len(requests)
        together, self._queued = [*self._queued, *requests], []
        to_send = {name: [self._routed(request, site) for request in together] for name, site in self.sites.items()}
        found = self.mail.exchange(to_send, self._check, self._opening)
        found = {name: replies[len(together) - len(requests) :] for name, replies in found.items()}
        for name, reason in self._checks.compare(requests, found, self._shares()).items():
            self.mail.refuse(name, reason)
            del found[name]
        self._require(found)
        for name in found:
            for request in requests:
                if isinstance(request, Train) and request.keep_states:
                    self.sites[name].merged[request.session] = request.exchange
        by_request = [{name: replies[at] for name, replies in found.items()} for at in range(len(requests))]
        return [self._combined(request, replies) for request, replies in zip(requests, by_request, strict=True)]

    def _routed(self, request: Any, site: SiteRecord) -> Any:
        return self._in_step(part_for(request, site.ids, self.roster, site.name), site)

    def _in_step(self, request: Any, site: SiteRecord) -> Any:
        """A training request that says which exchange of this site was merged last, and which one is saved."""
        if isinstance(request, Train) and request.keep_states:
            merged = min(request.merged, site.merged.get(request.session, 0))
            return request._replace(merged=merged, saved=self.saved.get(request.session, 0))
        return request

    def _opening(self, name: str) -> list[Any]:
        """What a site is sent first that does not know the run: its clients begin afresh."""
        self.sites[name].merged = dict.fromkeys(self._setups, 0)
        return ([] if self._open is None else [self._open]) + list(self._setups.values())

    def _check(self, name: str, requests: Sequence[Any], replies: Any) -> None:
        shown = {session: setup.method.shows for session, setup in self._setups.items()}
        self._checks.check_alone(requests, replies, self.sites[name].ids, shown)

    def _shares(self) -> dict[str, float]:
        whole = sum(site.importance for site in self.sites.values())
        return {name: site.importance / whole for name, site in self.sites.items()}

    def _require(self, found: Mapping[str, Any]) -> None:
        at_least = min(self.mail.patience.at_least, len(self.sites))
        if len(found) < at_least:
            absent = ", ".join(repr(name) for name in self.sites if name not in found)
            raise FederationError(
                f"{len(found)} of {len(self.sites)} sites answered, at least {at_least} are needed; look at the logs "
                f"here and at {absent}, then resume"
            )

    def _combined(self, request: Request, replies: Mapping[str, Reply]) -> Reply:
        """One reply of all sites that answered; clients of the others count as lost."""
        named = [named_rows(reply, self.sites[name].ids, self.roster) for name, reply in replies.items()]
        whole = combine(named, list(replies))
        absent = [client for name, site in self.sites.items() if name not in replies for client in site.ids]
        if isinstance(request, Train):
            whole = self._count_lost(request, whole, replies)
        if isinstance(request, Evaluate) and whole.rows.values:
            whole = whole._replace(rows=self._memberships.with_absent(whole.rows, self.roster.ids, absent))
        return whole

    def _count_lost(self, request: Train, whole: Reply, answered: Container[str]) -> Reply:
        """With the clients that were asked and are at sites that did not answer."""
        absent = [client for name, site in self.sites.items() if name not in answered for client in site.ids]
        if request.who is not None:
            absent = list({*absent} & {*request.who})
        lost = torch.tensor(float(len(absent)), dtype=torch.float64)
        counts = {name: whole.metrics.get(name, torch.zeros_like(lost)) + lost for name in ("asked", "lost")}
        return whole._replace(metrics=whole.metrics | counts) if absent else whole
