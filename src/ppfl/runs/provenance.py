"""What a run was made with."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import Any

_PACKAGES = ("ppfl", "torch", "numpy")


def describe_environment() -> dict[str, str]:
    """Versions, the commit where the package is run from its repository, the machine and the time now.

    >>> {"ppfl", "torch", "numpy", "python", "platform", "cores", "started"} <= describe_environment().keys()
    True
    """
    commit = commit_of(Path(__file__).parents[3])
    return {name: package_version(name) for name in _PACKAGES} | {
        **({"commit": commit} if commit else {}),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cores": str(os.cpu_count()),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def package_version(name: str) -> str:
    """As the package itself has it, installed or not."""
    return str(import_module(name).__version__)


def commit_of(root: Path) -> str | None:
    """What is checked out, with "-dirty" where files were changed since; None if `root` is not a repository's own."""
    if not (root / ".git").exists():  # git itself would go on to look in the folders above
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=7", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def made_with(environments: Iterable[Mapping[str, Any]]) -> str:
    """One line for several runs, each as described when it began, and when it was resumed.

    >>> run = {"ppfl": "0.1.0", "torch": "2.13.0", "commit": "5444b02", "cores": "2", "started": "2026-11-15T23:10:02"}
    >>> made_with([run, {**run, "resumed": [{**run, "started": "2026-11-16T07:00:41"}]}])
    'Runs of 2026-11-15 to 2026-11-16, ppfl 0.1.0 (5444b02), torch 2.13.0, 2 cores.'
    >>> made_with([run, {key: run[key] for key in ("ppfl", "torch", "cores", "started")}])
    'Runs of 2026-11-15, ppfl 0.1.0 (5444b02, unknown), torch 2.13.0, 2 cores.'
    """
    each = [one for run in environments for one in (run, *run.get("resumed", ()))]

    def all_of(key: str) -> list[str]:
        return sorted({one[key] for one in each if key in one})

    days, commits = sorted({one["started"][:10] for one in each}), all_of("commit")
    if commits and any("commit" not in one for one in each):
        commits.append("unknown")  # an installed package knows none
    parts = [f"Runs of {' to '.join(dict.fromkeys((days[0], days[-1])))}"]
    parts.append(f"ppfl {', '.join(all_of('ppfl'))}" + (f" ({', '.join(commits)})" if commits else ""))
    parts += [f"torch {version}" for version in all_of("torch")] + [f"{cores} cores" for cores in all_of("cores")]
    return ", ".join(parts) + "."
