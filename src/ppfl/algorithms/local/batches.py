"""A chunk of clients' own data, and the batches drawn from it.

A batch is a rectangle: clients by samples, padded with share 0. The clients of a chunk come largest first, so those
that still have a step to take are always the first ones, and a batch holds no others. Which samples are in it depends
on (seed, round, client id) only, so every engine and every chunking draws the same batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...core.backends import Backend, Batch
from ...core.draws import hashed, shuffles
from ...core.trees import Params
from ...core.workspace import Workspace
from ...data import Samples
from ...data.files import check_limit
from ...data.samples import Inputs, MappedRows, scaled, similar_sizes
from ...errors import SettingError

Integers = npt.NDArray[np.int64]  # which samples: numpy takes a fraction of torch's time for so few numbers


class Draws(NamedTuple):
    """What the random draws of a round depend on, besides a client's own key."""

    seed: int
    round: int
    masks: bool = False  # whether the network has dropout layers


class LocalData:
    """What a chunk of clients holds: their samples, their importance, and how this round draws from them.

    The inputs of a batch are overwritten by the next one.
    """

    def __init__(
        self,
        samples: Samples,
        weight: Tensor,
        keys: Tensor,
        clients: Tensor,
        draws: Draws,
        backend: Backend,
    ) -> None:
        """`weight` and `keys` (C,) are those of the `clients` (C,), positions in `samples`; `backend` runs models on
        them."""
        samples, clients = samples.in_memory(clients)
        self.weight, self.keys = weight, keys  # p_i; for draws
        self.samples, self.backend, self.space = samples, backend, backend.space
        self._clients, self._draws = clients, draws
        self.start = samples.starts[clients]  # (C,); indices are made on the CPU, data stay where they are
        self.sizes = samples.cpu_sizes[clients]  # (C,)
        self._starts, self._sizes = self.start.numpy(), self.sizes.numpy()
        self._largest = int(self._sizes[0])
        assert (self._sizes[1:] <= self._sizes[:-1]).all(), "the clients of a chunk come largest first"

    @cached_property
    def _side_by_side(self) -> bool:
        """Whether the data of these clients are one block, the same number of samples each."""
        gaps = self._starts[1:] - self._starts[:-1]
        return int(self._sizes[-1]) == self._largest and bool((gaps == self._largest).all())

    def copies(self, shared: Params) -> Params:
        """The same values for each client, leaves (C, ...), to be written to; used again after `work`."""
        return self.space.copies(shared, len(self.weight))

    def groups(self) -> list[tuple[slice, LocalData]]:
        """The clients in groups of similar size, for passes over all samples with little padding."""
        return [(which, self.select(which)) for which in similar_sizes(self.sizes)]

    def select(self, which: slice | Tensor) -> LocalData:
        """Some of the clients, at these positions in the chunk, in order."""
        weight, keys, clients = self.weight[which], self.keys[which], self._clients[which]
        return LocalData(self.samples, weight, keys, clients, self._draws, self.backend)

    @property
    def seed(self) -> int:
        """The seed of the run."""
        return self._draws.seed

    def count_steps(self, batch_size: int | None, epochs: int | None, steps: int | None = None) -> Tensor:
        """How many steps each client takes, (C,): so many epochs, or so many steps."""
        if epochs is None:
            return torch.full_like(self.sizes, steps or 0)
        size = batch_size or self._largest
        return (self.sizes + size - 1) // size * epochs

    def steps(
        self, batch_size: int | None, epochs: int | None = None, steps: int | None = None, purpose: str = "theta"
    ) -> Iterator[Batch]:
        """One batch per local step: `epochs` passes over each client's data, or `steps` steps each."""
        size = min(batch_size or self._largest, self._largest)
        per_epoch = (self._sizes + size - 1) // size
        todo = self.count_steps(batch_size, epochs, steps).numpy()
        passes = int(((todo + per_epoch - 1) // per_epoch).max())
        visits = self._visits(passes, size, purpose)
        seed, round, draws_masks = self._draws
        masks = hashed(seed, "dropout", purpose, round, self.keys) if draws_masks else None
        inputs = _Inputs(self.samples.x, self.space)
        for step in range(int(todo[0])):
            n = int(np.count_nonzero(todo > step))
            at = step % per_epoch[:n] * size
            real = np.minimum(self._sizes[:n] - at, size)
            if visits is None:
                where = _rectangle(self._starts[:n] + at, real)
            elif passes == 1:  # all are at the same place
                where = visits[:n, 0, step * size : step * size + int(real.max())]
            else:
                epochs_before = np.arange(n) * passes + step // per_epoch[:n]
                where = visits.reshape(-1)[_rectangle(epochs_before * visits.shape[2] + at, real)]
            keys = None if masks is None else hashed(step, after=masks[:n].clone()).to(self.samples.x.device)
            yield self._batch(inputs, where, real, keys, whole=visits is None)

    def everything(self, block: int, after: int = 0) -> Iterator[Batch]:
        """All samples of every client, or those after the first `after`, in blocks of at most `block` samples per
        client; dropout is off."""
        inputs = _Inputs(self.samples.x, self.space)
        for first in range(after, self._largest, block):
            n = int(np.count_nonzero(self._sizes > first))
            real = np.minimum(self._sizes[:n] - first, block)
            where = _rectangle(self._starts[:n] + first, real)
            yield self._batch(inputs, where, real, None, whole=int(real[0]) == self._largest)

    def _visits(self, epochs: int, batch_size: int, purpose: str) -> Integers | None:
        """(C, epochs, N): rows of the data in the order they are visited, one of the client's own where it has no more.

        A client whose samples fit into one batch has no order to draw; None where no client has.
        """
        shuffled = int(np.count_nonzero(self._sizes > batch_size))
        if shuffled == 0:
            return None
        clients, longest = len(self._sizes), self._largest
        size = clients * epochs * longest * self._starts.itemsize
        what = f"{epochs:,} passes over {longest:,} samples of {clients:,} clients need {size:,} bytes"
        check_limit("bytes", size, what, "use fewer local epochs or steps, or ", SettingError)
        state = hashed(self._draws.seed, purpose, self._draws.round, self.keys[:shuffled])
        visits = np.empty((clients, epochs, longest), np.int64)
        visits[:] = self._starts[:, None, None]
        visits[shuffled:] += np.minimum(np.arange(longest), self._sizes[shuffled:, None, None] - 1)
        for which in similar_sizes(self.sizes[:shuffled]):  # rectangles of little padding
            longest, sizes = int(self._sizes[which.start]), self.sizes[which]
            draws = hashed(torch.arange(epochs)[:, None], torch.arange(longest), after=state[which, None, None])
            orders = shuffles(draws, sizes).numpy()
            visits[which, :, :longest] += np.minimum(orders, self._sizes[which, None, None] - 1, out=orders)
        return visits

    def _batch(self, inputs: _Inputs, rows: Integers, real: Integers, keys: Tensor | None, whole: bool) -> Batch:
        """The samples at these rows (C, B), of which the first `real` (C,) of each client are no padding."""
        x, y, device = self.samples.x, self.samples.y, self.samples.x.device
        count = real.astype(np.float64 if x.dtype == torch.float64 else np.float32)
        if int(real.min()) == rows.shape[1]:  # no padding: one number serves all
            share = torch.from_numpy(np.reciprocal(count[:1, None])).to(device).expand(rows.shape)
        else:
            of_client = np.arange(rows.shape[1]) < real[:, None]
            share = torch.from_numpy(np.divide(of_client, count[:, None], dtype=count.dtype)).to(device)
        where = torch.from_numpy(rows).to(device)
        gathered = inputs.view(int(self._starts[0]), where) if whole and self._side_by_side else inputs.copy(where)
        targets = y.index_select(0, where.reshape(-1)).view(*where.shape, *y.shape[1:])
        return Batch(gathered, targets, share, torch.from_numpy(count).to(device), where, keys)


class _Inputs:
    """The inputs of one batch after the other, in one buffer: no later batch is larger than the first."""

    def __init__(self, x: Inputs, space: Workspace) -> None:
        self.x, self.space = x, space
        self._buffer: Tensor | None = None

    def copy(self, where: Tensor) -> Tensor:
        """x of the samples at `where` (C, B)."""
        if self._buffer is None:
            like = self.x.values if isinstance(self.x, MappedRows) else self.x
            self._buffer = self.space.empty((where.numel(), *self.x.shape[1:]), like)
        gathered = self._buffer[: where.numel()]
        if isinstance(self.x, MappedRows):
            self.x.gather(where.reshape(-1), out=gathered)
        else:
            torch.index_select(self.x, 0, where.reshape(-1), out=gathered)
        return scaled(gathered).view(*where.shape, *self.x.shape[1:])

    def view(self, first: int, where: Tensor) -> Tensor:
        """The same where they lie side by side from `first` on, without a copy."""
        return scaled(self.x[first : first + where.numel()]).view(*where.shape, *self.x.shape[1:])


def _rectangle(first: Integers, real: Integers) -> Integers:
    """(C, B): `real` (C,) positions from `first` (C,) on, and the last of them again where others have more."""
    position: Integers = first[:, None] + np.arange(real.max())
    np.minimum(position, (first + real - 1)[:, None], out=position)
    return position
