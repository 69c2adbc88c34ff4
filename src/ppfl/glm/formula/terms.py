"""Terms of a formula, and the design matrices that formulaic builds from them."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ...errors import DataError, SettingError
from .expressions import FUNCTIONS, used_columns

INTERCEPT_TERM = "1"


class DesignState(NamedTuple):
    """What the terms have learned from the rows of the fit, such as knots of splines and levels of text."""

    transforms: dict[str, Any]  # state of transformations, by expression
    levels: dict[str, list[Any]]  # of categorical factors, by expression; the reference level is the first


class BuiltDesign(NamedTuple):
    matrix: Any  # a DataFrame (n, columns), with a column for the intercept
    positions: dict[str, list[int]]  # the columns of every term
    state: DesignState


def parse_terms(text: str, columns: Sequence[str]) -> list[str]:
    """The single terms that a text such as `a * b` stands for; a dot stands for all `columns`.

    >>> parse_terms("0 + log(dose) + a * b", [])
    ['{log(dose)}', '`a`', '`b`', '`a`:`b`']
    """
    formulaic = _import_formulaic()
    context = {"__formulaic_variables_available__": list(columns), "__formulaic_variables_used_lhs__": []}
    try:
        found = formulaic.Formula.from_spec(text, context=context)
        terms = [_term_text(term) for term in found]
    except (formulaic.errors.FormulaicError, ValueError, SyntaxError, AttributeError, RecursionError) as error:
        raise SettingError(
            f"{text!r} is not a sum of terms: {_first_line(error)}; write it as in 'days + dose'"
        ) from None
    for term in terms:
        term_columns(term)
    return terms


def _term_text(term: Any) -> str:
    """The term in a form that gives the same term when it is parsed again."""
    marks = {"lookup": "`{}`", "python": "{{{}}}", "literal": "{}"}
    return ":".join(marks[factor.eval_method.value].format(factor.expr) for factor in term.factors)


def split_factors(term: str) -> list[str]:
    """The factors of a term, without numbers: column names in backticks, and expressions in braces."""
    pattern = r"`[^`]+`|\{(?:`[^`]*`|[^{}`])*\}"
    if re.sub(r"[\s\d.]", "", re.sub(pattern, "", term)).strip(":"):
        raise SettingError(f"the term {term!r} cannot be read; use no braces or backticks inside of text")
    return re.findall(pattern, term)


def term_columns(term: str) -> list[str]:
    """The columns of the table in a term, whose expressions are checked first."""
    found = (used_columns(factor if factor[0] == "`" else factor[1:-1]) for factor in split_factors(term))
    return list(dict.fromkeys(name for names in found for name in names))


def same_terms(terms: Sequence[str]) -> dict[frozenset[str], str]:
    """The terms by their factors, as a:b is b:a."""
    return {frozenset(split_factors(term)): term for term in terms}


def build_design(terms: Sequence[str], frame: Any, state: DesignState | None = None) -> BuiltDesign:
    """The columns of all terms for these rows, which have no missing values."""
    formulaic = _import_formulaic()
    from formulaic.errors import DataMismatchWarning
    from formulaic.parser.types import Factor

    encoders = {}
    if state is not None:
        encoders = {name: (Factor.Kind.CATEGORICAL, {"categories": each}) for name, each in state.levels.items()}
    parsed = formulaic.Formula(list(terms))
    for factor in (factor for term in parsed for factor in term.factors):
        if factor.eval_method is Factor.EvalMethod.PYTHON:
            used_columns(factor.expr)  # nothing is evaluated that was not checked, whatever its source
    try:
        with np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("error", DataMismatchWarning)
            spec = formulaic.ModelSpec(
                formula=parsed,
                na_action="ignore",
                output="pandas",
                transform_state={} if state is None else state.transforms,
                encoder_state=encoders,
            )
            matrix = spec.get_model_matrix(frame, context=FUNCTIONS)
    except DataMismatchWarning as warning:
        found = re.search(r"\{.*\}", str(warning))
        raise DataError(f"a term has levels that the fit did not have: {found[0] if found else warning}") from None
    except Exception as error:  # formulaic passes on any error of the functions that it calls
        hint = "; is a column called as a function is? rename it" if "not callable" in str(error) else ""
        raise DataError(f"the terms of the formula cannot be computed: {_first_line(error)}{hint}") from None
    found = matrix.model_spec
    learned = {
        name: list(map(_plain, known["categories"])) for name, (_, known) in found.encoder_state.items() if known
    }
    by_factors = same_terms(terms)
    columns = {}
    for term, at in found.term_indices.items():
        text = _term_text(term)
        columns[by_factors.get(frozenset(split_factors(text)), text)] = at
    return BuiltDesign(matrix.astype(np.float64), columns, DesignState(found.transform_state, learned))


def to_json(value: Any) -> Any:
    """A value of a state as JSON; numpy's numbers and arrays, and dictionaries with numbers as keys, included."""
    if isinstance(value, Mapping):
        return {"items": [[to_json(key), to_json(item)] for key, item in value.items()]}
    if isinstance(value, np.ndarray):
        return {"array": value.tolist()}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    value = _plain(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise DataError(f"the formula cannot be saved, as a term has kept a {type(value).__name__}; use other functions")


def from_json(value: Any) -> Any:
    """The inverse of `to_json`."""
    if isinstance(value, dict) and set(value) == {"items"}:
        return {from_json(key): from_json(item) for key, item in value["items"]}
    if isinstance(value, dict) and set(value) == {"array"}:
        return np.array(value["array"])
    if isinstance(value, list):
        return [from_json(item) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise DataError(f"the state of a formula has {value!r}; expected what to_json writes")


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def _first_line(error: Exception) -> str:
    return re.sub(r"\x1b\[[0-9;]*m|[⧛⧚]", "", str(error)).strip().split("\n")[0].rstrip(".")


def _import_formulaic() -> Any:
    try:
        import formulaic
        import formulaic.errors
    except ImportError as error:
        raise DataError(f"formulas need {error.name}; install it with: pip install 'ppfl[tables]'") from error
    return formulaic
