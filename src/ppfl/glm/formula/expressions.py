"""Which expressions a formula may contain.

A formula may come from a file, and formulaic evaluates its terms as Python. So only arithmetic, comparisons and the
functions listed here are allowed.
"""

from __future__ import annotations

import ast
from typing import Any

import numpy as np

from ...errors import SettingError

_NUMPY = (
    "abs", "arcsinh", "arctan", "ceil", "clip", "cos", "cosh", "exp", "exp2", "expm1", "floor", "log", "log10", "log1p",
    "log2", "maximum", "minimum", "power", "round", "sign", "sin", "sinh", "sqrt", "square", "tan", "tanh", "where",
)  # fmt: skip
_FORMULAIC = (
    "bs", "cc", "cr", "cs", "center", "poly", "scale", "standardize", "C", "I",
    "Treatment", "Poly", "Sum", "Helmert", "Diff",
)  # fmt: skip
_CONTRASTS = ("treatment", "SAS", "sum", "poly", "helmert", "diff")
FUNCTIONS: dict[str, Any] = {name: getattr(np, name) for name in _NUMPY}  # formulaic has its own
_OTHER_NAMES = {  # of R and its packages
    "factor": "C(x)", "ns": "cr(x, df=4)", "rcs": "cr(x, df=4)", "s": "cr(x, df=4)", "te": "cr(x, df=4):cr(z, df=4)",
    "relevel": "C(x, Treatment('level'))", "ifelse": "where(condition, a, b)", "Q": "`x`, in backticks",
    "lag": "a column of the data", "cut": "a column of the data", "cbind": "one column",
}  # fmt: skip
_MODULES = {"np": _NUMPY, "contr": _CONTRASTS}
_NODES = (
    ast.Expression, ast.BinOp, ast.UnaryOp, ast.Compare, ast.Call, ast.keyword, ast.Name, ast.Attribute, ast.Constant,
    ast.List, ast.Tuple, ast.expr_context, ast.unaryop, ast.cmpop, ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv,
    ast.Mod, ast.Pow, ast.BitAnd, ast.BitOr,
)  # fmt: skip


def used_columns(expression: str) -> list[str]:
    """The columns in an expression, which is checked first.

    >>> used_columns("log(dose + 1) * `body weight`")
    ['dose', 'body weight']
    """
    from formulaic.utils.code import sanitize_variable_names  # what formulaic evaluates is what is checked here

    quoted: dict[str, str] = {}
    code = sanitize_variable_names(expression, {}, quoted)
    try:
        tree = ast.parse(code, mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise SettingError(f"{expression!r} is not an expression; write it as in 'log(dose + 1)'") from None
    functions = _check(tree, expression)
    names = [node for node in ast.walk(tree) if isinstance(node, ast.Name) and id(node) not in functions]
    names.sort(key=lambda node: node.col_offset)
    return list(dict.fromkeys(quoted.get(node.id, node.id) for node in names))


def _check(tree: ast.AST, expression: str) -> set[int]:
    """Refuse all but known functions of columns and constants, and return the names that are functions."""
    functions = set()
    for node in ast.walk(tree):
        if not isinstance(node, _NODES):
            raise SettingError(f"{expression!r} uses {type(node).__name__}; a formula may use arithmetic and functions")
        if isinstance(node, ast.Call):
            functions.add(id(_function_name(node.func, expression)))
        elif isinstance(node, ast.Attribute):
            functions.add(id(_function_name(node, expression)))
        elif isinstance(node, ast.Name) and node.id in ("Treatment", "Poly", "Sum", "Helmert", "Diff"):
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
    module = node.value if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) else None
    if isinstance(node, ast.Attribute) and module and node.attr in _MODULES.get(module.id, ()):
        return module
    if isinstance(node, ast.Attribute):
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
    """Refuse operations on text and lists, and powers of constants, whose results may be huge."""
    for side in (node.left, node.right):
        if isinstance(side, ast.List | ast.Tuple) or (isinstance(side, ast.Constant) and isinstance(side.value, str)):
            raise SettingError(f"{expression!r} computes with {ast.unparse(side)}; use numbers and columns")
    if isinstance(node.op, ast.Pow) and not any(isinstance(part, ast.Name) for part in ast.walk(node.left)):
        raise SettingError(f"{expression!r} has a power of a constant; write its value")
