"""HTML and SVG as text. Text from data enters through `escape` or as an attribute, and both escape it.

The types enforce this: children must be `Markup`, and mypy rejects a plain string.
"""

import html
from collections.abc import Collection, Iterable, Sequence
from typing import NewType

from ppfl.core.text import visible

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


def shorten(text: str, length: int) -> str:
    """The text, or its beginning if it is too long.

    >>> shorten("a very long name", 8)
    'a very …'
    """
    return text if len(text) <= length else text[: length - 1] + "…"


def shorten_distinct(texts: Sequence[str], length: int) -> list[str]:
    """Shorten every text; texts with the same beginning keep the part where they differ.

    >>> shorten_distinct(["PPFL, mixed weights", "PPFL, mixed outputs", "Local"], 12)
    ['PPFL…weights', 'PPFL…outputs', 'Local']
    """
    same_start: dict[str, set[str]] = {}
    for text in texts:
        same_start.setdefault(shorten(text, length), set()).add(text)
    return [_shorten_among(text, same_start[shorten(text, length)], length) for text in texts]


def _shorten_among(text: str, others: Collection[str], length: int) -> str:
    if len(others) == 1:
        return shorten(text, length)
    head = length // 3
    shortest = min(map(len, others))
    common = next((at for at in range(shortest) if len({other[at] for other in others}) > 1), shortest)
    differs = max(text.rfind(" ", 0, common) + 1, common - head)  # start at a word boundary if the word is short
    return f"{text[:head]}…{shorten(text[differs:], length - head - 1)}"


def _value(value: str | float) -> Markup:
    # two decimals are finer than any screen, and digits make up most of the size of a drawing
    return escape(value if isinstance(value, str) else f"{value:.2f}".rstrip("0").rstrip("."))
