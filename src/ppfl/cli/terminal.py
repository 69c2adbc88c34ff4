"""The only way to a terminal: all text is made visible first, and none of it is taken for markup.

Commands print lines with `say` and tables with `make_console`, and nothing else.
"""

from __future__ import annotations

import io
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from typer.core import TyperGroup

from ..io.text import visible
from ..report.terminal import WIDE as WIDE
from ..report.terminal import make_console as make_console
from ..report.terminal import printable as printable
from ..report.terminal import say as say
from ..report.terminal import show as show


@contextmanager
def safe_output() -> Iterator[None]:
    """Warnings are one line each, and what a terminal cannot show is spelled out instead of an error."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    shown = warnings.showwarning
    warnings.showwarning = _say_warning
    try:
        yield
    finally:
        warnings.showwarning = shown


def _say_warning(message: Warning | str, *_: object, **__: object) -> None:
    say(f"warning: {' '.join(str(message).split())}", error=True)


class PlainGroup(TyperGroup):
    """Commands whose usage errors, which repeat arguments, are visible text too."""

    def make_context(self, *arguments: Any, **options: Any) -> Any:
        with _visible_usage_errors():
            return super().make_context(*arguments, **options)

    def invoke(self, ctx: Any) -> Any:
        with _visible_usage_errors():
            return super().invoke(ctx)


@contextmanager
def _visible_usage_errors() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if hasattr(error, "format_message"):  # a usage error; where its class is found differs between versions
            error.message = visible(error.message)  # type: ignore[attr-defined]
        raise
