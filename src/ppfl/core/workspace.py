"""Memory that is used again: writing to fresh pages costs several times what writing to warm ones does."""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from .params import Params

Kind = tuple[torch.dtype, torch.device]

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # numbers of malloc.h
_KEPT, _LARGEST = 2**30, 2**25  # bytes; no larger threshold for blocks of their own is accepted
_USERS_OWN = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


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


def keep_freed_memory() -> bool:
    """Let the process keep up to 1 GiB that it has freed, instead of giving it back and asking for it again.

    Autograd frees what it kept of a step at its end. By default glibc gives that back to the system, and the next step
    pays for each page anew. It is a setting of the whole process, so only experiments that run as commands use it.
    Returns whether it was set: not without glibc, nor where the environment sets it.

    >>> keep_freed_memory() in (True, False)
    True
    """
    if any(name in os.environ for name in _USERS_OWN):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # another C library, or Windows
        return False
    wanted = {_TRIM_THRESHOLD: _KEPT, _MMAP_THRESHOLD: _LARGEST}
    return all(mallopt(setting, value) for setting, value in wanted.items())


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
