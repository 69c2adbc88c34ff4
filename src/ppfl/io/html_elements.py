"""HTML and SVG as text. Text from data enters through `escape` or as an attribute, and both escape it.

The types enforce this: children must be `Markup`, and mypy rejects a plain string.
"""

import html
from collections.abc import Iterable
from typing import NewType

from .text import visible

Markup = NewType("Markup", str)

# Only these may be written as <name/>: a browser would read <td/> as an opening tag.
_EMPTY = frozenset({"meta", "rect", "circle", "line", "path"})


def escape(text: object) -> Markup:
    """Any value as escaped text; what cannot be seen, which XML forbids in part, is written out.

    >>> escape('<b>&"x"')
    '&lt;b&gt;&amp;&quot;x&quot;'
    """
    return Markup(html.escape(visible(text)))


def join(parts: Iterable[Markup], between: str = "") -> Markup:
    """Concatenate parts."""
    return Markup(escape(between).join(parts))


def element(name: str, /, *children: Markup, **attributes: str | float | None) -> Markup:
    """An element. `stroke_width` is written as stroke-width and `class_` as class; None leaves an attribute out.

    >>> element("text", escape("a < b"), x=1 / 3, text_anchor="end", fill=None)
    '<text x="0.33" text-anchor="end">a &lt; b</text>'
    """
    start = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{_value(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in _EMPTY and not children:
        return Markup(f"<{name}{start}/>")
    return Markup(f"<{name}{start}>{join(children)}</{name}>")


def _value(value: str | float) -> Markup:
    # two decimals are finer than any screen, and digits make up most of the size of a drawing
    return escape(value if isinstance(value, str) else f"{value:.2f}".rstrip("0").rstrip("."))
