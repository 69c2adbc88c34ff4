"""A site whose sums leave it masked (Bonawitz et al., CCS 2017).

To its sums a site adds a mask of its own and, for each other site, a mask that the two have in common: one of them adds
it and the other one subtracts it, so that in the total over all sites they cancel. In the same message it sends, sealed
for each site, shares of the seeds of its masks for this one request. When the server says who has answered, the sites
give it their shares of two kinds: of the own masks of those who answered, and of the masks they had in common with
those who did not. So the server can read the total of those who answered, and nothing else. Seeds are made anew for
each request, because a seed that is opened must say nothing about other requests (as in Flamingo, Ma et al., 2023).

This holds against a server that reads all it can, together with fewer sites than `threshold`. A server that tells
different sites different things, or that asks for totals that differ by one client, is not covered.
"""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from secrets import token_bytes
from typing import Any, NamedTuple, Protocol, cast

import torch
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from ...core.draws import name_key, uniform
from ...data import Federation
from ...sites import Describe, Refusal, Reply, Request, Site, Train
from ...sites.messages import Save, encode
from ...sites.site import Session
from ..federation_errors import FederationError
from .key_agreement import PairKeys, PublicKeys, SiteIdentity, check_offers, new_private_key
from .mask_streams import KEY_BYTES, add_mask, pair_sign, part_key
from .messages import AcceptKeys, Masked, MaskedNote, NoKeys, OfferKey, Shares, Unmask
from .reply_parts import CLIPPED, COUNTS, PARTS, SUMS, ReplyPart, clients_counted, split_sums
from .secure_settings import SecureSettings
from .shamir import RandomBytes, split_secret

REMEMBERED = 16  # answers to repeated requests; one message carries fewer


class AnsweringSite(Protocol):
    """What masks are put around: a site, or one with a store."""

    @property
    def name(self) -> str: ...
    @property
    def sessions(self) -> Mapping[str, Session]: ...
    def answer(self, request: Any) -> Reply: ...


class _Answer(NamedTuple):
    digest: bytes  # of the request
    reply: Reply


