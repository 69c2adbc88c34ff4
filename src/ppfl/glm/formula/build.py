"""From the text of a formula and a table to the rows of a fit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from ...data.arrays import quoted
from ...errors import DataError, SettingError
from ..client_ids import Array
from ..standardize import INTERCEPT
from .expressions import used_columns
from .parts import FormulaParts, split_formula
from .spec import FormulaSpec, as_frame, check_columns, check_design, drop_intercept, plain_column
from .terms import (
    INTERCEPT_TERM,
    BuiltDesign,
    build_design,
    parse_terms,
    same_terms,
    split_factors,
    term_columns,
    to_json,
)


class FormulaFit(NamedTuple):
    """A formula that has learned its levels from a table, and the complete rows of that table."""

    spec: FormulaSpec
    frame: Any  # the complete rows, with all columns
    x: Any  # their design


def prepare_formula(
    text: str, data: Any, *, offset: str | None = None, exposure: str | None = None, weights: str | None = None
) -> FormulaFit:
    """Read a table by a formula. `offset`, `exposure` and `weights` are columns."""
    parts = split_formula(text)
    frame = as_frame(data)
    if (target := parts.response.strip("`")) in frame.columns:
        parts = parts._replace(response=f"`{target}`")  # so that a name may contain dots and spaces
    for name, column in (("offset", offset), ("exposure", exposure), ("weights", weights)):
        if not isinstance(column, str | None):
            raise SettingError(f"{name} is of type {type(column).__name__}; name a column of the data")
    offsets = [*parts.offsets]
    offsets += [f"`{offset}`"] if offset is not None else []
    offsets += [f"log(`{exposure}`)"] if exposure is not None else []
    aside = [*used_columns(parts.response), parts.client, *(name for each in offsets for name in used_columns(each))]
    aside += [weights] if weights is not None else []
    others = [name for name in frame.columns if name not in aside]
    fixed, varying, notes = _match_terms(parts, others)
    used = list(dict.fromkeys([*(name for term in fixed for name in term_columns(term)), *aside]))
    check_columns(frame, used, f"formula {text!r}")
    terms = {name for term in fixed for name in term_columns(term)}
    for name, what in ((parts.client, "the client column"), (parts.response.strip("`"), "the target")):
        if name in terms:
            raise SettingError(f"{name!r} is {what} and a term of {text!r}; leave one of them out")
    if "`Intercept`" in fixed and INTERCEPT_TERM in fixed:
        raise DataError("a column is called 'Intercept', as the intercept of the formula is; rename the column")
    complete = frame[used].notna().all(axis=1).to_numpy()
    if not complete.any():
        raise DataError(f"none of {len(frame)} rows has a value in each of {quoted(used, 12)}; fill some")
    rows = frame[complete]
    table = _term_table(rows, fixed)
    built = build_design(fixed, table)
    matrix = drop_intercept(built.matrix, fixed)
    shared, more = _shared_columns(fixed, varying, built, table)
    dropped, lost = count_dropped(frame[parts.client], complete)
    spec = FormulaSpec(
        formula=text, response=parts.response, terms=tuple(fixed), names=tuple(map(str, matrix.columns)),
        intercept=INTERCEPT_TERM in fixed, shared=tuple(shared), client=parts.client, offsets=tuple(offsets),
        weights=weights, levels=built.state.levels, transforms=to_json(built.state.transforms),
        notes=(*notes, *more), dropped=dropped, lost=lost,
    )  # fmt: skip
    return FormulaFit(spec, rows, check_design(matrix))


def _match_terms(parts: FormulaParts, columns: Sequence[str]) -> tuple[list[str], list[str], list[str]]:
    """All terms, those of the bar part, and a note on terms that only the bar part has."""
    fixed, varying = parse_terms(parts.fixed, columns), parse_terms(parts.varying, columns)
    if not varying:
        raise SettingError(
            f"({parts.varying} | {parts.client}) has no terms, so clients cannot differ; write (1 | {parts.client})"
        )
    if INTERCEPT_TERM in varying and INTERCEPT_TERM not in fixed:
        none = f"write (0 + {parts.varying} | {parts.client}) for none at all, or " if len(varying) > 1 else ""
        raise SettingError(
            f"({parts.varying} | {parts.client}) has an intercept and {parts.fixed!r} has none; {none}leave the 0 or "
            f"-1 out of {parts.fixed!r}"
        )
    known = same_terms(fixed)
    added = [term for factors, term in same_terms(varying).items() if factors not in known]
    shown = ", ".join(term.replace("`", "").strip("{}") for term in added)
    notes = [f"added to the other terms, as it is in the bar part: {shown}"] if added else []
    return [*fixed, *added], varying, notes


def _shared_columns(
    fixed: Sequence[str], varying: Sequence[str], built: BuiltDesign, table: Any
) -> tuple[list[Any], list[str]]:
    """Columns whose coefficients do not vary, as the setting `shared` of an estimator, and notes."""
    known = same_terms(fixed)
    vary = {known[frozenset(split_factors(term))] for term in varying}
    marginal = _marginal_terms(known, varying, built, table) - vary
    notes = []
    if marginal:
        shown = ", ".join(INTERCEPT if term == INTERCEPT_TERM else term.replace("`", "") for term in sorted(marginal))
        notes.append(f"varies too, because the bar part has all levels of a column: {shown}")
    positions = {at for term in vary | marginal for at in built.positions[term]}
    names = list(built.matrix.columns)
    kept = [at for at in range(len(names)) if INTERCEPT_TERM not in fixed or at not in built.positions[INTERCEPT_TERM]]
    shared: list[Any] = [i for i, at in enumerate(kept) if at not in positions]
    if INTERCEPT_TERM in fixed and INTERCEPT_TERM not in vary | marginal:
        shared.append(INTERCEPT)
    return shared, notes


def _marginal_terms(
    known: dict[frozenset[str], str], varying: Sequence[str], built: BuiltDesign, table: Any
) -> set[str]:
    """Terms that must vary so that clients can differ in every level of a column.

    On its own `0 + colour` has a column for every level; beside an intercept it has one less, because the intercept is
    that of the reference level. So if the bar part has no intercept, the one of the formula has to vary.
    """
    categorical = set(built.state.levels)
    bare = {factor.strip("`{}") for term in varying for factor in split_factors(term)}
    if not bare & categorical:
        return set()
    alone = build_design(varying, table)
    found = set()
    for factors, term in same_terms(varying).items():
        own = [alone.matrix.columns[at] for at in alone.positions[term]]
        if set(own) == {built.matrix.columns[at] for at in built.positions[known[factors]]}:
            continue
        for other, name in known.items():
            missing = {factor.strip("`{}") for factor in factors - other}
            if other < factors and missing <= categorical:
                found.add(name)
    return found


def _term_table(frame: Any, terms: Sequence[str]) -> Any:
    """The columns that the terms use, without levels that no row has."""
    names = dict.fromkeys(name for term in terms for name in term_columns(term))
    columns = {name: plain_column(frame[name]) for name in names}
    for name, values in columns.items():
        if isinstance(values.dtype, pd.CategoricalDtype):
            columns[name] = values.cat.remove_unused_categories()
    return pd.DataFrame(columns, index=frame.index)


def count_dropped(clients: Any, complete: Array) -> tuple[tuple[tuple[Any, int], ...], tuple[Any, ...]]:
    """Clients with their numbers of incomplete rows, and the clients that have no other rows."""
    ids = [None if missing else _plain_id(each) for each, missing in zip(clients, clients.isna(), strict=True)]
    counts: dict[Any, int] = {}
    for each, is_complete in zip(ids, complete.tolist(), strict=True):
        if not is_complete:
            counts[each] = counts.get(each, 0) + 1
    kept = {each for each, is_complete in zip(ids, complete.tolist(), strict=True) if is_complete}
    return tuple(counts.items()), tuple(each for each in counts if each is not None and each not in kept)


def _plain_id(value: Any) -> Any:
    value = value.item() if isinstance(value, np.generic) else value
    return value if isinstance(value, str | bool | int | float) else str(value)
