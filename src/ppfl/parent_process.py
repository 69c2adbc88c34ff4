"""A process that ends with the one that started it, whatever that died of. Imported before torch."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

CHECK_SECONDS = 0.2
_is_watching = False


def end_with_parent() -> None:
    """Watch the process that started this one, and leave at once when it is gone.

    Nothing is saved on the way out: the folder must be free when somebody runs the same command again.
    """
    global _is_watching
    if not _is_watching:
        import multiprocessing  # here, as help need not wait for it

        _is_watching = True
        who = os.getppid(), multiprocessing.parent_process()
        threading.Thread(target=_leave_when_alone, args=who, daemon=True).start()


def end_with_torchrun() -> None:
    """The same if torchrun started this process.

    It must watch before it connects to the other processes, because it would wait for a torchrun that is dead.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        if _torchrun_is_dead():
            os._exit(1)
        end_with_parent()


def _torchrun_is_dead() -> bool:
    """Whether process 1 has taken over this one; in a container torchrun may itself be process 1."""
    command = Path("/proc/1/cmdline")
    return os.getppid() == 1 and command.exists() and b"torch" not in command.read_bytes()


def _leave_when_alone(parent: int, started_by: BaseProcess | None) -> None:
    if started_by is not None:  # also knows of a parent that died before this thread began
        started_by.join()
    else:
        while os.getppid() == parent:
            time.sleep(CHECK_SECONDS)
    os._exit(1)