class MaskedSite:
    """Answers like a site, but no sum leaves it that is not masked, and nothing that belongs to one client."""

    def __init__(
        self,
        site: AnsweringSite,
        private_key: bytes,
        public_keys: PublicKeys,
        settings: SecureSettings,
        random_bytes: RandomBytes = token_bytes,
    ) -> None:
        """public_keys: of all sites, this one too, by name."""
        self.site, self.settings, self._random_bytes = site, settings, random_bytes
        self.identity = SiteIdentity(site.name, private_key, public_keys)
        self._offered: tuple[str, X25519PrivateKey] | None = None
        self._pairs: PairKeys | None = None
        self._answers: dict[int, _Answer] = {}
        self._opened: dict[int, tuple[str, ...]] = {}  # the sites whose total was opened, by number of the request
        self._kinds: dict[type, Callable[[Any], Reply]] = {
            OfferKey: self._offer_key,
            AcceptKeys: self._accept_keys,
            Masked: self._masked,
            Unmask: self._unmask,
        }

    @property
    def name(self) -> str:
        return self.site.name

    @property
    def federation(self) -> Federation:
        return cast(Site, self.site).federation  # where sites are in one process with the server

    def answer(self, request: Any) -> Reply:
        """Do what a request asks for."""
        if type(request) in self._kinds:
            return self._kinds[type(request)](request)
        if isinstance(request, SUMS) and not isinstance(request, Describe):
            raise FederationError(
                f"site {self.name!r} has secure sums on and was asked for sums without masks; turn secure sums on at "
                f"the server too"
            )
        reply = self.site.answer(request)
        if isinstance(request, Describe):  # how many samples it has is a sum
            return reply._replace(metrics={})
        return self._without_rows(request, reply)

    # ------------------------------------------------------------------ keys, once in a run

    def _offer_key(self, request: OfferKey) -> Reply:
        private = new_private_key(self._random_bytes)
        self._offered, self._pairs = (request.run, private), None
        return self._reply(self.identity.offer(request.run, private.public_key(), self.settings))

    def _accept_keys(self, request: AcceptKeys) -> Reply:
        if self._offered is None or self._offered[0] != request.run or self.name not in request.offers:
            return Reply()  # it missed the beginning, and will say so when it is asked for sums
        run, private = self._offered
        check_offers(run, request.offers, self.identity.public_keys, self.settings)
        if self.identity.offer(run, private.public_key(), self.settings).key != request.offers[self.name].key:
            raise FederationError(f"site {self.name!r} did not offer the key that came back to it; offer keys again")
        self.settings.needed(len(request.offers))
        self._pairs, self._offered = PairKeys(run, self.name, private, request.offers), None
        self._answers, self._opened = {}, {}
        return Reply()

    # ------------------------------------------------------------------ sums

    def _masked(self, request: Masked) -> Reply:
        pairs = self._keys_of(request)
        if pairs is None:
            return self._reply(NoKeys())
        if not isinstance(request.request, SUMS):  # of others it is not known how many they sum
            raise FederationError(f"a {type(request.request).__name__} has no sums that are masked; ask for it openly")
        digest = sha256(encode(request)).digest()
        known = self._answers.get(request.number)
        if known is not None and known.digest == digest:
            return known.reply
        if request.number <= max(self._answers, default=0):  # the difference of two answers would have no masks
            raise FederationError(
                f"request {request.number} came to site {self.name!r} a second time with other contents; each is "
                f"answered once"
            )
        reply = self._without_rows(request.request, self.site.answer(request.request))
        masked = self._mask(pairs, request, reply)
        self._answers[request.number] = _Answer(digest, masked)
        for old in sorted(self._answers)[:-REMEMBERED]:
            del self._answers[old]
        return masked

    def _mask(self, pairs: PairKeys, request: Masked, reply: Reply) -> Reply:
        own = self._random_bytes(KEY_BYTES)
        common = {other: pairs.seed(other, request.number) for other in pairs.others}
        parts = split_sums(reply)
        numbers = self.settings.numbers(len(pairs.sites))
        sums, clipped = {}, 0
        for part in reversed(PARTS):  # counts come last: one of them is how many numbers were clipped
            if part not in parts:
                continue
            values, layout = parts[part] if part != COUNTS else _with_count(reply, clipped)
            parts[part] = ReplyPart(values, layout)
            draws = uniform(*self._rounding_keys(request.request), part, torch.arange(len(values)))
            integers, beyond = numbers[part].to_integers(values, draws)
            clipped += beyond
            add_mask(integers, part_key(own, part), 1)
            for other, seed in common.items():
                add_mask(integers, part_key(seed, part), pair_sign(self.name, other))
            sums[part] = torch.from_numpy(integers.view(f"<i{integers.dtype.itemsize}"))
        absent = {
            part: {other: part_key(seed, part).hex() for other, seed in common.items()}
            for part in PARTS
            if part not in parts
        }
        counted = clients_counted(request.request, reply) if len(parts) > 1 else []
        packets = self._packets(pairs, request.number, own, common, counted)
        note = MaskedNote(packets, {part: held.layout for part, held in parts.items()}, absent)
        refused = tuple(Refusal(client, _without_numbers(reason)) for client, reason in reply.refused)
        return self._reply(note)._replace(metrics=sums, rows=reply.rows, facts=reply.facts, refused=refused)

    def _packets(
        self, pairs: PairKeys, number: int, own: bytes, common: dict[str, bytes], counted: list[int]
    ) -> dict[str, str]:
        """For each site its shares of all seeds, and of how many clients the sums are."""
        sites, needed = pairs.sites, self.settings.needed(len(pairs.sites))
        shares = {name: split_secret(seed, len(sites), needed, self._random_bytes) for name, seed in common.items()}
        shares[self.name] = split_secret(own, len(sites), needed, self._random_bytes)
        packets = {}
        for at, receiver in enumerate(sites):
            of_receiver = {name: of_sites[at].hex() for name, of_sites in shares.items()}
            text = json.dumps({"shares": of_receiver, "clients": counted}).encode()
            packets[receiver] = b64encode(pairs.seal(receiver, number, text)).decode()
        return packets

    # ------------------------------------------------------------------ opening a total

    def _unmask(self, request: Unmask) -> Reply:
        pairs = self._keys_of(request)
        if pairs is None:
            return self._reply(NoKeys())
        answered = tuple(sorted(request.packets))
        if self.name not in answered:  # its sums came too late
            return Reply()
        if request.number not in self._answers or not {*answered} <= {*pairs.sites}:
            raise FederationError(
                f"site {self.name!r} was asked to open request {request.number} of {', '.join(answered)}, which it "
                f"has not answered with them; it opens its own alone"
            )
        if self._opened.setdefault(request.number, answered) != answered:
            raise FederationError(
                f"request {request.number} was opened for {', '.join(self._opened[request.number])} and cannot be "
                f"opened for {', '.join(answered)}: the difference would show one site's sums"
            )
        opened = {
            sender: json.loads(pairs.open(sender, request.number, b64decode(packets[self.name])))
            for sender, packets in request.packets.items()
        }
        if reason := self._too_few(len(pairs.sites), opened):
            return self._reply(Shares({}, {}, reason))
        missing = [site for site in pairs.sites if site not in answered]
        own = {sender: packet["shares"][sender] for sender, packet in opened.items()}
        common = {sender: {site: packet["shares"][site] for site in missing} for sender, packet in opened.items()}
        return self._reply(Shares(own, common))

    def _too_few(self, sites: int, packets: dict[str, Any]) -> str:
        """Why a total must not be opened; empty where it may be."""
        settings = self.settings
        if len(packets) < (least := max(settings.min_sites, settings.needed(sites))):
            return f"a total over {len(packets)} sites; it needs {least}"
        with_sums = [packet["clients"] for packet in packets.values() if packet["clients"]]
        if with_sums and len(with_sums) < settings.min_sites:
            return (
                f"clients of {len(with_sums)} sites took part and min_sites is {settings.min_sites}; let more "
                f"clients take part in a round"
            )
        for clients in map(sum, zip(*with_sums, strict=True)):
            if 0 < clients < settings.min_clients:
                return (
                    f"a total over {clients} clients; min_clients is {settings.min_clients}: let more clients take "
                    f"part in a round"
                )
        return ""

    # ------------------------------------------------------------------

    def _keys_of(self, request: Masked | Unmask) -> PairKeys | None:
        """None where this site has not these keys."""
        if self._pairs is not None and self._pairs.run != request.run:
            raise FederationError(
                f"site {self.name!r} takes part in run {self._pairs.run!r} and got a request of run {request.run!r}; "
                f"begin that run with an offer of keys"
            )
        return self._pairs if self._pairs is not None and self._pairs.keys == request.keys else None

    def _rounding_keys(self, request: Request) -> Sequence[int | str]:
        """Of a training exchange always the same, so that a run that is resumed ends with the same bits."""
        if not isinstance(request, Train):
            return 0, "rounding", name_key(self.name)
        return self.site.sessions[request.session].seed, "rounding", request.exchange, name_key(self.name)

    def _without_rows(self, request: Any, reply: Reply) -> Reply:
        if not reply.rows.values:
            return reply
        shown = ", ".join(sorted(reply.rows.values)[:3])
        what = "its clients' states" if isinstance(request, Save) else f"{shown} of each of its clients"
        raise FederationError(
            f"site {self.name!r} has secure sums on and would show {what}; use a method without rows (ppfl with "
            f"share_memberships = false and penalty = 0), report_clients = false, and keep states at the sites"
        )

    def _reply(self, note: Any) -> Reply:
        return Reply(by_site={self.name: note})


def _with_count(reply: Reply, clipped: int) -> ReplyPart:
    count = torch.tensor(float(clipped), dtype=torch.float64)
    return split_sums(reply._replace(metrics={**reply.metrics, CLIPPED: count}))[COUNTS]


def _without_numbers(reason: str) -> str:
    """Why an upload was refused, without its norm, which would be a number of one client."""
    return reason if "not finite" in reason else "its update is far larger than most"
