"""Client states in a file, for many clients or large states.

A client that has never been written to takes no space: its state is what the method begins with. Every write takes a
new slot of the file and leaves the old one as it is, so that to undo a write is to point back to the old slot, and a
copy of all states is a copy of the pointers. A slot that nothing points to is used again.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import threading
import weakref
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..core.trees import Tree, named_leaves, tree_leaves, tree_map, with_leaves
from ..errors import WriteError

_BLOCK = 16 * 2**20  # bytes of states that are copied at a time
_GAP = 16 * 2**10  # bytes between two records that are read with them rather than in two calls
_NOWHERE = -1  # the slot of a client that was never written to


class _Move(NamedTuple):
    """Clients whose states go from one slot to another."""

    who: Tensor
    slots: Tensor  # (len(who),), before


class MappedTable:
    """A table (`StateTable`) of `clients` clients. initial: the first states of the clients at these positions."""

    def __init__(self, initial: Callable[[Tensor], Tree], clients: int, folder: str | None = None) -> None:
        self._initial = initial
        self._like: Tree = initial(torch.zeros(1, dtype=torch.long))
        self._records = _Records([(tuple(leaf.shape[1:]), leaf.dtype) for leaf in tree_leaves(self._like)], folder)
        self._slots = torch.full((clients,), _NOWHERE, dtype=torch.int32)

    @property
    def bytes_on_disk(self) -> int:
        """That the file takes."""
        return self._records.bytes_on_disk

    def rows(self, who: Tensor) -> Tree:
        slots = self._slots[who]
        new = slots == _NOWHERE
        if bool(new.all()):
            return tree_map(_own_memory, self._initial(who))
        if not bool(new.any()):
            return self._tree(self._records.read(slots))
        found = tree_map(lambda leaf: leaf.new_empty(len(who), *leaf.shape[1:]), self._like)
        for which, rows in ((new, self._initial(who[new])), (~new, self._tree(self._records.read(slots[~new])))):
            tree_map(lambda all_, some, at=which: all_.__setitem__(at.to(all_.device), some), found, rows)
        return found

    def written(self) -> Tree:
        return self.rows((self._slots != _NOWHERE).nonzero()[:, 0])

    def change(self, who: Tensor, before: Tree) -> _Move:
        return _Move(who, self._slots[who])

    def write(self, change: _Move, after: Tree) -> None:
        self._slots[change.who] = self._records.add(tree_leaves(after), len(change.who))

    def undo(self, change: _Move) -> None:
        now = self._slots[change.who]
        self._slots[change.who] = change.slots
        self._records.drop(now[now != change.slots])

    def forget(self, change: _Move) -> None:
        self._records.drop(change.slots)

    def copy(self) -> MappedTable:
        other = MappedTable.__new__(MappedTable)
        vars(other).update(vars(self), _slots=self._slots.clone())
        self._records.share(self._slots)
        return other

    def release(self) -> None:
        self._records.drop(self._slots)
        self._slots = torch.full_like(self._slots, _NOWHERE)

    def named(self) -> dict[str, Tensor]:
        """In files of their own, which go when the tensors go."""
        clients, like = len(self._slots), named_leaves(self._like)
        files = {name: MappedMemory(clients * _row_bytes(leaf), self._records.folder) for name, leaf in like.items()}
        leaves = {name: files[name].tensor(leaf.dtype, (clients, *leaf.shape[1:])) for name, leaf in like.items()}
        for at in self._blocks():
            for name, leaf in named_leaves(self.rows(at)).items():
                leaves[name][at[0] : at[-1] + 1] = leaf.cpu()
                files[name].trim()
        return leaves

    def restored(self, named: Mapping[str, Tensor]) -> MappedTable:
        other = MappedTable.__new__(MappedTable)
        vars(other).update(vars(self), _slots=torch.full_like(self._slots, _NOWHERE))
        like = named_leaves(self._like)
        for at in self._blocks():
            tree = with_leaves(self._like, {name: named[name][at].to(leaf) for name, leaf in like.items()})
            pairs = zip(tree_leaves(tree), tree_leaves(self._initial(at)), strict=True)
            differs = torch.stack([(_bytes_of(leaf) != _bytes_of(first)).any(1) for leaf, first in pairs] or [at < 0])
            if bool(differs.any()):
                which = differs.any(0).nonzero()[:, 0]
                rows = tree_map(lambda leaf, some=which: leaf[some.to(leaf.device)], tree)
                other.write(other.change(at[which], None), rows)
        return other

    def _blocks(self) -> tuple[Tensor, ...]:
        """All positions, so many at a time that their states fit into little memory."""
        per_client = sum(_row_bytes(leaf) for leaf in tree_leaves(self._like))
        return torch.split(torch.arange(len(self._slots)), max(1, _BLOCK // max(1, per_client)))

    def _tree(self, leaves: list[Tensor]) -> Tree:
        flat = dict(zip(named_leaves(self._like), leaves, strict=True))
        return tree_map(lambda like, leaf: leaf.to(like.device), self._like, with_leaves(self._like, flat))


class _Records:
    """Records of one size in a file, one for each slot. A slot is free when nothing uses it.

    They are read and written by calls, as the system maps far more of a file than the rows that are touched.
    """

    def __init__(self, fields: list[tuple[tuple[int, ...], torch.dtype]], folder: str | None) -> None:
        self.fields, self.folder = fields, folder
        self._widths = [torch.Size(shape).numel() * dtype.itemsize for shape, dtype in fields]
        self._size = max(1, sum(self._widths))
        self._file = _UnnamedFile(folder)
        self._uses = torch.zeros(0, dtype=torch.int32)  # of each slot
        self._free = torch.zeros(0, dtype=torch.int32)
        self._lock = threading.Lock()

    @property
    def bytes_on_disk(self) -> int:
        return self._file.size

    def add(self, leaves: list[Tensor], count: int) -> Tensor:
        """Slots (count,), in use once, that hold these leaves (count, ...)."""
        record = torch.cat([_bytes_of(leaf) for leaf in leaves] or [torch.zeros(count, 1, dtype=torch.uint8)], dim=1)
        with self._lock:
            slots = self._take(count)
        order = slots.argsort()
        places, rows = slots[order].numpy().astype(np.int64), record[order].numpy()
        for some in _runs(np.diff(places) > 1):
            self._file.write(places[some.start] * self._size, rows[some])
        return slots

    def read(self, slots: Tensor) -> list[Tensor]:
        """The leaves (len(slots), ...) that these slots hold."""
        wanted, at = np.unique(slots.numpy().astype(np.int64), return_inverse=True)  # in the order of the file
        rows = np.empty((len(wanted), self._size), np.uint8)
        another_block = np.diff(wanted * self._size // _BLOCK) > 0
        for some in _runs(((np.diff(wanted) - 1) * self._size > _GAP) | another_block):
            first, last = wanted[some.start], wanted[some.stop - 1]
            if last - first == some.stop - some.start - 1:  # side by side
                self._file.read(first * self._size, rows[some])
            else:
                found = np.empty((last + 1 - first, self._size), np.uint8)
                self._file.read(first * self._size, found)
                rows[some] = found[wanted[some] - first]
        record = torch.from_numpy(rows)[torch.from_numpy(at)]
        parts = torch.split(record[:, : sum(self._widths)], self._widths, dim=1)
        return [
            _own_memory(part).view(dtype).reshape(len(slots), *shape)
            if part.numel()
            else torch.empty(len(slots), *shape, dtype=dtype)
            for part, (shape, dtype) in zip(parts, self.fields, strict=True)
        ]

    def share(self, slots: Tensor) -> None:
        """Use these slots, each of them another one, once more."""
        with self._lock:
            self._uses[slots[slots != _NOWHERE].long()] += 1

    def drop(self, slots: Tensor) -> None:
        """Use these slots, each of them another one, once less."""
        used = slots[slots != _NOWHERE]
        with self._lock:
            self._uses[used.long()] -= 1
            self._free = torch.cat([self._free, used[self._uses[used.long()] == 0]])

    def _take(self, count: int) -> Tensor:
        if len(self._free) < count:
            before, more = len(self._uses), max(count, len(self._uses) // 4)
            self._file.grow((before + more) * self._size)
            self._uses = torch.cat([self._uses, self._uses.new_zeros(more)])
            # the lowest last, as the last are taken first: the file is filled from its beginning
            self._free = torch.cat([torch.arange(before + more - 1, before - 1, -1, dtype=torch.int32), self._free])
        slots = self._free[len(self._free) - count :].flip(0)
        self._free = self._free[: len(self._free) - count].clone()
        self._uses[slots.long()] = 1
        return slots


class _UnnamedFile:
    """A file that the system removes at the end."""

    def __init__(self, folder: str | None = None) -> None:
        self.size = 0
        self._file = tempfile.TemporaryFile(buffering=0, dir=folder, prefix="ppfl-states-")  # noqa: SIM115
        weakref.finalize(self, self._file.close)
        self._lock = threading.Lock()  # threads share one position

    def fileno(self) -> int:
        return self._file.fileno()

    def grow(self, size: int) -> None:
        """To so many bytes."""
        if size <= self.size:
            return
        try:  # a full disk must be found here: where the file is mapped it would end the process
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(self.fileno(), 0, size)
            else:
                self._file.truncate(size)
        except OSError as error:
            raise _no_space(size, error) from error
        self.size = size

    def read(self, at: int, into: npt.NDArray[np.uint8]) -> None:
        """The bytes from `at` on."""
        rest = memoryview(into.data).cast("B")
        with self._lock:
            self._file.seek(at)
            while len(rest):  # the system may give less than was asked for
                if not (count := self._file.readinto(rest)):
                    raise WriteError(f"client states end before byte {at + into.nbytes:,}; start the run again")
                rest = rest[count:]

    def write(self, at: int, rows: npt.NDArray[np.uint8]) -> None:
        """These bytes from `at` on."""
        rest = memoryview(rows.data).cast("B")
        try:
            with self._lock:
                self._file.seek(at)
                while len(rest):
                    rest = rest[self._file.write(rest) or 0 :]
        except OSError as error:
            raise _no_space(self.size, error) from error


class MappedMemory:
    """A nameless file that is memory: the system writes it out when memory is short, and removes it at the end."""

    def __init__(self, size: int, folder: str | None = None) -> None:
        self._file = _UnnamedFile(folder)
        self._file.grow(size)
        self._map = mmap.mmap(self._file.fileno(), size) if size else None

    def tensor(self, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        """The memory as a tensor."""
        count = torch.Size(shape).numel()
        if not count or self._map is None:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(self._map, dtype=dtype, count=count).reshape(shape)

    def trim(self) -> None:
        """Give back the process's memory; what was written is in the file."""
        if self._map is not None and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)


def _runs(ends: npt.NDArray[np.bool_]) -> list[slice]:
    """N rows in runs: `ends` (N - 1,) says of each row but the last whether a run ends there."""
    stops = [*(np.flatnonzero(ends) + 1).tolist(), len(ends) + 1]
    return [slice(*pair) for pair in zip([0, *stops], stops, strict=False)]


def _no_space(size: int, error: OSError) -> WriteError:
    return WriteError(
        f"client states need {size:,} bytes in {tempfile.gettempdir()} and cannot have them ({error.strerror}); "
        f"free some space, or set TMPDIR to another folder"
    )


def _row_bytes(leaf: Tensor) -> int:
    return int(leaf.shape[1:].numel() * leaf.element_size())


def _bytes_of(leaf: Tensor) -> Tensor:
    """(C, bytes) of a leaf (C, ...), on the CPU."""
    return _own_memory(leaf.detach().cpu().reshape(len(leaf), leaf.shape[1:].numel())).view(torch.uint8)


def _own_memory(leaf: Tensor) -> Tensor:
    """A copy with the strides of its shape; what is contiguous may have others, if it is one row."""
    return leaf.clone(memory_format=torch.contiguous_format)
