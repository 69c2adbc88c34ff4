"""Gradients of clients' losses for their memberships, theta fixed, at the least cost the model allows."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..core.mixing import MembershipLoss
from ..core.population import Population, Shared
from .batches import Batch, LocalData


class MembershipSteps:
    """f_i as a function of c_i alone: on all of a client's data, or on batches of it."""

    def __init__(self, population: Population, shared: Shared, data: LocalData, batch_size: int | None) -> None:
        self.population, self.shared, self.data, self.batch_size = population, shared, data, batch_size

    def steps(self, count: int) -> Iterator[MembershipLoss]:
        """The gradient to use at each of `count` steps."""
        if self.batch_size is not None:
            for batch in self.data.steps(self.batch_size, steps=count, purpose="memberships"):
                yield self._on([batch])
            return
        full = self._cached() if self.population.caches_outputs else self._on(list(self.data.everything()))
        for _ in range(count):
            yield full

    def _cached(self) -> MembershipLoss:
        """Short cut 2: one forward pass of the K models, then steps that never touch the network again."""
        blocks = [
            (self.population.outputs(self.shared, batch.x), batch.y, batch.weight) for batch in self.data.everything()
        ]
        outputs = torch.cat([outputs for outputs, _, _ in blocks], dim=2)  # (C, K, N, ...)
        y, weight = torch.cat([y for _, y, _ in blocks], dim=1), torch.cat([w for _, _, w in blocks], dim=1)
        return self.population.membership_loss(outputs, y, weight)

    def _on(self, batches: list[Batch]) -> MembershipLoss:
        total = sum((batch.weight.sum(dim=1) for batch in batches), torch.zeros(())).clamp_min(1)

        def gradient(c: Tensor) -> tuple[Tensor, Tensor]:
            slopes, losses = torch.zeros_like(c), torch.zeros_like(c[:, 0])
            for batch in batches:
                share = batch.weight.sum(dim=1) / total
                slope, loss = self.population.membership_gradients(self.shared, c, batch.x, batch.y, batch.weight)
                slopes, losses = slopes + share[:, None] * slope, losses + share * loss
            return slopes, losses

        return gradient
