"""Filters on what leaves clients. They look at every upload before it is counted, and change nothing in a clean run.

An upload that is refused is left out of all sums and rows, its client keeps the state it had, and the refusal is
reported with the client's name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Numbers = npt.NDArray[np.float64]

MEDIAN, UPPER, TIMES = 0.5, 0.9, 10.0
FEWEST = 4  # uploads to compare with
RECENT = 16  # uploads of earlier rounds that are remembered, for rounds with fewer
# Of the bound, in every round. A client of SCAFFOLD that comes back moves far, as its control is old: with 0.5, honest
# ones were refused after ten rounds of absence. With 0.9 they pass after 17, and after 50 some are refused.
DECAY = 0.9

# What filters remember of the uploads of a session, by kind: `Norms.bound` and `Norms.recent`.
FilterMemory = dict[str, tuple[list[float], list[list[float]]]]


@dataclass(frozen=True)
class Norms:
    """What the uploads of a round look like, one row per client."""

    upload: Tensor  # (S,), Euclidean norm of what is sent, without what is one number per client, such as a count
    steps: Tensor  # (S,), about how many local steps it comes from
    rest: Tensor  # (S,), norm of all else: such numbers, metrics, and the client's new state
    bound: Sequence[float] = (0.0, 0.0)  # of earlier rounds, for `compared`; 0 where there is none
    recent: Sequence[list[float]] = ()  # `compared` of the last uploads of earlier rounds

    @cached_property
    def compared(self) -> Numbers:
        """(S, 2): a client with more data takes more steps, so norms are compared as they are and per step."""
        return torch.stack([self.upload, self.upload / self.steps], dim=1).numpy()

    @cached_property
    def known(self) -> Numbers:
        """(N, 2), each column in order: what is compared and finite, with the last ones before it where these are
        few."""
        known = self.compared[np.isfinite(self.compared[:, 0])]
        if len(known) < FEWEST:
            known = np.concatenate([np.reshape(self.recent, (-1, 2)), known])
        return np.sort(known, axis=0)

    @cached_property
    def largest(self) -> Numbers:
        """(2,): above them norms are too large, by this round alone; 0 where nothing can be said."""
        if len(self.known) < FEWEST:
            return np.zeros(2)
        median, upper = (self.known[int(share * (len(self.known) - 1))] for share in (MEDIAN, UPPER))
        return TIMES * upper * (upper / median) if median.min() > 0 else np.zeros(2)


class Filter(Protocol):
    """Decides which uploads are counted."""

    def refuse(self, norms: Norms) -> dict[int, str]:
        """Reasons for refusing uploads, by their position in the round."""


class FiniteUploads:
    """Refuses what is not finite."""

    def refuse(self, norms: Norms) -> dict[int, str]:
        finite = np.isfinite(norms.upload.numpy()) & np.isfinite(norms.rest.numpy())
        return dict.fromkeys(np.flatnonzero(~finite).tolist(), "its update is not finite")


class BoundedUploads:
    """Refuses norms far above the others': one client must not move everyone's models.

    A norm is too large if it is above 10 q (q / m), with m the median of the round's norms and q their upper decile:
    norms of clean data differ by more than ten times where clients have few samples or take long steps, and then q / m
    is large too. It must be so both as it is and per local step. Up to a tenth of the clients may be bad. A round with
    fewer than four uploads is compared together with the last 16 before it.

    The bound of a round holds for the next ones too, a tenth lower in each: updates become smaller in the course of
    training, and a client that has not taken part for some rounds may still move as far as others did then.
    """

    def refuse(self, norms: Norms) -> dict[int, str]:
        compared, bound = norms.compared, np.maximum(norms.largest, norms.bound)
        if bound.min() <= 0:
            return {}
        large = np.isfinite(compared[:, 0]) & (compared > bound).all(axis=1)
        median = norms.known[int(MEDIAN * (len(norms.known) - 1)), 0]
        return {
            at: f"its update has norm {compared[at, 0]:.3g}, most have {median:.3g}"
            for at in np.flatnonzero(large).tolist()
        }


def remember(norms: Norms) -> tuple[list[float], list[list[float]]]:
    """What later uploads are compared with, after the uploads of a round were counted: `Norms.bound` and `.recent`."""
    compared, bound = norms.compared, np.array(norms.bound)
    if norms.largest.min() > 0:  # else most have come to rest, or there are too few to tell
        bound = np.maximum(norms.largest, DECAY * bound)
    recent = [*norms.recent, *compared[np.isfinite(compared[:, 0])][-RECENT:].tolist()]
    return bound.tolist(), recent[-RECENT:]


def default_filters() -> tuple[Filter, ...]:
    """A finite check and a norm bound on every client's upload."""
    return FiniteUploads(), BoundedUploads()


def refusals(filters: Sequence[Filter], norms: Norms) -> dict[int, str]:
    """Reasons of the first filter that refuses an upload, by position."""
    found: dict[int, str] = {}
    for one in reversed(filters):
        found |= one.refuse(norms)
    return found


def row_norms(tensors: Sequence[Tensor], clients: int) -> Tensor:
    """(C,): Euclidean norm of each client's part of tensors (C, ...), in float64 on the CPU."""
    floats = [t for t in tensors if t.is_floating_point() and t.numel()]
    if not floats:
        return torch.zeros(clients, dtype=torch.float64)
    parts = [torch.linalg.vector_norm(t.reshape(clients, -1), dim=1) for t in floats]
    norms: Tensor = torch.linalg.vector_norm(torch.stack(parts).double(), dim=0).cpu()
    return norms
