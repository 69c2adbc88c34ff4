"""Filters on what leaves clients. They look at every upload before it is counted, and change nothing in a clean run.

An upload that is refused is left out of all sums and rows, its client keeps the state it had, and the refusal is
reported with the client's name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

MEDIAN, UPPER, TIMES = 0.5, 0.9, 10.0
FEWEST = 4  # uploads to compare with


class Norms(NamedTuple):
    """What the uploads of a round look like, one row per client."""

    upload: Tensor  # (S,), Euclidean norm of what is sent, without what is one number per client, such as a count
    steps: Tensor  # (S,), about how many local steps it comes from
    rest: Tensor  # (S,), norm of all else: such numbers, metrics, and the client's new state
    earlier: Tensor  # (N, 2): the largest upload, and upload / steps, that each client sent in earlier rounds

    @property
    def compared(self) -> Tensor:
        """(S, 2): a client with more data takes more steps, so norms are compared as they are and per step."""
        return torch.stack([self.upload, self.upload / self.steps], dim=1)


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
    is large too. It must be so both as it is and per local step, and also among the norms of earlier rounds: at the end
    of training most clients hardly move, and one that still does is no danger. Up to a tenth of the clients may be bad.
    """

    def refuse(self, norms: Norms) -> dict[int, str]:
        compared, earlier = norms.compared.numpy(), norms.earlier.numpy()
        here = np.isfinite(compared[:, 0])
        now = compared[here]
        pools = [now, earlier] if len(now) >= FEWEST else [np.concatenate([earlier, now])]
        large, bounded = here, False
        for pool in pools:
            if large.any() and (bound := _bound(pool)) is not None:  # after the first pool hardly ever one is left
                large, bounded = large & (compared > bound).all(axis=1), True
        if not bounded:
            return {}
        return {
            at: f"its update has norm {compared[at, 0]:.3g}, most have {_at(MEDIAN, np.sort(pools[0][:, 0])):.3g}"
            for at in np.flatnonzero(large).tolist()
        }


def _bound(pool: npt.NDArray[np.float64]) -> list[float] | None:
    """Two numbers: above them norms are too large, given those of a pool (N, 2); None where there are too few."""
    if len(pool) < FEWEST:
        return None
    ordered = np.sort(pool, axis=0)
    medians, uppers = (_at(share, ordered).tolist() for share in (MEDIAN, UPPER))
    if min(medians) <= 0:
        return None
    return [TIMES * upper * (upper / median) for median, upper in zip(medians, uppers, strict=True)]


def _at(share: float, ordered: npt.NDArray[np.float64]) -> Any:
    """The number, or the row, that this share of the others comes before."""
    return ordered[int(share * (len(ordered) - 1))]


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
