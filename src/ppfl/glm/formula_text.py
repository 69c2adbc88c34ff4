"""The text of a formula such as `reaction ~ days + offset(log(hours)) + (days | subject)`: its parts, and which
expressions it may have.

A formula may come from a file, and formulaic evaluates its terms as Python with all builtins. So only arithmetic,
comparisons and the functions that are listed here are allowed.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from ..errors import SettingError

EXAMPLE = "'reaction ~ days + (days | subject)'"
_NAME = re.compile(r"[^\W\d][\w.]*|`[^`]+`")
_CLOSING = {")": "(", "]": "[", "}": "{"}


class FormulaParts(NamedTuple):
    """The texts of the parts."""

    response: str  # left of the tilde
    fixed: str  # all terms outside of the bar part
    varying: str  # left of the bar: the terms whose coefficients differ between clients
    client: str  # right of the bar: the client column
    offsets: tuple[str, ...]  # expressions in offset(...)


def split_formula(text: str) -> FormulaParts:
    """Splits a formula with one bar part.

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
            f"the target {response!r} has two columns; use one row per outcome, with its count as weights"
        )
    fixed: list[str] = []
    bars: list[str] = []
    offsets: list[str] = []
    for sign, term in _split(sides[1][1], "+-"):
        term = term.strip()
        offset = re.fullmatch(r"offset\s*\((.+)\)", term, re.DOTALL)
        if not term and sign:
            raise SettingError(f"formula {text!r} has nothing after {sign!r}; write it as in {EXAMPLE}")
        if sign == "-" and (offset or _is_bar(term)):
            raise SettingError(f"formula {text!r} subtracts {term!r}; leave it out instead")
        if offset:
            offsets.append(offset[1].strip())
        elif _is_bar(term):
            bars.append(term[1:-1])
        elif len(_split(term, "|")) > 1:
            raise SettingError(f"the bar in {term!r} is not in a group of its own; write it as in {EXAMPLE}")
        elif term:
            fixed.append(f"{sign or '+'} {term}")
    return FormulaParts(response, " ".join(fixed).removeprefix("+ ") or "1", *_split_bar(text, bars), tuple(offsets))


def _split_bar(text: str, bars: list[str]) -> tuple[str, str]:
    """The varying terms and the client column of the only bar part."""
    if not bars:
        raise SettingError(
            f"formula {text!r} does not say who the clients are; add a bar part such as (1 | subject), as in {EXAMPLE}"
        )
    if len(bars) > 1:
        raise SettingError(
            f"formula {text!r} has {len(bars)} bar parts; each row belongs to one client with one membership, so name "
            f"the finest grouping in one bar part and add the others as plain terms"
        )
    varying, *middle, client = [part.strip() for _, part in _split(bars[0], "|")]
    if middle == [""]:
        raise SettingError(
            f"({bars[0]}) has two bars, for uncorrelated effects; write ({varying} | {client}) and set residual = "
            f"'diagonal'"
        )
    if middle or not varying or not client:
        raise SettingError(f"({bars[0]}) is not '(terms | client)'; write it as in {EXAMPLE}")
    if _NAME.fullmatch(client):
        return varying, client.strip("`")
    groups = [name for name in re.split(r"[/:+*\s]+", client) if _NAME.fullmatch(name)]
    if len(groups) > 1 and "/" in client:
        raise SettingError(
            f"({bars[0]}) nests {groups[-1]!r} in {groups[0]!r}, and a client has one membership, not one per level; "
            f"use the finer grouping and add the coarser one as a term: {groups[0]} + ({varying} | {groups[-1]}), "
            f"with ids in {groups[-1]!r} that are not used twice"
        )
    raise SettingError(
        f"({bars[0]}) has {client!r} after the bar; write one client column there, and join several into one first"
    )


def _is_bar(term: str) -> bool:
    """Whether this is one group in parentheses with a bar in it."""
    is_group = term[:1] == "(" and term[-1:] == ")" and all(depth > 0 for depth, *_ in list(_scan(term))[:-1])
    return is_group and len(_split(term[1:-1], "|")) > 1


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


# ---------------------------------------------------------------------- expressions

