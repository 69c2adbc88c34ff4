"""What clients' memberships follow from, with theta fixed: gradients of their losses for them, at the least cost the
model allows, and the losses of each of the K shared models by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from ...core.backends import Backend, Batch
from ...core.mixing import MembershipLoss
from ...core.simplex import FLOOR, raise_to_floor
from ...core.trees import Params
from .batches import LocalData

GAP = {torch.float32: 1e-5, torch.float64: 1e-9}  # how near to its minimum a loss is brought
ROUNDING = {torch.float32: 1e-6, torch.float64: 1e-14}  # of a loss, where steps no longer make a difference
SHORTEST, LONGEST = 1e-6, 1e6  # steps
KEPT_OUTPUTS = 256 * 2**20  # bytes, in the network's precision, of outputs that a chunk of clients may keep


class MembershipSteps:
    """f_i as a function of c_i alone: on all of a client's data, or on batches of it."""

    def __init__(self, models: Params, data: LocalData, batch_size: int | None) -> None:
        self.backend, self.models, self.data, self.batch_size = data.backend, models, data, batch_size

    def best(self, c: Tensor, most_steps: int) -> tuple[Tensor, Tensor]:
        """The best memberships on all of the data, from c (C, K), and the losses (C,) there.

        On kept outputs in double precision, in which also flat minima have one place.
        """
        kept = self.backend.caches_outputs
        found, loss = best_memberships(self._on_everything(double=kept), c.double() if kept else c, most_steps)
        return found.to(c), loss.to(c)

    def steps(self, count: int) -> Iterator[MembershipLoss]:
        """The gradient to use at each of `count` steps."""
        if self.batch_size is not None:
            for batch in self.data.steps(self.batch_size, steps=count, purpose="memberships"):
                yield partial(self._on, partial(list, [batch._replace(keys=None)]))
            return
        full = self._on_everything()
        for _ in range(count):
            yield full

    def _on_everything(self, double: bool = False) -> MembershipLoss:
        if self.backend.caches_outputs:
            of_group = _KeptBlocks(self.backend, self.models, double).loss_of
        else:
            of_group = self._run_at_each_step
        groups = [(which, of_group(data)) for which, data in self.data.groups()]
        if len(groups) == 1:
            return groups[0][1]

        def gradient(c: Tensor) -> tuple[Tensor, Tensor]:
            slopes, losses = zip(*(of_group(c[which]) for which, of_group in groups), strict=True)
            return torch.cat(slopes), torch.cat(losses)

        return gradient

    def _run_at_each_step(self, data: LocalData) -> MembershipLoss:
        block = self.backend.samples_per_block(len(data.weight))
        return partial(self._on, partial(data.everything, block))

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


class _KeptBlocks:
    """Short cut 2: one forward pass of the K models, then steps that never touch the network again.

    Samples come in blocks, whose losses add up. Blocks whose outputs no longer fit into KEPT_OUTPUTS run again at each
    step. They take as many steps as the others: what is learned must not depend on what fits into memory.
    """

    def __init__(self, backend: Backend, models: Params, double: bool) -> None:
        self.backend, self.models, self.double = backend, models, double
        self.left = KEPT_OUTPUTS

    def loss_of(self, data: LocalData) -> MembershipLoss:
        """f_i of clients of similar size as a function of c (C, K)."""
        block = self.backend.samples_per_block(len(data.weight), self.backend.population.k)
        kept: list[tuple[int, MembershipLoss]] = []
        with data.space.frame():
            for batch in data.everything(block):
                self.left -= self._bytes(batch)
                if self.left < 0:
                    break
                kept.append((len(batch.x), self._on(batch, data)))
        done = len(kept) * block

        def at(c: Tensor) -> tuple[Tensor, Tensor]:
            slopes, losses = torch.zeros_like(c), torch.zeros_like(c[:, 0])
            with data.space.frame():
                again = ((len(batch.x), self._on(batch, data)) for batch in data.everything(block, after=done))
                for n, loss_at in chain(kept, again):
                    slope, loss = loss_at(c[:n])
                    slopes[:n] += slope
                    losses[:n] += loss
            return slopes, losses

        return kept[0][1] if len(kept) == 1 and done >= int(data.sizes[0]) else at

    def _on(self, batch: Batch, data: LocalData) -> MembershipLoss:
        """What a block adds to f_i."""
        n = len(batch.x)
        part = batch.real[:, None] / data.sizes[:n, None].to(batch.real)  # of its client's data, (C, 1)
        outputs, share = self.backend.outputs(self.models, batch.x), batch.share * part
        if self.double:
            outputs, share = outputs.double(), share.double()
        return self.backend.membership_loss(outputs, batch.y, share)

    def _bytes(self, batch: Batch) -> int:
        models = self.backend.population.k if self.backend.keeps_outputs else 0
        return batch.share.numel() * models * self.backend.output_bytes


