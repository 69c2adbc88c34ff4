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

from rich.console import Console
from rich.text import Text
from typer.core import TyperGroup

from ..core.text import visible

WIDE = 140  # columns, where no terminal says how many there are
_ASCII_SIGNS = str.maketrans({"–": "-", "±": "+/-", "…": "...", "×": "x"})


def say(text: str, *, error: bool = False) -> None:
    """Print one line on standard output, or on standard error."""
    stream = sys.stderr if error else sys.stdout
    print(printable(text, stream.encoding), file=stream, flush=error)


def printable(text: str, encoding: str | None = None) -> str:
    r"""Visible text, as the encoding of a terminal can have it.

    >>> print(printable("café – \x07", "ascii"))
    caf\xe9 - \x07
    """
    shown, encoding = visible(text), encoding or "utf-8"
    if not encoding.lower().startswith("utf"):
        shown = shown.translate(_ASCII_SIGNS)
    return shown.encode(encoding, "backslashreplace").decode(encoding)


class PlainConsole(Console):
    """A console for which every string is plain text; styles are given as arguments."""

    def render_str(self, text: str, **how: Any) -> Text:
        shown = printable(text, self.encoding)
        return Text(shown, how.get("style") or "", justify=how.get("justify"), overflow=how.get("overflow"))


def make_console(*, error: bool = False, wide: int | None = None) -> PlainConsole:
    """Where tables and bars go; `wide` is their width if that is no terminal."""
    stream = sys.stderr if error else sys.stdout
    return PlainConsole(stderr=error, highlight=False, width=None if stream.isatty() else wide)


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
