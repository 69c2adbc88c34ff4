"""Filters on what leaves clients. They look at every upload before it is counted, and change nothing in a clean run.

An upload that is refused is left out of all sums and rows, its client keeps the state it had, and the refusal is
reported with the client's name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

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
        finite = norms.upload.isfinite() & norms.rest.isfinite()
        return dict.fromkeys((~finite).nonzero().flatten().tolist(), "its update is not finite")


class BoundedUploads:
    """Refuses norms far above the others': one client must not move everyone's models.

    A norm is too large if it is above 10 q (q / m), with m the median of the round's norms and q their upper decile:
    norms of clean data differ by more than ten times where clients have few samples or take long steps, and then q / m
    is large too. It must be so both as it is and per local step, and also among the norms of earlier rounds: at the end
    of training most clients hardly move, and one that still does is no danger. Up to a tenth of the clients may be bad.
    """

    def refuse(self, norms: Norms) -> dict[int, str]:
        here = norms.upload.isfinite()
        now = norms.compared[here]
        pools = [now, norms.earlier] if len(now) >= FEWEST else [torch.cat([norms.earlier, now])]
        bounds = [bound for pool in pools if (bound := _bound(pool)) is not None]
        if not bounds:
            return {}
        large = (norms.compared > torch.stack(bounds).amax(0)).all(dim=1) & here
        usual = float(now.median(0).values[0]) if len(now) >= FEWEST else float(pools[0].median(0).values[0])
        return {
            at: f"its update has norm {float(norms.upload[at]):.3g}, most have {usual:.3g}"
            for at in large.nonzero().flatten().tolist()
        }


def _bound(pool: Tensor) -> Tensor | None:
    """(2,): above it a norm is too large, given those of a pool (N, 2); None where there are too few of them."""
    if len(pool) < FEWEST:
        return None
    ordered = pool.sort(dim=0).values
    median, upper = (ordered[int(share * (len(pool) - 1))] for share in (MEDIAN, UPPER))  # (2,)
    return TIMES * upper * (upper / median) if bool((median > 0).all()) else None


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
