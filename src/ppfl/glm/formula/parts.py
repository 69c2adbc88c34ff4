"""The parts of a formula such as `reaction ~ days + offset(log(hours)) + (days | subject)`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from ...errors import SettingError

EXAMPLE = "'reaction ~ days + (days | subject)'"
_NAME = re.compile(r"[^\W\d][\w.]*|`[^`]+`")
_CLOSING = {")": "(", "]": "[", "}": "{"}


class FormulaParts(NamedTuple):
    """The texts of the parts."""

    response: str  # left of the tilde
    fixed: str  # all terms outside of the bar part
    varying: str  # left of the bar: the terms that differ between clients
    client: str  # right of the bar: the client column
    offsets: tuple[str, ...]  # expressions in offset(...)


def split_formula(text: str) -> FormulaParts:
    """Split a formula with one bar part.

    >>> split_formula("reaction ~ days + offset(log(hours)) + (1 | subject)")
    FormulaParts(response='reaction', fixed='days', varying='1', client='subject', offsets=('log(hours)',))
    """
    if not isinstance(text, str):
        raise SettingError(f"the formula is {text!r}; expected text such as {EXAMPLE}")
    sides = _split(text, "~")
    if len(sides) != 2 or not all(side.strip() for _, side in sides):
        raise SettingError(f"formula {text!r} is not 'target ~ terms'; write it as in {EXAMPLE}")
    response = sides[0][1].strip()
    if response.startswith("cbind"):
        raise SettingError(
            f"the target {response!r} has two columns; use one row per trial, or one row per outcome with its count "
            f"as weights"
        )
    fixed: list[str] = []
    bars: list[str] = []
    offsets: list[str] = []
    for sign, term in _split(sides[1][1], "+-"):
        term = term.strip()
        if not term and sign:
            raise SettingError(f"formula {text!r} has nothing after {sign!r}; write it as in {EXAMPLE}")
        is_offset = re.fullmatch(r"offset\s*\((.+)\)", term, re.DOTALL)
        if _is_bar(term) or is_offset:
            if sign == "-":
                raise SettingError(f"formula {text!r} subtracts {term!r}; leave it out instead")
            (offsets if is_offset else bars).append(is_offset[1].strip() if is_offset else term[1:-1])
        elif term:
            _check_no_bar(term)
            fixed.append(f"{sign or '+'} {term}")
    return FormulaParts(response, " ".join(fixed).removeprefix("+ ") or "1", *_split_bar(text, bars), tuple(offsets))


def _split_bar(text: str, bars: list[str]) -> tuple[str, str]:
    """The varying terms and the client column of the only bar part."""
    if not bars:
        raise SettingError(
            f"formula {text!r} does not say who the clients are; add a bar part such as (1 | subject), as in {EXAMPLE}"
        )
    if len(bars) > 1:
        shown = " and ".join(f"({bar})" for bar in bars)
        raise SettingError(
            f"formula {text!r} has {len(bars)} bar parts, {shown}; each row belongs to one client with one membership, "
            f"so name the finest grouping in one bar part and add the others as plain terms"
        )
    parts = [part.strip() for _, part in _split(bars[0], "|")]
    if len(parts) == 3 and not parts[1]:
        raise SettingError(
            f"({bars[0]}) has two bars, for uncorrelated effects; a membership mixes whole models and has no "
            f"correlations to leave out: write ({parts[0]} | {parts[2]})"
        )
    if len(parts) != 2 or not all(parts):
        raise SettingError(f"({bars[0]}) is not '(terms | client)'; write it as in {EXAMPLE}")
    varying, client = parts
    if _NAME.fullmatch(client):
        return varying, client.strip("`")
    groups = [name for name in re.split(r"[/:+*\s]+", client) if _NAME.fullmatch(name)]
    if len(groups) > 1 and "/" in client:
        raise SettingError(
            f"({bars[0]}) nests {groups[-1]!r} in {groups[0]!r}, and a client has one membership, not one per level; "
            f"use the finer grouping and add the coarser one as a term: {groups[0]} + ({varying} | {groups[-1]}), "
            f"with ids in {groups[-1]!r} that are not used twice"
        )
    if len(groups) > 1:
        raise SettingError(
            f"({bars[0]}) names {len(groups)} columns after the bar; join them into one column, such as "
            f"data['client'] = data[{groups[0]!r}].astype(str) + ':' + data[{groups[1]!r}].astype(str)"
        )
    raise SettingError(f"({bars[0]}) names no column after the bar; write the client column there, as in {EXAMPLE}")


def _is_bar(term: str) -> bool:
    """Whether this is one group in parentheses with a bar in it."""
    if not term.startswith("(") or not term.endswith(")"):
        return False
    is_one_group = all(depth > 0 for depth, _, _ in list(_scan(term))[:-1])
    return is_one_group and len(_split(term[1:-1], "|")) > 1


def _check_no_bar(term: str) -> None:
    """Raise a SettingError for a bar outside of a group that is added to the formula; functions may contain one."""
    calls: list[bool] = []  # for every open parenthesis, whether it follows the name of a function
    before = ""
    for _, character, is_code in _scan(term):
        if not is_code:
            continue
        if character in "([{":
            calls.append(character != "(" or bool(re.match(r"[\w.`)\]]", before)))
        elif character in _CLOSING and calls:
            calls.pop()
        elif character == "|" and not any(calls):
            raise SettingError(f"the bar in {term!r} is not in a group of its own; write it as in {EXAMPLE}")
        before = character


def _split(text: str, separators: str) -> list[tuple[str, str]]:
    """The parts between separators outside of parentheses and quotes, each with the separator before it."""
    parts, start, sign = [], 0, ""
    for i, (depth, character, is_code) in enumerate(_scan(text)):
        if is_code and depth == 0 and character in separators:
            parts.append((sign, text[start:i]))
            start, sign = i + 1, character
    return [*parts, (sign, text[start:])]


def _scan(text: str) -> Iterator[tuple[int, str, bool]]:
    """Each character with its depth in parentheses after it, and whether it is outside of quotes."""
    opened: list[str] = []
    quote = ""
    for character in text:
        if quote:
            quote = "" if character == quote else quote
            yield len(opened), character, False
            continue
        if character in "\"'`":
            quote = character
        elif character in "([{":
            opened.append(character)
        elif character in _CLOSING and (not opened or opened.pop() != _CLOSING[character]):
            raise SettingError(f"{text!r} has a {character!r} that closes nothing; check its parentheses")
        yield len(opened), character, character not in "\"'`"
    if opened or quote:
        raise SettingError(f"{text!r} has a {quote or opened[-1]!r} without an end; check its quotes and parentheses")
