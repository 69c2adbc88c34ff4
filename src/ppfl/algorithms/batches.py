"""A chunk of clients' own data, and the batches drawn from it.

A batch is a rectangle: clients by samples, padded with share 0. The clients of a chunk come largest first, so those
that still have a step to take are always the first ones, and a batch holds no others. Which samples are in it depends
on (seed, round, client id) only, so every engine and every chunking draws the same batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ..core.draws import hashed, name_keys, shuffles
from ..core.workspace import Workspace
from ..data import Samples


class Batch(NamedTuple):
    x: Tensor  # (C, B, ...), of the first C clients of the chunk
    y: Tensor  # (C, B)
    share: Tensor  # (C, B), of each sample in its client's mean: sums to 1, and is 0 for padding
    real: Tensor  # (C,), samples that are no padding
    rows: Tensor  # (C, B), where in the data each sample stands, for what is kept sample by sample


class LocalData:
    """What a chunk of clients holds: their samples, their importance, and how this round draws from them.

    With a workspace the inputs of a batch are overwritten by the next one.
    """

    def __init__(
        self,
        samples: Samples,
        weights: Tensor,
        keys: Tensor,
        clients: Tensor,
        seed: int,
        round: int,
        space: Workspace | None = None,
    ) -> None:
        self.weight = weights[clients]  # (C,), p_i
        self.samples, self.space, self._clients = samples, space, clients
        self.start = samples.offsets.cpu()[clients]  # (C,); indices are made on the CPU, data stay where they are
        self.sizes = samples.sizes.cpu()[clients]  # (C,)
        assert bool((self.sizes.diff() <= 0).all()), "the clients of a chunk come largest first"
        self._side_by_side = bool((self.sizes == self.sizes[0]).all() and (self.start.diff() == self.sizes[0]).all())
        self._all, self._draw = (weights, keys), (seed, round)

    def groups(self) -> list[tuple[slice, LocalData]]:
        """The clients in groups of like size, for passes over all samples with little padding."""
        return [
            (which, LocalData(self.samples, *self._all, self._clients[which], *self._draw, self.space))
            for which in like_sizes(self.sizes)
        ]

    def count_steps(self, batch_size: int | None, epochs: int | None, steps: int | None = None) -> Tensor:
        """How many steps each client takes, (C,): so many epochs, or so many steps."""
        if epochs is None:
            return torch.full_like(self.sizes, steps or 0)
        size = batch_size or int(self.sizes.max())
        return (self.sizes + size - 1) // size * epochs

    def steps(
        self, batch_size: int | None, epochs: int | None = None, steps: int | None = None, purpose: str = "theta"
    ) -> Iterator[Batch]:
        """One batch a local step: `epochs` passes over each client's data, or `steps` steps each."""
        size = batch_size or int(self.sizes.max())
        per_epoch = (self.sizes + size - 1) // size
        todo = self.count_steps(batch_size, epochs, steps)
        passes = int(((todo + per_epoch - 1) // per_epoch).max())
        visits = self._visits(passes, None if batch_size is None else purpose)
        for step in range(int(todo[0])):
            n = int((todo > step).sum())
            at = step % per_epoch[:n] * size
            real = (self.sizes[:n] - at).clamp_max_(size)
            if visits is None:
                where = _rectangle(self.start[:n] + at, real)
            elif passes == 1:  # all are at the same place
                where = visits[:n, 0, step * size : step * size + int(real.max())]
            else:
                epochs_before = torch.arange(n) * passes + step // per_epoch[:n]
                where = visits.reshape(-1)[_rectangle(epochs_before * visits.shape[2] + at, real)]
            yield self._batch(where, real, whole=batch_size is None)

    def everything(self, block: int = 2048) -> Iterator[Batch]:
        """All samples of every client, in blocks of at most `block` a client."""
        for first in range(0, int(self.sizes[0]), block):
            n = int((self.sizes > first).sum())
            real = (self.sizes[:n] - first).clamp_max_(block)
            yield self._batch(_rectangle(self.start[:n] + first, real), real, whole=int(real[0]) == int(self.sizes[0]))

    def _visits(self, epochs: int, purpose: str | None) -> Tensor | None:
        """(C, epochs, N): rows of the data in the order they are visited, one of the client's own where it has no more;
        None where whole batches are visited as they lie.
        """
        if purpose is None:
            return None
        (_, keys), (seed, round) = self._all, self._draw
        state = hashed(seed, purpose, round, keys[self._clients])
        visits = self.start[:, None, None].repeat(1, epochs, int(self.sizes[0]))
        for which in like_sizes(self.sizes):  # rectangles of little padding
            longest, sizes = int(self.sizes[which.start]), self.sizes[which]
            draws = hashed(torch.arange(epochs)[:, None], torch.arange(longest), after=state[which, None, None])
            visits[which, :, :longest] += shuffles(draws, sizes).clamp_max_(sizes[:, None, None] - 1)
        return visits

    def _batch(self, where: Tensor, real: Tensor, whole: bool) -> Batch:
        """The samples at these rows (C, B), of which the first `real` (C,) of each client are no padding."""
        x = self.samples.x
        count = real.to(x.dtype if x.is_floating_point() else torch.float32)
        share = (torch.arange(where.shape[1]) < real[:, None]) / count[:, None]
        where = where.to(x.device)
        inputs, targets = self._inputs(where, whole), self.samples.y[where]
        return Batch(inputs, targets, share.to(x.device), count.to(x.device), where)

    def _inputs(self, where: Tensor, whole: bool) -> Tensor:
        """x of these samples (C, B): a copy, or a view where they are all there is and lie side by side."""
        x = self.samples.x
        if whole and self._side_by_side:
            first = int(self.start[0])
            return x[first : first + where.numel()].view(*where.shape, *x.shape[1:])
        if self.space is None:
            return x[where]
        room = self.space.take("batch", (where.numel(), *x.shape[1:]), x)
        torch.index_select(x, 0, where.reshape(-1), out=room)
        return room.view(*where.shape, *x.shape[1:])


def _rectangle(first: Tensor, real: Tensor) -> Tensor:
    """(C, B): `real` (C,) positions from `first` (C,) on, and the last of them again where others have more."""
    width = int(real.max())
    position = first[:, None] + torch.arange(width)
    return position if int(real.min()) == width else position.clamp_max_((first + real - 1)[:, None])


def like_sizes(sizes: Tensor, most: int | None = None) -> list[slice]:
    """Sizes (C,), largest first, in runs of at most `most` whose smallest is at least half the largest.

    >>> [sizes[run].tolist() for sizes in [torch.tensor([100, 90, 60, 4, 3])] for run in like_sizes(sizes, most=2)]
    [[100, 90], [60], [4, 3]]
    """
    runs, first, most = [], 0, most or len(sizes)
    while first < len(sizes):
        alike = int((2 * sizes[first : first + most] >= sizes[first]).sum())
        runs.append(slice(first, first + alike))
        first += alike
    return runs


@lru_cache(maxsize=16)
def id_keys(ids: tuple[str, ...]) -> Tensor:
    """(M,) keys of the clients' names for their draws."""
    return name_keys(ids)
