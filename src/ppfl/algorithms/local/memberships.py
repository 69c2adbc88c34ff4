"""Gradients of clients' losses for their memberships, theta fixed, at the least cost the model allows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial

import torch
from torch import Tensor

from ...core.backends import Backend, Batch
from ...core.mixing import MembershipLoss
from ...core.params import Params
from .batches import LocalData


class MembershipSteps:
    """f_i as a function of c_i alone: on all of a client's data, or on batches of it."""

    def __init__(self, backend: Backend, models: Params, data: LocalData, batch_size: int | None) -> None:
        self.backend, self.models, self.data, self.batch_size = backend, models, data, batch_size

    def steps(self, count: int) -> Iterator[MembershipLoss]:
        """The gradient to use at each of `count` steps."""
        if self.batch_size is not None:
            for batch in self.data.steps(self.batch_size, steps=count, purpose="memberships"):
                yield partial(self._on, partial(list, [batch._replace(keys=None)]))
            return
        full = self._on_everything()
        for _ in range(count):
            yield full

    def _on_everything(self) -> MembershipLoss:
        of_group = self._cached if self.backend.caches_outputs else lambda data: partial(self._on, data.everything)
        groups = [(which, of_group(data)) for which, data in self.data.groups()]
        if len(groups) == 1:
            return groups[0][1]

        def gradient(c: Tensor) -> tuple[Tensor, Tensor]:
            slopes, losses = zip(*(of_group(c[which]) for which, of_group in groups), strict=True)
            return torch.cat(slopes), torch.cat(losses)

        return gradient

    def _cached(self, data: LocalData) -> MembershipLoss:
        """Short cut 2: one forward pass of the K models, then steps that never touch the network again."""
        with data.space.frame():
            blocks = [
                (self.backend.outputs(self.models, batch.x), batch.y, batch.share * _part(batch, data))
                for batch in data.everything()
            ]
        if len(blocks) == 1:
            return self.backend.membership_loss(*blocks[0])
        clients = len(data.weight)
        outputs = torch.cat([_for_all(outputs, clients) for outputs, _, _ in blocks], dim=-1)  # (C, K, ..., N)
        y, share = (torch.cat([_for_all(block[at], clients) for block in blocks], dim=1) for at in (1, 2))
        return self.backend.membership_loss(outputs, y, share)

    def _on(self, batches: Callable[[], Iterable[Batch]], c: Tensor) -> tuple[Tensor, Tensor]:
        slopes, losses, total = torch.zeros_like(c), torch.zeros_like(c[:, 0]), torch.zeros_like(c[:, 0])
        with self.data.space.frame():
            for batch in batches():
                n = len(batch.x)
                slope, loss = self.backend.membership_gradients(self.models, c[:n], batch)
                slopes[:n] += batch.real[:, None] * slope
                losses[:n] += batch.real * loss
                total[:n] += batch.real
        return slopes / total[:, None], losses / total


def _part(batch: Batch, data: LocalData) -> Tensor:
    """How much of its client's data a block holds, (C, 1)."""
    return batch.real[:, None] / data.sizes[: len(batch.x), None].to(batch.real)


def _for_all(leaf: Tensor, clients: int) -> Tensor:
    """A block that only the first clients have samples in, with zeros for the others."""
    missing = leaf.new_zeros(clients - len(leaf), *leaf.shape[1:])
    return torch.cat([leaf, missing])
