"""Titled tables of text, for the terminal and as HTML."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from ...io.html_elements import Markup, element, escape, join
from ...io.text import visible

WIDTH = 100
_GAP = 2
_STYLE = """
.ppfl-summary { font: 14px/1.45 system-ui, sans-serif; max-width: 62rem; color: #1c1c1c; }
.ppfl-page { margin: 0; padding: 1.5rem 2rem; }
.ppfl-summary h2 { font-size: 1.25em; margin: 0 0 .4em; }
.ppfl-summary h3 { font-size: 1em; margin: 1.4em 0 .3em; }
.ppfl-summary table { border-collapse: collapse; font-variant-numeric: tabular-nums; margin: 0; }
.ppfl-summary th, .ppfl-summary td { padding: .2em 0 .2em 1.6em; text-align: right; white-space: nowrap;
  border: 0; background: none; vertical-align: top; }
.ppfl-summary th:first-child { text-align: left; font-weight: 500; padding-left: 0; }
.ppfl-summary thead th { border-bottom: 1px solid #888; font-weight: 600; }
.ppfl-summary table.facts td { text-align: left; white-space: normal; }
.ppfl-summary .range { color: #555; font-size: .9em; }
.ppfl-summary .scroll { overflow-x: auto; }
.ppfl-summary p { margin: .4em 0; max-width: 50rem; color: #444; }
@media (prefers-color-scheme: dark) {
  body.ppfl-page { background: #181818; }
  .ppfl-page .ppfl-summary { color: #e4e4e4; }
  .ppfl-page .ppfl-summary p, .ppfl-page .ppfl-summary .range { color: #b4b4b4; }
}
"""


class Cell(NamedTuple):
    """A number, and its interval below it."""

    text: str
    below: str = ""


class SummaryTable(NamedTuple):
    """Rows with a label each. Without columns it is a list of facts."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, tuple[Cell, ...]], ...]
    notes: tuple[str, ...] = ()


class ModelSummary:
    """Shown as text in a terminal and as HTML in a notebook; `to_html(path)` writes a page."""

    def __init__(self, title: str, tables: Sequence[SummaryTable]) -> None:
        self.title, self.tables = title, tuple(tables)

    def __str__(self) -> str:
        return "\n".join([self.title, "=" * len(self.title), *(_table_text(table) for table in self.tables)])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return f"<style>{_STYLE}</style>" + self._body()

    def _body(self) -> Markup:
        parts = [element("h2", escape(self.title)), *(_table_html(table) for table in self.tables)]
        return element("div", *parts, class_="ppfl-summary")

    def to_html(self, path: str | Path | None = None) -> str:
        """The summary as a page of its own, which is also written to `path` if given."""
        head = element("meta", charset="utf-8") + element("title", escape(self.title)) + f"<style>{_STYLE}</style>"
        body = element("body", self._body(), class_="ppfl-page")
        page = f'<!doctype html>\n<html lang="en"><head>{head}</head>{body}</html>\n'
        if path is not None:
            Path(path).write_text(page, encoding="utf-8")
        return page


# ---------------------------------------------------------------------- HTML


def _table_html(table: SummaryTable) -> Markup:
    heads = [element("th", escape(name), scope="col") for name in ("", *table.columns)]
    head = [element("thead", element("tr", *heads))] if table.columns else []
    rows = [
        element("tr", element("th", escape(label), scope="row"), *(_cell_html(cell) for cell in cells))
        for label, cells in table.rows
    ]
    drawn = element("table", *head, element("tbody", *rows), class_=None if table.columns else "facts")
    title = [element("h3", escape(table.title))] if table.title else []
    notes = [element("p", escape(note)) for note in table.notes]
    return join([*title, element("div", drawn, class_="scroll"), *notes])


def _cell_html(cell: Cell) -> Markup:
    below = [Markup("<br>"), element("span", escape(cell.below), class_="range")] if cell.below else []
    return element("td", escape(cell.text), *below)


# ---------------------------------------------------------------------- text


def _table_text(table: SummaryTable) -> str:
    lines = ["", table.title] if table.title else [""]
    for columns in _columns_that_fit(table):
        lines += _lines(table, columns)
    for note in table.notes:
        lines += textwrap.wrap(visible(note), WIDTH)
    return "\n".join(lines)


def _widths(table: SummaryTable) -> tuple[int, list[int]]:
    """Of the labels and of each column."""
    label = max((len(visible(label)) for label, _ in table.rows), default=0)
    count = max((len(cells) for _, cells in table.rows), default=0)
    widths = [len(visible(name)) for name in table.columns] or [0] * count
    for _, cells in table.rows:
        for at, cell in enumerate(cells):
            widths[at] = max(widths[at], len(visible(cell.text)), len(visible(cell.below)))
    return min(label, WIDTH // 3), widths


def _columns_that_fit(table: SummaryTable) -> list[list[int]]:
    """Groups of columns that are at most WIDTH wide together with the labels."""
    label, widths = _widths(table)
    groups: list[list[int]] = [[]]
    used = label
    for at, width in enumerate(widths):
        if groups[-1] and used + _GAP + width > WIDTH:
            groups.append([])
            used = label
        groups[-1].append(at)
        used += _GAP + width
    return groups


def _lines(table: SummaryTable, columns: Sequence[int]) -> list[str]:
    label_width, widths = _widths(table)
    is_table = bool(table.columns)

    def line(label: str, texts: Sequence[str]) -> str:
        shown = visible(label)
        shown = shown if len(shown) <= label_width else shown[: label_width - 1] + "…"
        cells = [text.rjust(widths[at]) if is_table else text for at, text in zip(columns, texts, strict=True)]
        return (" " * _GAP).join([shown.ljust(label_width), *cells]).rstrip()

    lines = []
    if is_table:
        lines.append(line("", [visible(table.columns[at]) for at in columns]))
        lines.append("-" * (label_width + sum(_GAP + widths[at] for at in columns)))
    for label, cells in table.rows:
        shown = [visible(cells[at].text) if at < len(cells) else "" for at in columns]
        if not is_table and label_width + _GAP + len(shown[0]) > WIDTH:
            first, *rest = textwrap.wrap(shown[0], WIDTH - label_width - _GAP)
            lines += [line(label, [first]), *(line("", [more]) for more in rest)]
            continue
        lines.append(line(label, shown))
        if any(at < len(cells) and cells[at].below for at in columns):
            lines.append(line("", [visible(cells[at].below) if at < len(cells) else "" for at in columns]))
    return lines
