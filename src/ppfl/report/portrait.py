"""Who the clients are: memberships in an order that a person can read, beside the truth where it is known.

Canonical models have no order of their own. Here they are called A, B, C, ... from the largest share of the
population to the smallest; clients are sorted by their largest membership, and by how large it is.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ppfl.core.simplex import harden, match

from .methods import Method
from .records import Run, algorithm_name

MIXED_BELOW = 0.6  # a client with no larger membership than this is called a mixture


class Portrait(NamedTuple):
    label: str
    ids: tuple[str, ...]  # M, in the order of the picture
    memberships: Tensor  # (M, K), columns from the largest share to the smallest
    columns: tuple[int, ...]  # (K,), where each is in the run's own files
    truth: Tensor | None  # (M, max(K, true groups)); column j is the group that model j was matched with
    rounds: tuple[int, ...]  # (T,)
    history: Tensor  # (T, M, K)
    seeds: int = 1  # this is the first of so many

    @property
    def k(self) -> int:
        return self.memberships.shape[1]

    @property
    def shares(self) -> list[float]:
        """(K,), of the population."""
        return [float(share) for share in self.memberships.mean(0)]

    @property
    def counts(self) -> list[int]:
        """(K,), clients whose largest membership it is."""
        return [int(count) for count in self.memberships.argmax(1).bincount(minlength=self.k)]

    @property
    def mixed(self) -> int:
        """Clients without a clear kind."""
        return int((self.memberships.amax(1) < MIXED_BELOW).sum())


class Agreement(NamedTuple):
    """With the truth. Groups: the share of clients put in the right one. Mixtures: the mean overlap, 1 - TV."""

    value: float
    groups: bool


def letter(position: int) -> str:
    """The name of the model with the position-th largest share.

    >>> letter(0), letter(25), letter(26)
    ('A', 'Z', 'AA')
    """
    before, at = divmod(position, 26)
    return (letter(before - 1) if before else "") + chr(ord("A") + at)


def portrait(label: str, run: Run) -> Portrait | None:
    """None where clients cannot differ: no memberships, one canonical model, or a run that blew up."""
    c = _rows(run.memberships, len(run.ids))
    if c is None or c.shape[1] < 2:
        return None
    columns = c.mean(0).argsort(descending=True, stable=True)
    c = c[:, columns]
    order = by_kind(c)
    truth = _rows(run.truth, len(run.ids))
    by_round = {t: _rows(past, len(run.ids)) for t, past in sorted(run.memberships_by_round.items())}
    history = {
        t: past[order][:, columns] for t, past in by_round.items() if past is not None and past.shape[1] == len(columns)
    }
    return Portrait(
        label,
        tuple(run.ids[int(i)] for i in order),
        c[order],
        tuple(int(k) for k in columns),
        None if truth is None else matched(c, truth)[order],
        tuple(history),
        torch.stack(list(history.values())) if history else c.new_empty(0, *c.shape),
    )


def by_kind(c: Tensor) -> Tensor:
    """Positions of clients (M,) by their largest membership, and by how large it is."""
    top = c.max(1)
    by_size = top.values.argsort(descending=True, stable=True)
    return by_size[top.indices[by_size].argsort(stable=True)]


def portraits(methods: Sequence[Method]) -> list[Portrait]:
    """Of the first seed of all methods that have memberships; PPFL's first, whose they are the product."""
    ppfl_first = sorted(methods, key=lambda method: algorithm_name(method.first) != "ppfl")
    drawn = ((portrait(method.label, method.first), len(method.runs)) for method in ppfl_first)
    return [found._replace(seeds=seeds) for found, seeds in drawn if found is not None]


def matched(memberships: Tensor, truth: Tensor) -> Tensor:
    """Truth (M, max(K, Kt)) with each true group in the column of its canonical model, leftovers at the end.

    >>> matched(torch.eye(3), torch.eye(3)[:, [1, 2, 0]]).equal(torch.eye(3))
    True
    """
    k = max(memberships.shape[1], truth.shape[1])
    found, true = (pad(c, (0, k - c.shape[1])) for c in (memberships, truth))
    return true[:, match(harden(found) if in_groups(truth) else found, true)]


def in_groups(truth: Tensor) -> bool:
    """Whether every client is wholly in one."""
    return bool((truth.amax(1) > 1 - 1e-6).all())


def agreement(run: Run) -> Agreement | None:
    """How far the memberships say what the truth says; None where none is known, or matching must make it so."""
    from ppfl.runs import group_agreement  # here, so that a page without truth needs no engines and data sets

    c, truth = (_rows(rows, len(run.ids)) for rows in (run.memberships, run.truth))
    if c is None or truth is None or c.shape[1] < 2 or len(c) < 2:
        return None
    found, groups = group_agreement(c, truth), in_groups(truth)
    return Agreement(found.share if groups else 1 - found.distance, groups)


def _rows(c: Tensor | None, n_clients: int) -> Tensor | None:
    """Rows that sum to exactly one, of these clients; None where there are none such."""
    if c is None or c.dim() != 2 or c.shape[0] != n_clients or c.numel() == 0:
        return None
    c = c.detach().cpu().double()
    if not c.isfinite().all() or (c < 0).any() or (c.sum(1) <= 0).any():
        return None
    return c / c.sum(1, keepdim=True)
