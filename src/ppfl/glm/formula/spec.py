"""What a fitted model remembers of its formula: enough to read a new table as the fit read its own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple, Self

import numpy as np
import pandas as pd
from pandas.api import types
from pydantic import BaseModel, ConfigDict, ValidationError

from ...data.arrays import quoted
from ...data.columns import as_pandas
from ...errors import DataError, SettingError
from ..client_ids import Array
from .expressions import used_columns
from .terms import INTERCEPT_TERM, DesignState, build_design, from_json, term_columns

DESIGN = "design of a formula"  # marks tables that are designs already

Id = str | bool | int | float


class FormulaRows(NamedTuple):
    """Rows that an estimator takes."""

    x: Any  # the design without the intercept, a DataFrame, or an array if it has no columns
    clients: Array
    offset: Array | None


class FormulaSpec(BaseModel):
    """A formula, with the columns and levels that it had in the fit."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    formula: str
    response: str
    terms: tuple[str, ...]
    names: tuple[str, ...]  # of the columns of the design, without the intercept
    intercept: bool
    shared: tuple[int | Literal["intercept"], ...]  # columns with one coefficient for all clients
    client: str
    offsets: tuple[str, ...] = ()  # expressions
    weights: str | None = None
    levels: dict[str, list[Id]] = {}
    transforms: Any = None  # as `to_json` writes it
    notes: tuple[str, ...] = ()  # what a reader of the formula might not expect
    dropped: tuple[tuple[Id | None, int], ...] = ()  # clients and their rows with missing values; None: no client
    lost: tuple[Id, ...] = ()  # clients without any complete row

    def to_json(self) -> dict[str, Any]:
        """As plain values that a JSON file can hold."""
        return self.model_dump(mode="json")

    @classmethod
    def from_json(cls, content: Any) -> Self:
        """From what `to_json` gives; expressions are checked again, as a file may hold anything."""
        try:
            found = cls.model_validate(content)
        except ValidationError as error:
            raise DataError(f"this is not a saved formula: {error.errors()[0]['msg']}; save the model again") from None
        try:
            found.term_columns()
            for expression in found.offsets:
                used_columns(expression)
            from_json(found.transforms)
        except (SettingError, TypeError, ValueError) as error:
            raise DataError(f"the saved formula cannot be used: {error}; save the model again") from None
        return found

    def describe(self) -> list[str]:
        """Sentences for a summary: the formula, what it does besides, and which rows were left out."""
        lines = [f"formula {self.formula}", *self.notes]
        if self.dropped:
            counts = ", ".join(f"{'no client' if each is None else each}: {rows}" for each, rows in self.dropped[:8])
            more = f" and {len(self.dropped) - 8} more" if len(self.dropped) > 8 else ""
            total = sum(rows for _, rows in self.dropped)
            lines.append(f"rows left out because a value is missing: {total} ({self.client} {counts}{more})")
        if self.lost:
            lines.append(f"clients without any complete row: {quoted(list(map(str, self.lost)))}")
        return lines

    # ------------------------------------------------------------------ columns

    def term_columns(self) -> list[str]:
        """The columns of the table that the terms use."""
        return _distinct(map(term_columns, self.terms))

    def columns(self) -> list[str]:
        """The columns that a prediction needs."""
        return _distinct([self.term_columns(), *map(used_columns, self.offsets), [self.client]])

    # ------------------------------------------------------------------ reading tables

    def read(self, frame: Any, clients: Any = None, offset: Any = None) -> FormulaRows:
        """The design, the clients and the offset of a table; given clients or offsets replace those of the table."""
        frame = as_frame(frame)
        needed = [name for name in self.columns() if name != self.client or clients is None]
        check_columns(frame, needed, f"formula {self.formula!r}")
        used = frame[needed]
        if missing := [name for name in needed if bool(used[name].isna().any())]:
            row = used.index[used[missing[0]].isna()][0]
            raise DataError(f"column {quoted(missing)} has missing values, such as in row {row!r}; fill or drop them")
        ids = used[self.client].to_numpy() if clients is None else clients
        added = self.offset(used) if offset is None else offset
        return FormulaRows(self.design(used), ids, added)

    def design(self, frame: Any) -> Any:
        """The design of these rows, without a column for the intercept."""
        names = self.term_columns()
        state = DesignState(from_json(self.transforms) or {}, self.levels)
        built = build_design(self.terms, self._with_levels(frame[names]), state)
        matrix = drop_intercept(built.matrix, self.terms)
        if (found := tuple(map(str, matrix.columns))) != self.names:
            raise DataError(f"the table gives the columns {quoted(found)}; the fit had {quoted(self.names)}")
        return check_design(matrix)

    def offset(self, frame: Any) -> Array | None:
        """The sum of all offsets, (n,), or None without any."""
        if not self.offsets:
            return None
        return np.asarray(sum(evaluate_numbers(f"offset({each})", each, frame) for each in self.offsets))

    def sample_weight(self, frame: Any) -> Array | None:
        if self.weights is None:
            return None
        return evaluate_numbers(f"weights {self.weights!r}", f"`{self.weights}`", frame)

    def target(self, frame: Any, *, classes: bool) -> Array:
        """The target of every row: numbers, or classes as they are."""
        name = self.response.strip("`")
        if name not in frame.columns:
            return evaluate_numbers(f"target {self.response!r}", self.response, frame)
        values = frame[name].infer_objects()
        if not classes and not is_number(values):
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
                        f"column {name!r} has the level {quoted(new)}, which the fit did not have: it had {had}"
                    )
                values = pd.Series(pd.Categorical(values, categories=known), index=values.index)
            elif not is_number(values) and f"`{name}`" in "".join(self.terms):
                raise DataError(f"column {name!r} holds text ({str(values.iloc[0])!r}); the fit had numbers there")
            ready[name] = values
        return pd.DataFrame(ready, index=frame.index)


