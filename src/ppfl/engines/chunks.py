"""A round on this machine: clients in chunks.

`loop` takes one client at a time, with plain autograd, and is what everything else is compared with; `stacked` takes
many in one tensor operation, and several chunks at once in threads of one core each. They give the same trajectory to
rounding error.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..algorithms.batches import LocalData, id_keys, like_sizes
from ..algorithms.contract import Algorithm, Plan, Problem, Sum, Total, Tree
from ..core.errors import SettingError
from ..core.workspace import Workspace
from ..data import Federation
from .crew import Crew
from .ranks import ALONE, Ranks, balanced

SMALL_MODEL = 64 * 2**10  # bytes; below, operations are short, and threads would wait for each other's Python
WORKING_SET = 48 * 2**20  # bytes a chunk may touch in one step: about what the caches of a small machine hold


class Outcome(NamedTuple):
    """What a round brought."""

    clients: Tree  # all M, those that took part renewed
    totals: dict[str, Total]
    who: Tensor  # (S,), the clients whose rows are here
    rows: dict[str, Tensor]  # (S, ...), in the order of `who`
    loss: float  # mean over the samples met; nan where no client reported one
    samples: float  # how many those are
    bytes_up: int  # all clients together


class Engine(Protocol):
    """Decides where and how clients work; knows nothing of what they do."""

    name: str
    ranks: Ranks  # the processes that share the clients

    def run(
        self, algorithm: Algorithm, problem: Problem, federation: Federation, plan: Plan, clients: Tree, round: int
    ) -> Outcome: ...


class Round(NamedTuple):
    """All that a chunk of clients needs to know, and where it puts what it has done."""

    algorithm: Algorithm
    problem: Problem
    federation: Federation
    plan: Plan
    clients: Tree
    round: int
    renewed: Tree  # client states after the round
    rows: dict[str, Tensor]

    def run(self, chunks: Sequence[Tensor], space: Workspace | None) -> Tally:
        """Chunks of positions in plan.who, one after the other."""
        tally = Tally()
        for chunk in chunks:
            self._run_one(chunk, space, tally)
        return tally

    def _run_one(self, chunk: Tensor, space: Workspace | None, tally: Tally) -> None:
        algorithm, problem, plan = self.algorithm, self.problem, self.plan
        who = plan.who[chunk]
        keys = id_keys(problem.ids)
        data = LocalData(self.federation.train, problem.weights, keys, who, problem.seed, self.round, space)
        own = {name: leaf[chunk] for name, leaf in plan.own.items()}
        mine = pytree.tree_map(lambda leaf: leaf[who], self.clients)
        with torch.no_grad():  # torch.func has its own tape; nothing else may build one
            work = algorithm.work(problem.population, plan.task, plan.shared, own, mine, data)
            pytree.tree_map(lambda all_, new: all_.index_copy_(0, who.to(all_.device), new), self.renewed, work.client)
            for name, leaf in work.upload.rows.items():
                if name not in self.rows:  # threads may both make it; one of them is kept
                    self.rows.setdefault(name, leaf.new_empty(len(plan.who), *leaf.shape[1:]))
                self.rows[name][chunk] = leaf
            for name, sum_ in work.upload.sums.items():
                tally.add(name, sum_, data.weight)
            tally.lost += float((work.loss * work.samples).sum())
            tally.met += float(work.samples.sum())
        tally.up += bytes_of(work.upload)


class Tally:
    """Sums over chunks."""

    def __init__(self) -> None:
        self.totals: dict[str, Total] = {}
        self.lost = self.met = 0.0
        self.up = 0

    def add(self, name: str, sum_: Sum, p: Tensor) -> None:
        """sum_i p_i weight_i ⊗ value_i over a chunk."""
        weight = p[:, None] if sum_.weight is None else p[:, None] * sum_.weight  # (C, r)
        if name not in self.totals:
            room = pytree.tree_map(lambda leaf: leaf.new_zeros(weight.shape[1], *leaf.shape[1:]), sum_.value)
            self.totals[name] = Total(weight.new_zeros(weight.shape[1]), room)
        total = self.totals[name]
        total.weight.add_(weight.sum(dim=0))
        for onto, leaf in zip(pytree.tree_leaves(total.value), pytree.tree_leaves(sum_.value), strict=True):
            onto.view(len(onto), -1).addmm_(weight.T, leaf.reshape(len(leaf), -1))

    def join(self, other: Tally) -> Tally:
        """Both together, in this one."""
        for name, total in other.totals.items():
            self.totals[name] = pytree.tree_map(torch.add, self.totals[name], total) if name in self.totals else total
        self.lost, self.met, self.up = self.lost + other.lost, self.met + other.met, self.up + other.up
        return self


class Loop:
    """One client at a time."""

    name, ranks = "loop", ALONE

    def run(
        self, algorithm: Algorithm, problem: Problem, federation: Federation, plan: Plan, clients: Tree, round: int
    ) -> Outcome:
        this = _begin(algorithm, problem, federation, plan, clients, round)
        one_by_one = torch.arange(len(plan.who))[:, None].unbind()
        return _outcome(this, this.run(one_by_one, space=None))


class Stacked:
    """Clients of like size side by side.

    chunk: how many, or (None) as many as the working set allows. threads: chunks at a time, each on a core of its own;
    or (None) as many as torch may use cores, where models are large enough to gain from it.
    """

    name, ranks = "stacked", ALONE

    def __init__(self, chunk: int | None = None, threads: int | None = None) -> None:
        if chunk is not None and chunk < 1:
            raise SettingError(f"chunk is {chunk}; a chunk has at least one client: set chunk >= 1 or leave it out")
        if threads is not None and threads < 1:
            raise SettingError(f"threads is {threads}; set threads >= 1, or leave it out for all cores")
        self.chunk, self.threads = chunk, threads
        self._crew: Crew | None = None

    def run(
        self, algorithm: Algorithm, problem: Problem, federation: Federation, plan: Plan, clients: Tree, round: int
    ) -> Outcome:
        threads = self._threads_for(problem, federation)
        sizes = federation.train.sizes.cpu()[plan.who]
        batch = min(getattr(algorithm, "batch_size", None) or int(sizes.max()), int(sizes.max()))
        size = self.chunk or even_chunk(len(plan.who), threads, fitting_chunk(problem, federation, batch))
        chunks = chunks_of_like_size(sizes, batch, size)
        this = _begin(algorithm, problem, federation, plan, clients, round)
        if self._crew is None or self._crew.threads != threads:
            self._crew = Crew(threads)
        shares = balanced([int(sizes[chunk].sum()) for chunk in chunks], threads)
        tallies = self._crew.run(this.run, [[chunks[at] for at in share] for share in shares if share])
        return _outcome(this, _joined(tallies))

    def _threads_for(self, problem: Problem, federation: Federation) -> int:
        if federation.train.x.device.type != "cpu":
            return 1
        if self.threads is not None:
            return self.threads
        return torch.get_num_threads() if problem.population.bytes_of_local_run() >= SMALL_MODEL else 1


ENGINES: dict[str, type[Loop] | type[Stacked]] = {engine.name: engine for engine in (Loop, Stacked)}


def fitting_chunk(problem: Problem, federation: Federation, batch: int) -> int:
    """How many clients fit in the working set: a model with its velocity, and a batch, for each."""
    model = problem.population.bytes_of_local_run()
    sample = bytes_of(federation.train.x) // len(federation.train.x)
    if problem.population.clients.one_by_one(federation.train.x):
        return 1
    return max(1, WORKING_SET // (2 * model + sample * batch))


def even_chunk(clients: int, threads: int, most: int) -> int:
    """A chunk of at most `most` that gives every thread as many chunks as any other.

    >>> even_chunk(100, threads=2, most=27)
    25
    """
    turns = -(-clients // (threads * most))
    return -(-clients // (threads * turns))


def chunks_of_like_size(sizes: Tensor, batch: int, most: int) -> list[Tensor]:
    """Positions in chunks of at most `most`, largest first, in each the smallest batch at least half the largest: a
    client that has no batch left costs nothing, one whose batch is smaller than others' is padded.

    >>> [chunk.tolist() for chunk in chunks_of_like_size(torch.tensor([3, 100, 60, 4, 90]), batch=50, most=2)]
    [[1, 4], [2], [3, 0]]
    """
    largest_first = sizes.argsort(descending=True, stable=True)
    return [largest_first[run] for run in like_sizes(sizes[largest_first].clamp_max(batch), most)]


def bytes_of(tree: Any) -> int:
    """Bytes of the tensors in a tree, each counted once."""
    tensors = {id(leaf): leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)}
    return sum(leaf.numel() * leaf.element_size() for leaf in tensors.values())


def _begin(
    algorithm: Algorithm, problem: Problem, federation: Federation, plan: Plan, clients: Tree, round: int
) -> Round:
    id_keys(problem.ids)  # made before threads ask for it
    everyone = len(plan.who) == problem.n_clients
    renewed = pytree.tree_map(torch.empty_like if everyone else torch.clone, clients)
    return Round(algorithm, problem, federation, plan, clients, round, renewed, {})


def _outcome(this: Round, tally: Tally) -> Outcome:
    loss = tally.lost / tally.met if tally.met else float("nan")
    return Outcome(this.renewed, tally.totals, this.plan.who, this.rows, loss, tally.met, tally.up)


def _joined(tallies: Sequence[Tally]) -> Tally:
    first, *others = tallies
    for other in others:
        first.join(other)
    return first
