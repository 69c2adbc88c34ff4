"""Resident memory of this process, as the kernel counts it."""

import contextlib
import resource
import sys
from pathlib import Path

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def resident() -> int:
    """Bytes now; where the kernel does not say, the most there were."""
    return _field("VmRSS") or _most_by_usage()


def most_resident() -> int:
    """The high-water mark in bytes. VmHWM is this program's own, where ru_maxrss keeps that of its parent."""
    return _field("VmHWM") or _most_by_usage()


def forget_most() -> None:
    """Set the high-water mark to what is resident now, where the kernel lets us."""
    with contextlib.suppress(OSError):
        CLEAR.write_text("5")


def _field(name: str) -> int:
    if not STATUS.exists():
        return 0
    found = [line.split() for line in STATUS.read_text().splitlines() if line.startswith(f"{name}:")]
    return int(found[0][1]) * 1024 if found else 0


def _most_by_usage() -> int:
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
