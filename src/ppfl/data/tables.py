"""Tables with one row per sample: whose rows they are, what is predicted, and from what."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
import torch
from pandas.api.types import infer_dtype, is_bool_dtype
from torch import Tensor

from ppfl.data.arrays import LearningTask, as_mask, as_targets, quoted
from ppfl.data.column_sums import TARGET
from ppfl.data.columns import (
    LISTS,
    BadCells,
    as_numbers,
    as_pandas,
    as_text,
    check_column,
    is_plain,
    is_text,
    read_numbers,
    reason_to_leave_out,
)
from ppfl.data.federation import Federation
from ppfl.data.ids import Holdout, RowGroups, group_rows, split_rows, text_ids
from ppfl.data.preparation import MissingRule, Preparation, PreparationSettings
from ppfl.data.samples import Samples
from ppfl.errors import DataError

logger = logging.getLogger("ppfl")

Array = np.ndarray[Any, Any]


class UnpreparedError(DataError):
    """A table with text or gaps, which [preparation] of an experiment can make numbers of."""


def _feature_names(
    frame: pd.DataFrame, apart: Sequence[str], columns: Sequence[str] | None, text: Sequence[str]
) -> list[str]:
    features = [name for name in frame.columns if name not in apart] if columns is None else list(columns)
    if apart[0] == apart[1]:
        raise DataError(f"client and target are one column, {apart[0]!r}; set target to the column to predict")
    if absent := [name for name in [*apart, *features] if name not in frame.columns]:
        raise DataError(f"no column {quoted(absent)}; the table has {quoted(list(frame.columns), most=12)}")
    if both := [name for name in features if name in apart]:
        raise DataError(f"column {both[0]!r} is no feature but the client, the target or left out; name other columns")
    if len(set(features)) < len(features):
        raise DataError(f"columns {quoted(features, 12)} name one of them twice; name each once")
    if unknown := [name for name in text if name not in features]:
        raise DataError(f"[preparation] names column {unknown[0]!r}, which is no feature; correct its name")
    return features


def _client_column(values: pd.Series) -> Array:
    """Ids as text (n,), None where there is none."""
    known = (values.notna() & (values.astype(object) != "")).to_numpy()
    clients = np.full(len(values), None, dtype=object)
    clients[known] = text_ids(values[known].to_numpy())
    return clients


def _target_column(name: str, values: pd.Series) -> Array:
    """Targets (n,), numbers checked; whole numbers stay whole unless some are missing."""
    targets: Array = values.to_numpy()
    if is_text(values) or is_bool_dtype(values):
        return targets
    numbers: Array = as_numbers(name, values).to_numpy()
    return numbers if values.isna().any() or values.dtype.kind not in "iu" else targets.astype(np.int64)


@dataclass(frozen=True, eq=False)
class DataTable:
    """Rows of a table: whose they are, what is predicted, and from what.

    Attributes:
        features: The columns to predict from: text as object, anything else as float64, NaN where a value is missing.
        clients: The client of every row as text (n,), None where it is missing.
        targets: What is to be predicted (n,), as it is in the table.
        is_test: True for the test rows (n,), or None if the table does not say.
        left_out: The columns that are not used, each with the reason.
        bad_cells: Cells without a number in columns of numbers; they are missing values.
        named: False if features may still be left out, because the tables of several sites decide together.
    """

    features: pd.DataFrame
    clients: Array
    targets: Array
    is_test: Array | None
    left_out: Mapping[str, str]
    bad_cells: tuple[BadCells, ...]
    name: str = "table"
    named: bool = True

    @classmethod
    def of(
        cls,
        data: Any,
        client: str,
        target: str,
        *,
        columns: Sequence[str] | None = None,
        drop: Sequence[str] = (),
        is_test: str | None = None,
        text: Sequence[str] = (),
        target_is_text: bool = False,
        choose: bool = True,
        name: str = "table",
    ) -> DataTable:
        """From a pandas table, a dict of columns, or any table that narwhals knows (polars, pyarrow, ...).

        Args:
            data: One row per sample.
            client: The column with the client of every row. Ids are compared as text: 7, 7.0 and "7" are one client.
            target: The column to predict.
            columns: The features. By default all other columns but row numbers, columns with one value, lists or
                bytes, and text with more than 20 levels.
            drop: Columns that are not used.
            is_test: A column that marks the test rows.
            text: Columns of numbers that are names, such as postcodes.
            target_is_text: Whether targets that look like numbers are names of classes all the same.
            choose: False to leave out no column yet, because the tables of several sites decide together.
            name: What the table is called.

        >>> table = DataTable.of({"shop": [1, 1, 2], "price": [1.5, 2.0, 3.0], "sold": ["no", "yes", "no"],
        ...                       "country": ["at"] * 3}, "shop", "sold")
        >>> table
        <DataTable table: 3 rows, features 'price'; left out: country (one value)>
        >>> table.federation(Holdout(test_fraction=0)).classes
        ('no', 'yes')
        """
        frame = as_pandas(data)
        apart = [client, target, *drop, *([is_test] if is_test else [])]
        features: dict[str, pd.Series] = {}
        left_out: dict[str, str] = {}
        bad_cells = []
        for column in _feature_names(frame, apart, columns, text):
            values = frame[column].reset_index(drop=True)
            if column in text:
                features[column] = as_text(values)
                continue
            if columns is None and not is_plain(values.dropna()):
                left_out[column] = LISTS
                continue
            values, bad = read_numbers(values)
            values = check_column(column, values)
            reason = "" if columns is not None else reason_to_leave_out(column, values)
            if reason:
                left_out[column] = reason
            if choose and reason:
                continue
            features[column] = values
            bad_cells += [bad] if bad else []
        targets = frame[target].reset_index(drop=True)
        if not target_is_text:
            targets, bad = read_numbers(targets)
            bad_cells += [bad] if bad else []
        return cls(
            pd.DataFrame(features, index=pd.RangeIndex(len(frame))), _client_column(frame[client]),
            _target_column(target, targets), None if is_test is None else frame[is_test].to_numpy(), left_out,
            tuple(bad_cells), name, choose or columns is not None,
        )  # fmt: skip

    def __len__(self) -> int:
        return len(self.features)

    def __repr__(self) -> str:
        notes = "".join(f"; {note}" for note in self.notes())
        return f"<DataTable {self.name}: {len(self)} rows, features {quoted(list(self.features.columns))}{notes}>"

    def notes(self) -> list[str]:
        """What was left out and what could not be read, in short sentences."""
        left_out = ", ".join(f"{name} ({reason})" for name, reason in self.left_out.items())
        return [f"left out: {left_out}"] * bool(left_out) + [cells.describe() for cells in self.bad_cells]

    # ------------------------------------------------------------------ rows

    def take(self, rows: Array) -> DataTable:
        """Some of the rows, by a mask (n,)."""
        return replace(
            self, features=self.features[rows].reset_index(drop=True), clients=self.clients[rows],
            targets=self.targets[rows], is_test=None if self.is_test is None else self.is_test[rows],
        )  # fmt: skip

    def only(self, clients: Collection[str]) -> DataTable:
        """The rows of these clients."""
        return self.take(np.isin(self.clients.astype(str), list(clients)))

    def complete(self) -> Array:
        """(n,), True for the rows that have a client, a target and a value in every feature."""
        gaps: Array = pd.isna(self.clients) | pd.isna(self.targets) | self.features.isna().any(axis=1).to_numpy()
        return ~gaps

    def usable(self, missing: MissingRule) -> Array:
        """(n,), True for the rows that a fit uses by this rule for missing values."""
        if missing == "drop":
            kept = self.complete()
            if not kept.any():
                raise DataError(f"none of {len(kept)} rows has all its values; set missing = 'fill', or drop columns")
            return kept
        if missing == "refuse" and (gaps := self._gaps()):
            raise DataError(
                f"columns {gaps} have missing values; set missing = 'drop' or 'fill' in [preparation], or fill them"
            )
        return np.ones(len(self), dtype=bool)

    def rows(self, holdout: Holdout, missing: MissingRule = "refuse") -> dict[str, RowGroups]:
        """The numbers of the rows of every split, client by client."""
        used = torch.from_numpy(np.flatnonzero(self.usable(missing)))
        groups = group_rows(self.clients[used.numpy()])
        is_test = None if self.is_test is None else as_mask(self.is_test[used.numpy()], len(used))
        parts = split_rows(groups, holdout.test_fraction, holdout.validation_fraction, holdout.seed, is_test)
        return {split: part._replace(order=part.take(used)) for split, part in parts.items()}

    def numbers(self, name: str) -> Array:
        """A column of numbers, or the targets (n,), float64, NaN where a value is missing."""
        if name != TARGET:
            numbers: Array = self.features[name].to_numpy(dtype=np.float64)
            return numbers
        if self.targets.dtype.kind not in "iuf":
            raise DataError("standardise_target is for a target that is a number; leave it out for classes")
        return self.targets.astype(np.float64)

    # ------------------------------------------------------------------ a federation

    def federation(
        self,
        holdout: Holdout | None = None,
        prepared: Preparation | PreparationSettings | None = None,
        *,
        task: LearningTask = "auto",
        classes: Sequence[str] | None = None,
    ) -> Federation:
        """The clients and their samples.

        Args:
            holdout: How many rows of each client are held out; by default a fifth, for testing.
            prepared: How the features become numbers: settings, or a preparation that was fitted before. By default
                they stay as they are, and text and gaps are refused.
            task: "classification", "regression", or by default what the type of the targets says: whole numbers,
                booleans and text are classes.
            classes: The names of the classes, in their order.
        """
        for note in self.notes():
            logger.warning("%s: %s", self.name, note)
        if prepared is None:
            self._refuse_unprepared()
        missing: MissingRule = "refuse" if prepared is None else prepared.missing
        rows = self.rows(holdout or Holdout(), missing)
        if isinstance(prepared, PreparationSettings):
            prepared = Preparation.fit(self, rows["train"].numbers, prepared)
        used = np.concatenate([part.numbers for part in rows.values()])  # split by split, client by client
        features = self.features.iloc[used]
        x = features.to_numpy(dtype=np.float64) if prepared is None else prepared.apply(features)
        names = tuple(features.columns) if prepared is None else prepared.terms
        if not names:
            raise DataError(f"{self.name}: no column is left for features; name some in columns, or drop fewer")
        with np.errstate(over="ignore"):  # what is too large becomes infinite, and a federation refuses that
            x = x.astype(np.float32)
        y, found = self.read_targets(used, task, classes)
        if prepared is not None and prepared.target != (0.0, 1.0):
            if not y.is_floating_point():
                raise DataError("standardise_target is for a target that is a number; leave it out for classes")
            shift, scale = prepared.target
            y = torch.from_numpy((self.numbers(TARGET)[used] - shift) / scale).float()
        sizes = [len(part.numbers) for part in rows.values()]
        parts = zip(rows.items(), torch.split(torch.from_numpy(x), sizes), torch.split(y, sizes), strict=True)
        samples = {split: Samples(own_x, own_y, part.offsets) for (split, part), own_x, own_y in parts}
        return Federation(
            rows["train"].ids, samples["train"], samples.get("test"), samples.get("validation"), name=self.name,
            classes=found, features=names, preparation=prepared,
        )  # fmt: skip

    def read_targets(
        self, used: Array, task: LearningTask, classes: Sequence[str] | None
    ) -> tuple[Tensor, tuple[str, ...] | None]:
        """The targets of some rows (a mask, or their numbers) as numbers or classes, and the names of these."""
        targets = self.targets[used]
        if task != "regression" and infer_dtype(targets, skipna=False) == "boolean":
            targets = targets.astype(str)  # the classes False and True
        return as_targets(targets, task, classes)

    def fingerprint(self, rows: Mapping[str, RowGroups]) -> str:
        """A digest of clients, splits, targets and all values that are used."""
        digest = hashlib.sha256(repr([self.name, rows["train"].ids, *self.features.columns]).encode())
        targets = pd.Series(self.targets)
        for split, part in rows.items():
            at = part.numbers
            digest.update(split.encode() + part.offsets.numpy().tobytes())
            for values in (targets.iloc[at], self.features.iloc[at]):
                digest.update(pd.util.hash_pandas_object(values, index=False).to_numpy().tobytes())
        return digest.hexdigest()[:32]

    def _gaps(self) -> str:
        bad = {cells.column: f", such as {cells.example!r}" for cells in self.bad_cells}
        counts = self.features.isna().sum().items()
        return ", ".join(f"{name!r} ({n}{bad.get(str(name), '')})" for name, n in counts if n)

    def _refuse_unprepared(self) -> None:
        if text := [str(name) for name in self.features if self.features[name].dtype == object]:
            raise UnpreparedError(
                f"columns {quoted(text)} are not numeric; list them in drop, encode them first, for instance with "
                f"pandas.get_dummies, or add [preparation] to the experiment (in Python, "
                f"prepared=PreparationSettings())"
            )
        if gaps := self._gaps():
            raise UnpreparedError(
                f"columns {gaps} have missing values; fill them, drop the rows or columns, or add [preparation] with "
                f"missing = 'drop' or 'fill' to the experiment (in Python, "
                f"prepared=PreparationSettings(missing='fill'))"
            )
