"""Where the seconds of a round go, and what went wrong in it."""

from __future__ import annotations

import time
from typing import Any

from .flower_transport import FlowerTransport


class RoundClock:
    """How the seconds of a round split, and what went wrong in it."""

    def __init__(self, transport: FlowerTransport) -> None:
        self.transport, self.mail = transport, transport.mail
        self.began, self.times, self.counts = time.monotonic(), self.mail.times, transport.counts.copy()
        self.carried = self.mail.bytes_carried

    def lap(self) -> dict[str, Any]:
        """Since the last lap. A round's training travels with the scores of the one before, so that seconds and bytes
        are those of a whole round."""
        now, times = time.monotonic(), self.mail.times
        waiting, work = times.waiting - self.times.waiting, times.work - self.times.work
        found: dict[str, Any] = {
            "seconds": now - self.began, "bytes_carried": self.mail.bytes_carried - self.carried,
            "seconds_sites": work, "seconds_transport": max(0.0, waiting - work),
            "seconds_server": max(0.0, now - self.began - waiting),
        }  # fmt: skip
        found |= {f"sites_{name}": count for name, count in (self.transport.counts - self.counts).items()}
        self.began, self.times, self.counts = now, times, self.transport.counts.copy()
        self.carried = self.mail.bytes_carried
        return found
