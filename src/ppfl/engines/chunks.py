"""A round on this machine: chunks of clients, one after the other.

`loop` takes one client at a time and is what everything else is compared with; `stacked` takes many in one
tensor operation. They differ in the chunks alone, so they give the same trajectory to rounding error.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..algorithms.batches import LocalData, id_keys
from ..algorithms.contract import Algorithm, Plan, Problem, Sum, Total, Tree
from ..core.errors import SettingError
from ..data import Federation

WORKING_SET = 32 * 2**20  # bytes a chunk may touch in one step: about what the caches of a small machine hold


class Outcome(NamedTuple):
    """What a round brought."""

    clients: Tree  # all M, those that took part renewed
    totals: dict[str, Total]
    rows: dict[str, Tensor]  # (S, ...), in the order of plan.who
    loss: float  # mean over the samples met; nan where no client reported one
    bytes_up: int  # all clients together
    bytes_down: int


class Engine(Protocol):
    """Decides where and how clients work; knows nothing of what they do."""

    name: str

    def run(
        self, algorithm: Algorithm, problem: Problem, federation: Federation, plan: Plan, clients: Tree, round: int
    ) -> Outcome: ...


class Loop:
    """One client at a time."""

    name = "loop"

    def run(
        self, algorithm: Algorithm, problem: Problem, federation: Federation, plan: Plan, clients: Tree, round: int
    ) -> Outcome:
        one_by_one = torch.arange(len(plan.who))[:, None].unbind()
        return _run_chunks(algorithm, problem, federation, plan, clients, round, one_by_one)


class Stacked:
    """Clients of like size side by side; `chunk` of them, or as many as the working set allows."""

    name = "stacked"

    def __init__(self, chunk: int | None = None) -> None:
        if chunk is not None and chunk < 1:
            raise SettingError(f"chunk is {chunk}; a chunk has at least one client: set chunk >= 1 or leave it out")
        self.chunk = chunk

    def run(
        self, algorithm: Algorithm, problem: Problem, federation: Federation, plan: Plan, clients: Tree, round: int
    ) -> Outcome:
        size = self.chunk or fitting_chunk(plan.shared, clients, federation, getattr(algorithm, "batch_size", None))
        chunks = chunks_of_like_size(federation.train.sizes.cpu()[plan.who], size)
        return _run_chunks(algorithm, problem, federation, plan, clients, round, chunks)


ENGINES: dict[str, type[Loop] | type[Stacked]] = {engine.name: engine for engine in (Loop, Stacked)}


def fitting_chunk(shared: Tree, clients: Tree, federation: Federation, batch_size: int | None) -> int:
    """How many clients fit in the working set: a model with gradient and velocity, and a batch, for each."""
    model = _bytes(shared) + _bytes(clients) // federation.n_clients
    sample = _bytes(federation.train.x) // len(federation.train.x)
    longest = int(federation.train.sizes.max())
    return max(1, WORKING_SET // (3 * model + sample * min(batch_size or longest, longest)))


def chunks_of_like_size(sizes: Tensor, most: int) -> list[Tensor]:
    """Positions in chunks of at most `most`, in each the smallest client at least half the largest: little padding.

    >>> [chunk.tolist() for chunk in chunks_of_like_size(torch.tensor([3, 100, 60, 4, 90]), most=2)]
    [[1, 4], [2], [3, 0]]
    """
    ordered, largest_first = sizes.sort(descending=True, stable=True)
    chunks, first = [], 0
    while first < len(sizes):
        alike = int((2 * ordered[first:] >= ordered[first]).sum())
        last = first + min(most, alike)
        chunks.append(largest_first[first:last])
        first = last
    return chunks


def _run_chunks(
    algorithm: Algorithm,
    problem: Problem,
    federation: Federation,
    plan: Plan,
    clients: Tree,
    round: int,
    chunks: Sequence[Tensor],
) -> Outcome:
    keys = id_keys(problem.ids)
    renewed = pytree.tree_map(torch.clone, clients)
    totals: dict[str, Total] = {}
    rows: dict[str, Tensor] = {}
    lost = met = 0.0
    up = down = 0
    for chunk in chunks:
        who = plan.who[chunk]
        data = LocalData(federation.train, problem.weights, keys, who, problem.seed, round)
        own = {name: leaf[chunk] for name, leaf in plan.own.items()}
        mine = pytree.tree_map(lambda leaf, who=who: leaf[who], clients)
        with torch.no_grad():  # torch.func has its own tape; nothing else may build one
            work = algorithm.work(problem.population, plan.task, plan.shared, own, mine, data)
        pytree.tree_map(lambda all_, new, who=who: all_.index_copy_(0, who.to(all_.device), new), renewed, work.client)
        for name, sum_ in work.upload.sums.items():
            total = total_of(sum_)
            totals[name] = pytree.tree_map(torch.add, totals[name], total) if name in totals else total
        for name, leaf in work.upload.rows.items():
            rows.setdefault(name, leaf.new_empty(len(plan.who), *leaf.shape[1:]))[chunk] = leaf
        lost += float((work.loss * work.samples).sum())
        met += float(work.samples.sum())
        up += _bytes(work.upload)
        down += _bytes(own) + len(chunk) * _bytes(plan.shared)
    return Outcome(renewed, totals, rows, lost / met if met else float("nan"), up, down)


def total_of(sum_: Sum) -> Total:
    """sum_i weight_i ⊗ value_i over a chunk."""
    weight = sum_.weight  # (C, r)

    def outer(leaf: Tensor) -> Tensor:
        flat = weight.T @ leaf.reshape(len(leaf), -1)
        return flat.reshape(weight.shape[1], *leaf.shape[1:])

    return Total(weight.sum(dim=0), pytree.tree_map(outer, sum_.value))


def _bytes(tree: Any) -> int:
    return sum(leaf.numel() * leaf.element_size() for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor))
