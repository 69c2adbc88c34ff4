"""Ctrl-C and SIGTERM: both stop a command in the same way, each with an exit code of its own.

Imported before torch, so that a command can be stopped while it starts.
"""

import os
import signal
import sys
from collections.abc import Callable
from typing import NoReturn

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_last: signal.Signals | None = None
_announced = False


def leave_on_signals() -> None:
    """Where there is nothing to save, while modules are imported and after the work is done: go at once."""
    for number in _SIGNALS:
        _handle(number, _leave)


def interrupt_on_signals() -> None:
    """While a command works: a KeyboardInterrupt, on which runs save themselves. A second signal ends them at once."""
    for number in _SIGNALS:
        _handle(number, _interrupt)


def exit_code() -> int:
    """Of a command that was stopped: 128 + the signal, as shells have it."""
    return 128 + (_last or signal.SIGINT)


def announce() -> None:
    """Note that a line was printed which says that the command was stopped."""
    global _announced
    _announced = True


def leave_if_stopped() -> None:
    """End a program that was stopped with the exit code of its signal, and say so if no command could.

    Python itself would at times end by the signal instead, after a KeyboardInterrupt in code that was made from text.
    """
    if _last is not None:
        for stream in (sys.__stdout__, sys.__stderr__):
            if stream is not None:
                stream.flush()
        if not _announced:
            os.write(2, b"stopped\n")
        os._exit(128 + _last)


def _handle(number: int, handler: Callable[[int, object], NoReturn]) -> None:
    if signal.getsignal(number) != signal.SIG_IGN:  # as in a background job of a shell
        signal.signal(number, handler)


def _leave(number: int, frame: object) -> NoReturn:
    os.write(2, b"stopped\n")
    os._exit(128 + number)


def _interrupt(number: int, frame: object) -> NoReturn:
    global _last
    _last = signal.Signals(number)
    leave_on_signals()
    raise KeyboardInterrupt
