"""Resident memory of this process, as the kernel counts it."""

import contextlib
import resource
import sys
from pathlib import Path

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def resident() -> int:
    """Bytes now, or the peak where the kernel does not tell."""
    return _field("VmRSS") or _most_by_usage()


def most_resident() -> int:
    """The peak in bytes. VmHWM is that of this program alone; ru_maxrss would include its parent's."""
    return _field("VmHWM") or _most_by_usage()


def forget_most() -> None:
    """Set the peak to what is resident now, where the kernel allows it."""
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
