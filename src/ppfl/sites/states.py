"""The states of a site's clients: after the last exchange, before the last round, and as they were kept.

A state is a row of bytes in a slot. All clients begin with the one in slot 0, so that a client that was never written
to takes no space. Every write takes new slots and leaves the old ones as they are: to undo a write is to point back,
and a copy of all states is a copy of the pointers. Slots that nothing points to are used again.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..algorithms.contract import Rows
from ..core.ids import positions_of
from ..core.trees import Tree, named_leaves, tree_leaves, tree_map, with_leaves
from ..errors import CheckpointError, WriteError
from .filters import FilterMemory

MOST_BYTES = 256 * 2**20  # of client states in memory; a run may need two copies of them
_BLOCK = 16 * 2**20  # bytes of states that are copied at a time


class _Undo(NamedTuple):
    """What brings back the states before an exchange."""

    exchange: int  # the one before it
    filters: FilterMemory
    moves: list[tuple[Tensor, Tensor]]  # clients that were written to, and their slots before


class ClientStates:
    """One state per client. The exchanges of the last round can be undone.

    `filters` is what the site's filters remember; it is undone, kept and restored together with the states.
    """

    def __init__(self, initial: Tree, n_clients: int, on_disk: bool | None = None) -> None:
        """initial: the state that every client begins with, leaves (...).

        on_disk: whether states are in a file; None: where they would take more than MOST_BYTES.
        """
        self.initial, self._leaves = initial, tree_leaves(initial)
        size = sum(map(_bytes_in, self._leaves))
        on_disk = n_clients * size > MOST_BYTES if on_disk is None else on_disk
        device = self._leaves[0].device if self._leaves else torch.device("cpu")
        self._records = _Records(size, 1, None if on_disk and size else device)
        if size:
            self._records.write(torch.zeros(1), _as_bytes([leaf[None] for leaf in self._leaves]))
        self._free = torch.zeros(0, dtype=torch.int32)  # slots that nothing points to
        self._reserved, self._used = self._free, 0  # slots for the work of this exchange, and how many are written to
        self._lock = threading.Lock()
        self._slots = self._kept = torch.zeros(n_clients, dtype=torch.int32)
        self.filters: FilterMemory = {}
        self._kept_filters = self.filters
        self.exchange = 0  # the last one whose work is in the states
        self._round = -1  # of the last exchange
        self._undo: list[_Undo] = []  # for each exchange of that round

    @property
    def bytes_on_disk(self) -> int:
        """That the states take; 0 where they are in memory."""
        return self._records.bytes_on_disk

    def rows(self, who: Tensor) -> Tree:
        """Copies of the states of the clients at these positions, leaves (len(who), ...)."""
        if not self._leaves:
            return self.initial
        return self._read(self._slots[who])

    def return_to(self, merged: int) -> None:
        """Undo exchanges of the last round whose reply the server has not merged: it was late, refused or lost."""
        if merged < (self._undo[0].exchange if self._undo else self.exchange):
            raise CheckpointError(
                f"this site's clients are after exchange {self.exchange}, but the server has merged no reply of theirs "
                f"after exchange {merged}; restore the states of that time, or start a new session"
            )
        while merged < self.exchange:
            self.undo_work()
            # an interrupt before the last step leaves an undo that changes nothing
            self.exchange, self.filters = self._undo[-1].exchange, self._undo[-1].filters
            self._undo.pop()

    def begin(self, round: int, exchange: int, merged: int, clients: int) -> None:
        """Before the work of at most so many clients. `merged` is the last exchange that the server has merged."""
        self.return_to(merged)
        if round != self._round:
            self._undo.clear()
        # all at once and before threads write, as records move when they grow
        self._reserved, self._used = self._take(clients if self._records.size else 0), 0
        self._own_pointers()
        self._undo.append(_Undo(self.exchange, self.filters, []))
        self._round, self.exchange = round, exchange

    def write(self, who: Tensor, after: Tree) -> None:
        """New states of the clients at these positions. Threads may write at the same time, each its own clients."""
        if not self._records.size:
            return
        with self._lock:
            slots = self._reserved[self._used : self._used + len(who)]
            self._used += len(who)
        self._records.write(slots, _as_bytes(tree_leaves(after)))
        # in this order: a run may be interrupted at any instant
        self._undo[-1].moves.append((who, self._slots[who]))
        self._slots[who] = slots

    def undo_work(self) -> None:
        """The states as they were before the work of this exchange."""
        self._own_pointers()
        for who, before in reversed(self._undo[-1].moves):
            self._slots[who] = before
        self._undo[-1].moves.clear()
        self._used = 0

    def keep(self) -> None:
        """Remember the states as they are now."""
        self._kept, self._kept_filters = self._slots, self.filters

    def use_kept(self, exchange: int) -> None:
        """The kept states, which were those after this exchange."""
        self._undo.clear()
        self._slots, self.filters, self.exchange = self._kept, self._kept_filters, exchange

    def save(self, kept: bool = False) -> tuple[Tensor, Tree, FilterMemory]:
        """Positions of the clients that were ever written to, in order, their states, and what filters remember.

        States that are on disk come in files of their own, which go when the tensors go.
        """
        slots = self._kept if kept else self._slots
        at = slots.nonzero()[:, 0]
        saved = [_Records(_bytes_in(leaf), len(at), self._records.device) for leaf in self._leaves]
        for some in self._blocks(len(at)):
            for records, leaf in zip(saved, tree_leaves(self._read(slots[at[some]])), strict=True):
                records.write(some, _as_bytes([leaf]))
        leaves = [_as_leaf(records.data, like) for records, like in zip(saved, self._leaves, strict=True)]
        return at, self._tree(leaves), self._kept_filters if kept else self.filters

    def restore(self, at: Tensor, rows: Tree, filters: FilterMemory, exchange: int, kept: bool = False) -> None:
        """States that were saved; clients at other positions get the state that all begin with."""
        at = at if self._records.size else at[:0]  # without a state there is nothing to write
        slots, pointers = self._take(len(at)), torch.zeros_like(self._slots)
        for some in self._blocks(len(at)):
            block = [leaf[some.to(leaf.device)] for leaf in tree_leaves(rows)]
            self._records.write(slots[some], _as_bytes(block))
        pointers[at] = slots
        if kept:
            self._kept, self._kept_filters = pointers, filters
        else:
            self._undo.clear()
            self._slots, self.filters, self.exchange = pointers, filters, exchange

    def _own_pointers(self) -> None:
        """Before pointers change: kept ones stay as they are."""
        if self._slots is self._kept:
            self._slots = self._slots.clone()

    def _take(self, count: int) -> Tensor:
        """Slots that nothing points to. What is taken and not pointed to in the end is found again later."""
        if len(self._free) < count:
            self._free = self._unused()
        if (lacking := count - len(self._free)) > 0:
            before = len(self._records.data)
            more = torch.arange(before, before + max(lacking, before // 4), dtype=torch.int32)
            self._records.grow(before + len(more))
            self._free = torch.cat([self._free, more])
        slots, self._free = self._free[:count], self._free[count:]
        return slots

    def _unused(self) -> Tensor:
        used = torch.zeros(len(self._records.data), dtype=torch.bool)
        used[0] = True
        for pointers in (self._slots, self._kept, *(before for undo in self._undo for _, before in undo.moves)):
            used[pointers[pointers != 0].long()] = True
        return (~used).nonzero()[:, 0].int()

    def _blocks(self, count: int) -> Iterator[Tensor]:
        """So many numbers, in parts whose states fit into little memory."""
        most = max(1, _BLOCK // max(1, self._records.size))
        return (torch.arange(start, min(count, start + most)) for start in range(0, count, most))

    def _read(self, slots: Tensor) -> Tree:
        parts = torch.split(self._records.read(slots), [_bytes_in(leaf) for leaf in self._leaves], dim=1)
        pairs = zip(parts, self._leaves, strict=True)
        return self._tree([_as_leaf(_own_memory(part), like).to(like.device) for part, like in pairs])

    def _tree(self, leaves: list[Tensor]) -> Tree:
        return with_leaves(self.initial, dict(zip(named_leaves(self.initial), leaves, strict=True)))


class _Records:
    """Rows of bytes, `data` (rows, size), in memory or in a nameless file, which the system removes at the end."""

    def __init__(self, size: int, rows: int, device: torch.device | None) -> None:
        """device: where the memory is; None: in a file."""
        self.size, self.device = size, device
        self.data = torch.empty(0, size, dtype=torch.uint8, device=device)
        self._map: mmap.mmap | None = None
        if device is None:
            self._file = tempfile.TemporaryFile(buffering=0, prefix="ppfl-states-")  # noqa: SIM115
            weakref.finalize(self, self._file.close)
        self.grow(rows)

    @property
    def bytes_on_disk(self) -> int:
        return self.data.numel() if self.device is None else 0

    def grow(self, rows: int) -> None:
        """To so many rows. Those that are there stay as they are, at another place in memory."""
        if self.device is None and rows * self.size:
            self.data = self._mapped(rows * self.size).view(rows, self.size)
        else:
            data = self.data.new_empty(rows, self.size)
            data[: len(self.data)] = self.data
            self.data = data

    def read(self, at: Tensor) -> Tensor:
        """A copy (len(at), size)."""
        found = self.data.index_select(0, at.long().to(self.data.device))
        self._trim()
        return found

    def write(self, at: Tensor, rows: Tensor) -> None:
        self.data[at.long().to(self.data.device)] = rows.to(self.data.device)
        self._trim()

    def _mapped(self, size: int) -> Tensor:
        """So many bytes of the file as a tensor."""
        try:  # a full disk must be found here: where the file is mapped it would end the process
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(self._file.fileno(), 0, size)
            else:
                self._file.truncate(size)
        except OSError as error:
            raise WriteError(
                f"client states need {size:,} bytes in {tempfile.gettempdir()} and cannot have them "
                f"({error.strerror}); free some space, or set TMPDIR to another folder"
            ) from error
        self._map = mmap.mmap(self._file.fileno(), size)
        return torch.frombuffer(self._map, dtype=torch.uint8)

    def _trim(self) -> None:
        """Give back the process's memory; what was written is in the file. Threads may go on reading and writing."""
        if self._map is not None and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)


