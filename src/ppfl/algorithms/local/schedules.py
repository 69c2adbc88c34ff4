"""Step sizes over the rounds, as a factor of the first one."""

import math
from collections.abc import Callable
from typing import Literal

ScheduleName = Literal["constant", "step", "cosine", "inverse_sqrt"]


def _step(round: int, rounds: int) -> float:
    """Divided by 10 at half and at three quarters of the rounds, as in the paper's experiments."""
    return 0.1 ** ((2 * round >= rounds) + (4 * round >= 3 * rounds))


SCHEDULES: dict[ScheduleName, Callable[[int, int], float]] = {
    "constant": lambda _round, _rounds: 1.0,
    "step": _step,
    "cosine": lambda round, rounds: 0.5 * (1 + math.cos(math.pi * round / rounds)),
    "inverse_sqrt": lambda round, _rounds: 1 / math.sqrt(round + 1),
}


def factor(schedule: ScheduleName, round: int, rounds: int) -> float:
    """What the step sizes of `round` (from 0) are multiplied with.

    >>> [round(factor("step", t, 8), 3) for t in range(8)]
    [1.0, 1.0, 1.0, 1.0, 0.1, 0.1, 0.01, 0.01]
    """
    return SCHEDULES[schedule](round, rounds)
