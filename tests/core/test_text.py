"""Text from outside is shown as it is, and all that a terminal would obey is spelled out."""

import ast
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppfl.core.text import visible

OBEYED = [*map(chr, range(0x20)), *map(chr, range(0x7F, 0xA0)), "\ud800", "\udfff", "\u2028", "\u2029", "\u200b"]
OBEYED += [*map(chr, range(0x202A, 0x202F)), *map(chr, range(0x2066, 0x206A))]


@pytest.mark.parametrize("character", OBEYED, ids=ascii)
def test_what_terminals_obey_is_spelled_as_in_python(character: str) -> None:
    shown = visible(f"a{character}b")
    assert shown.isascii()
    assert shown.isprintable()
    assert ast.literal_eval(f"'{shown}'") == f"a{character}b"


@given(st.text(st.characters(categories=["L", "N", "P", "S", "M", "Zs"])))
def test_all_other_text_stays_as_it_is(text: str) -> None:
    assert visible(text) == text


@given(st.text(st.characters()))
def test_one_line_without_controls_that_can_be_written(text: str) -> None:
    shown = visible(text)
    shown.encode()
    assert len(shown.splitlines()) <= 1
    assert not {unicodedata.category(character) for character in shown} & {"Cc", "Cs", "Zl", "Zp"}
    assert visible(shown) == shown
