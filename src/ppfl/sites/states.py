"""The states of a site's clients: after the last exchange, before the last round, and as they were kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, Self

import torch
from torch import Tensor

from ..core.draws import name_key
from ..core.trees import Tree
from ..errors import CheckpointError
from .mapped_states import MappedTable
from .state_tables import Change, InMemoryTable, StateTable

NORMS, KINDS = "filter.norms", "filter.kinds"  # saved with the states, so that a resumed run refuses the same


class _Undo(NamedTuple):
    """What brings back the states before an exchange."""

    exchange: int  # the one before it
    states: list[Change]
    norms: list[Change]


class _Tables(NamedTuple):
    states: StateTable
    norms: StateTable  # the largest norms of the uploads of each client, and of which kind these were

    def copy(self) -> _Tables:
        return _Tables(self.states.copy(), self.norms.copy())

    def release(self) -> None:
        self.states.release()
        self.norms.release()


class ClientStates:
    """One row per client, written to in place. The exchanges of the last round can be undone."""

    def __init__(self, states: StateTable, norms: StateTable) -> None:
        self._now = self._kept = _Tables(states, norms)
        self.exchange = 0  # the last one whose work is in the states
        self._round = -1  # of the last exchange
        self._undo: list[_Undo] = []  # for each exchange of that round
        self._shared = True  # whether others hold the tables too, so that a copy must be made before writing

    @classmethod
    def in_memory(cls, states: Tree, clients: int) -> Self:
        """One tree for all clients, leaves (M, ...)."""
        return cls(InMemoryTable(states), InMemoryTable(_no_norms(clients)))

    @classmethod
    def on_disk(cls, initial: Callable[[Tensor], Tree], clients: int) -> Self:
        """In files of the folder for temporary files; `initial` has the first states of clients at these positions."""
        return cls(MappedTable(initial, clients), MappedTable(lambda who: _no_norms(len(who)), clients))

    def named(self, snapshot: str) -> dict[str, Tensor]:
        """All that is saved of the clients, by name, leaves (M, ...)."""
        tables = self._kept if snapshot == "kept" else self._now
        return tables.states.named() | tables.norms.named()

    @property
    def bytes_on_disk(self) -> int:
        """That the states take; 0 where they are in memory."""
        return sum(table.bytes_on_disk for table in self._now)

    def rows(self, who: Tensor) -> Tree:
        """Copies of the states of the clients at these positions."""
        return self._now.states.rows(who)

    def return_to(self, merged: int) -> None:
        """Undo exchanges of the last round whose reply the server has not merged: it was late, refused or lost."""
        if merged < (self._undo[0].exchange if self._undo else self.exchange):
            raise CheckpointError(
                f"this site's clients are after exchange {self.exchange}, but the server has merged no reply of theirs "
                f"after exchange {merged}; restore the states of that time, or start a new session"
            )
        if merged < self.exchange:
            self._own_tables()
        while merged < self.exchange:
            self.undo_work()
            self.exchange, _, norms = self._undo.pop()
            for change in reversed(norms):
                self._now.norms.undo(change)

    def begin(self, round: int, exchange: int, merged: int) -> None:
        """Before the work of an exchange. `merged` is the last one whose reply the server has merged."""
        self.return_to(merged)
        if round != self._round:
            self._forget_changes()
        self._undo.append(_Undo(self.exchange, [], []))
        self._round, self.exchange = round, exchange
        self._own_tables()

    def write(self, who: Tensor, before: Tree, after: Tree) -> None:
        """The new states of the clients at these positions; `before` are their rows as they were."""
        change = self._now.states.change(who, before)
        self._undo[-1].states.append(change)
        self._now.states.write(change, after)

    def undo_work(self) -> None:
        """The states as they were before the work of this exchange."""
        changes = self._undo[-1].states
        for change in reversed(changes):
            self._now.states.undo(change)
        changes.clear()

    def earlier_norms(self, kind: str) -> Tensor:
        """(N, 2): the largest norms of uploads of this kind that each client has sent, for filters to compare with."""
        known = self._now.norms.written()
        norms: Tensor = known[NORMS][known[KINDS] == name_key(kind)]
        return norms

    def remember_norms(self, kind: str, who: Tensor, norms: Tensor) -> None:
        """Norms (S, 2) of the uploads that were counted."""
        before = self._now.norms.rows(who)
        same = (before[KINDS] == name_key(kind))[:, None]
        after = {
            NORMS: torch.maximum(torch.where(same, before[NORMS], 0), norms),
            KINDS: torch.full_like(before[KINDS], name_key(kind)),
        }
        change = self._now.norms.change(who, before)
        self._undo[-1].norms.append(change)
        self._now.norms.write(change, after)

    def keep(self) -> None:
        """Remember the states as they are now."""
        if self._kept is not self._now:
            self._kept.release()
        self._kept, self._shared = self._now, True

    def restore(self, snapshot: str, named: Mapping[str, Tensor], exchange: int) -> None:
        """States that were saved, leaves by name."""
        tables = _Tables(*(table.restored(named) for table in self._now))
        if snapshot == "kept":
            if self._kept is not self._now:
                self._kept.release()
            self._kept = tables
        else:
            self._forget_changes()
            if self._kept is not self._now:
                self._now.release()
            self._now, self._shared, self.exchange = tables, True, exchange

    def _own_tables(self) -> None:
        """Tables that no one else holds: first states may share memory among clients, and kept ones stay."""
        if self._shared:
            held_by_others = self._now
            self._now, self._shared = held_by_others.copy(), False
            if self._kept is not held_by_others:
                held_by_others.release()

    def _forget_changes(self) -> None:
        for undo in self._undo:
            for table, changes in zip(self._now, (undo.states, undo.norms), strict=True):
                for change in changes:
                    table.forget(change)
        self._undo.clear()


def _no_norms(clients: int) -> Tree:
    return {NORMS: torch.zeros(clients, 2, dtype=torch.float64), KINDS: torch.zeros(clients, dtype=torch.int64)}
