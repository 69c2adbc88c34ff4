"""Memberships of a run, sorted for display, together with the truth if it is known.

Canonical models have no natural order. Here they are named A, B, C, ... from the largest share of the population to
the smallest. Clients are sorted by the model of their largest membership, then by the size of that membership.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..core.simplex import harden, match
from ..runs.record import Agreement, RunRecord
from .theme import CLEAR, model_name, model_names


class SortedMemberships(NamedTuple):
    label: str
    ids: tuple[str, ...]  # of M clients, in sorted order
    memberships: Tensor  # (M, K), columns from the largest share to the smallest
    columns: tuple[int, ...]  # (K,), the column of each model in the files of the run
    truth: Tensor | None  # (M, max(K, true groups)); column j is the group matched with model j
    rounds: tuple[int, ...]  # (T,), rounds of the history
    history: Tensor  # (T, M, K)
    seeds: int = 1  # number of seeds of the method, of which this is the first

    @property
    def k(self) -> int:
        return self.memberships.shape[1]

    @property
    def shares(self) -> list[float]:
        """Share of each canonical model in the population, (K,)."""
        return [float(share) for share in self.memberships.mean(0)]

    @property
    def names(self) -> list[str]:
        return model_names(self.k)

    @property
    def counts(self) -> list[int]:
        """Number of clients whose largest membership is in each model, (K,)."""
        return [int(count) for count in self.memberships.argmax(1).bincount(minlength=self.k)]

    @property
    def clear(self) -> list[int]:
        """Number of clients that are clearly each model, (K,)."""
        return [int(count) for count in (self.memberships >= CLEAR).sum(0)]

    def true_name(self, client: int) -> str:
        """The true group of a client by the name of its model, with the share where it is not all of it."""
        assert self.truth is not None
        share, group = self.truth[client].max(0)
        name = model_name(int(group))
        return name if share > 1 - 1e-6 else f"{name} {share:.2f}"

    @property
    def mixed(self) -> int:
        """Number of clients that are clearly no model."""
        return len(self.ids) - sum(self.clear)


def sort_memberships(label: str, run: RunRecord) -> SortedMemberships | None:
    """The memberships of a run, or None if it has none, has one canonical model only, or has diverged."""
    c = _valid_memberships(run.memberships, len(run.ids))
    if c is None or c.shape[1] < 2:
        return None
    columns = c.mean(0).argsort(descending=True, stable=True)
    c = c[:, columns]
    order = order_by_largest(c)
    truth = _valid_memberships(run.truth, len(run.ids))
    by_round = {t: _valid_memberships(past, len(run.ids)) for t, past in sorted(run.memberships_by_round.items())}
    history = {
        t: past[order][:, columns] for t, past in by_round.items() if past is not None and past.shape[1] == len(columns)
    }
    return SortedMemberships(
        label,
        tuple(run.ids[int(i)] for i in order),
        c[order],
        tuple(int(k) for k in columns),
        None if truth is None else match_truth(c, truth)[order],
        tuple(history),
        torch.stack(list(history.values())) if history else c.new_empty(0, *c.shape),
    )


def agreement(run: RunRecord) -> Agreement | None:
    """Of the memberships with the truth; None where it is not known, would be trivial, or the run has diverged."""
    c = _valid_memberships(run.memberships, len(run.ids))
    return None if c is None or len(c) < 2 or c.shape[1] < 2 else run.agreement


def order_by_largest(c: Tensor) -> Tensor:
    """The order of clients (M,) by the model of their largest membership, then by its size."""
    top = c.max(1)
    by_size = top.values.argsort(descending=True, stable=True)
    return by_size[top.indices[by_size].argsort(stable=True)]


def match_truth(memberships: Tensor, truth: Tensor) -> Tensor:
    """The truth (M, max(K, Kt)) with each true group in the column of its matching model, unmatched groups last.

    >>> match_truth(torch.eye(3), torch.eye(3)[:, [1, 2, 0]]).equal(torch.eye(3))
    True
    """
    k = max(memberships.shape[1], truth.shape[1])
    found, true = (pad(c, (0, k - c.shape[1])) for c in (memberships, truth))
    return true[:, match(harden(found) if is_one_hot(truth) else found, true)]


def is_one_hot(truth: Tensor) -> bool:
    """Whether every client belongs to exactly one group."""
    return bool((truth.amax(1) > 1 - 1e-6).all())


def _valid_memberships(c: Tensor | None, n_clients: int) -> Tensor | None:
    """Memberships (n_clients, K) scaled to sum to one; None if they are missing, of another shape or invalid."""
    if c is None or c.dim() != 2 or c.shape[0] != n_clients or c.numel() == 0:
        return None
    c = c.detach().cpu().double()
    if not c.isfinite().all() or (c < 0).any() or (c.sum(1) <= 0).any():
        return None
    return c / c.sum(1, keepdim=True)