def states_of(initial: Tree, saved: Rows, ids: Sequence[str]) -> Tree:
    """The states of these clients, leaves (len(ids), ...), from saved ones: `initial` for those that have no row."""
    assert saved.ids is not None
    where = positions_of(saved.ids)
    at = torch.tensor([where.get(client, -1) for client in ids], dtype=torch.long)
    first = tree_map(lambda leaf: leaf.repeat(len(ids), *(1 for _ in leaf.shape)), initial)
    found = named_leaves(first)
    for name, leaf in saved.values.items():
        found[name] = found[name].to(leaf.device)
        found[name][at >= 0] = leaf[at[at >= 0].to(leaf.device)]
    return with_leaves(first, found)


def _bytes_in(leaf: Tensor) -> int:
    return leaf.numel() * leaf.element_size()


def _as_bytes(leaves: Sequence[Tensor]) -> Tensor:
    """(C, bytes) of leaves (C, ...)."""
    flat = (leaf.detach().reshape(len(leaf), leaf.shape[1:].numel()) for leaf in leaves)
    return torch.cat([_own_memory(leaf).view(torch.uint8) for leaf in flat], dim=1)


def _as_leaf(data: Tensor, like: Tensor) -> Tensor:
    """Bytes (C, bytes) as a leaf (C, ...), where `like` is (...)."""
    if not data.numel():
        return like.new_empty(len(data), *like.shape, device=data.device)
    return data.view(like.dtype).view(len(data), *like.shape)


def _own_memory(leaf: Tensor) -> Tensor:
    """A copy with the strides of its shape; what is contiguous may have others, if it is one row."""
    return leaf.clone(memory_format=torch.contiguous_format)
