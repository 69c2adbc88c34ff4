"""Threads of one core each: on a CPU, clients in parallel beat more cores for one client."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from ..core.workspace import Workspace

Share = TypeVar("Share")
Result = TypeVar("Result")


class Crew:
    """So many threads, with a workspace for each."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._spaces = [Workspace() for _ in range(threads)]
        self._pool = _single_core_threads(threads) if threads > 1 else None

    def run(self, work: Callable[[Share, Workspace], Result], shares: Sequence[Share]) -> list[Result]:
        """Each share in a thread of its own; one share alone has all cores."""
        if self._pool is None or len(shares) == 1:
            return [work(share, space) for share, space in zip(shares, self._spaces, strict=False)]
        return list(self._pool.map(work, shares, self._spaces))


def _single_core_threads(count: int) -> ThreadPoolExecutor:
    """torch keeps a number of cores a thread, and one for threads to come, which is put back here."""
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
