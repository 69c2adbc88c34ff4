"""Memberships of clients that sat out some rounds: they were last moved when the models were others.

| rule | what a client does that missed m rounds, before its work on theta |
|---|---|
| "none" | the usual membership steps, from where its membership was left |
| "step_size" | the usual steps, each 1 + m times as long |
| "steps" | 1 + m times as many steps: those of the rounds it missed too |
| "solve" | first the membership that fits its data best with the models as they are now, then the usual steps |

In a round without membership steps only "solve" does something. Who missed nothing does the same under every rule, so
with participation = 1 there is no difference.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

CatchUp = Literal["none", "step_size", "steps", "solve"]

MOST_MISSED = 20  # rounds that are made up for: steps cost time, and long ones overshoot
MOST_STEPS = 50  # of "solve", which ends as soon as a membership is found


def rounds_missed(last: Tensor, round: int) -> Tensor:
    """How many rounds (C,) clients sat out before `round` (from 0), at most MOST_MISSED.

    last (C,): how many rounds there had been when they last took part. The first round is a survey, which moves no
    membership, so it never counts as missed.

    >>> import torch
    >>> rounds_missed(torch.tensor([0, 5, 7]), 7).tolist()
    [6, 2, 0]
    """
    return (round - last.clamp_min(1)).clamp(0, MOST_MISSED)
