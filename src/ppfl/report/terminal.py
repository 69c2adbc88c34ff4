"""Text on a terminal or in a notebook: all of it is made visible first, and none of it is taken for markup."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from ..io.text import visible

if TYPE_CHECKING:
    from .tables import Table

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


def show(*tables: Table) -> None:
    """Print tables on standard output."""
    console = make_console(wide=WIDE)
    for table in tables:
        _print(console, table)


def as_text(table: Table) -> str:
    """A table as plain text."""
    console = PlainConsole(width=WIDE, color_system=None, highlight=False)
    with console.capture() as captured:
        _print(console, table)
    return captured.get().rstrip()


def _print(console: PlainConsole, table: Table) -> None:
    if table.title:
        console.print(table.title, style="bold")
    console.print(table.to_rich())
    if table.about:
        console.print(" ".join(table.about))
