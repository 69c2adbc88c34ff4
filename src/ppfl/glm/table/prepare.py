"""The rows and columns of a table that a fit can use."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from ...data.arrays import quoted
from ...data.columns import BadCells, as_pandas, check_column, read_numbers
from ...data.ids import group_rows, text_ids
from ...data.samples import held_out
from ...data.tables import DataTable
from ...errors import DataError, SettingError
from ..client_ids import Array
from ..formula import FormulaDesign
from ..formula_text import check_expression as used_columns
from .encoding import Encoding, FormulaEncoding
from .table_settings import TableSettings
from .target import Target


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
        return self.source if isinstance(self.source, FormulaDesign) else None

    @property
    def encoding(self) -> Encoding | FormulaEncoding:
        """The encoding with the levels of all rows."""
        return self.encoding_of(np.ones(len(self.frame), dtype=bool))

    def encoding_of(self, rows: Array) -> Encoding | FormulaEncoding:
        """With the levels of these rows only, except for a formula, which would refuse the levels of others."""
        if isinstance(self.source, FormulaDesign):
            return FormulaEncoding(self.source)
        return Encoding.of(self.source, rows)

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
    spec, rows = FormulaDesign.fit(str(settings.formula), frame.assign(**changed))
    columns = spec.columns
    for name in columns:
        check_column(name, rows[name])
    values = rows.assign(**{settings.target: spec.target(rows, classes=True)})[settings.target]
    target = Target.of(settings.target, values, settings.family)
    clients = _check_count(text_ids(rows[settings.client].to_numpy()), settings)
    mentioned = {*columns, *used_columns(spec.response)}
    return PreparedTable(
        rows, clients, target, tuple(columns), {}, len(frame) - len(rows), tuple(map(str, spec.lost)),
        [bad for name, (_, bad) in read.items() if bad and name in mentioned],
        _hold_out(clients, target, settings), spec,
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
