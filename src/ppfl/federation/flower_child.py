"""A program of Flower that ends with the process that started it: `python -m ppfl.federation.flower_child NAME ...`.

A SuperNode looks for messages every 3 seconds, and no option changes that; most of a round would be spent waiting. So
its pauses are cut short here, to a third of the time since it last had something to do. They are at least four times as
long as a look takes, because looks of many sites would keep the SuperLink from its work; a look costs about 1 kB. Where
another version of Flower pauses in another way, it just is as slow as ever. And a SuperNode goes on after the thread
that says it is alive has ended, so that nobody sends it anything any more; here it ends, and the site starts it again.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from functools import partial
from importlib import import_module
from typing import Any

from ..parent_process import end_with_parent

PROGRAMS = {
    "flower-superlink": ("flwr.superlink.cli", "flower_superlink"),
    "flower-supernode": ("flwr.supernode.cli", "flower_supernode"),
}


SUPERNODE_LOOP = "flwr.supernode.start_client_internal"
SHORTEST_PAUSE = 0.05  # seconds
LONGEST_WAIT_FOR_OBJECTS = 1.0


class ShortPauses:
    """What a SuperNode's loop has instead of the module `time`."""

    def __init__(self) -> None:
        self._last_busy = self._woke = time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Pauses of a second and more are those without a message, shorter ones are for a reply of this site."""
        now = time.monotonic()
        if seconds < 1:
            self._last_busy = now
            time.sleep(min(seconds, SHORTEST_PAUSE))
        else:
            time.sleep(min(seconds, max(SHORTEST_PAUSE + (now - self._last_busy) / 3, 4 * (now - self._woke))))
        self._woke = time.monotonic()


def _end_after_error(args: Any) -> None:
    sys.__excepthook__(args.exc_type, args.exc_value, args.exc_traceback)
    os._exit(1)


def main() -> None:
    """Run the program that the first argument names, with the others as its arguments."""
    end_with_parent()
    sys.argv = sys.argv[1:]
    module, function = PROGRAMS[sys.argv[0]]
    if sys.argv[0] == "flower-supernode":
        loop: Any = import_module(SUPERNODE_LOOP)
        loop.time = ShortPauses()
        loop.pull_objects = partial(
            loop.pull_objects, initial_backoff=SHORTEST_PAUSE, backoff_cap=LONGEST_WAIT_FOR_OBJECTS
        )
        threading.excepthook = _end_after_error
    getattr(import_module(module), function)()


if __name__ == "__main__":
    main()
