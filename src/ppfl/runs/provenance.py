"""What a run was made with."""

import platform
from datetime import UTC, datetime
from importlib import import_module

_PACKAGES = ("ppfl", "torch", "numpy")


def describe_environment() -> dict[str, str]:
    """Versions, platform and the time now.

    >>> sorted(describe_environment())
    ['numpy', 'platform', 'ppfl', 'python', 'started', 'torch']
    """
    return {name: package_version(name) for name in _PACKAGES} | {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def package_version(name: str) -> str:
    """As the package itself has it, installed or not."""
    return str(import_module(name).__version__)
