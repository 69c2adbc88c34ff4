"""Losses of each of the K shared models by itself on clients' own data: one pass over it, whatever K is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

from ...core.backends import Batch
from ...core.trees import Params
from .batches import LocalData


class Block(NamedTuple):
    """Some samples of some clients."""

    which: slice  # of the chunk's clients
    batch: Batch  # their samples
    part: Tensor  # (C,), how much of each client's data this is
    losses: Tensor  # (C, K, B)

    def mean(self, values: Tensor) -> Tensor:
        """What this block adds to each client's mean of values (C, ..., B) over all its samples, (C, ...)."""
        share = self.batch.share * self.part[:, None]
        return (values * share.reshape(len(share), *(1 for _ in values.shape[2:]), -1)).sum(-1)


def losses_of_models(models: Params, data: LocalData) -> Iterator[Block]:
    """Every sample of every client once."""
    backend = data.backend
    for group, own in data.groups():
        for batch in own.everything(backend.samples_per_block(len(own.weight), backend.population.k)):
            n = len(batch.x)
            outputs = backend.outputs(models, batch.x)
            _, losses = backend.loss.model_slopes(outputs, batch.y)
            part = batch.real / own.sizes[:n].to(batch.real)
            yield Block(slice(group.start, group.start + n), batch, part, losses)
