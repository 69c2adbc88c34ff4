"""What to type to run this program again, and how a command that was stopped is resumed."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from .stop_signals import announce, exit_code
from .terminal import say

# Options that several commands have, with the same words in each.
SetOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a setting, such as population.k=4.")
]
RunsOption = Annotated[Path | None, typer.Option(help="Folder to write to.", show_default="runs/<name>")]
ResumeOption = Annotated[bool, typer.Option("--resume", help="Continue a run that was stopped.")]
JobsOption = Annotated[
    int | None, typer.Option(min=1, help="Number of runs at the same time.", show_default="one per core")
]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")]


def program() -> str:
    """The command as it was typed, where a virtual environment is not on the path; else its name."""
    typed = Path(sys.argv[0])
    return str(typed) if typed.name == "ppfl" else "ppfl"


def changes(settings: Sequence[str] | None) -> list[str]:
    """The options that make these changes again."""
    return [part for setting in settings or () for part in ("--set", setting)]


@contextmanager
def resumable(command: Sequence[str]) -> Iterator[None]:
    """Ctrl-C and SIGTERM end in one line that says how to resume."""
    try:
        yield
    except KeyboardInterrupt as stop:
        from ..runs import Interrupted
        from ..server import is_first_process

        if is_first_process():
            where = f" after round {stop.round} of {stop.rounds}" if isinstance(stop, Interrupted) else ""
            say(f"stopped{where}; resume with: {shlex.join(command)}", error=True)
        announce()
        raise typer.Exit(exit_code()) from None
