"""Worker processes that work on tasks side by side. They end with this process, whatever it dies of."""

from __future__ import annotations

import multiprocessing
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any, Generic, TypeVar

import torch

from ..errors import LostWorkerError
from ..parent_process import end_with_parent

Task = TypeVar("Task")
Result = TypeVar("Result")


class ProcessPool(Generic[Task, Result]):
    """`jobs` processes that call `work`, with `threads` threads each.

    An error or Ctrl-C in the `with` block sends SIGTERM to the workers, which is a KeyboardInterrupt in `work`, and
    waits until they have ended; a second Ctrl-C kills them.
    """

    def __init__(self, jobs: int, work: Callable[[Task], Result], threads: int) -> None:
        self._context = multiprocessing.get_context("spawn")  # a fork would copy threads that hold locks
        self._work, self._threads, self._jobs = work, threads, jobs
        self._workers: list[_Worker] = []

    def __enter__(self) -> ProcessPool[Task, Result]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            for worker in self._workers:
                worker.connection.close()  # one that waits for a task ends
                if kind is not None:
                    worker.process.terminate()
            for worker in self._workers:
                worker.process.join()
        except KeyboardInterrupt:
            for worker in self._workers:
                worker.process.kill()
            raise

    def run(self, tasks: Iterable[Task]) -> Iterator[tuple[Task, Result | LostWorkerError]]:
        """Tasks as they end, each with its result, or with the error that its worker died."""
        waiting = deque(tasks)
        busy: dict[Any, tuple[_Worker, Task]] = {}
        while waiting or busy:
            while waiting and len(busy) < self._jobs:
                worker, task = self._idle_worker({id(one) for one, _ in busy.values()}), waiting.popleft()
                worker.connection.send(task)
                busy[worker.connection] = worker, task
            for connection in wait(list(busy)):
                worker, task = busy.pop(connection)
                yield task, self._result(worker)

    def _idle_worker(self, busy: set[int]) -> _Worker:
        for worker in self._workers:
            if id(worker) not in busy:
                return worker
        self._workers.append(_Worker(self._context, self._work, self._threads))
        return self._workers[-1]

    def _result(self, worker: _Worker) -> Result | LostWorkerError:
        try:
            result: Result = worker.connection.recv()
            return result
        except (EOFError, OSError):
            self._workers.remove(worker)
            worker.process.join()
            return LostWorkerError(
                f"its process {_how_it_ended(worker.process.exitcode)}; what it had saved is safe: run the same "
                f"command again to go on, with a smaller --jobs if memory ran out"
            )


class _Worker:
    def __init__(self, context: Any, work: Callable[[Any], Any], threads: int) -> None:
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, work, threads), daemon=True)
        with _without_ctrl_c():
            self.process.start()
        theirs.close()  # so that the connection ends with the worker


@contextmanager
def _without_ctrl_c() -> Iterator[None]:
    """Processes started here never get SIGINT, which a terminal sends to all: this process tells them to stop."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _serve(connection: Connection, work: Callable[[Any], Any], threads: int) -> None:
    """What a worker does."""
    end_with_parent()
    torch.set_num_threads(threads)
    try:
        while True:
            task = connection.recv()
            signal.signal(signal.SIGTERM, _interrupt_once)
            result = work(task)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)  # between tasks there is nothing to save
            connection.send(result)
    except (KeyboardInterrupt, EOFError, BrokenPipeError):  # told to stop, or nothing is left to do
        return


def _interrupt_once(number: int, frame: object) -> None:
    signal.signal(number, signal.SIG_IGN)  # the run is being saved from here on
    raise KeyboardInterrupt


def _how_it_ended(code: int | None) -> str:
    if code is not None and code < 0:
        reason = ", most likely for lack of memory" if -code == signal.SIGKILL else ""
        return f"was killed by {signal.Signals(-code).name}{reason}"
    return f"ended with exit code {code}"
