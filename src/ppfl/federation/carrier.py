"""The narrow way between a transport and whatever carries its bytes: Flower's Grid, or a stand-in of tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol


class OnlineSite(NamedTuple):
    """A site that can be reached now."""

    address: int  # of the carrier's own; never used as an identity
    since: str  # when it last came online: another value means that it was started anew, and lost what it was sent


class Delivery(NamedTuple):
    """What came back for a message."""

    message: str  # the one it answers
    data: bytes | None  # None: the carrier gave up, and it may be sent again
    reason: str = ""  # then, why; with data: why these are not to be used


class Carrier(Protocol):
    """Takes bytes to sites and brings bytes back."""

    def online(self) -> Mapping[str, OnlineSite]:
        """The sites that can be reached and may take part, by name."""

    def push(self, messages: Mapping[int, bytes]) -> Mapping[int, str]:
        """Send to addresses; the id of each message."""

    def pull(self, messages: Sequence[str]) -> Sequence[Delivery]:
        """What has come back for these messages since the last time; may be nothing."""