_NUMPY = (
    "abs", "arcsinh", "arctan", "ceil", "clip", "cos", "cosh", "exp", "exp2", "expm1", "floor", "log", "log10", "log1p",
    "log2", "maximum", "minimum", "power", "round", "sign", "sin", "sinh", "sqrt", "square", "tan", "tanh", "where",
)  # fmt: skip
_CONTRASTS = ("Treatment", "Poly", "Sum", "Helmert", "Diff")
_FORMULAIC = ("bs", "cc", "cr", "cs", "center", "poly", "scale", "standardize", "C", "I", *_CONTRASTS)
_MODULES = {"np": _NUMPY, "contr": ("treatment", "SAS", "sum", "poly", "helmert", "diff")}
FUNCTIONS: dict[str, Any] = {name: getattr(np, name) for name in _NUMPY}  # formulaic has its own
_OTHER_NAMES = {  # of R and its packages
    "factor": "C(x)", "ns": "cr(x, df=4)", "rcs": "cr(x, df=4)", "s": "cr(x, df=4)", "te": "cr(x, df=4):cr(z, df=4)",
    "relevel": "C(x, Treatment('level'))", "ifelse": "where(condition, a, b)",
}  # fmt: skip
_NODES = (
    ast.Expression, ast.BinOp, ast.UnaryOp, ast.Compare, ast.Call, ast.keyword, ast.Name, ast.Attribute, ast.Constant,
    ast.List, ast.Tuple, ast.expr_context, ast.unaryop, ast.cmpop, ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv,
    ast.Mod, ast.Pow, ast.BitAnd, ast.BitOr,
)  # fmt: skip


def check_expression(expression: str) -> list[str]:
    """The columns that an expression uses; refuses all but arithmetic and the listed functions.

    >>> check_expression("log(dose + 1) * `body weight`")
    ['dose', 'body weight']
    """
    from formulaic.utils.code import sanitize_variable_names  # what formulaic evaluates is what is checked here

    quoted: dict[str, str] = {}
    try:
        tree = ast.parse(sanitize_variable_names(expression, {}, quoted), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise SettingError(f"{expression!r} is not an expression; write it as in 'log(dose + 1)'") from None
    functions = _check(tree, expression)
    names = [node for node in ast.walk(tree) if isinstance(node, ast.Name) and id(node) not in functions]
    names.sort(key=lambda node: node.col_offset)
    return list(dict.fromkeys(quoted.get(node.id, node.id) for node in names))


def _check(tree: ast.AST, expression: str) -> set[int]:
    """Refuses all but known functions of columns and constants; the names that are functions."""
    functions = set()
    for node in ast.walk(tree):
        if not isinstance(node, _NODES):
            raise SettingError(f"{expression!r} uses {type(node).__name__}; a formula may use arithmetic and functions")
        if isinstance(node, ast.Call):
            functions.add(id(_function_name(node.func, expression)))
        elif isinstance(node, ast.Attribute):
            functions.add(id(_function_name(node, expression)))
        elif isinstance(node, ast.Name) and node.id in _CONTRASTS:
            functions.add(id(node))  # contrasts may be named without a call
        elif isinstance(node, ast.keyword) and (node.arg is None or node.arg.startswith("_")):
            raise SettingError(f"{expression!r} passes {node.arg or '**'!r}, which no function has")
        elif isinstance(node, ast.BinOp):
            _check_operands(node, expression)
    return functions


def _function_name(node: ast.expr, expression: str) -> ast.expr:
    """The name in a call of a known function, or the module in np.log."""
    if isinstance(node, ast.Name) and node.id in (*_NUMPY, *_FORMULAIC):
        return node
    if isinstance(node, ast.Attribute):
        if isinstance(node.value, ast.Name) and node.attr in _MODULES.get(node.value.id, ()):
            return node.value
        raise SettingError(
            f"{expression!r} contains {ast.unparse(node)!r}, which is no function of a formula; if it is a column, put "
            f"its name in backticks"
        )
    name = ast.unparse(node)
    if name in _OTHER_NAMES:
        raise SettingError(f"{expression!r} calls {name!r}, which formulas here have as {_OTHER_NAMES[name]}; use that")
    known = ", ".join(sorted((*_NUMPY, *_FORMULAIC)))
    raise SettingError(f"{expression!r} calls {name!r}, which no formula can; use {known}, or add a column to the data")


def _check_operands(node: ast.BinOp, expression: str) -> None:
    """Refuses operations on text and lists, and powers of constants, whose results may be huge."""
    for side in (node.left, node.right):
        if isinstance(side, ast.List | ast.Tuple) or (isinstance(side, ast.Constant) and isinstance(side.value, str)):
            raise SettingError(f"{expression!r} computes with {ast.unparse(side)}; use numbers and columns")
    if isinstance(node.op, ast.Pow) and not any(isinstance(part, ast.Name) for part in ast.walk(node.left)):
        raise SettingError(f"{expression!r} has a power of a constant; write its value")
