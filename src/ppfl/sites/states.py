"""The states of a site's clients: after the last exchange, before the last round, and as they were kept."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from ..core.draws import name_key
from ..core.errors import CheckpointError
from ..core.trees import Tree, named_leaves, tree_map, with_leaves

NORMS, KINDS = "filter.norms", "filter.kinds"  # saved with the states, so that a resumed run refuses the same


class _Undo(NamedTuple):
    """What brings back the states before an exchange."""

    exchange: int  # the one before it
    norms: dict[str, Tensor]
    rows: list[tuple[Tensor, Tree]]  # positions, and the rows as they were


class ClientStates:
    """One tree for all clients, leaves (M, ...), written to in place. The exchanges of the last round can be undone."""

    def __init__(self, states: Tree, clients: int) -> None:
        self.now = states
        self.kept: Tree = states
        self.exchange = 0  # the last one whose work is in `now`
        self._round = -1  # of the last exchange
        self._undo: list[_Undo] = []  # for each exchange of that round
        self._written = False  # whether `now` is memory of our own
        self._kept_is_now = True
        self.norms = {
            NORMS: torch.zeros(clients, 2, dtype=torch.float64),
            KINDS: torch.zeros(clients, dtype=torch.int64),
        }
        self._kept_norms = self.norms

    def named(self, snapshot: str) -> dict[str, Tensor]:
        """All that is saved of the clients, by name, leaves (M, ...)."""
        kept = snapshot == "kept"
        return named_leaves(self.kept if kept else self.now) | (self._kept_norms if kept else self.norms)

    def rows(self, who: Tensor) -> Tree:
        """Copies of the states of the clients at these positions."""
        return tree_map(lambda leaf: leaf[who.to(leaf.device)], self.now)

    def return_to(self, merged: int) -> None:
        """Undo exchanges of the last round whose reply the server has not merged: it was late, refused or lost."""
        if merged < (self._undo[0].exchange if self._undo else self.exchange):
            raise CheckpointError(
                f"this site's clients are after exchange {self.exchange}, but the server has merged no reply of theirs "
                f"after exchange {merged}; restore the states of that time, or start a new session"
            )
        if merged < self.exchange and self._kept_is_now:
            self.now, self._kept_is_now = tree_map(torch.clone, self.now), False
        while merged < self.exchange:
            self.undo_work()
            self.exchange, self.norms, _ = self._undo.pop()

    def begin(self, round: int, exchange: int, merged: int) -> None:
        """Before the work of an exchange. `merged` is the last one whose reply the server has merged."""
        self.return_to(merged)
        if round != self._round:
            self._undo.clear()
        self._undo.append(_Undo(self.exchange, self.norms, []))
        self._round, self.exchange = round, exchange
        if not self._written:  # initial states may share memory among clients, and the kept ones stay as they are
            self.now = tree_map(_own_memory, self.now)
            self._written = True
        elif self._kept_is_now:
            self.now = tree_map(torch.clone, self.now)
        self._kept_is_now = False

    def write(self, who: Tensor, before: Tree, after: Tree) -> None:
        """The new states of the clients at these positions; `before` are their rows as they were."""
        self._undo[-1].rows.append((who, before))
        tree_map(lambda all_, new: all_.index_copy_(0, who.to(all_.device), new), self.now, after)

    def undo_work(self) -> None:
        """The states as they were before the work of this exchange."""
        rows = self._undo[-1].rows
        for who, before in reversed(rows):
            tree_map(lambda all_, old, at=who: all_.index_copy_(0, at.to(all_.device), old), self.now, before)
        rows.clear()

    def earlier_norms(self, kind: str) -> Tensor:
        """(N, 2): the largest norms of uploads of this kind that each client has sent, for filters to compare with."""
        return self.norms[NORMS][self.norms[KINDS] == name_key(kind)]

    def remember_norms(self, kind: str, who: Tensor, norms: Tensor) -> None:
        """Norms (S, 2) of the uploads that were counted."""
        self.norms = {name: leaf.clone() for name, leaf in self.norms.items()}
        same = (self.norms[KINDS][who] == name_key(kind))[:, None]
        before = torch.where(same, self.norms[NORMS][who], 0)
        self.norms[NORMS][who], self.norms[KINDS][who] = torch.maximum(before, norms), name_key(kind)

    def keep(self) -> None:
        """Remember the states as they are now."""
        self.kept, self._kept_is_now, self._kept_norms = self.now, True, self.norms

    def restore(self, snapshot: str, named: Mapping[str, Tensor], exchange: int) -> None:
        """States that were saved, leaves by name."""
        states = with_leaves(self.now, {name: named[name].to(leaf) for name, leaf in named_leaves(self.now).items()})
        norms = {name: named[name].cpu() for name in self.norms}
        if snapshot == "kept":
            self.kept, self._kept_is_now, self._kept_norms = states, False, norms
        else:
            self.now, self._written, self.norms, self.exchange = states, False, norms, exchange
            self._undo.clear()


def _own_memory(leaf: Tensor) -> Tensor:
    return leaf.clone(memory_format=torch.contiguous_format)
