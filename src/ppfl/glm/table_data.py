"""From a DataFrame with a client column to the rows of a fit: settings, the target and its family, and the features."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch

from ..data.arrays import quoted
from ..data.columns import BadCells, as_pandas, check_column, is_text, read_numbers
from ..data.ids import group_rows, text_ids
from ..data.preparation import Preparation, PreparationSettings, PreparedColumn
from ..data.samples import held_out
from ..data.tables import DataTable
from ..errors import DataError, SettingError
from .choose_k import CRITERIA
from .columns import Array
from .estimators import PopulationClassifier, PopulationRegressor
from .families import REGRESSIONS, GaussianFamily, classification_family, regression_family
from .family import Family
from .formula import INTERCEPT, FormulaDesign
from .formula_text import EXAMPLE, check_expression, split_formula

AUTO = "auto"
CLASSES = ("bernoulli", "multinomial")
FAMILIES = (*REGRESSIONS, *CLASSES)
_FEW = 5  # whole numbers with at most this many distinct values are classes, if they do not look like counts
_SMALL = 10  # counts with a larger mean are not guessed, as a gaussian suits them too
_MANY = 50  # more classes than this are a mistake
# estimators standardise columns themselves, and report coefficients in the units of the table
_IN_OWN_UNITS = PreparationSettings(standardise=False, missing="drop")


@dataclass(frozen=True)
class TableSettings:
    """What to fit. The fields from `mix` on are settings of the estimators."""

    client: str = ""  # from the formula, if there is one
    target: str = ""
    family: str | None = None  # guessed from the target if None
    columns: Sequence[str] | None = None  # all other columns if None; intercepts only if empty
    ks: Sequence[int] | str = AUTO  # numbers of canonical models to choose from
    test_fraction: float = 0.2  # of each client's rows
    seed: int = 0
    shared: Sequence[str] = ()
    mix: str = "weights"
    penalty: float = 0.0
    affinity: str = "uniform"
    ridge: float = 1.0
    n_init: int = 1
    formula: str | None = None  # says client, target, columns and shared
    choose: str = "held_out"
    residual: str | None = "auto"

    def __post_init__(self) -> None:
        if self.formula is not None:
            self._take_from_formula(self.formula)
        for name in ("client", "target"):
            if not getattr(self, name):
                raise SettingError(f"no {name} column is named; name it, or give a formula such as {EXAMPLE}")
        if self.client == self.target:
            raise SettingError(f"column {self.client!r} is both client and target; name two columns")
        if not self.ks or (isinstance(self.ks, str) and self.ks != AUTO):
            raise SettingError("there is no number of canonical models to try; set k, such as 3 or 1,2,3 or auto")
        if self.choose not in CRITERIA:
            raise SettingError(f"choose is {self.choose!r}; use one of {', '.join(CRITERIA)}")
        if self.affinity != "uniform" and not self.penalty:
            raise SettingError(
                f"affinity is {self.affinity!r} but penalty is 0, so it has no effect; set a penalty such as 0.01"
            )

    def _take_from_formula(self, formula: str) -> None:
        parts = split_formula(formula)
        for name, found in (("client", parts.client), ("target", parts.response)):
            given = getattr(self, name)
            if given and given != found:
                raise SettingError(f"{name} is {given!r}, but the formula has {found!r}; leave {name} out")
            object.__setattr__(self, name, found)
        if self.columns is not None or self.shared:
            raise SettingError("columns and shared are what the formula says; leave them out, or the formula")

    @property
    def k(self) -> Any:
        """The setting k of an estimator."""
        return self.ks if isinstance(self.ks, str) or len(self.ks) > 1 else self.ks[0]

    def estimator(self, target: Target, k: Any, shared: Any, *, intercept: bool = True, residual: Any = "auto") -> Any:
        """The estimator for K canonical models, not fitted."""
        more = {"mix": self.mix, "penalty": self.penalty, "affinity": self.affinity, "n_init": self.n_init}
        more |= {"shared": shared, "random_state": self.seed, "choose": self.choose, "residual": residual}
        return _make_estimator(target, k, ridge=self.ridge, fit_intercept=intercept, **more)

    def pooled(self, target: Target, *, intercept: bool = True) -> Any:
        """The estimator for one model for all, not fitted."""
        return _make_estimator(target, 1, ridge=self.ridge, fit_intercept=intercept, residual=None)


def _make_estimator(target: Target, k: Any, **settings: Any) -> Any:
    if target.classes:
        return PopulationClassifier(k, **settings)
    return PopulationRegressor(k, family=target.family, **settings)


# ---------------------------------------------------------------------- the target


class Target(NamedTuple):
    """The target column, encoded for its family."""

    name: str
    family: str
    reason: str  # why this family was guessed; empty if it was given
    values: Array  # (n,), numbers, or positions in `classes`
    classes: tuple[str, ...]  # sorted, empty for numbers

    @classmethod
    def of(cls, name: str, values: Any, family: str | None) -> Target:
        """With the given family, or a guessed one if it is None."""
        if family is not None and family not in FAMILIES:
            raise SettingError(f"there is no family {family!r}; use one of {', '.join(FAMILIES)}")
        values = values.astype(str) if values.dtype.kind == "b" else values
        if not is_text(values) and values.nunique() == 1:
            value = values.iloc[0]
            raise DataError(f"target {name!r} is {value:g} in every row; there is nothing to predict: choose another")
        found, reason = (family, "") if family else _guess_family(name, values)
        if found in REGRESSIONS:
            return cls(name, found, reason, _to_numbers(name, values, found), ())
        levels, codes = np.unique(np.array(_class_labels(values)), return_inverse=True)
        names = tuple(str(level) for level in levels.tolist())
        if len(names) < 2:
            raise DataError(f"target {name!r} has one class only, {names[0]!r}; a classifier needs two")
        if len(names) > _MANY:
            raise DataError(f"target {name!r} has {len(names)} classes; choose another target, or family gaussian")
        if family == "bernoulli" and len(names) > 2:
            raise DataError(f"target {name!r} has {len(names)} classes ({quoted(names)}); use family multinomial")
        return cls(name, CLASSES[len(names) > 2], reason, codes.astype(np.int64), names)

    @property
    def outcomes(self) -> tuple[str, ...]:
        """The names of the predictors: all classes, only the second of two, or the column name for numbers."""
        return self.classes[1:] if self.family == "bernoulli" else self.classes or (self.name,)

    def make_family(self) -> Family:
        """The distribution."""
        return classification_family(len(self.classes)) if self.classes else regression_family(self.family)

    def figures(self, mean: Array, rows: Array) -> dict[str, float]:
        """Scores of means (n,) or class probabilities (n, classes) for these rows, the main metric first."""
        y, family = self.values[rows], self.make_family()
        deviance = family.deviance(torch.tensor(mean), torch.tensor(y, dtype=torch.float64))
        mean_deviance = float(deviance.mean())
        if isinstance(family, GaussianFamily):
            return {"rmse": mean_deviance**0.5}
        return {"deviance": mean_deviance} | ({"accuracy": float((mean.argmax(1) == y).mean())} if self.classes else {})


def _guess_family(name: str, values: Any) -> tuple[str, str]:
    if is_text(values):
        return "multinomial", f"{name} has {values.nunique()} classes"
    distinct = values.nunique()
    whole = bool((values == values.round()).all())
    if whole and distinct > 2 and float(values.min()) == 0 and float(values.mean()) < _SMALL:
        return "poisson", f"{name} has counts, 0 to {int(values.max())} (for classes: multinomial)"
    if whole and distinct <= _FEW:
        ordered = ", whose order is not used" if distinct > 2 else ""
        return "multinomial", f"{name} has {distinct} values, all whole, taken as classes{ordered}"
    if whole and float(values.min()) >= 0:
        return "gaussian", f"{name} has numbers (for counts: poisson)"
    return "gaussian", f"{name} has numbers"


def _class_labels(values: Any) -> Sequence[Any]:
    if values.dtype.kind in "iuf" and bool((values == values.round()).all()):
        return [int(value) for value in values]  # so that 10 comes after 2
    return [str(value) for value in values]


def _to_numbers(name: str, values: Any, family: str) -> Array:
    if is_text(values):
        raise DataError(
            f"target {name!r} holds text ({str(values.iloc[0])!r}), and family {family!r} needs numbers; "
            f"use family bernoulli or multinomial"
        )
    numbers = np.array(values, dtype=np.float64)
    regression_family(family).check(torch.from_numpy(numbers))
    return numbers


# ---------------------------------------------------------------------- rows and features


class Encoding(NamedTuple):
    """How the columns of a table become numbers: by a preparation, or by the design of a formula."""

    source: Preparation | FormulaDesign

    @classmethod
    def of(cls, table: DataTable, rows: Array) -> Encoding:
        """With the levels that the rows of this mask have."""
        return cls(Preparation.fit(table, np.flatnonzero(rows), _IN_OWN_UNITS))

    @property
    def columns(self) -> tuple[PreparedColumn, ...]:
        """Prepared columns; a formula has none."""
        return self.source.columns if isinstance(self.source, Preparation) else ()

    @property
    def terms(self) -> list[str]:
        """The names of the encoded columns."""
        return list(self.source.terms if isinstance(self.source, Preparation) else self.source.names)

    @property
    def intercept(self) -> bool:
        """Whether there is one."""
        return isinstance(self.source, Preparation) or self.source.intercept

    def encode(self, frame: Any) -> Array:
        """(n, terms)."""
        if isinstance(self.source, Preparation):
            return self.source.encode(frame)
        return np.asarray(self.source.design(frame), dtype=np.float64)

    def shared(self, names: Sequence[str]) -> list[int | str] | str | None:
        """The `shared` setting of an estimator: positions of the encoded columns, `intercept`, or `all`."""
        if isinstance(self.source, FormulaDesign):
            return list(self.source.shared) or None
        if not names:
            return None
        if "all" in names and INTERCEPT not in names:
            return "all"
        known = {column.name: column for column in self.columns}
        if absent := [name for name in names if name not in known and name not in (INTERCEPT, "all")]:
            raise DataError(
                f"shared names {quoted(absent)}, which is no feature; use some of {quoted(list(known), 12)}"
            )
        wanted = {term for name in (known if "all" in names else names) if name in known for term in known[name].terms}
        positions: list[int | str] = [i for i, term in enumerate(self.terms) if term in wanted]
        return [*positions, *([INTERCEPT] if INTERCEPT in names else [])]


class PreparedTable(NamedTuple):
    """The usable rows of a table."""

    frame: Any
    clients: Array  # (n,), as text
    target: Target
    features: tuple[str, ...]
    left_out: dict[str, str]  # column -> reason
    incomplete: int  # number of rows with missing values, which are left out
    lost: tuple[str, ...]  # clients that have no other rows
    bad_cells: list[BadCells]
    is_test: Array  # (n,)
    source: DataTable | FormulaDesign  # whose rows these are, or the formula that chose them

    @property
    def formula(self) -> FormulaDesign | None:
        """The formula, if there is one."""
        return self.source if isinstance(self.source, FormulaDesign) else None

    @property
    def encoding(self) -> Encoding:
        """The encoding with the levels of all rows."""
        return self.encoding_of(np.ones(len(self.frame), dtype=bool))

    def encoding_of(self, rows: Array) -> Encoding:
        """With the levels of these rows only, except for a formula, which would refuse the levels of others."""
        return Encoding(self.source) if isinstance(self.source, FormulaDesign) else Encoding.of(self.source, rows)

    def offset(self) -> Array | None:
        """(n,), or None."""
        return self.formula.offset(self.frame) if self.formula else None


def prepare_table(frame: Any, settings: TableSettings) -> PreparedTable:
    """Check a table, and take the wanted columns and all rows without missing values."""
    frame = as_pandas(frame)
    return _prepare_by_formula(frame, settings) if settings.formula else _prepare_by_columns(frame, settings)


def _prepare_by_columns(frame: Any, settings: TableSettings) -> PreparedTable:
    whole = DataTable.of(frame, settings.client, settings.target, columns=settings.columns)
    complete = whole.complete()
    if not complete.any():
        used = [settings.client, settings.target, *whole.features]
        raise DataError(f"none of {len(frame)} rows has a value in each of {quoted(used, 12)}; fill some")
    table = whole.take(complete)
    target = Target.of(settings.target, pd.Series(table.targets), settings.family)
    lost = dict.fromkeys(client for client in whole.clients[~complete] if client is not None)
    kept = set(table.clients)
    return PreparedTable(
        table.features, _check_count(table.clients, settings), target, tuple(table.features), dict(table.left_out),
        int((~complete).sum()), tuple(client for client in lost if client not in kept), list(table.bad_cells),
        _hold_out(table.clients, target, settings), table,
    )  # fmt: skip


def _prepare_by_formula(frame: Any, settings: TableSettings) -> PreparedTable:
    read = {name: read_numbers(frame[name]) for name in frame.columns if name != settings.client}
    changed = {name: values for name, (values, bad) in read.items() if bad}
    design, rows = FormulaDesign.fit(str(settings.formula), frame.assign(**changed))
    for name in design.columns:
        check_column(name, rows[name])
    values = rows.assign(**{settings.target: design.target(rows, classes=True)})[settings.target]
    target = Target.of(settings.target, values, settings.family)
    clients = _check_count(text_ids(rows[settings.client].to_numpy()), settings)
    mentioned = {*design.columns, *check_expression(design.response)}
    return PreparedTable(
        rows, clients, target, tuple(design.columns), {}, len(frame) - len(rows), tuple(map(str, design.lost)),
        [bad for name, (_, bad) in read.items() if bad and name in mentioned],
        _hold_out(clients, target, settings), design,
    )  # fmt: skip


def _check_count(clients: Array, settings: TableSettings) -> Array:
    clients = clients.astype(np.str_)
    count = len(np.unique(clients))
    if not isinstance(settings.ks, str) and (most := max(settings.ks)) > count:
        raise SettingError(f"k is {most} but there are {count} clients; set k to at most this number")
    return clients


def _hold_out(clients: Array, target: Target, settings: TableSettings) -> Array:
    """(n,), True for a random part of each client's rows; some rows of every class stay for training."""
    rows = group_rows(clients)
    drawn = held_out(rows.sizes, rows.ids, settings.test_fraction, settings.seed, "test").numpy()
    is_test = np.zeros(len(clients), dtype=bool)
    is_test[rows.numbers] = drawn
    if target.classes:
        missing = np.setdiff1d(target.values, target.values[~is_test])
        is_test &= ~np.isin(target.values, missing)
    return is_test
