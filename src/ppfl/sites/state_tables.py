"""Where the states of clients are: in tensors, or in files that are mapped into memory (`mapped_states`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from ..core.trees import Tree, named_leaves, tree_map, with_leaves

Change = Any  # what a table needs to undo one write


class StateTable(Protocol):
    """One row per client. Threads may write to it at the same time, each for clients of its own."""

    @property
    def bytes_on_disk(self) -> int:
        """That its file takes."""

    def rows(self, who: Tensor) -> Tree:
        """Copies of the states of the clients at these positions, leaves (len(who), ...)."""

    def written(self) -> Tree:
        """The states of all clients that were ever written to, and perhaps of others."""

    def change(self, who: Tensor, before: Tree) -> Change:
        """What can undo a write to the clients at these positions, whose rows are `before`, made before the write:
        a run may be interrupted at any instant."""

    def write(self, change: Change, after: Tree) -> None:
        """New states of the clients of a change."""

    def undo(self, change: Change) -> None:
        """Take back a write, the last one first, whether or not it came to its end."""

    def forget(self, change: Change) -> None:
        """The write, which came to its end, will not be taken back."""

    def copy(self) -> Self:
        """Another table with the same states: writes to one of them do not change the other."""

    def release(self) -> None:
        """The table will not be used any more."""

    def named(self) -> dict[str, Tensor]:
        """The states of all clients by name, leaves (M, ...)."""

    def restored(self, named: Mapping[str, Tensor]) -> Self:
        """A table with a copy of these states, which may be in a file; they are not written to before it is copied."""


class InMemoryTable:
    """A tree of tensors, leaves (M, ...), written to in place. It has memory of its own only once it is copied."""

    bytes_on_disk = 0

    def __init__(self, tree: Tree) -> None:
        self.tree = tree

    def rows(self, who: Tensor) -> Tree:
        return tree_map(lambda leaf: leaf[who.to(leaf.device)], self.tree)

    def written(self) -> Tree:
        return self.tree

    def change(self, who: Tensor, before: Tree) -> tuple[Tensor, Tree]:
        return who, before

    def write(self, change: tuple[Tensor, Tree], after: Tree) -> None:
        tree_map(lambda all_, new: all_.index_copy_(0, change[0].to(all_.device), new), self.tree, after)

    def undo(self, change: tuple[Tensor, Tree]) -> None:
        self.write(change, change[1])

    def forget(self, change: tuple[Tensor, Tree]) -> None:
        """Nothing to do."""

    def copy(self) -> InMemoryTable:
        return InMemoryTable(tree_map(_own_memory, self.tree))

    def release(self) -> None:
        """Nothing to do."""

    def named(self) -> dict[str, Tensor]:
        return named_leaves(self.tree)

    def restored(self, named: Mapping[str, Tensor]) -> InMemoryTable:
        leaves = {name: named[name].to(leaf, copy=True) for name, leaf in self.named().items()}
        return InMemoryTable(with_leaves(self.tree, leaves))


def _own_memory(leaf: Tensor) -> Tensor:
    return leaf.clone(memory_format=torch.contiguous_format)
