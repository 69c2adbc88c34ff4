"""Memberships of a run, sorted for display, together with the truth if it is known.

Canonical models have no natural order. Here they are named A, B, C, ... from the largest share of the population to
the smallest. Clients are sorted by the model of their largest membership, then by the size of that membership.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ppfl.core.simplex import harden, match
from ppfl.runs.record import RunRecord, group_agreement

from .methods import MethodRuns

MIXED_BELOW = 0.6  # a client whose largest membership is below this is called mixed


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
    def counts(self) -> list[int]:
        """Number of clients whose largest membership is in each model, (K,)."""
        return [int(count) for count in self.memberships.argmax(1).bincount(minlength=self.k)]

    @property
    def mixed(self) -> int:
        """Number of clients whose largest membership is below MIXED_BELOW."""
        return int((self.memberships.amax(1) < MIXED_BELOW).sum())


class TruthAgreement(NamedTuple):
    """For true groups, the share of clients in the right group; for true mixtures, the mean overlap 1 - TV."""

    value: float
    groups: bool


def letter(position: int) -> str:
    """The name of the model with the position-th largest share.

    >>> letter(0), letter(25), letter(26)
    ('A', 'Z', 'AA')
    """
    before, at = divmod(position, 26)
    return (letter(before - 1) if before else "") + chr(ord("A") + at)


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


def order_by_largest(c: Tensor) -> Tensor:
    """The order of clients (M,) by the model of their largest membership, then by its size."""
    top = c.max(1)
    by_size = top.values.argsort(descending=True, stable=True)
    return by_size[top.indices[by_size].argsort(stable=True)]


def memberships_of_methods(methods: Sequence[MethodRuns]) -> list[SortedMemberships]:
    """Memberships of the first seed of every method that has them, PPFL first."""
    ppfl_first = sorted(methods, key=lambda method: method.first.method != "ppfl")
    drawn = ((sort_memberships(method.label, method.first), len(method.runs)) for method in ppfl_first)
    return [found._replace(seeds=seeds) for found, seeds in drawn if found is not None]


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


def truth_agreement(run: RunRecord) -> TruthAgreement | None:
    """How well the memberships agree with the truth; None if the truth is unknown or agreement would be trivial."""
    c, truth = (_valid_memberships(rows, len(run.ids)) for rows in (run.memberships, run.truth))
    if c is None or truth is None or c.shape[1] < 2 or len(c) < 2:
        return None
    found, groups = group_agreement(c, truth), is_one_hot(truth)
    return TruthAgreement(found.share if groups else 1 - found.distance, groups)


def _valid_memberships(c: Tensor | None, n_clients: int) -> Tensor | None:
    """Memberships (n_clients, K) scaled to sum to one; None if they are missing, of another shape or invalid."""
    if c is None or c.dim() != 2 or c.shape[0] != n_clients or c.numel() == 0:
        return None
    c = c.detach().cpu().double()
    if not c.isfinite().all() or (c < 0).any() or (c.sum(1) <= 0).any():
        return None
    return c / c.sum(1, keepdim=True)
