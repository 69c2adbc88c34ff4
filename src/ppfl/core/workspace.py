"""Memory that is used again: writing to fresh pages costs several times what writing to warm ones does."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from .trees import Params

Kind = tuple[torch.dtype, torch.device]


class Workspace:
    """Buffers in the order of a stack: every call gives another one, and leaving a frame frees what it took.

    Two buffers that are in use at the same time are therefore never the same memory. One thread's own.

    >>> space, like = Workspace(), torch.zeros(())
    >>> with space.frame():
    ...     first, second = space.empty((2, 3), like), space.empty((3,), like)
    >>> with space.frame():
    ...     again = space.empty((3,), like)
    >>> again.data_ptr() == first.data_ptr() != second.data_ptr()
    True
    """

    def __init__(self) -> None:
        self._buffers: dict[Kind, list[_Buffer]] = {}
        self._in_use: dict[Kind, int] = {}

    def empty(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """A tensor of this shape with any values, in use until its frame is left."""
        kind = like.dtype, like.device
        at = self._in_use.get(kind, 0)
        self._in_use[kind] = at + 1
        buffers = self._buffers.setdefault(kind, [])
        if at == len(buffers):
            buffers.append(_Buffer())
        return buffers[at].shaped(shape, like)

    def empty_like(self, params: Params) -> Params:
        """Tensors of the same shapes with any values."""
        return {name: self.empty(tuple(leaf.shape), leaf) for name, leaf in params.items()}

    def copies(self, params: Params, clients: int) -> Params:
        """The same values for each of `clients` clients, leaves (C, ...), to be written to."""
        return {
            name: self.empty((clients, *leaf.shape), leaf).copy_(leaf.expand(clients, *leaf.shape))
            for name, leaf in params.items()
        }

    @contextmanager
    def frame(self) -> Iterator[None]:
        """What is taken inside is free again at the end."""
        before = dict(self._in_use)
        try:
            yield
        finally:
            self._in_use = before


class _Buffer:
    """Memory that grows. Most rounds ask for the shape of the round before, so that view is kept."""

    def __init__(self) -> None:
        self._memory: Tensor | None = None
        self._view: Tensor | None = None

    def shaped(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        if self._view is None or self._view.shape != shape:
            size = math.prod(shape)
            if self._memory is None or self._memory.numel() < size:
                self._memory = like.new_empty(size)
            self._view = self._memory[:size].view(shape)
        return self._view