def as_frame(data: Any) -> Any:
    """The table, with its column names as text, if it is a DataFrame with rows."""
    if not isinstance(data, pd.DataFrame):
        raise DataError(f"data is of type {type(data).__name__}; a formula needs a pandas DataFrame")
    if data.empty:
        raise DataError("data has no rows; a formula needs some")
    return as_pandas(data)


def drop_intercept(matrix: Any, terms: Sequence[str]) -> Any:
    """The design without the column of the intercept, which estimators add themselves."""
    return matrix.drop(columns="Intercept") if INTERCEPT_TERM in terms else matrix


def check_design(matrix: Any) -> Any:
    """The design, marked as one, if all its values are finite."""
    finite = np.isfinite(matrix.to_numpy())
    if not finite.all():
        row, column = (int(each[0]) for each in np.nonzero(~finite))
        raise DataError(
            f"term {matrix.columns[column]!r} is {matrix.iat[row, column]} in row {matrix.index[row]!r}; correct the "
            f"values, or leave the row out"
        )
    if not len(matrix.columns):
        return matrix.to_numpy()  # scikit-learn takes no DataFrame without columns
    matrix.attrs[DESIGN] = True
    return matrix


def evaluate_numbers(what: str, expression: str, frame: Any) -> Array:
    """The finite value of an expression in every row, (n,)."""
    names = used_columns(expression)
    check_columns(frame, names, what)
    if text := [name for name in names if not is_number(plain_column(frame[name]))]:
        raise DataError(f"{what} uses column {quoted(text)}, which holds text; expected numbers")
    numbers = frame[names].astype(np.float64)
    if not names:
        raise DataError(f"{what} names no column; expected one with a number for every row")
    built = build_design([f"{{I({expression})}}"], numbers)
    values = np.asarray(built.matrix.iloc[:, 0])
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


def is_number(values: Any) -> bool:
    return bool(types.is_numeric_dtype(values.dtype))


def check_columns(frame: Any, names: Sequence[str], what: str) -> None:
    if absent := [name for name in names if name not in frame.columns]:
        raise DataError(
            f"{what} uses {quoted(absent)}, but the table has the columns {quoted(list(frame.columns), 12)}"
        )


def _distinct(groups: Iterable[Iterable[str]]) -> list[str]:
    return list(dict.fromkeys(name for group in groups for name in group))
