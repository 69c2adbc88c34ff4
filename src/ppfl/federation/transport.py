"""The server loop's transport to sites on machines of their own. It knows nothing of methods.

Every site gets one call per `ask`, with all its requests. A site that does not answer in time, or whose reply is
refused, is left out of this exchange: its clients count as lost, and the next request tells it which exchange was
merged last, so that it undoes what the server does not know. Sites keep the states of their clients: what a checkpoint
holds of a site is the last exchange that was merged.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ..algorithms.contract import Roster, Rows
from ..core.ids import ClientIds
from ..core.population import Population
from ..errors import DataError
from ..server import DivergedError
from ..server.transports import make_roster, named_rows
from ..sites import Close, Describe, Evaluate, Reply, Request, Restore, Save, Setup, Train
from ..sites.messages import combine, part_for
from .exchange import Exchange
from .messages import FederationError, Join, Masked, PrepareRows, Reveal, names_of
from .reply_checks import SiteFacts, SiteNorms, check_description, check_reply
from .secure_sums import SUMS, RollCall

log = logging.getLogger("ppfl.federation")
CONNECT_SECONDS = 600.0
WITHOUT_ANSWER = PrepareRows | Setup | Close  # the reply to them is empty


class SiteRecord(NamedTuple):
    """What the server knows of a site."""

    facts: SiteFacts
    described: Reply
    merged: dict[str, int]  # of each session, the last exchange whose reply was merged

    @property
    def ids(self) -> ClientIds:
        return self.facts.ids

    @classmethod
    def of(cls, described: Reply) -> SiteRecord:
        numbers = {name: float(value) for name, value in described.metrics.items()}
        samples = {name.removeprefix("samples."): n for name, n in numbers.items() if name.startswith("samples.")}
        return cls(SiteFacts(described.rows.ids or (), numbers["importance"], samples), described, {})


class _Ahead(NamedTuple):
    """What travelled with an evaluation."""

    request: Train
    reply: Reply
    noted: tuple[Counter[str], dict[str, str]]  # of what had gone wrong before


class SiteTransport:
    """Sites that a channel reaches. First `connect`, then it is a `Transport`."""

    def __init__(self, exchange: Exchange, join: Join, device: str = "cpu", *, secure: bool = False) -> None:
        """secure: whether only totals over sites are read; then all sites must have secure sums."""
        self.exchange, self.join, self.device, self.secure = exchange, join, torch.device(device), secure
        self.sites: dict[str, SiteRecord] = {}
        self.roster = Roster(())
        self.importance: float | None = None  # of all clients when the run began; None: of those there are now
        self.stale: set[str] = set()  # sites whose clients have changed
        self.saved: dict[str, int] = {}  # of each session, the exchange of the last checkpoint
        self.unscored: dict[str, str] = {}  # sites that the last scores lack, and why
        self._norms = SiteNorms()
        self._prepared: list[Any] = []  # how tables are prepared, once that is known
        self._queued: list[Any] = []  # requests that travel with the next ones, as a call costs seconds
        self._setups: dict[str, Setup] = {}
        self._next: Train | None = None  # what is to travel with the next evaluation
        self._ahead: _Ahead | None = None  # what has travelled with the last one

    @property
    def bytes_carried(self) -> int:
        return self.exchange.bytes_carried

    # ------------------------------------------------------------------ before the first round

    def connect(self, count: int, known: Mapping[str, Reply] | None = None, seconds: float = CONNECT_SECONDS) -> None:
        """Wait for the sites, ask what their data look like, and refuse one that does not fit.

        Args:
            count: How many sites take part in the run; it never begins with fewer.
            known: The sites of a run that is resumed, in the order of its roster, with what they said of their data.
                Some of them may be away.
            seconds: To wait for them.
        """
        exchange = self.exchange
        needed = count if known is None else self.at_least(len(known))
        end, names = exchange.now() + seconds, list[str]()
        while True:
            online = exchange.channel.online()
            before, names = names, sorted(name for name in online if known is None or name in known)
            if names != before:
                log.info("%d of %d sites are online: %s", len(names), count, names_of(names))
            if len(names) >= (count if known is None else len(known)) or exchange.now() > end:
                break
            exchange.sleep(exchange.timeouts.poll)
        if len(names) < needed:
            raise FederationError(
                f"{len(names)} sites are online after {seconds:.0f} s, {names_of(names)}; {needed} are needed: start "
                f"the SuperNodes of the others, or set --sites"
            )
        if known is None and len(names) > count:
            raise FederationError(f"{len(names)} sites are online, {names_of(names)}, and --sites is {count}; set it")
        if known is not None:  # they know the run; one that does not is sent what it lacks with the first call
            self.sites = {name: SiteRecord.of(described) for name, described in known.items()}
        else:
            self._describe(names)
        self.roster = make_roster([site.ids for site in self.sites.values()], None)

    def _describe(self, names: Sequence[str]) -> None:
        found = self.exchange.ask({name: [self.join] for name in names}, _check_descriptions)
        for name in names:
            if name not in found:
                raise FederationError(
                    f"site {name!r} takes no part: {self.exchange.absent[name]} (experiment {self.join.experiment:.12})"
                )
            described = found[name][0]
            for other, record in self.sites.items():
                _refuse_different_data(other, record.described, name, described)
            self.sites[name] = SiteRecord.of(described)

    def prepare(self, request: PrepareRows) -> None:
        """Let the sites prepare their tables, with the next call."""
        self._prepared = [request]
        self._queued.append(request)

    def bound_scores(self, population: Population) -> None:
        """Scores that are shares are at most 1."""
        higher = 1.0 if population.loss.metric_name == "accuracy" else math.inf
        for name, site in self.sites.items():
            self.sites[name] = site._replace(facts=site.facts._replace(higher=higher))

    def join_again(self) -> bool:
        """Ask sites whose clients have changed who is left; whether the roster is another one now."""
        names, self.stale = sorted(self.stale), set()
        if not names:
            return False
        before, higher = self.roster.ids, next(iter(self.sites.values())).facts.higher
        try:
            found = self.exchange.ask({name: [self.join] for name in names}, _check_descriptions)
        except FederationError:
            found = {}
        for name in names:
            if name not in found:
                self.stale.add(name)
                continue
            described, merged = found[name][0], self.sites[name].merged
            if {*described.rows.ids} <= {*self.sites[name].ids}:
                new = SiteRecord.of(described)
                self.sites[name] = new._replace(facts=new.facts._replace(higher=higher), merged=merged)
        self.roster = make_roster([site.ids for site in self.sites.values()], None)
        self._next = self._ahead = None  # what was done ahead was done with the clients before
        return self.roster.ids != before

    @property
    def agreed(self) -> dict[str, Any]:
        """What all sites have alike."""
        return dict(next(iter(self.sites.values())).described.facts["agreed"])

    def described_total(self, metric: str) -> float:
        """The sum over sites of something that they described."""
        return sum(float(site.described.metrics[metric]) for site in self.sites.values())

    # ------------------------------------------------------------------ exchanges

    def look_ahead(self, following: Callable[[], Train | None]) -> None:
        """Say what is asked after the next evaluation: the two then travel in one call."""
        self._next, self._ahead = following(), None

    def ask(self, requests: Sequence[Any]) -> list[Reply]:
        """One reply of all sites together for each request. What sites keep, they are not asked for."""
        if isinstance(requests[0], Save):
            merged = {name: {MERGED: site.merged.get(requests[0].session, 0)} for name, site in self.sites.items()}
            return [Reply(rows=Rows((), {}), by_site=merged)] * len(requests)
        if isinstance(requests[0], Restore):
            self._go_on(requests[0])
            return [Reply()] * len(requests)
        if all(isinstance(request, Describe) for request in requests):  # they have said it
            importance = self.described_total("importance") if self.importance is None else self.importance
            return [Reply(metrics={"importance": torch.tensor(importance)}, facts=self.agreed)] * len(requests)
        if (found := self._found_ahead(requests)) is not None:
            return [found]
        if self._next is None or not all(isinstance(request, Evaluate) for request in requests):
            return self._ask_now(requests)
        following, self._next, noted = self._next, None, self.noted
        *replies, last = self._ask_now([*requests, following])
        self._ahead = _Ahead(following, last, noted)
        return replies

    @property
    def noted(self) -> tuple[Counter[str], dict[str, str]]:
        """What went wrong in the rounds that are done, and which sites the last one lacks; what did so ahead is part
        of the next one."""
        exchange = self.exchange
        return (exchange.counts.copy(), dict(exchange.absent)) if self._ahead is None else self._ahead.noted

    def _go_on(self, request: Restore) -> None:
        """With a session whose client states the sites have."""
        self._queued = [queued for queued in self._queued if not isinstance(queued, Setup)]
        if request.snapshot == "now":
            self.saved[request.session] = request.exchange
            for name, site in self.sites.items():
                site.merged[request.session] = int(request.saved.by_site.get(name, {}).get(MERGED, 0))

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
            if isinstance(request, Setup):
                self._setups[request.session] = request
                for site in self.sites.values():
                    site.merged[request.session] = 0
            elif isinstance(request, Close):
                self._setups.pop(request.session, None)
        if all(isinstance(request, WITHOUT_ANSWER) for request in requests):
            self._queued += requests
            return [Reply()] * len(requests)
        together, self._queued = [*self._queued, *requests], []
        to_send = {name: [self._routed(request, name) for request in together] for name in self.sites}
        found = self.exchange.ask(to_send, self._check, self._opening, self._are_enough)
        self._read_codes()
        if any(isinstance(request, Evaluate) for request in requests):
            self.unscored = dict(self.exchange.absent)
        found = {name: replies[len(together) - len(requests) :] for name, replies in found.items()}
        if self.secure:
            combined = self._reveal_all(requests, found)
        else:
            self._compare(requests, found)
            self._require(found)
            by_request = [{name: replies[at] for name, replies in found.items()} for at in range(len(requests))]
            combined = [self._combined(one, replies) for one, replies in zip(requests, by_request, strict=True)]
        return combined

    def _routed(self, request: Any, name: str) -> Any:
        """The part of a site, which says which exchange of this site was merged last, and which one is saved."""
        site = self.sites[name]
        request = part_for(request, site.ids, self.roster, name)
        if isinstance(request, Train) and request.keep_states:
            merged = min(request.merged, site.merged.get(request.session, 0))
            return request._replace(merged=merged, saved=self.saved.get(request.session, 0))
        return request

    def _opening(self, name: str) -> list[Any]:
        """What a site is sent first that does not know the run: its clients begin anew."""
        self.sites[name].merged.clear()
        return [self.join, *self._prepared, *self._setups.values()]

    def _check(self, name: str, requests: Sequence[Any], replies: Sequence[Any]) -> None:
        for request, reply in zip(requests, replies, strict=True):
            if isinstance(request, Join):
                check_description(reply)
                if reply.rows.ids != self.sites[name].ids:
                    raise FederationError("it has other clients than when it joined")
                continue
            setup = self._setups.get(getattr(request, "session", ""))
            check_reply(request, reply, self.sites[name].facts, () if setup is None else setup.method.shows)

    def _read_codes(self) -> None:
        for name, code in self.exchange.codes.items():
            if code == "clients-changed":
                self.stale.add(name)
            if code == "out-of-range":
                raise DivergedError(f"site {name!r}: {self.exchange.absent[name]}")

    def _compare(self, requests: Sequence[Any], found: dict[str, list[Reply]]) -> None:
        for at, request in enumerate(requests):
            if isinstance(request, Train):
                facts = {name: site.facts for name, site in self.sites.items()}
                ones = {name: replies[at] for name, replies in found.items()}
                for name, reason in self._norms.compare(request, ones, facts).items():
                    self.exchange.refuse(name, reason)
                    del found[name]
                    self.unscored |= {name: reason} if len(requests) > 1 else {}

    def at_least(self, sites: int) -> int:
        """How many of so many sites must answer."""
        asked = self.exchange.timeouts.at_least
        return sites // 2 + 1 if asked is None else min(asked, sites)

    def _are_enough(self, found: Collection[str]) -> bool:
        return len(found) >= self.at_least(len(self.sites))

    def _require(self, found: Collection[str]) -> None:
        if not self._are_enough(found):
            absent = "; ".join(f"{name!r}: {why}" for name, why in self.exchange.absent.items())
            raise FederationError(
                f"{len(found)} of {len(self.sites)} sites answered, at least {self.at_least(len(self.sites))} are "
                f"needed; look at the log of {absent}; then run again, which resumes"
            )

    def _combined(self, request: Request, replies: Mapping[str, Reply]) -> Reply:
        """One reply of all sites that answered; clients of the others count as lost."""
        if isinstance(request, Train) and request.keep_states:
            for name in replies:
                self.sites[name].merged[request.session] = request.exchange
        named = [named_rows(reply, self.sites[name].ids, self.roster) for name, reply in replies.items()]
        return self._with_absent(request, combine(named, list(replies)), replies)

    def _with_absent(self, request: Request, whole: Reply, answered: Collection[str]) -> Reply:
        absent = [client for name, site in self.sites.items() if name not in answered for client in site.ids]
        if not absent:
            return whole
        if isinstance(request, Train):
            gone = len(absent) if request.who is None else len({*absent} & {*request.who})
            lost = torch.tensor(float(gone), dtype=torch.float64)
            counts = {key: whole.metrics.get(key, torch.zeros_like(lost)) + lost for key in ("asked", "lost")}
            return whole._replace(metrics=whole.metrics | counts)
        if isinstance(request, Evaluate) and whole.rows.values:
            return whole._replace(rows=_with_absent_rows(whole.rows, absent))
        return whole

    # ------------------------------------------------------------------ secure sums

    def _reveal_all(self, requests: Sequence[Any], found: Mapping[str, list[Reply]]) -> list[Reply]:
        """Totals over sites, in a second exchange. A request of which one site does not reveal is lost."""
        self._require(found)
        number, calls = self.exchange.number, dict[int, RollCall]()
        by_site: dict[str, list[tuple[int, Reveal]]] = {}
        for at, request in enumerate(requests):
            if isinstance(request, SUMS):
                calls[at] = RollCall({name: replies[at] for name, replies in found.items()})
                for name in calls[at].ready:
                    by_site.setdefault(name, []).append((at, calls[at].reveal(number)))
        to_send = {name: [reveal for _, reveal in reveals] for name, reveals in by_site.items()}
        revealed = self.exchange.ask(to_send, self._check) if to_send else {}
        self._read_codes()
        masked: dict[int, dict[str, Masked]] = {at: {} for at in calls}
        for name, reveals in by_site.items():
            for (at, _), reply in zip(reveals, revealed.get(name, ()), strict=False):
                masked[at][name] = reply
        return [self._total(one, calls.get(at), masked.get(at, {}), found) for at, one in enumerate(requests)]

    def _total(
        self, request: Any, call: RollCall | None, masked: Mapping[str, Masked], found: Mapping[str, Any]
    ) -> Reply:
        if call is None:
            return Reply()
        if not call.ready or masked.keys() < call.ready.keys():
            if isinstance(request, Evaluate) or not isinstance(request, Train):
                raise FederationError(
                    f"sites {names_of(sorted(call.ready.keys() - masked.keys()))} did not reveal their sums; run "
                    f"again, which resumes"
                )
            log.warning("the exchange is lost, as not all sites revealed their sums")
            nobody = {name: torch.zeros((), dtype=torch.float64) for name in ("asked", "participants", "lost")}
            return self._with_absent(request, Reply(metrics=nobody), ())
        if isinstance(request, Train) and request.keep_states:
            for name in found:
                self.sites[name].merged[request.session] = request.exchange
        return self._with_absent(request, call.total(masked), found)


MERGED = "merged"  # of a site, in a checkpoint


def _check_descriptions(name: str, requests: Sequence[Any], replies: Sequence[Any]) -> None:
    check_description(replies[0])


def _with_absent_rows(rows: Rows, absent: Sequence[str]) -> Rows:
    """Without scores for clients that are not there, and with an even membership, which is marked by its score."""

    def filled(name: str, leaf: torch.Tensor) -> torch.Tensor:
        empty = 1 / leaf.shape[1] if name == "membership" else math.nan
        return torch.cat([leaf, leaf.new_full((len(absent), *leaf.shape[1:]), empty)])

    return Rows((*(rows.ids or ()), *absent), {name: filled(name, leaf) for name, leaf in rows.values.items()})


def _refuse_different_data(first: str, one: Reply, second: str, other: Reply) -> None:
    """Refuse two sites whose data do not fit together; the difference is named."""
    for key, here in one.facts["agreed"].items():
        there = other.facts["agreed"].get(key)
        if here != there:
            raise DataError(
                f"site {second!r} does not fit: {_difference(key, here, there, first)}; change the data or the config "
                f"of one of them"
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
