"""HTML and SVG as text. What comes from data gets in through `words` or an attribute, and both escape it.

The type keeps it so: children are `Markup`, a plain string is not, and mypy refuses it.
"""

import html
import re
from collections.abc import Collection, Iterable, Sequence
from typing import NewType

Markup = NewType("Markup", str)

# A browser would take <td/> for an opening tag, so only these may close themselves.
_EMPTY = frozenset({"meta", "rect", "circle", "line", "path"})
# XML allows none of these, not even escaped, and lone surrogates cannot be written as UTF-8.
_FORBIDDEN = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def words(text: object) -> Markup:
    """Any value as text that means itself.

    >>> words('<b>&"x"')
    '&lt;b&gt;&amp;&quot;x&quot;'
    """
    return Markup(html.escape(_FORBIDDEN.sub("\ufffd", str(text))))


def join(parts: Iterable[Markup], between: str = "") -> Markup:
    """Parts after each other."""
    return Markup(words(between).join(parts))


def element(name: str, /, *children: Markup, **attributes: str | float | None) -> Markup:
    """An element; `stroke_width` is written stroke-width, `class_` class, and None leaves an attribute out.

    >>> element("text", words("a < b"), x=1 / 3, text_anchor="end", fill=None)
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


def shortened(text: str, length: int) -> str:
    """The text, or its beginning.

    >>> shortened("a very long name", 8)
    'a very …'
    """
    return text if len(text) <= length else text[: length - 1] + "…"


def shortened_apart(texts: Sequence[str], length: int) -> list[str]:
    """Each shortened; those that begin alike go on where they begin to differ.

    >>> shortened_apart(["PPFL, mixed weights", "PPFL, mixed outputs", "Local"], 12)
    ['PPFL…weights', 'PPFL…outputs', 'Local']
    """
    alike: dict[str, set[str]] = {}
    for text in texts:
        alike.setdefault(shortened(text, length), set()).add(text)
    return [_among(text, alike[shortened(text, length)], length) for text in texts]


def _among(text: str, others: Collection[str], length: int) -> str:
    if len(others) == 1:
        return shortened(text, length)
    head = length // 3
    shortest = min(map(len, others))
    common = next((at for at in range(shortest) if len({other[at] for other in others}) > 1), shortest)
    differs = max(text.rfind(" ", 0, common) + 1, common - head)  # whole words, where these are short
    return f"{text[:head]}…{shortened(text[differs:], length - head - 1)}"


def _value(value: str | float) -> Markup:
    # a hundredth of a pixel is finer than any screen, and digits are most of a drawing's size
    return words(value if isinstance(value, str) else f"{value:.2f}".rstrip("0").rstrip("."))
