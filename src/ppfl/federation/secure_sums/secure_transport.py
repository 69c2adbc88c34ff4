"""The server's side: a transport that carries every sum masked and opens only the total over sites.

It works on top of any transport, because masked sums are integers that the transport adds like other sums. Each message
is followed by one that asks for the shares that open its totals. Keys are agreed on before the first sum, and again
after a message that a site did not answer, so that one that comes back takes part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from ...algorithms.contract import Roster
from ...errors import SettingError
from ...server import DivergedError, Transport
from ...sites import Evaluate, Reply, Request, Setup, Train
from ...sites.messages import number
from ..federation_errors import FederationError
from .key_agreement import PublicKeys, check_offers, name_of_keys
from .mask_streams import Integers, add_mask, pair_sign, part_key
from .messages import AcceptKeys, KeyOffer, Masked, MaskedNote, OfferKey, Shares, Unmask
from .reply_parts import CLIPPED, PARTS, SUMS, ReplyPart, join_sums
from .secure_settings import SecureSettings
from .shamir import join_shares


class _OpenedSeeds(NamedTuple):
    """Seeds of masks that the sites have opened."""

    own: dict[str, bytes]  # by site that answered
    pairs: dict[tuple[str, str], bytes]  # of a site that answered and one that did not


class SecureSums:
    """A transport by which the server reads totals over sites and nothing of one site."""

    def __init__(self, transport: Transport, settings: SecureSettings, public_keys: PublicKeys, run: str) -> None:
        """public_keys: of all sites, by name. run: an id that no other run has."""
        self.transport, self.settings, self.public_keys, self.run = transport, settings, public_keys, run
        self.sites: tuple[str, ...] = ()  # those that have keys
        self._keys, self._number = "", 0

    @property
    def roster(self) -> Roster:
        return self.transport.roster

    @property
    def device(self) -> torch.device:
        return self.transport.device

    @property
    def bytes_carried(self) -> int:
        return self.transport.bytes_carried

    @property
    def durable(self) -> bool:
        return self.transport.durable

    def look_ahead(self, following: Callable[[], Train | None]) -> None:
        self.transport.look_ahead(following)

    def ask(self, requests: Sequence[Request]) -> list[Reply]:
        for request in requests:
            refuse_rows(request)
        masked = [at for at, request in enumerate(requests) if isinstance(request, SUMS)]
        if masked and not self.sites:
            self._agree_on_keys()
        sent = [self._masked(request) if at in masked else request for at, request in enumerate(requests)]
        replies = self._carry(sent)
        questions = [self._unmask(sent[at], replies[at]) for at in masked]
        answers = self._carry(questions) if questions else []
        for at, question, answer in zip(masked, questions, answers, strict=True):
            replies[at] = self._open(question, replies[at], answer)
        if any({*_notes(replies[at])} != {*self.sites} | {*replies[at].by_site} for at in masked):
            self.sites = ()  # one was missing, or has no keys: agree on new ones before the next sum
        return [reply._replace(by_site={}) for reply in replies]

    def _carry(self, requests: Sequence[Any]) -> list[Reply]:
        """Requests that only masked sites know go the same way as others."""
        return self.transport.ask(requests)

    def _agree_on_keys(self) -> None:
        (offered,) = self._carry([OfferKey(self.run)])
        offers = {name: offer for name, offer in offered.by_site.items() if isinstance(offer, KeyOffer)}
        check_offers(self.run, offers, self.public_keys, self.settings)
        self.settings.needed(len(offers))
        self._carry([AcceptKeys(self.run, offers)])
        self.sites, self._keys, self._number = tuple(sorted(offers)), name_of_keys(self.run, offers), 0

    def _masked(self, request: Any) -> Masked:
        self._number += 1
        return Masked(self.run, self._keys, self._number, request)

    def _unmask(self, sent: Any, reply: Reply) -> Unmask:
        notes = _notes(reply)
        missing = [site for site in self.sites if site not in notes]
        if len(notes) < max(self.settings.min_sites, self.settings.needed(len(self.sites))):
            raise FederationError(
                f"{len(notes)} of {len(self.sites)} sites answered (missing: {', '.join(missing)}); a total over so "
                f"few could show what one of them sent: wait for them, or set a smaller min_sites or threshold"
            )
        if strangers := sorted({*notes} - {*self.sites}):
            raise FederationError(f"site {strangers[0]!r} sent a sum without having keys; start it again")
        return Unmask(self.run, self._keys, sent.number, {name: note.packets for name, note in notes.items()})

    def _open(self, question: Unmask, reply: Reply, answer: Reply) -> Reply:
        notes = _notes(reply)
        opened = self._opened(question, answer)
        numbers = self.settings.numbers(len(self.sites))
        parts = {}
        for part in PARTS:
            holders = [site for site in self.sites if site in notes and part in notes[site].layouts]
            if not holders:
                continue
            total = _integers(reply, part, numbers[part].bits)
            self._take_masks_away(total, part, holders, notes, opened)
            layout = _one_layout(part, {site: notes[site].layouts[part] for site in holders})
            parts[part] = ReplyPart(numbers[part].to_numbers(total).to(self.device), layout)
        sums = join_sums(reply, parts)
        if clipped := int(number(sums, CLIPPED)):
            raise DivergedError(
                f"training diverged: {clipped} numbers of the sums are above {self.settings.largest:g}, the largest "
                f"that secure sums carry; use a smaller lr, or set a larger value of largest"
            )
        return sums._replace(metrics={name: value for name, value in sums.metrics.items() if name != CLIPPED})

    def _take_masks_away(
        self, total: Integers, part: str, holders: list[str], notes: Mapping[str, MaskedNote], opened: _OpenedSeeds
    ) -> None:
        """All that is on the total of the sites that have a part, and does not cancel in it."""
        for site in holders:
            add_mask(total, part_key(opened.own[site], part), -1)
            for other in self.sites:
                if other in holders:
                    continue
                if other in notes:  # it answered, and has nothing of this part
                    key = bytes.fromhex(notes[other].absent[part][site])
                else:
                    key = part_key(opened.pairs[site, other], part)
                add_mask(total, key, -pair_sign(site, other))

    def _opened(self, question: Unmask, answer: Reply) -> _OpenedSeeds:
        shares = {name: note for name, note in answer.by_site.items() if isinstance(note, Shares)}
        for name, note in shares.items():
            if note.refused:
                raise FederationError(f"site {name!r} refused to open {note.refused}")
        needed = self.settings.needed(len(self.sites))
        if len(shares) < needed:
            raise FederationError(
                f"{len(shares)} sites helped to open a total and {needed} are needed; ask again when more sites are up"
            )
        at = {site: 1 + place for place, site in enumerate(self.sites)}
        answered, missing = question.packets, [site for site in self.sites if site not in question.packets]

        def joined(share_of: Any) -> bytes:
            return join_shares({at[name]: bytes.fromhex(share_of(note)) for name, note in shares.items()}, needed)

        own = {site: joined(lambda note, site=site: note.own[site]) for site in answered}
        pairs = {
            (site, other): joined(lambda note, site=site, other=other: note.pairs[site][other])
            for site in answered
            for other in missing
        }
        return _OpenedSeeds(own, pairs)


def refuse_rows(request: Request) -> None:
    """Refuse what would show one client, before anything is sent."""
    if isinstance(request, Setup) and request.method.shows:
        shown = ", ".join(request.method.shows)
        raise SettingError(
            f"secure sums are on, and {request.method.name} shows {shown} of each client to the server; use settings "
            f"without rows (ppfl: share_memberships = false, penalty = 0) or another method"
        )
    if isinstance(request, Evaluate) and request.per_client:
        raise SettingError(
            "secure sums are on, and the scores of each client were asked for; set report_clients = false under [watch]"
        )


def _notes(reply: Reply) -> dict[str, MaskedNote]:
    return {name: note for name, note in reply.by_site.items() if isinstance(note, MaskedNote)}


def _integers(reply: Reply, part: str, bits: int) -> Integers:
    found = reply.metrics[part]
    if found.dtype != {32: torch.int32, 64: torch.int64}[bits]:
        raise FederationError(f"masked {part} are {found.dtype} and should have {bits} bits; use the same settings")
    return np.array(found.cpu().numpy()).view(f"<u{bits // 8}")  # a copy, to be written to


def _one_layout(part: str, layouts: Mapping[str, str]) -> str:
    (first, layout), *others = layouts.items()
    for site, other in others:
        if other != layout:
            raise FederationError(
                f"the {part} of site {site!r} are {other[:200]} and those of {first!r} {layout[:200]}; sites must run "
                f"the same experiment and version"
            )
    return layout
