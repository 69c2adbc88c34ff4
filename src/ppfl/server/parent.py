"""A process that ends with the one that started it, whatever that died of."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time

CHECK_SECONDS = 0.2


def end_with_parent() -> None:
    """Watch the process that started this one, and leave at once when it is gone.

    Nothing is saved on the way out: the folder must be free when somebody runs the same command again.
    """
    threading.Thread(target=_leave_when_alone, args=(os.getppid(),), daemon=True).start()


def _leave_when_alone(parent: int) -> None:
    started_by = multiprocessing.parent_process()
    if started_by is not None:  # also knows of a parent that died before this thread began
        started_by.join()
    else:
        while os.getppid() == parent:
            time.sleep(CHECK_SECONDS)
    os._exit(1)
