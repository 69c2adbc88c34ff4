"""A terminal to write to."""

import os
import sys
import threading
from contextlib import contextmanager, suppress

import pytest


@contextmanager
def terminal(written: list[str]):
    """Standard error is a terminal in this context; afterwards the list has one text, all that was written to it."""
    reader, writer = pytest.importorskip("pty").openpty()

    def read():
        with suppress(OSError):  # when the other side is closed
            while part := os.read(reader, 1 << 16):
                written.append(part.decode())

    thread = threading.Thread(target=read)
    thread.start()
    try:
        with pytest.MonkeyPatch.context() as patch, os.fdopen(writer, "w") as stream:
            patch.setenv("TERM", "xterm")
            patch.setenv("COLUMNS", "120")
            for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
                patch.delenv(name, raising=False)
            patch.setattr(sys, "stderr", stream)
            yield
    finally:
        thread.join()
        os.close(reader)
        written[:] = ["".join(written)]
