"""HTML and SVG as text (`io/html_elements.py`), and texts cut to a length."""

from collections.abc import Collection, Sequence

from ppfl.io.html_elements import Markup as Markup
from ppfl.io.html_elements import element as element
from ppfl.io.html_elements import escape as escape
from ppfl.io.html_elements import join as join


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
