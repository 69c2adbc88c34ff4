"""A chunk of clients' own data, and the batches drawn from it.

A batch is a rectangle of index tensors: clients by samples, padded with weight 0. Which samples are in it
depends on (seed, round, client id) only, so every engine and every chunking draws the same batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ..core.draws import hashed, name_key
from ..data import Samples


class Batch(NamedTuple):
    x: Tensor  # (C, B, ...)
    y: Tensor  # (C, B)
    weight: Tensor  # (C, B), 0 for padding
    active: Tensor  # (C,), 0 for a client that has no step left


class LocalData:
    """What a chunk of clients holds: their samples, their importance, and how this round draws from them."""

    def __init__(self, samples: Samples, weights: Tensor, keys: Tensor, clients: Tensor, seed: int, round: int) -> None:
        self.weight = weights[clients]  # (C,), p_i
        self.samples = samples
        self.start = samples.offsets.cpu()[clients]  # (C,); indices are made on the CPU, data stay where they are
        self.sizes = samples.sizes.cpu()[clients]  # (C,)
        self._keys, self._seed, self._round = keys[clients], seed, round

    def steps(
        self, batch_size: int | None, epochs: int | None = None, steps: int | None = None, purpose: str = "theta"
    ) -> Iterator[Batch]:
        """One batch a local step: `epochs` passes over each client's data, or `steps` steps each.

        A client that is done earlier than others in its chunk is inactive from then on.
        """
        size = batch_size or int(self.sizes.max())
        per_epoch = (self.sizes + size - 1) // size
        todo = per_epoch * epochs if epochs is not None else torch.full_like(per_epoch, steps or 0)
        order = self._shuffled(
            int(((todo + per_epoch - 1) // per_epoch).max()), None if batch_size is None else purpose
        )
        for step in range(int(todo.max())):
            active = step < todo
            first = (step % per_epoch) * size
            width = int((torch.minimum(self.sizes - first, torch.tensor(size)) * active).max())
            position = first[:, None] + torch.arange(width)  # (C, B)
            real = (position < self.sizes[:, None]) & active[:, None]
            epoch = torch.where(active, step // per_epoch, 0)
            rows = torch.arange(len(order))[:, None]
            index = order[rows, epoch[:, None], torch.where(real, position, 0)]
            yield self._gather(index, real, active)

    def everything(self, block: int = 2048) -> Iterator[Batch]:
        """All samples of every client, in blocks of at most `block` a client."""
        for first in range(0, int(self.sizes.max()), block):
            width = min(block, int(self.sizes.max()) - first)
            position = (first + torch.arange(width)).expand(len(self.sizes), -1)
            real = position < self.sizes[:, None]
            yield self._gather(torch.where(real, position, 0), real, real.any(dim=1))

    def _shuffled(self, epochs: int, purpose: str | None) -> Tensor:
        """(C, epochs, N): each client's samples in the order of each epoch; whole batches need no order."""
        longest = torch.arange(int(self.sizes.max()))
        if purpose is None:
            return longest.expand(len(self.sizes), epochs, -1)
        keys = self._keys[:, None, None]
        draws = hashed(self._seed, purpose, self._round, keys, torch.arange(epochs)[:, None], longest)
        beyond = longest >= self.sizes[:, None, None]
        return draws.masked_fill(beyond, torch.iinfo(torch.int64).max).argsort(dim=-1)

    def _gather(self, index: Tensor, real: Tensor, active: Tensor) -> Batch:
        samples = self.samples
        where = (self.start[:, None] + index).to(samples.x.device)
        weight = real.to(samples.x.device, torch.float32 if not samples.x.is_floating_point() else samples.x.dtype)
        return Batch(samples.x[where], samples.y[where], weight, active.to(weight))


@lru_cache(maxsize=16)
def id_keys(ids: tuple[str, ...]) -> Tensor:
    """(M,) keys of the clients' names for their draws."""
    return torch.tensor([name_key(client) for client in ids])
