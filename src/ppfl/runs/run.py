"""Running an experiment: one folder per seed, safe to stop at any instant."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from ..data.federation import Federation
from ..errors import CheckpointError
from ..io.lock import locked
from ..server import launched_ranks
from .experiment import Experiment
from .folder import RunFolder
from .record import RunRecord, load_run
from .seed_run import OnRoundEnd, SeedRun

_USERS_OWN = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")

Reader = Callable[[Experiment, Path | None], Federation]  # relative paths start at the second


def read_data(experiment: Experiment, base: Path | None) -> Federation:
    """From its files, or drawn anew."""
    return experiment.build_data(base)


def run(
    experiment: Experiment,
    out: str | Path,
    *,
    base: Path | None = None,
    resume: bool = False,
    checkpoint_every: int | None = None,
    on_round_end: OnRoundEnd | None = None,
    read: Reader = read_data,
    start_method: Path | None = None,
) -> list[RunRecord]:
    """Run every seed into `out`/seed-<seed>. Relative paths and factories' modules start at `base`.

    start_method: in a comparison, the folder of the method that `[start]` names.

    A checkpoint is written every `checkpoint_every` rounds, or else about every ten seconds. With `resume`, seeds
    that are finished are left alone, others go on from their checkpoint and end with the same bits as a run never
    stopped.

    In processes that torchrun started, each works on clients of its own, and the first one writes: it alone gets the
    records. A checkpoint holds every client's state, so a run may go on with another number of processes.
    """
    keep_freed_memory()
    out, ranks = Path(out), launched_ranks(experiment.device)
    folders = {seed: RunFolder(out / f"seed-{seed}") for seed in experiment.seeds}
    with _usable(out), ExitStack() as locks:
        todo = ranks.decide_on_first(partial(_claim, experiment, folders, locks, resume=resume))
        if todo:
            federation = read(experiment, base).to(experiment.device)
        for seed in todo:
            one = SeedRun(experiment.for_seed(seed), federation, folders[seed], ranks, base, start_method)
            one.go(checkpoint_every, on_round_end)
        return [load_run(folder.path) for folder in folders.values()] if ranks.first else []


@contextmanager
def _usable(out: Path) -> Iterator[None]:
    """Errors of the file system, as one that names what could not be used."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"{error.filename or out} cannot be used ({error.strerror or error}); choose another --out"
        ) from error


def _claim(experiment: Experiment, folders: dict[int, RunFolder], locks: ExitStack, *, resume: bool) -> list[int]:
    """The seeds that are not finished, each locked against other processes."""
    for seed, folder in folders.items():
        with _usable(folder.path):
            if not folder.finished:
                locks.enter_context(locked(folder.path))
            folder.claim(experiment.for_seed(seed), resume=resume)
    return [seed for seed, folder in folders.items() if not folder.finished]


def keep_freed_memory() -> None:
    """Let the process keep up to 1 GiB that it has freed, instead of giving it back and asking for it again.

    Autograd frees what it kept of a step at its end. By default glibc gives that back to the system, and the next step
    pays for each page anew. Nothing is done without glibc, or where the environment has settings of its own.
    """
    if any(name in os.environ for name in _USERS_OWN):
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # another C library, or Windows
        return
    mallopt(-1, 2**30)  # M_TRIM_THRESHOLD of malloc.h
    mallopt(-3, 2**25)  # M_MMAP_THRESHOLD, the largest that is accepted
