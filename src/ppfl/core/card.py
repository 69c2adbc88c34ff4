"""What an object shows of itself in a notebook: a title, a few facts, and a table or a drawing.

Colours are those of the notebook, light or dark: text is in its colour, lines are a faint shade of it. Styles are
written into the elements, because notebooks remove style sheets from what they do not trust.
"""

from collections.abc import Sequence
from typing import NamedTuple

from .html_elements import Markup, element, escape

_CARD = (
    "display:inline-block;max-width:42rem;padding:.7rem .9rem;border:1px solid rgba(128,128,128,.4);"
    "border-radius:6px;font-family:system-ui,-apple-system,'Segoe UI',Roboto,Helvetica,Arial,sans-serif;"
    "font-size:13px;line-height:1.5"
)
_FACTS = "display:grid;grid-template-columns:max-content 1fr;gap:0 1rem;margin:.25rem 0 0"
_NAME = "opacity:.65"
_VALUE = "margin:0;overflow-wrap:anywhere"
_CELL = "padding:.1rem .9rem .1rem 0;border:none;background:none;text-align:"
_LINE = ";border-bottom:1px solid rgba(128,128,128,.3)"


class Card(NamedTuple):
    """A title, facts as pairs of a name and a value, and what is drawn below them."""

    title: str
    facts: Sequence[tuple[str, str]]
    below: tuple[Markup, ...] = ()

    def html(self) -> Markup:
        """One element for a notebook.

        >>> "a &lt;b&gt;" in Card("clients", [("name", "a <b>")]).html()
        True
        """
        rows = []
        for name, value in self.facts:
            rows += [element("div", escape(name), style=_NAME), element("div", escape(value), style=_VALUE)]
        title = element("div", escape(self.title), style="font-weight:600;overflow-wrap:anywhere")
        return element("div", title, element("div", *rows, style=_FACTS), *self.below, style=_CARD)


def small_table(heading: Sequence[str], rows: Sequence[Sequence[str]], note: str = "") -> Markup:
    """A table: the first column is text, the others are numbers; a note stands below it."""

    def row(kind: str, cells: Sequence[str], line: str, **more: str) -> Markup:
        aligned = zip(cells, ["left", *["right"] * (len(cells) - 1)], strict=True)
        found = (element(kind, escape(cell), style=_CELL + side + line, **more) for cell, side in aligned)
        return element("tr", *found, style="background:none")

    head = element("thead", row("th", heading, ";font-weight:500;opacity:.65" + _LINE, scope="col"))
    body = element("tbody", *(row("td", cells, ";overflow-wrap:anywhere") for cells in rows))
    style = "margin:.5rem 0 0;border:none;border-collapse:collapse;font-size:inherit;font-variant-numeric:tabular-nums"
    table = element("table", head, body, style=style)
    return element("div", table, element("div", escape(note), style=_NAME)) if note else table


def count_of(number: int, thing: str) -> str:
    """A number with its thing, in the plural unless it is one.

    >>> count_of(1, "client"), count_of(1200, "client")
    ('1 client', '1,200 clients')
    """
    return f"{number:,} {thing}{'s' * (number != 1)}"
