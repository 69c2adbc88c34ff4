"""A program of Flower that ends with the process that started it: `python -m ppfl.federation.flower_child NAME ...`.

A SuperNode looks for messages every 3 seconds, and no option changes that; most of a round would be spent waiting. So
its pauses are cut short here. Where another version of Flower pauses in another way, it just is as slow as ever.
"""

from __future__ import annotations

import sys
import time
from importlib import import_module
from types import SimpleNamespace

from ..parent_process import end_with_parent

PROGRAMS = {
    "flower-superlink": ("flwr.superlink.cli", "flower_superlink"),
    "flower-supernode": ("flwr.supernode.cli", "flower_supernode"),
}


SUPERNODE_LOOP = "flwr.supernode.start_client_internal"
LONGEST_PAUSE = 1.0  # seconds


def main() -> None:
    """Run the program that the first argument names, with the others as its arguments."""
    end_with_parent()
    sys.argv = sys.argv[1:]
    module, function = PROGRAMS[sys.argv[0]]
    if sys.argv[0] == "flower-supernode":
        loop = import_module(SUPERNODE_LOOP)
        loop.time = SimpleNamespace(sleep=lambda seconds: time.sleep(min(seconds, LONGEST_PAUSE)))  # type: ignore[attr-defined]
    getattr(import_module(module), function)()


if __name__ == "__main__":
    main()
