"""How a site computes: its clients in chunks.

`loop` takes one client at a time, by plain autograd, and is what everything else is compared with; `stacked` takes
many in one tensor operation, and several chunks at once in threads of one core each. They give the same trajectory to
rounding error.
"""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from ..algorithms.local.memberships import KEPT_OUTPUTS
from ..core.backends import Autograd, Backend, make_backend
from ..core.population import Population
from ..data import Samples
from ..data.samples import similar_sizes
from ..errors import SettingError

SMALL_MODEL = 64 * 2**10  # bytes; below, operations are short, and threads would wait for each other's Python
WORKING_SET = 48 * 2**20  # bytes a chunk may touch in one step: about what the caches of a small machine hold
BATCH_INPUTS = 8 * 2**20  # bytes of inputs in it: they are read twice at once after they were gathered

Result = TypeVar("Result")
ChunkWork = Callable[[Sequence[Tensor]], Result]  # chunks of positions, one after the other


class Engine(Protocol):
    """Decides how clients are computed; knows nothing of what they do."""

    name: str

    def backend(self, population: Population, x: Tensor, y: Tensor, n_classes: int | None) -> Backend:
        """How models run on data like these samples x (N, ...) and targets y (N, ...)."""

    def run(
        self, work: ChunkWork[Result], sizes: Tensor, batch_size: int | None, backend: Backend, samples: Samples
    ) -> list[Result]:
        """`work` on clients with so many samples each (S,), in chunks of positions; one result per thread."""


class Loop:
    """One client at a time."""

    name = "loop"

    def backend(self, population: Population, x: Tensor, y: Tensor, n_classes: int | None) -> Backend:
        return Autograd(population, x, y, n_classes)

    def run(
        self, work: ChunkWork[Result], sizes: Tensor, batch_size: int | None, backend: Backend, samples: Samples
    ) -> list[Result]:
        return [work(torch.arange(len(sizes))[:, None].unbind())]


