"""Settings of secure sums. All sites have the same, each in its own file: none takes them from the server."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from ...core.settings import Count, Positive, Settings
from ...errors import SettingError
from .fixed_point import FixedPoint, fixed_point, whole_range

METRIC_STEP = 2.0**-24  # metrics are few, so they have 64 bits: up to 7e10 for each of three sites


class SecureSettings(Settings):
    """What a server may read of sums, and how finely they are rounded.

    >>> SecureSettings().describe(sites=3)
    'secure sums over 3 sites: step 2.3e-10, up to 1.0e+06, 64 bits per number, any 2 sites open a total'
    """

    step: Positive = 2.0**-32  # sums are rounded to multiples of it
    largest: Positive = 2.0**20  # of a number in a site's sum; beyond it, training has diverged
    min_sites: Annotated[int, Field(ge=2, le=10**6)] = 2  # a total over fewer sites is refused
    min_clients: Count = 2  # a total over fewer clients is refused
    threshold: Annotated[int, Field(ge=2, le=10**6)] | None = None  # sites that open a total; None: more than half

    def needed(self, sites: int) -> int:
        """How many of so many sites must help to open a total."""
        needed = sites // 2 + 1 if self.threshold is None else self.threshold
        if sites < max(needed, self.min_sites):
            raise SettingError(
                f"{sites} sites take part, and a total needs {max(needed, self.min_sites)}: fewer would show what one "
                f"of them sent; wait for more sites, or set a smaller min_sites or threshold at all of them"
            )
        return max(needed, 2)

    def numbers(self, sites: int) -> dict[str, FixedPoint]:
        """How the numbers of each part of a reply become integers."""
        return {
            "counts": whole_range(1.0, sites),
            "metrics": whole_range(METRIC_STEP, sites),
            "totals": fixed_point(self.step, self.largest, sites),
        }

    def describe(self, sites: int) -> str:
        """One line for people."""
        numbers = self.numbers(sites)["totals"]
        return (
            f"secure sums over {sites} sites: step {self.step:.1e}, up to {self.largest:.1e}, {numbers.bits} bits per "
            f"number, any {self.needed(sites)} sites open a total"
        )
