"""The rows and columns of a table that a fit can use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ...data.arrays import quoted
from ...data.ids import group_rows, text_ids
from ...data.samples import held_out
from ...data.table_readers import with_text_names
from ...errors import DataError, SettingError
from ..client_ids import Array
from ..formula import FormulaSpec, prepare_formula
from ..formula.build import count_dropped
from ..formula.expressions import used_columns
from .encoding import Encoding, choose_features, is_plain
from .number_cells import BadCells, read_numbers
from .table_settings import TableSettings
from .target import Target

SMALLEST, LARGEST = 1e-100, 1e100  # of a column's largest value


class FormulaEncoding(NamedTuple):
    """The design of a formula, in the place of an encoding."""

    spec: FormulaSpec

    @property
    def columns(self) -> tuple[Any, ...]:
        return ()

    @property
    def terms(self) -> list[str]:
        return list(self.spec.names)

    @property
    def intercept(self) -> bool:
        return self.spec.intercept

    def encode(self, frame: Any) -> Array:
        """(n, terms)."""
        return np.asarray(self.spec.design(frame), dtype=np.float64)

    def shared(self, names: Sequence[str]) -> list[int | str] | None:
        return list(self.spec.shared) or None


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
    formula: FormulaSpec | None = None

    @property
    def encoding(self) -> Encoding | FormulaEncoding:
        """The encoding with the levels of all rows."""
        return self.encoding_of(np.ones(len(self.frame), dtype=bool))

    def encoding_of(self, rows: Array) -> Encoding | FormulaEncoding:
        """With the levels of these rows only, except for a formula, which would refuse the levels of others."""
        return FormulaEncoding(self.formula) if self.formula else Encoding.of(self.frame[rows], self.features)

    def offset(self) -> Array | None:
        """(n,), or None."""
        return self.formula.offset(self.frame) if self.formula else None


def prepare_table(frame: Any, settings: TableSettings) -> PreparedTable:
    """Check a table, and take the wanted columns and all rows without missing values."""
    frame = with_text_names(frame)
    return _prepare_by_formula(frame, settings) if settings.formula else _prepare_by_columns(frame, settings)


def _prepare_by_columns(frame: Any, settings: TableSettings) -> PreparedTable:
    excluded = (settings.client, settings.target)
    frame, bad_cells = read_numbers(frame, [name for name in frame.columns if name != settings.client])
    features = choose_features(frame, excluded, settings.columns)
    used = frame[[*excluded, *features.names]]
    kept = used.dropna()
    if kept.empty:
        raise DataError(f"none of {len(frame)} rows has a value in each of {quoted(list(used.columns), 12)}; fill some")
    target = _check_columns(kept, settings)
    _, lost = count_dropped(used[settings.client], used.notna().all(axis=1).to_numpy())
    clients = _check_clients(kept, settings)
    return PreparedTable(
        kept, clients, target, features.names, features.left_out, len(used) - len(kept), tuple(map(str, lost)),
        [cells for cells in bad_cells if cells.column in used], _hold_out(clients, target, settings),
    )  # fmt: skip


def _prepare_by_formula(frame: Any, settings: TableSettings) -> PreparedTable:
    frame, bad_cells = read_numbers(frame, [name for name in frame.columns if name != settings.client])
    found = prepare_formula(str(settings.formula), frame)
    spec, rows = found.spec, found.frame
    columns = [name for name in spec.columns() if name != spec.client]
    _check_columns(rows[columns], None)
    values = rows.assign(**{settings.target: spec.target(rows, classes=True)})[settings.target]
    target = Target.of(settings.target, values, settings.family)
    clients = _check_clients(rows, settings)
    return PreparedTable(
        rows, clients, target, tuple(columns), {}, len(frame) - len(rows), tuple(map(str, spec.lost)),
        [cells for cells in bad_cells if cells.column in (*columns, *used_columns(spec.response))],
        _hold_out(clients, target, settings), spec,
    )  # fmt: skip


def _check_columns(kept: Any, settings: TableSettings | None) -> Any:
    """Refuse columns that are no plain finite numbers or text, and return the target if the settings name one."""
    if odd := [name for name, dtype in kept.dtypes.items() if dtype.kind == "c"]:
        raise DataError(f"column {quoted(odd)} has complex numbers; use their real and imaginary parts as two columns")
    if odd := [name for name in kept.columns if not is_plain(kept[name])]:
        raise DataError(f"column {quoted(odd)} has lists or bytes; expected numbers or text: convert it first")
    numbers = kept.select_dtypes("number")
    if infinite := [name for name in numbers if not bool(np.isfinite(np.array(numbers[name], dtype=float)).all())]:
        raise DataError(f"column {quoted(infinite)} has infinite values; correct them, or drop the rows")
    _check_sizes(numbers)
    return Target.of(settings.target, kept[settings.target], settings.family) if settings else None


def _check_clients(kept: Any, settings: TableSettings) -> Array:
    clients = text_ids(kept[settings.client].to_numpy())
    count = len(np.unique(clients))
    if not isinstance(settings.ks, str) and (most := max(settings.ks)) > count:
        raise SettingError(f"k is {most} but there are {count} clients; set k to at most this number")
    return clients


def _check_sizes(numbers: Any) -> None:
    """Squares of numbers, and sums of these over all rows, must neither overflow nor vanish."""
    for name in numbers:
        largest = float(np.abs(np.array(numbers[name], dtype=float)).max())
        if largest and not SMALLEST <= largest <= LARGEST:
            expected = f"{SMALLEST:.0e} to {LARGEST:.0e}"
            raise DataError(f"column {name!r} has values up to {largest:.3g}; expected {expected}: change its unit")


def _hold_out(clients: Array, target: Target, settings: TableSettings) -> Array:
    """(n,), True for a random part of each client's rows; some rows of every class stay for training."""
    rows = group_rows(clients)
    drawn = held_out(rows.sizes, rows.ids, settings.test_fraction, settings.seed, "test").numpy()
    is_test = np.zeros(len(clients), dtype=bool)
    is_test[slice(None) if rows.order is None else rows.order.numpy()] = drawn
    if target.classes:
        missing = np.setdiff1d(target.values, target.values[~is_test])
        is_test &= ~np.isin(target.values, missing)
    return is_test