class Stacked:
    """Clients of similar size side by side.

    chunk: how many, or (None) as many as the working set allows. threads: chunks at a time, each on a core of its own;
    or (None) as many as torch may use cores, where models and rounds are large enough to gain from it.
    """

    name = "stacked"

    def __init__(self, chunk: int | None = None, threads: int | None = None) -> None:
        if chunk is not None and chunk < 1:
            raise SettingError(f"chunk is {chunk}; a chunk has at least one client: set chunk >= 1 or leave it out")
        if threads is not None and threads < 1:
            raise SettingError(f"threads is {threads}; set threads >= 1, or leave it out for all cores")
        self.chunk, self.threads = chunk, threads
        self._pool: WorkerPool | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Without its threads, which belong to this process."""
        return {**vars(self), "_pool": None}

    def backend(self, population: Population, x: Tensor, y: Tensor, n_classes: int | None) -> Backend:
        return make_backend(population, x, y, n_classes)

    def run(
        self, work: ChunkWork[Result], sizes: Tensor, batch_size: int | None, backend: Backend, samples: Samples
    ) -> list[Result]:
        threads, largest = self._threads_for(backend.population, samples), int(sizes.max())
        batch = min(batch_size or largest, largest)
        most = self.chunk or fitting_chunk(backend, samples, batch, largest)
        # a round that fits into one chunk is short: threads would wait for each other's Python
        parts = 1 if self.threads is None and len(sizes) <= most else threads
        chunks = chunks_of_similar_size(sizes, batch, self.chunk or even_chunk(len(sizes), parts, most))
        if self._pool is None or self._pool.threads != threads:
            self._pool = WorkerPool(threads)
        shares = balanced([int(sizes[chunk].sum()) for chunk in chunks], parts)
        return self._pool.run(work, [[chunks[at] for at in share] for share in shares if share])

    def _threads_for(self, population: Population, samples: Samples) -> int:
        if samples.x.device.type != "cpu":
            return 1
        if self.threads is not None:
            return self.threads
        return torch.get_num_threads() if population.bytes_of_local_run >= SMALL_MODEL else 1


ENGINES: dict[str, type[Loop] | type[Stacked]] = {engine.name: engine for engine in (Loop, Stacked)}


def engine_by_name(engine: str | Engine) -> Engine:
    """An engine, from its name or as it is."""
    if not isinstance(engine, str):
        return engine
    if engine not in ENGINES:
        raise SettingError(f"there is no engine {engine!r}; use one of {', '.join(map(repr, ENGINES))}")
    return ENGINES[engine]()


def fitting_chunk(backend: Backend, samples: Samples, batch: int, largest: int) -> int:
    """How many clients fit in the working set, each with a model, its velocity, and a batch with its outputs; and how
    many of `largest` samples fit where the outputs of all samples are kept while memberships move."""
    if backend.clients.one_by_one:
        return 1
    population = backend.population
    outputs = backend.output_bytes * (population.k if backend.caches_outputs else 1)
    step = 2 * population.bytes_of_local_run + (samples.bytes_per_sample + outputs) * batch
    kept = outputs * largest if backend.keeps_outputs else 0
    inputs = samples.bytes_per_sample * batch
    return max(1, min(WORKING_SET // step, BATCH_INPUTS // max(1, inputs), KEPT_OUTPUTS // max(1, kept)))


def even_chunk(clients: int, threads: int, most: int) -> int:
    """A chunk of at most `most` that gives every thread as many chunks as any other.

    >>> even_chunk(100, threads=2, most=27)
    25
    """
    turns = -(-clients // (threads * most))
    return -(-clients // (threads * turns))


def chunks_of_similar_size(sizes: Tensor, batch: int, most: int) -> list[Tensor]:
    """Positions in chunks of at most `most`, largest first, in each the smallest batch at least half the largest: a
    client that has no batch left costs nothing, one whose batch is smaller than others' is padded.

    >>> [chunk.tolist() for chunk in chunks_of_similar_size(torch.tensor([3, 100, 60, 4, 90]), batch=50, most=2)]
    [[1, 4], [2], [3, 0]]
    """
    largest_first = sizes.argsort(descending=True, stable=True)
    return [largest_first[run] for run in similar_sizes(sizes[largest_first].clamp_max(batch), most)]


def balanced(work: Sequence[int], parts: int) -> list[list[int]]:
    """Positions in `parts` lists of about equal work: the largest first, always to the list that has least.

    >>> balanced([5, 4, 3, 3], 2)
    [[0, 3], [1, 2]]
    """
    shares: list[list[int]] = [[] for _ in range(parts)]
    loads = [(0, at) for at in range(parts)]
    for position in sorted(range(len(work)), key=lambda position: -work[position]):
        load, at = heapq.heappop(loads)
        shares[at].append(position)
        heapq.heappush(loads, (load + work[position], at))
    return shares


class WorkerPool:
    """Threads of one core each: on a CPU, clients in parallel beat more cores for one client."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._pool = _single_core_threads(threads) if threads > 1 else None

    def run(self, work: ChunkWork[Result], shares: Sequence[Sequence[Tensor]]) -> list[Result]:
        """Each share in a thread of its own; one share alone has all cores."""
        if self._pool is None or len(shares) == 1:
            return [work(share) for share in shares]
        running = [self._pool.submit(work, share) for share in shares]
        try:
            return [one.result() for one in running]
        finally:
            wait(running)  # a thread that goes on after an interrupt would write to states that are being saved


def _single_core_threads(count: int) -> ThreadPoolExecutor:
    """torch keeps one number of cores per thread, and one for threads to come, which is put back here."""
    cores, ready = torch.get_num_threads(), threading.Barrier(count + 1)

    def start() -> None:
        torch.set_num_threads(1)
        torch.get_num_threads()  # a thread's first question settles its number; later ones of others do not touch it
        ready.wait()

    pool = ThreadPoolExecutor(count, thread_name_prefix="ppfl", initializer=start)
    for _ in range(count):
        pool.submit(int)
    ready.wait()
    torch.set_num_threads(cores)
    return pool
