"""What every message between server and site begins with, and how large it may be.

Layout: the letters PPFL, 4 bytes for the length of the header, the header in JSON, the payload. The payload is what
`io.codec` makes of a list of requests or replies: typed arrays and JSON, never a pickled object. Lengths are checked
before anything is taken apart.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from .federation_errors import FederationError

PROTOCOL = 1
MAGIC = b"PPFL"
MOST_BYTES = 1 << 30  # of a message
MOST_HEADER_BYTES = 1 << 16
REQUESTS, REPLIES, ERROR = "requests", "replies", "error"


class Envelope(NamedTuple):
    """A message. A site answers with the same run, site, start and number."""

    kind: str  # REQUESTS, REPLIES or ERROR
    run: str  # which run it is part of
    site: str  # which site it goes to or comes from
    start: int  # how often the server of the run was started
    number: int  # of the message, counted from that start
    payload: bytes  # a list of requests or replies; of an error, its text
    seconds: float = 0.0  # that the site worked for it
    protocol: int = PROTOCOL

    @property
    def order(self) -> tuple[int, int]:
        """Messages of a run are in this order."""
        return self.start, self.number


_FIELDS: dict[str, type | tuple[type, ...]] = {
    "kind": str, "run": str, "site": str, "start": int, "number": int, "seconds": (int, float), "protocol": int,
}  # fmt: skip


def seal(envelope: Envelope) -> bytes:
    """A message as bytes.

    >>> sent = Envelope(REQUESTS, "run-1", "clinic", 1, 7, b"...")
    >>> unseal(seal(sent)) == sent
    True
    """
    header = json.dumps({name: getattr(envelope, name) for name in _FIELDS}, separators=(",", ":")).encode()
    return b"".join([MAGIC, len(header).to_bytes(4, "big"), header, envelope.payload])


def unseal(data: bytes, most_bytes: int = MOST_BYTES) -> Envelope:
    """The message in these bytes; FederationError where they are none, are too many or of another protocol."""
    if len(data) > most_bytes:
        raise FederationError(f"a message of {len(data):,} bytes; at most {most_bytes:,} are taken")
    if data[:4] != MAGIC or len(data) < 8:
        raise FederationError("bytes that are no message of ppfl; is the other side another program?")
    length = int.from_bytes(data[4:8], "big")
    if length > min(MOST_HEADER_BYTES, len(data) - 8):
        raise FederationError(f"a message whose header has {length:,} bytes; it is damaged")
    header = _parse_header(data[8 : 8 + length])
    if header["protocol"] != PROTOCOL:
        raise FederationError(
            f"a message of protocol {header['protocol']}, this is {PROTOCOL}; install the same ppfl on both sides"
        )
    return Envelope(payload=data[8 + length :], **header)


def _parse_header(text: bytes) -> dict[str, Any]:
    try:
        header = json.loads(text)
    except (ValueError, RecursionError):
        raise FederationError("a message whose header is not JSON; it is damaged") from None
    if not isinstance(header, dict) or header.keys() != _FIELDS.keys():
        raise FederationError("a message whose header has other fields; install the same ppfl on both sides")
    for name, kind in _FIELDS.items():
        if not isinstance(header[name], kind) or isinstance(header[name], bool):
            raise FederationError(f"a message whose {name} is {header[name]!r:.60}; it is damaged")
    return header
