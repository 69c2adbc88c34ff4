"""Text from outside that a terminal would obey is spelled out."""

import ast
import unicodedata

from hypothesis import given
from hypothesis import strategies as st

from ppfl.io.text import visible

OBEYED = [*map(chr, range(0x20)), *map(chr, range(0x7F, 0xA0)), "\ud800", "\udfff", "\u2028", "\u2029", "\u200b"]
OBEYED += [*map(chr, range(0x202A, 0x202F)), *map(chr, range(0x2066, 0x206A))]


def test_what_terminals_obey_is_spelled_as_in_python():
    for character in OBEYED:
        shown = visible(f"a{character}b")
        assert shown.isascii() and shown.isprintable(), ascii(character)
        assert ast.literal_eval(f"'{shown}'") == f"a{character}b"


@given(st.text(st.characters()), st.text(st.characters(categories=["L", "N", "P", "S", "M", "Zs"])))
def test_text_becomes_one_line_without_controls_and_harmless_text_stays_as_it_is(text, harmless):
    shown = visible(text)
    shown.encode()
    assert len(shown.splitlines()) <= 1
    assert not {unicodedata.category(character) for character in shown} & {"Cc", "Cs", "Zl", "Zp"}
    assert visible(shown) == shown
    assert visible(harmless) == harmless