def best_memberships(loss_at: MembershipLoss, c: Tensor, most_steps: int) -> tuple[Tensor, Tensor]:
    """The minimum of every client's loss over the simplex, from c (C, K), and the losses (C,) there.

    Losses have the precision of c. The search itself is in double precision: near a minimum steps become shorter than
    what single precision can tell apart.

    Mirror steps whose length each client finds for itself: twice as long after a step that keeps what a bound of that
    length promises, and else taken back. <c, g> - min <., g> bounds how far a convex loss is from its minimum, so it
    says when to stop: at GAP, relative to 1 + loss. A loss that is not convex, as with mixed weights, ends in a
    stationary point, to the same gap. Who else is searched for changes rounding errors alone, so it changes a client's
    loss by no more than that.
    """

    def at(c: Tensor) -> tuple[Tensor, Tensor]:
        slope, loss = loss_at(c.to(precision))
        return slope.double(), loss.double()

    precision, c = c.dtype, raise_to_floor(c.double())
    g, loss = at(c)
    eta, near, rounding = torch.ones_like(loss), GAP[precision], ROUNDING[precision]
    for _ in range(most_steps):
        gap = ((c - FLOOR) * (g - g.amin(1, keepdim=True))).sum(1)  # no membership is below the floor
        done = (gap <= near * (1 + loss.abs())) | (eta <= SHORTEST)
        if bool(done.all()):
            break
        new = raise_to_floor(torch.softmax(c.log() - eta[:, None] * g, dim=-1))
        new_g, new_loss = at(new)
        # who is done moves no more, so that no client depends on how long others take
        kept = ~done & _keeps_its_promise(c, g, loss, new, new_g, new_loss, eta, rounding)
        c, g = torch.where(kept[:, None], new, c), torch.where(kept[:, None], new_g, g)
        loss = torch.where(kept, new_loss, loss)
        eta = torch.where(done, eta, torch.where(kept, 2 * eta, eta / 4).clamp(SHORTEST, LONGEST))
    return c.to(precision), loss.to(precision)


def _keeps_its_promise(
    c: Tensor, g: Tensor, loss: Tensor, new: Tensor, new_g: Tensor, new_loss: Tensor, eta: Tensor, rounding: float
) -> Tensor:
    """Whether steps from c to new are no longer than the losses' curvature allows, (C,).

    A loss lies below its tangent plus KL / eta. Near a minimum the losses differ by rounding errors alone, so there
    the slopes decide: they still show a step that goes too far, which would go to and fro for ever.
    """
    step, there = new - c, (new * (new / c).log()).sum(1)
    back = (c * (c / new).log()).sum(1)
    noise = rounding * (1 + loss.abs())
    below = new_loss <= loss + (step * g).sum(1) + there / eta + noise
    flat = (step * g).sum(1).abs() <= 2 * noise
    return below & (~flat | ((step * (new_g - g)).sum(1) <= (there + back) / eta))


# ---------------------------------------------------------------------- each model by itself


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
    """Losses of each of the K models on clients' own data: one pass over every sample, whatever K is."""
    backend = data.backend
    for group, own in data.groups():
        for batch in own.everything(backend.samples_per_block(len(own.weight), backend.population.k)):
            n = len(batch.x)
            outputs = backend.outputs(models, batch.x)
            _, losses = backend.loss.model_slopes(outputs, batch.y)
            part = batch.real / own.sizes[:n].to(batch.real)
            yield Block(slice(group.start, group.start + n), batch, part, losses)
