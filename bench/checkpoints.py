"""What digests add to a checkpoint of 400 MB: ours, and the same tensors written by safetensors alone, in turns.

.venv/bin/python bench/checkpoints.py [FOLDER]   # on the disk to measure; by default the current folder
"""

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from safetensors.torch import save_file

from ppfl.io.codec import dump
from ppfl.io.files import atomic_write, flush

TURNS = 16
TENSORS = {f"layer{i}": torch.randn(100, 1000, 250) for i in range(4)}  # 400 MB


def plain(path: Path) -> None:
    """Written beside, flushed and renamed, without digests."""
    partial = path.with_suffix(".partial")
    save_file(TENSORS, partial)
    flush(partial)
    partial.replace(path)
    flush(path.parent)


def with_digests(path: Path) -> None:
    """As a run folder writes it."""
    with atomic_write(path) as file:
        dump(TENSORS, file, "checkpoint", about={"round": 1})


def seconds(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def main() -> None:
    with tempfile.TemporaryDirectory(dir=sys.argv[1] if len(sys.argv) > 1 else ".") as folder:
        path = Path(folder) / "checkpoint.safetensors"
        actions = {
            "checkpoint with digests": lambda: with_digests(path),
            "safetensors alone": lambda: plain(path),
        }
        turns = []
        for turn in range(TURNS):
            order = list(actions) if turn % 2 else list(reversed(actions))  # the second finds the disk busy
            turns.append({name: seconds(actions[name]) for name in order})
    for name in actions:
        times = [turn[name] for turn in turns]
        print(f"{name:26} {median(times):.2f} s (fastest {min(times):.2f})")
    ours, alone = (sum(turn[name] for turn in turns) for name in actions)
    print(f"ratio of the sums          {ours / alone:.2f}")


if __name__ == "__main__":
    main()
