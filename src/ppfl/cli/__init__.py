"""The command line: parse, call, print. Typer and rich are used here and nowhere else."""

from collections.abc import Sequence

from .stop_signals import interrupt_on_signals, leave_on_signals


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; without arguments, as the program that was typed."""
    as_program = arguments is None
    if as_program:
        leave_on_signals()
    from .app import run_command_line  # takes seconds, as torch is imported

    if as_program:
        interrupt_on_signals()
    try:
        run_command_line(arguments)
    finally:
        if as_program:
            leave_on_signals()


__all__ = ["main"]
