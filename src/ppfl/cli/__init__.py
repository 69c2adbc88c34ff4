"""The command line: parse, call, print. Typer and rich are used here and nowhere else."""

from collections.abc import Sequence

from ..parent_process import end_with_torchrun
from .stop_signals import interrupt_on_signals, leave_if_stopped, leave_on_signals


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line, by default with the arguments of this program, which then can be stopped by signals."""
    if arguments is None:
        _run_program()
    else:
        from .app import run_command_line

        run_command_line(arguments)


def _run_program() -> None:
    leave_on_signals()
    end_with_torchrun()
    from .app import run_command_line  # takes seconds, as torch is imported

    try:
        interrupt_on_signals()
        run_command_line(None)
    finally:
        leave_on_signals()
        leave_if_stopped()


__all__ = ["main"]
