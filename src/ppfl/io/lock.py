"""One process at a time in a run folder."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from ..errors import CheckpointError

PATIENCE = 2.0  # seconds, in which the workers of a command that was killed have ended


def is_locked(folder: Path) -> bool:
    """Whether a process is at work in `folder`."""
    file = _lock_file(folder)
    if not file.exists():
        return False
    try:
        with FileLock(file, timeout=0):
            return False
    except Timeout:
        return True


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep other processes out of `folder`, which need not exist yet; the kernel ends the lock of a process that died.

    The lock is a file beside the folder, which says whose it is. It is removed in the end, with the folders that were
    made for it where nothing else is in them.
    """
    file = _lock_file(folder)
    made = [parent for parent in file.parents if not parent.exists()]
    file.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(file, timeout=PATIENCE)
    try:
        lock.acquire()
    except Timeout:
        raise CheckpointError(
            f"{folder} is in use by {_owner(file)}; wait until it ends, stop it, or choose another --out"
        ) from None
    try:
        file.write_text(json.dumps({"pid": os.getpid(), "host": platform.node()}), encoding="utf-8")
        yield
    finally:
        with suppress(OSError):  # somebody else may have put something there
            file.unlink()
        lock.release()
        with suppress(OSError):
            for parent in made:
                parent.rmdir()


def _lock_file(folder: Path) -> Path:
    return folder.with_name(folder.name + ".lock")


def _owner(file: Path) -> str:
    try:
        said = json.loads(file.read_text(encoding="utf-8"))
        return f"process {said['pid']} on {said['host']}"
    except (OSError, ValueError, TypeError, KeyError):  # it is just being written
        return "another process"
