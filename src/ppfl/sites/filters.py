"""Filters on what leaves clients. They look at every upload before it is counted, and change nothing in a clean run.

An upload that is refused is left out of all sums and rows, its client keeps the state it had, and the refusal is
reported with the client's name.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

MEDIAN, UPPER, TIMES = 0.5, 0.9, 10.0
FEWEST = 4  # uploads to compare with
REMEMBERED = 64  # norms of earlier rounds, for rounds of few clients


class Norms(NamedTuple):
    """What the uploads of a round look like, one number per client."""

    kind: str  # which parts they have
    upload: Tensor  # (S,), Euclidean norm of what is sent, without what is one number per client, such as a count
    kept: Tensor  # (S,), the same of all else: such numbers, metrics, and the client's new state


class Filter(Protocol):
    """Decides which uploads are counted."""

    def refuse(self, norms: Norms) -> dict[int, str]:
        """Reasons for refusing uploads, by their position in the round."""

    def remember(self, norms: Norms) -> None:
        """The uploads that were counted."""


class FiniteUploads:
    """Refuses what is not finite."""

    def refuse(self, norms: Norms) -> dict[int, str]:
        finite = norms.upload.isfinite() & norms.kept.isfinite()
        return dict.fromkeys((~finite).nonzero().flatten().tolist(), "its update is not finite")

    def remember(self, norms: Norms) -> None:
        """Nothing to remember."""


class BoundedUploads:
    """Refuses norms far above the others': one client must not move everyone's models.

    The bound is TIMES the upper decile of the round's norms, times its ratio to their median. Norms differ by more
    than ten times in clean data, where clients have few samples or take long steps, and then that ratio is large too.
    Up to a tenth of the clients may be bad. Rounds of few clients are compared with those before them.
    """

    def __init__(self) -> None:
        self._recent: dict[str, deque[float]] = {}

    def refuse(self, norms: Norms) -> dict[int, str]:
        here = norms.upload[norms.upload.isfinite()].tolist()
        pool = sorted(here if len(here) >= FEWEST else [*self._recent.get(norms.kind, ()), *here])
        if len(pool) < FEWEST:
            return {}
        median, upper = (pool[int(share * (len(pool) - 1))] for share in (MEDIAN, UPPER))
        if median == 0:
            return {}
        bound = TIMES * upper * (upper / median)
        large = ((norms.upload > bound) & norms.upload.isfinite()).nonzero().flatten().tolist()
        return {at: f"its update has norm {float(norms.upload[at]):.3g}, most have {median:.3g}" for at in large}

    def remember(self, norms: Norms) -> None:
        recent = self._recent.setdefault(norms.kind, deque(maxlen=REMEMBERED))
        recent.extend(norms.upload[:REMEMBERED].tolist())


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
    parts = [torch.linalg.vector_norm(t.flatten(1) if t.dim() > 1 else t[:, None], dim=1) for t in floats]
    norms: Tensor = torch.linalg.vector_norm(torch.stack(parts).double(), dim=0).cpu()
    return norms
