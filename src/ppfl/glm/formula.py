"""Designs from formulas: which columns a formula makes of a table, which of their coefficients vary between clients,
and how a fitted model reads another table in the same way.

formulaic builds the columns. `FormulaDesign` keeps what it learns from the rows of a fit, such as levels of text and
knots of splines.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from pandas.api import types

from ..data.arrays import quoted
from ..data.columns import as_pandas
from ..errors import DataError, SettingError
from ..io.codec import message
from .formula_text import FUNCTIONS, check_expression, split_formula

Array = NDArray[Any]
INTERCEPT = "intercept"  # in lists of shared columns
_OURS = "Intercept"  # formulaic's name of its column
_SPAN = 1e-8  # a column is in the span of others if what is left of it is smaller than this, relative to it


class FormulaRows(NamedTuple):
    """Rows that an estimator takes."""

    x: Any  # the design without the intercept: a DataFrame, or an array if it has no columns
    clients: Array
    offset: Array | None


@message
@dataclass(frozen=True)
class FormulaDesign:
    """A formula with what it has learned from the rows of a fit.

    >>> frame = pd.DataFrame({"y": [1.0, 2.0, 4.0, 3.0], "dose": [1.0, 2.0, 3.0, 5.0], "site": list("abab"), "id": 1})
    >>> design, rows = FormulaDesign.fit("y ~ log(dose) + site + (1 + site | id)", frame)
    >>> design.names, [design.names[at] for at in design.shared]
    (('log(dose)', 'site[T.b]'), ['log(dose)'])
    >>> design.read(frame[:2]).x.round(2).to_numpy().tolist()
    [[0.0, 0.0], [0.69, 1.0]]
    """

    formula: str
    response: str
    client: str
    terms: tuple[str, ...]
    offsets: tuple[str, ...]  # expressions
    weights: str | None  # a column
    names: tuple[str, ...]  # of the columns of the design, without the intercept
    intercept: bool
    shared: tuple[int | str, ...]  # columns with one coefficient for all clients
    levels: dict[str, list[Any]]  # of categorical factors, by expression; the reference level is the first
    transforms: dict[str, Any]  # state of transformations, by expression
    notes: tuple[str, ...] = ()  # what a reader of the formula might not expect
    dropped: tuple[tuple[Any, int], ...] = ()  # clients and their rows with missing values; None: no client
    lost: tuple[Any, ...] = ()  # clients without any complete row

    @classmethod
    def fit(
        cls, text: str, data: Any, *, offset: str | None = None, exposure: str | None = None, weights: str | None = None
    ) -> tuple[FormulaDesign, Any]:
        """The design of a table, and the rows of the table that have a value in every column that is used.

        Args:
            text: Such as "reaction ~ days + (days | subject)".
            data: A DataFrame.
            offset: A column that is added to the linear predictor.
            exposure: A column whose logarithm is added to it.
            weights: A column with the weight of every row.
        """
        for name, column in (("offset", offset), ("exposure", exposure), ("weights", weights)):
            if not isinstance(column, str | None):
                raise SettingError(f"{name} is of type {type(column).__name__}; name a column of the data")
        parts, frame = split_formula(text), as_frame(data)
        response = f"`{name}`" if (name := parts.response.strip("`")) in frame.columns else parts.response
        offsets = (
            *parts.offsets, *([f"`{offset}`"] if offset else []), *([f"log(`{exposure}`)"] if exposure else [])
        )  # fmt: skip
        aside = [parts.client, *(name for each in (response, *offsets) for name in check_expression(each))]
        aside += [weights] if weights else []
        others = [name for name in frame.columns if name not in aside]
        fixed, varying = _parse(parts.fixed, others), _parse(parts.varying, others)
        added = _missing_terms(fixed, varying, parts.varying, parts.client, parts.fixed)
        used = list(dict.fromkeys([*_columns_of([*fixed, *added]), *aside]))
        check_columns(frame, used, f"formula {text!r}")
        for name, what in ((parts.client, "the client column"), (response.strip("`"), "the target")):
            if name in _columns_of([*fixed, *added]):
                raise SettingError(f"{name!r} is {what} and a term of {text!r}; leave one of them out")
        complete = frame[used].notna().all(axis=1).to_numpy()
        if not complete.any():
            raise DataError(f"none of {len(frame)} rows has a value in each of {quoted(used, 12)}; fill some")
        rows, terms = frame[complete], [_text_of(term) for term in (*fixed, *added)]
        table = _without_empty_levels(rows, _columns_of([*fixed, *added]))
        matrix, levels, transforms = _build(terms, table)
        own, *_ = _build([_text_of(term) for term in varying], table)
        shared = _shared_columns(matrix, own)
        notes = [f"added to the other terms, as the bar part has it: {', '.join(map(str, added))}"] if added else []
        dropped, lost = count_dropped(frame[parts.client], complete)
        names = tuple(str(name) for name in matrix.columns if name != _OURS)
        design = cls(
            text, response, parts.client, tuple(terms), offsets, weights, names, _OURS in matrix.columns, shared,
            levels, transforms, tuple(notes), dropped, lost,
        )  # fmt: skip
        return design, rows

    def checked(self) -> FormulaDesign:
        """Itself, if its expressions are allowed; a file may hold any."""
        if not all(isinstance(text, str) for text in (self.formula, self.response, *self.terms, *self.offsets)):
            raise DataError("the formula of the file is not text; save the model again")
        _columns_of(_terms(self.terms))
        for expression in (self.response, *self.offsets):
            check_expression(expression)
        return self

    @property
    def columns(self) -> list[str]:
        """The columns of a table that a prediction needs, besides that of the clients."""
        more = [name for each in self.offsets for name in check_expression(each)]
        return list(dict.fromkeys([*_columns_of(_terms(self.terms)), *more]))

    def describe(self) -> list[str]:
        """Sentences for a summary: the formula, what it does besides, and which rows were left out."""
        lines = [self.formula, *self.notes]
        if self.dropped:
            counts = ", ".join(f"{'no client' if each is None else each}: {rows}" for each, rows in self.dropped[:8])
            more = f" and {len(self.dropped) - 8} more" if len(self.dropped) > 8 else ""
            total = sum(rows for _, rows in self.dropped)
            lines.append(f"rows left out because a value is missing: {total} ({self.client} {counts}{more})")
        if self.lost:
            lines.append(f"clients without any complete row: {quoted(list(map(str, self.lost)))}")
        return lines

    def read(self, data: Any, clients: Any = None, offset: Any = None) -> FormulaRows:
        """The design, the clients and the offset of a table; given clients or offsets replace those of the table."""
        frame = as_frame(data)
        needed = [*self.columns, *([self.client] if clients is None else [])]
        check_columns(frame, needed, f"formula {self.formula!r}")
        used = frame[needed]
        if missing := [name for name in needed if bool(used[name].isna().any())]:
            row = used.index[used[missing[0]].isna()][0]
            raise DataError(f"column {quoted(missing)} has missing values, such as in row {row!r}; fill or drop them")
        ids = used[self.client].to_numpy() if clients is None else clients
        return FormulaRows(self.design(used), ids, self.offset(used) if offset is None else offset)

    def design(self, frame: Any) -> Any:
        """The columns of these rows, without the intercept: a DataFrame, or an array if there are none."""
        columns = _columns_of(_terms(self.terms))
        matrix, *_ = _build(self.terms, self._with_levels(frame[columns]), self.levels, self.transforms)
        matrix = matrix.drop(columns=_OURS) if self.intercept else matrix
        if (found := tuple(map(str, matrix.columns))) != self.names:
            raise DataError(f"the table gives the columns {quoted(found)}; the fit had {quoted(self.names)}")
        finite = np.isfinite(matrix.to_numpy())
        if not finite.all():
            row, column = (int(each[0]) for each in np.nonzero(~finite))
            raise DataError(
                f"term {matrix.columns[column]!r} is {matrix.iat[row, column]} in row {matrix.index[row]!r}; correct "
                f"the values, or leave the row out"
            )
        return matrix if len(matrix.columns) else matrix.to_numpy()  # scikit-learn takes no DataFrame without columns

    def offset(self, frame: Any) -> Array | None:
        """The sum of all offsets (n,), or None without any."""
        if not self.offsets:
            return None
        return np.asarray(sum(evaluate(f"offset({each})", each, frame) for each in self.offsets))

    def sample_weight(self, frame: Any) -> Array | None:
        """(n,), or None without weights."""
        return None if self.weights is None else evaluate(f"weights {self.weights!r}", f"`{self.weights}`", frame)

    def target(self, data: Any, *, classes: bool) -> Array:
        """The target of every row: numbers, or classes as they are."""
        frame, name = as_frame(data), self.response.strip("`")
        if name not in frame.columns:
            return evaluate(f"target {self.response!r}", self.response, frame)
        values = frame[name].infer_objects()
        if not classes and not types.is_numeric_dtype(values.dtype):
            raise DataError(
                f"target {name!r} holds text ({str(values.iloc[0])!r}), and a regression needs numbers; for classes "
                f"use PopulationClassifier.from_formula"
            )
        return np.asarray(values if classes else values.astype(np.float64))

    def _with_levels(self, frame: Any) -> Any:
        """Text as categories with the levels of the fit."""
        ready = {}
        for name in frame.columns:
            values = plain_column(frame[name])
            if name in self.levels:
                known = self.levels[name]
                if new := sorted({str(value) for value in values.unique() if value not in known}):
                    had = quoted(list(map(str, known)))
                    raise DataError(
                        f"column {name!r} has the level {quoted(new)}, which the fit did not have; use {had}"
                    )
                values = pd.Series(pd.Categorical(values, categories=known), index=values.index)
            elif not types.is_numeric_dtype(values.dtype) and f"`{name}`" in "".join(self.terms):
                raise DataError(f"column {name!r} holds text ({str(values.iloc[0])!r}); the fit had numbers there")
            ready[name] = values
        return pd.DataFrame(ready, index=frame.index)


# ---------------------------------------------------------------------- terms


def _parse(text: str, columns: Sequence[str]) -> list[Any]:
    """The single terms that a text such as `a * b` stands for; a dot stands for all `columns`."""
    formulaic = _import_formulaic()
    context = {"__formulaic_variables_available__": list(columns), "__formulaic_variables_used_lhs__": []}
    try:
        found = list(formulaic.Formula.from_spec(text, context=context))
        return _terms([_text_of(term) for term in found])
    except (formulaic.errors.FormulaicError, ValueError, SyntaxError, AttributeError, RecursionError) as error:
        if isinstance(error, SettingError):
            raise
        raise SettingError(f"{text!r} is not a sum of terms: {_first_line(error)}; write 'days + dose'") from None


def _text_of(term: Any) -> str:
    """The term in a form that gives the same term when it is parsed again."""
    marks = {"lookup": "`{}`", "python": "{{{}}}", "literal": "{}"}
    return ":".join(marks[factor.eval_method.value].format(factor.expr) for factor in term.factors)


def _terms(texts: Sequence[str]) -> list[Any]:
    """From texts that `_text_of` wrote; their expressions are checked."""
    terms = list(_import_formulaic().Formula(list(texts)))
    _columns_of(terms)
    return terms


def _columns_of(terms: Sequence[Any]) -> list[str]:
    """The columns of the table in these terms, whose expressions are checked."""
    names: list[str] = []
    for factor in (factor for term in terms for factor in term.factors):
        if factor.eval_method.value == "python":
            names += check_expression(factor.expr)
        elif factor.eval_method.value == "lookup":
            names.append(factor.expr)
    return list(dict.fromkeys(names))


def _missing_terms(fixed: list[Any], varying: list[Any], bar: str, client: str, others: str) -> list[Any]:
    """Terms that only the bar part has."""
    if not varying:
        raise SettingError(f"({bar} | {client}) has no terms, so clients cannot differ; write (1 | {client})")
    if "1" in varying and "1" not in fixed:
        none = f"write (0 + {bar} | {client}) for none at all, or " if len(varying) > 1 else ""
        raise SettingError(
            f"({bar} | {client}) has an intercept and {others!r} has none; {none}leave the 0 or -1 out of {others!r}"
        )
    if _OURS in _columns_of(fixed) and "1" in fixed:
        raise DataError("a column is called 'Intercept', as the intercept of the formula is; rename the column")
    return [term for term in varying if term not in fixed]


def _shared_columns(matrix: Any, own: Any) -> tuple[int | str, ...]:
    """Positions of the columns whose coefficients are the same for all clients.

    A column varies if it lies in the span of the columns of the bar part: on its own `0 + colour` has a column for
    every level, so beside an intercept the intercept varies too.
    """
    finite = np.isfinite(matrix.to_numpy()).all(1) & np.isfinite(own.to_numpy()).all(1)
    if not finite.any():
        return ()  # reading the rows says which numbers are wrong
    x, basis = matrix.to_numpy()[finite], own.to_numpy()[finite]
    basis = basis / np.maximum(np.abs(basis).max(0), 1e-300)
    rest = x - basis @ np.linalg.lstsq(basis, x, rcond=None)[0]
    shared = np.linalg.norm(rest, axis=0) > _SPAN * np.linalg.norm(x, axis=0)
    names = [name for name in matrix.columns if name != _OURS]
    found: list[int | str] = [at for at, name in enumerate(names) if shared[matrix.columns.get_loc(name)]]
    if _OURS in matrix.columns and shared[matrix.columns.get_loc(_OURS)]:
        found.append(INTERCEPT)
    return tuple(found)


def _build(
    terms: Sequence[str],
    frame: Any,
    levels: Mapping[str, Any] | None = None,
    transforms: Mapping[str, Any] | None = None,
) -> tuple[Any, dict[str, list[Any]], dict[str, Any]]:
    """The columns of all terms for rows without missing values, levels and transforms.

    Nothing is evaluated that was not checked, whatever its source.
    """
    formulaic = _import_formulaic()
    from formulaic.errors import DataMismatchWarning
    from formulaic.parser.types import Factor

    encoders = {name: (Factor.Kind.CATEGORICAL, {"categories": each}) for name, each in (levels or {}).items()}
    parsed = formulaic.Formula(_terms(terms))
    spec = formulaic.ModelSpec(
        formula=parsed, na_action="ignore", output="pandas", encoder_state=encoders,
        transform_state=dict(transforms or {}),
    )  # fmt: skip
    try:
        with np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("error", DataMismatchWarning)
            matrix = spec.get_model_matrix(frame, context=FUNCTIONS)
    except DataMismatchWarning as warning:
        found = re.search(r"\{.*\}", str(warning))
        raise DataError(f"a term has levels that the fit did not have: {found[0] if found else warning}") from None
    except Exception as error:  # formulaic passes on any error of the functions that it calls
        hint = "; is a column called as a function is? rename it" if "not callable" in str(error) else ""
        raise DataError(f"the terms of the formula cannot be computed: {_first_line(error)}{hint}") from None
    known = {name: state.get("categories") for name, (_, state) in matrix.model_spec.encoder_state.items()}
    learned = {name: [_plain(each) for each in values] for name, values in known.items() if values is not None}
    return matrix.astype(np.float64), learned, _plain_state(matrix.model_spec.transform_state)


def _plain_state(value: Any) -> Any:
    """A state as numbers, text, lists and dicts."""
    if isinstance(value, Mapping):
        return {_plain(key): _plain_state(item) for key, item in value.items()}
    if isinstance(value, list | tuple | np.ndarray):
        return [_plain_state(item) for item in value]
    return _plain(value)


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


# ---------------------------------------------------------------------- tables


def as_frame(data: Any) -> Any:
    """A table with rows, with its column names as text."""
    if not hasattr(data, "columns"):
        raise DataError(f"data is of type {type(data).__name__}; a model with a formula needs a DataFrame")
    frame = as_pandas(data)
    if frame.empty:
        raise DataError("data has no rows; a formula needs some")
    return frame


def check_columns(frame: Any, names: Sequence[str], what: str) -> None:
    """Refuse columns that the table does not have."""
    if absent := [name for name in names if name not in frame.columns]:
        raise DataError(
            f"{what} uses {quoted(absent)}, but the table has the columns {quoted(list(frame.columns), 12)}"
        )


def evaluate(what: str, expression: str, frame: Any) -> Array:
    """The finite value of an expression in every row, (n,)."""
    names = check_expression(expression)
    check_columns(frame, names, what)
    if text := [name for name in names if not types.is_numeric_dtype(plain_column(frame[name]).dtype)]:
        raise DataError(f"{what} uses column {quoted(text)}, which holds text; expected numbers")
    if not names:
        raise DataError(f"{what} names no column; expected one with a number for every row")
    matrix, *_ = _build([f"{{I({expression})}}"], frame[names].astype(np.float64))
    values = np.asarray(matrix.iloc[:, -1])
    if not np.isfinite(values).all():
        row = int(np.nonzero(~np.isfinite(values))[0][0])
        raise DataError(f"{what} is {values[row]} in row {frame.index[row]!r}; expected a finite number everywhere")
    return values


def plain_column(values: Any) -> Any:
    """A column as formulaic takes it: numbers, booleans, categories, or text as objects."""
    if isinstance(values.dtype, pd.CategoricalDtype):
        return values
    values = values.infer_objects()
    if types.is_datetime64_any_dtype(values.dtype) or types.is_timedelta64_dtype(values.dtype):
        raise DataError(f"column {values.name!r} holds dates; make a number of it, such as days since the first")
    if types.is_bool_dtype(values.dtype):
        return values.astype(bool)
    if types.is_complex_dtype(values.dtype):
        raise DataError(f"column {values.name!r} holds complex numbers; use their real and imaginary parts")
    if types.is_integer_dtype(values.dtype):
        return values.astype(np.int64)  # not as floats, so that levels are called 1 and not 1.0
    return values.astype(np.float64) if types.is_numeric_dtype(values.dtype) else values.astype(str).astype(object)


def _without_empty_levels(frame: Any, names: Sequence[str]) -> Any:
    """The columns that the terms use, without levels that no row has."""
    columns = {name: plain_column(frame[name]) for name in names}
    for name, values in columns.items():
        if isinstance(values.dtype, pd.CategoricalDtype):
            columns[name] = values.cat.remove_unused_categories()
    return pd.DataFrame(columns, index=frame.index)


def count_dropped(clients: Any, complete: Array) -> tuple[tuple[tuple[Any, int], ...], tuple[Any, ...]]:
    """Clients with their numbers of incomplete rows, and the clients that have no other rows."""
    ids = clients.astype(object).where(clients.notna(), None)
    ids = ids.map(lambda value: value if value is None or isinstance(value, str | bool | int | float) else str(value))
    counts = ids[~complete].value_counts(dropna=False, sort=False)
    found = tuple((None if pd.isna(client) else client, int(count)) for client, count in counts.items())
    kept = set(ids[complete])
    return found, tuple(client for client, _ in found if client is not None and client not in kept)
