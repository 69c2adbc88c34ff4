"""Numbers as integers modulo 2^32 or 2^64: only integers can be masked so that nothing shows through.

x / step is rounded up with a probability that is its fraction, and down otherwise: its mean is x / step, so that
rounding adds no drift. A site's rounding error is below one step, that of a total below one step for each site.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...errors import SettingError
from .mask_streams import Integers


class FixedPoint(NamedTuple):
    """How numbers of one kind become integers."""

    step: float
    largest: float  # magnitude of a site's number; larger ones are clipped
    bits: int  # 32 or 64

    def to_integers(self, values: Tensor, draws: Tensor) -> tuple[Integers, int]:
        """Integers of values (N,), rounded by draws (N,) in [0, 1), and how many values were clipped."""
        wide = values.detach().cpu().double()
        clipped = int((~(wide.abs() <= self.largest)).sum())  # nan counts too
        bounded = wide.nan_to_num(0.0).clamp(-self.largest, self.largest)
        steps = bounded / self.step
        below = steps.floor()
        rounded = (below + (draws < steps - below)).to(torch.int64)
        return rounded.numpy().view(np.uint64).astype(f"<u{self.bits // 8}"), clipped

    def to_numbers(self, total: Integers) -> Tensor:
        """The total that integers stand for, in float64."""
        signed = total.view(f"<i{self.bits // 8}").astype(np.float64)
        return torch.from_numpy(signed * self.step)


def fixed_point(step: float, largest: float, sites: int) -> FixedPoint:
    """With as few bits as the total of so many sites needs: it never wraps.

    >>> fixed_point(step=2**-16, largest=1000.0, sites=10).bits, fixed_point(step=2**-32, largest=1e6, sites=10).bits
    (32, 64)
    """
    most = sites * (math.ceil(largest / step) + 1)
    for bits in (32, 64):
        if most < 2 ** (bits - 1):
            return FixedPoint(step, largest, bits)
    raise SettingError(
        f"sums up to {largest:g} of {sites} sites in steps of {step:g} need more than 64 bits; use a larger step or a "
        f"smaller largest"
    )


def whole_range(step: float, sites: int) -> FixedPoint:
    """With 64 bits, and the largest numbers that they allow.

    >>> whole_range(1.0, sites=2).largest == 2**61
    True
    """
    largest = 2.0 ** (62 - max(1, sites - 1).bit_length()) * step
    return FixedPoint(step, largest, 64)
