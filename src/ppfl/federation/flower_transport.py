"""The server loop's transport to sites on machines of their own. It knows nothing of methods.

Every site gets one message per `ask`, with all its requests. A site that does not answer in time, or whose reply is
refused, is left out of this exchange: its clients count as lost, and the next request tells it which exchange was
merged last, so that it undoes what the server does not know.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from ..algorithms.contract import Roster, Rows
from ..core.client_names import ClientIds
from ..core.errors import DataError
from ..server.transports import make_roster, named_rows, route
from ..sites import Close, Evaluate, Keep, Reply, Request, Setup, Train
from ..sites.messages import combine
from .federation_errors import FederationError
from .reply_checks import ReplyChecks
from .site_mail import SiteMail
from .site_requests import DescribeData, OpenRun

CONNECT_SECONDS = 180.0
WITHOUT_ANSWER = OpenRun | Setup | Keep | Close  # the reply to them is empty


class SiteRecord:
    """What the server knows of a site."""

    def __init__(self, name: str, described: Reply) -> None:
        self.name, self.described = name, described
        self.ids: ClientIds = described.rows.ids or ()
        self.importance = float(described.metrics["importance"])
        self.merged: dict[str, int] = {}  # the last exchange of each session whose reply was counted

    @property
    def facts(self) -> dict[str, Any]:
        """What all sites must agree on."""
        return dict(self.described.facts["agreed"])


class FlowerTransport:
    """Sites that a carrier reaches. First `connect`, then it is a `Transport`."""

    def __init__(self, mail: SiteMail, device: str = "cpu") -> None:
        self.mail, self.device = mail, torch.device(device)
        self.sites: dict[str, SiteRecord] = {}
        self.roster = Roster(())
        self._checks = ReplyChecks()
        self._turned_away: set[str] = set()
        self._open: OpenRun | None = None
        self.describe = DescribeData()  # how sites are asked what their data look like
        self._queued: list[Any] = []  # requests that travel with the next ones, as a message costs seconds
        self._setups: dict[str, Setup] = {}
        self._memberships: dict[str, Tensor] = {}  # as last reported, by client

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
        found = self.mail.exchange({name: [self.describe] for name in names}, _check_description, lambda name: [])
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

    def ask(self, requests: Sequence[Any]) -> list[Reply]:
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

    def _routed(self, request: Request, site: SiteRecord) -> Request:
        mine = route(request, self.roster, site.ids)
        if isinstance(mine, Train) and mine.keep_states:
            mine = mine._replace(merged=min(mine.merged, site.merged.get(mine.session, 0)))
        return mine

    def _opening(self, name: str) -> list[Any]:
        """What a site is sent first that does not know the run: its clients begin afresh."""
        self.sites[name].merged = dict.fromkeys(self._setups, 0)
        return ([] if self._open is None else [self._open]) + list(self._setups.values())

    def _check(self, name: str, requests: Sequence[Any], replies: Any) -> None:
        shown = {session: setup.method.visible_rows for session, setup in self._setups.items()}
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
        if isinstance(request, Train) and absent:
            lost = torch.tensor(float(len(absent)), dtype=torch.float64)
            counts = {name: whole.metrics.get(name, torch.zeros_like(lost)) + lost for name in ("asked", "lost")}
            whole = whole._replace(metrics=whole.metrics | counts)
        if isinstance(request, Evaluate) and whole.rows.values:
            whole = whole._replace(rows=self._with_absent(whole.rows, absent))
        return whole

    def _with_absent(self, rows: Rows, absent: Sequence[str]) -> Rows:
        """Scores of no samples for clients that are not there, and their memberships as last reported."""
        ids = self.roster.ids if rows.ids is None else rows.ids
        if (c := rows.values.get("membership")) is not None:
            self._memberships |= dict(zip(ids, c, strict=True))
        if not absent:
            return rows

        def filled(name: str, leaf: Tensor) -> Tensor:
            if name == "membership":
                even = torch.full_like(leaf[0], 1 / leaf.shape[1])
                return torch.cat([leaf, torch.stack([self._memberships.get(client, even) for client in absent])])
            nothing = 0 if name.endswith(".samples") or not leaf.is_floating_point() else float("nan")
            return torch.cat([leaf, leaf.new_full((len(absent), *leaf.shape[1:]), nothing)])

        return Rows((*ids, *absent), {name: filled(name, leaf) for name, leaf in rows.values.items()})


def _check_description(name: str, requests: Sequence[Any], replies: Any) -> None:
    try:
        (reply,) = replies
        facts, ids = reply.facts["agreed"], reply.rows.ids
        sound = isinstance(facts, dict) and len(set(ids)) == len(ids) > 0 and float(reply.metrics["importance"]) > 0
    except (TypeError, ValueError, KeyError, AttributeError):
        sound = False
    if not sound:
        raise FederationError("it does not describe its data; install the same ppfl there")


def refuse_different_data(one: SiteRecord, other: SiteRecord) -> None:
    """Refuse two sites whose data do not fit together; the difference is named."""
    for key, here in one.facts.items():
        there = other.facts.get(key)
        if here != there:
            raise DataError(
                f"site {other.name!r} does not fit: {_difference(key, here, there, one.name)}; change the data or the "
                f"config of one of them"
            )


def _difference(key: str, here: Any, there: Any, first: str) -> str:
    if isinstance(here, list) and isinstance(there, list):
        parts = [f"it lacks {one!r}" for one in here if one not in there][:1]
        parts += [f"it has {one!r}" for one in there if one not in here][:1]
        if parts:
            return f"{key} differ from those of site {first!r}: {' and '.join(parts)}"
    if isinstance(here, dict) and isinstance(there, dict):
        odd = next(name for name in {**here, **there} if here.get(name) != there.get(name))
        return f"{key} of {odd!r} is {there.get(odd)!r}, at site {first!r} it is {here.get(odd)!r}"
    return f"{key} is {there!r}, at site {first!r} it is {here!r}"
