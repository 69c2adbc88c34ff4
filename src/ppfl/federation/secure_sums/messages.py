"""Requests of secure sums, besides those of `sites.messages`, and the notes that sites answer with."""

from __future__ import annotations

from typing import Any, NamedTuple

from ...core.ids import ClientIds, Roster
from ...io.codec import message
from ...sites.messages import part_for


@message
class OfferKey(NamedTuple):
    """Make a key for the secure sums of a run, and offer its public half to the other sites."""

    run: str


@message
class AcceptKeys(NamedTuple):
    """What the sites that take part have offered."""

    run: str
    offers: dict[str, KeyOffer]  # by site


@message
class Masked(NamedTuple):
    """A request whose sums are masked: only their total over all sites can be read."""

    run: str
    keys: str  # which keys: the name of what the sites have accepted
    number: int  # of the request, counted from 1 for these keys
    request: Any  # Describe, Train or Evaluate

    def part_for(self, ids: ClientIds, roster: Roster, site: str) -> Masked:
        """With the site's part of the request."""
        return self._replace(request=part_for(self.request, ids, roster, site))


@message
class Unmask(NamedTuple):
    """What is needed to read the total of a masked request, from the sites that answered it."""

    run: str
    keys: str
    number: int
    packets: dict[str, dict[str, str]]  # by the site that answered, and the site it is for

    def part_for(self, ids: ClientIds, roster: Roster, site: str) -> Unmask:
        """With the packets for the site: those for others are many where sites are."""
        packets = {name: {to: text for to, text in sent.items() if to == site} for name, sent in self.packets.items()}
        return self._replace(packets=packets)


@message
class KeyOffer(NamedTuple):
    """A site's public key for one run, signed with the key by which the other sites know it. All in hexadecimal."""

    key: str
    settings: str  # of secure sums, as JSON
    signature: str


@message
class MaskedNote(NamedTuple):
    """What goes with the masked sums of a site."""

    packets: dict[str, str]  # for each site, shares of this site's masks that only it can read
    layouts: dict[str, str]  # names, types and shapes of what each part of the sums holds
    absent: dict[str, dict[str, str]]  # by part that this site has not, the masks that others have put on it for it


@message
class Shares(NamedTuple):
    """Shares that open the masks of one request, in hexadecimal; or why a site does not give them."""

    own: dict[str, str]  # by site that answered
    pairs: dict[str, dict[str, str]]  # by site that answered, and site that did not
    refused: str = ""


@message
class NoKeys(NamedTuple):
    """A site that has not the keys that a request speaks of, as it has been started again."""
