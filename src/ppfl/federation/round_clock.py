"""Where the seconds of a round go, and what went wrong in it."""

from __future__ import annotations

import time
from typing import Any

from .flower_transport import FlowerTransport


class RoundClock:
    """How the seconds of a round split, and what went wrong in it."""

    def __init__(self, transport: FlowerTransport) -> None:
        self.mail = transport.mail
        self.began, self.times, self.counts = time.monotonic(), self.mail.times, self.mail.counts.copy()

    def lap(self) -> dict[str, Any]:
        """Since the last lap."""
        now, times = time.monotonic(), self.mail.times
        waiting, work = times.waiting - self.times.waiting, times.work - self.times.work
        found: dict[str, Any] = {
            "seconds_sites": work, "seconds_transport": max(0.0, waiting - work),
            "seconds_server": max(0.0, now - self.began - waiting),
        }  # fmt: skip
        found |= {f"sites_{name}": count for name, count in (self.mail.counts - self.counts).items()}
        self.began, self.times, self.counts = now, times, self.mail.counts.copy()
        return found
