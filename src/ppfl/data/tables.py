"""Tables with one row per sample: files of them, and what each of their columns is for."""

from __future__ import annotations

import hashlib
import io
import logging
import os
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple

import narwhals as nw
import numpy as np
import pandas as pd
import torch
from pandas.api.types import infer_dtype, is_bool_dtype
from pyarrow import Table as ArrowTable
from pyarrow.parquet import ParquetFile
from torch import Tensor

from ppfl.data import checks
from ppfl.data.arrays import LearningTask, as_mask, as_targets, quoted
from ppfl.data.column_sums import (
    MOST_LEVELS,
    NO_VALUE,
    ONE_VALUE,
    ROW_NUMBERS,
    TARGET,
    Center,
    ColumnPlan,
    TableFacts,
    flat_sums,
)
from ppfl.data.federation import Federation
from ppfl.data.files import check_limit, check_size, existing_file, open_bounded, reading
from ppfl.data.ids import Holdout, RowGroups, group_rows, split_rows, text_ids
from ppfl.data.preparation import (
    GAP,
    OTHER,
    MissingRule,
    Preparation,
    PreparationSettings,
    as_numbers,
    as_text,
    is_text,
)
from ppfl.data.samples import Samples
from ppfl.errors import DataError, SettingError

logger = logging.getLogger("ppfl")

FEW = 10  # a text column of which at most one cell in so many is no number is one of numbers
LISTS = "lists or bytes"  # why a column is left out
_NOT_PLAIN = (bytes, list, tuple, dict, set, np.ndarray)
_ROW_NUMBERS = ("rownames", "index", "unnamed: 0", "")  # as R and pandas write them
_CONSTANT = 4  # steps between neighbouring floating-point numbers, by which a column of one value may vary
_ROWS_AT_A_TIME = 8192
# cells of a csv file that are missing values, as in pandas; in the column of clients they are ids
_MISSING_CELLS = (
    "", "#N/A", "#N/A N/A", "#NA", "-1.#IND", "-1.#QNAN", "-NaN", "-nan", "1.#IND", "1.#QNAN", "<NA>", "N/A", "NA",
    "NULL", "NaN", "None", "n/a", "nan", "null",
)  # fmt: skip

Array = np.ndarray[Any, Any]


class UnpreparedError(DataError):
    """A table with text or gaps, which [preparation] of an experiment can make numbers of."""


class BadCells(NamedTuple):
    """The cells of a column of numbers that are no numbers, such as `n/a?`."""

    column: str
    cells: int
    example: str
    row: int  # of the example, from 1

    def describe(self) -> str:
        """In one sentence."""
        what = "1 cell" if self.cells == 1 else f"{self.cells} cells"
        such_as = "" if self.cells == 1 else "such as "
        return (
            f"{self.column} has {what} without a number, {such_as}{self.example!r} in row {self.row}: taken as missing"
        )


# ---------------------------------------------------------------------- files


def read_table(path: str | Path, *, client: str = "", sep: str = ",", decimal: str = ".") -> pd.DataFrame:
    r"""A table from a csv or parquet file.

    Args:
        path: The file. A csv file may be compressed as .gz, .bz2, .xz, .zst, or .zip with one file in it.
        client: The column of client ids. They are read as text: 007 stays 007, and NA is a client called NA.
        sep: What separates the cells of a csv file.
        decimal: The decimal point in a csv file.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     _ = Path(folder, "shops.csv").write_text("shop,price\n007,1.5\nNA,2.5\n")
    ...     read_table(f"{folder}/shops.csv", client="shop")["shop"].tolist()
    ['007', 'NA']
    """
    if _is_parquet(path):
        if (sep, decimal) != (",", "."):
            raise SettingError(f"sep and decimal are for csv files, but {path} is a parquet file; leave them out")
        return _read_parquet(path)
    for name, value in (("sep", sep), ("decimal", decimal)):
        if len(value) != 1 or value in '\n\r"':
            raise SettingError(f"{name} is {value!r}; set one character, such as ; or , or a tab")
    return _read_csv(path, client, sep, decimal)


def _is_parquet(path: str | Path) -> bool:
    if Path(path).suffix in (".parquet", ".pq"):
        return True
    if not os.path.isfile(path):  # noqa: PTH113 (Path.is_file raises for names that no file can have)
        return False
    with Path(path).open("rb") as file:
        return file.read(4) == b"PAR1"


def _read_csv(path: str | Path, client: str, sep: str, decimal: str) -> pd.DataFrame:
    path = existing_file(path, "a csv file")
    options: dict[str, Any] = {"sep": sep, "skipinitialspace": sep != "\t"}  # an empty cell is no space to skip
    with reading(path, "cannot be read as csv", "check the file"):
        names = _column_names(path, options)
        missing = {name or f"Unnamed: {at}": _MISSING_CELLS for at, name in enumerate(names) if name != client}
        with open_bounded(path) as stream:
            frame = pd.read_csv(
                _WithoutNul(stream, path), decimal=decimal, dtype={client: str}, keep_default_na=False,
                na_values=missing, low_memory=False, **options,
            )  # fmt: skip
    if len(names) == 1 and (other := next((each for each in ";\t|," if each in names[0]), None)):
        raise DataError(
            f"{path} has one column only, {names[0]!r}; its cells seem to be separated by {other!r}, so set sep to it"
        )
    return frame


def _column_names(path: Path, options: Mapping[str, Any]) -> list[str]:
    """The names as they are in the file, none of them twice."""
    with open_bounded(path) as stream:
        header = next((line for line in stream if line.strip()), b"")
    count = header.count(options["sep"].encode()) + 1
    check_limit("features", count, f"{path} has {count:,} columns")
    with open_bounded(path) as stream:
        first = pd.read_csv(
            _WithoutNul(stream, path), header=None, nrows=1, dtype=str, keep_default_na=False, **options
        )
    names = [str(name) for name in first.iloc[0]]
    _refuse_repeated([name for name in names if name])
    return names


class _WithoutNul(io.RawIOBase):
    """A stream that contains no NUL: pandas drops what follows one in a cell, so that two ids could become one."""

    def __init__(self, stream: IO[bytes], path: Path) -> None:
        self._stream, self._path = stream, path

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1, /) -> bytes:
        content = self._stream.read(size)
        if b"\0" in content:
            raise DataError(f"{self._path} contains NUL bytes, so it is not text in UTF-8; save it as csv again")
        return content


def _read_parquet(path: str | Path) -> pd.DataFrame:
    path = existing_file(path, "a parquet file")
    with reading(path, "cannot be read as parquet", "check the file"), ParquetFile(path) as file:
        found = file.metadata
        check_limit("features", found.num_columns, f"{path} has {found.num_columns:,} columns")
        groups = [found.row_group(i).total_byte_size for i in range(found.num_row_groups)]
        check_size(path, max(sum(groups), found.num_rows * found.num_columns))
        batches, size = [], 0
        for batch in file.iter_batches(_ROWS_AT_A_TIME):
            size += batch.nbytes
            check_size(path, size)  # a value that repeats takes little room in the file
            batches.append(batch)
        return ArrowTable.from_batches(batches, file.schema_arrow).to_pandas()


def file_stem(path: str | Path) -> str:
    """The name of a table: its file name up to the first dot.

    >>> file_stem("data/sales.csv.gz")
    'sales'
    """
    return Path(path).name.split(".")[0]


# ---------------------------------------------------------------------- columns


def as_pandas(data: Any) -> pd.DataFrame:
    """A pandas table with its column names as text, none of them twice.

    >>> list(as_pandas({0: [1.0], "a": [2.0]}).columns)
    ['0', 'a']
    """
    if isinstance(data, Mapping):
        try:
            data = pd.DataFrame({name: np.asarray(column) if isinstance(column, Tensor) else column
                                 for name, column in data.items()})  # fmt: skip
        except ValueError as error:
            raise DataError(f"the columns are no table ({error}); give one value per row in each of them") from None
    elif not isinstance(data, pd.DataFrame):
        try:
            data = nw.from_native(data, eager_only=True).to_pandas()
        except TypeError:
            raise DataError(
                f"the data are a {type(data).__name__}; expected a table: pandas, polars, pyarrow, or a dict of columns"
            ) from None
    names = [str(name) for name in data.columns]
    _refuse_repeated(names)
    return data.set_axis(names, axis=1)


def _refuse_repeated(names: Sequence[str]) -> None:
    if repeated := sorted(name for name, times in Counter(names).items() if times > 1):
        raise DataError(f"the table has two columns {repeated[0]!r}; rename one of them")


def is_plain(values: Any) -> bool:
    """Whether a column holds numbers and text, rather than lists or bytes as parquet files may have them."""
    return values.dtype.kind != "O" or not any(isinstance(value, _NOT_PLAIN) for value in values)


def read_numbers(values: pd.Series) -> tuple[pd.Series, BadCells | None]:
    """A text column in which nearly all cells are numbers as numbers, and the cells that are none; others as they are.

    A text column in which all cells are numbers stays text: somebody made it text, as names of things often are.
    """
    known = values.dropna()
    if known.empty or not is_text(values) or isinstance(values.dtype, pd.CategoricalDtype) or not is_plain(known):
        return values, None
    numbers = pd.to_numeric(values.astype(str).where(values.notna()), errors="coerce")
    bad = (numbers.isna() & values.notna()).to_numpy()
    if not bad.any() or bad.sum() > len(known) // FEW:
        return values, None
    first = int(bad.argmax())
    return numbers.astype(float), BadCells(str(values.name), int(bad.sum()), str(values.iloc[first]), first + 1)


def check_column(name: str, values: pd.Series) -> pd.Series:
    """A column as text (object) or float64, NaN where a value is missing; an error where it is neither."""
    if not is_plain(values.dropna()):
        raise DataError(f"column {name!r} has lists or bytes; expected numbers or text: convert it first")
    return as_text(values) if is_text(values) and values.notna().any() else as_numbers(name, values)


def reason_to_leave_out(name: str, values: pd.Series) -> str:
    """Why a column of text or float64 is not used unless it is named; empty for a useful column."""
    known = values.dropna()
    if known.empty:
        return NO_VALUE
    distinct = known.nunique()
    if values.dtype == object:
        if distinct <= MOST_LEVELS:
            return ONE_VALUE if distinct == 1 else ""
        return "numbers with a decimal comma" if _has_decimal_commas(known) else f"{distinct} levels"
    least, most = float(known.min()), float(known.max())
    if most - least <= _CONSTANT * np.spacing(max(abs(least), abs(most))):
        return ONE_VALUE
    numbered = name.strip().lower() in _ROW_NUMBERS or most - least == len(values) - 1
    different = distinct == len(values) > 2 and bool((known == known.round()).all())
    return ROW_NUMBERS if numbered and different else ""


def _has_decimal_commas(values: Any) -> bool:
    """Whether most cells of a text column are numbers such as 1,5."""
    number = re.compile(r"\s*[-+]?\d+,\d+\s*")
    return 2 * sum(bool(number.fullmatch(str(value))) for value in values) > len(values)


def _feature_names(
    frame: pd.DataFrame, apart: Sequence[str], columns: Sequence[str] | None, text: Sequence[str]
) -> list[str]:
    features = [name for name in frame.columns if name not in apart] if columns is None else list(columns)
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


# ---------------------------------------------------------------------- the table of a user


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
        checks.check_ids(groups.ids, {})
        checks.check_train(groups.ids, groups.sizes)
        is_test = None if self.is_test is None else as_mask(self.is_test[used.numpy()], len(used))
        parts = split_rows(groups, holdout.test_fraction, holdout.validation_fraction, holdout.seed, is_test)
        return {split: part._replace(order=part.take(used)) for split, part in parts.items()}

    # ------------------------------------------------------------------ what a preparation needs

    def describe(self, settings: PreparationSettings, train: Array) -> TableFacts:
        """What the columns have, and the levels of text in the training rows that the settings do not name."""
        kinds: dict[str, Literal["numbers", "text", "empty"]] = {}
        levels: dict[str, tuple[str, ...]] = {}
        for name in self.features:
            values = self.features[name]
            kinds[name] = "text" if values.dtype == object else "numbers" if values.notna().any() else "empty"
            if kinds[name] == "text" and name not in settings.levels and self._has_few_levels(name):
                levels[name] = tuple(sorted(self._texts(name, train, settings.missing).unique().tolist()))
        return TableFacts(kinds=kinds, levels=levels, left_out=dict(self.left_out), named=self.named)

    def sums(self, plan: ColumnPlan, train: Array, center: Center | None = None) -> dict[str, Tensor]:
        """Over the training rows: counts and sums, or with a center the sums of deviations and their squares.

        Missing values and rows that are left out are those of all rows.
        """
        about = {"sites": 1.0, "clients": float(len(np.unique(self.clients[train].astype(str))))}
        columns = [self._numbers(name)[train] for name in plan.numbers]
        numbers = np.array(columns, dtype=np.float64).reshape(len(columns), len(train))
        known = ~np.isnan(numbers)
        if center is not None:
            mean, unit = (np.array(part)[:, None] for part in (center.mean, center.unit))
            away = np.where(known, (numbers - mean) / unit, 0.0)
            return flat_sums({**about, "deviation": away.sum(1), "square": (away**2).sum(1)})
        filled = np.where(known, numbers, 0.0)
        levels = [self._counts(name, plan, train) for name in plan.levels]
        return flat_sums({
            **about, "rows": float(len(train)), "dropped": float((~self.usable(plan.missing)).sum()),
            "log_factorials": self._log_factorials(train) if plan.count_target else 0.0,
            "missing": [float(self.features[name].isna().sum()) for name in plan.columns],
            "known": known.sum(1), "sum": filled.sum(1), "size": np.abs(filled).sum(1),
            "levels": [count for counts in levels for count in counts],
        })  # fmt: skip

    def _has_few_levels(self, name: str) -> bool:
        return self.named or self.left_out.get(name, ONE_VALUE) == ONE_VALUE

    def _numbers(self, name: str) -> Array:
        if name != TARGET:
            numbers: Array = self.features[name].to_numpy(dtype=np.float64)
            return numbers
        if self.targets.dtype.kind not in "iuf":
            raise DataError("standardise_target is for a target that is a number; leave it out for classes")
        return self.targets.astype(np.float64)

    def _log_factorials(self, train: Array) -> float:
        """The sum of log y!."""
        counts = self.targets[train].astype(np.float64) if self.targets.dtype.kind in "iuf" else None
        if counts is None or (counts < 0).any():
            raise DataError("targets are not counts: expected numbers from 0 on, with task = 'regression' under [data]")
        return float(torch.lgamma(torch.from_numpy(counts) + 1).sum())

    def _texts(self, name: str, train: Array, missing: MissingRule) -> pd.Series:
        values = self.features[name].iloc[train].astype(object)
        return values.fillna(GAP) if missing == "fill" else values.dropna()

    def _counts(self, name: str, plan: ColumnPlan, train: Array) -> list[float]:
        levels = plan.levels[name]
        counts = self._texts(name, train, plan.missing).value_counts().to_dict()
        unknown = sorted(str(level) for level in counts if level not in set(levels))
        if unknown and OTHER not in levels:
            raise DataError(
                f"column {name!r} has level {unknown[0]!r:.40}, which is not one of its levels in [preparation]; add "
                f"it, or {OTHER!r} for all others"
            )
        rest = float(sum(counts[level] for level in unknown))
        return [counts.get(level, 0) + rest * (level == OTHER) for level in levels]

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
        used = self.usable(missing)
        if isinstance(prepared, PreparationSettings):
            prepared = Preparation.fit(self, _numbers_of(rows["train"]), prepared)
        features = self.features[used]
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
            y = torch.from_numpy((self._numbers(TARGET)[used] - shift) / scale).float()
        at = torch.from_numpy(np.cumsum(used) - 1)  # where a row stands among those that are used
        inputs = torch.from_numpy(x)
        samples = {
            split: Samples(inputs[at[part.order]], y[at[part.order]], part.offsets) for split, part in rows.items()
        }
        return Federation(
            rows["train"].ids, samples["train"], samples.get("test"), samples.get("validation"), name=self.name,
            classes=found, features=names, preparation=prepared,
        )  # fmt: skip

    def read_targets(
        self, used: Array, task: LearningTask, classes: Sequence[str] | None
    ) -> tuple[Tensor, tuple[str, ...] | None]:
        """The targets of the rows that are used, as numbers or classes, and the names of these."""
        targets = self.targets[used]
        if task != "regression" and infer_dtype(targets, skipna=False) == "boolean":
            targets = targets.astype(str)  # the classes False and True
        return as_targets(targets, task, classes)

    def fingerprint(self, rows: Mapping[str, RowGroups]) -> str:
        """A digest of clients, splits, targets and all values that are used."""
        digest = hashlib.sha256(repr([self.name, rows["train"].ids, *self.features.columns]).encode())
        targets = pd.Series(self.targets)
        for split, part in rows.items():
            at = _numbers_of(part)
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
                f"pandas.get_dummies, or add [preparation] to the experiment"
            )
        if gaps := self._gaps():
            raise UnpreparedError(
                f"columns {gaps} have missing values; fill them, drop the rows or columns, or add [preparation] with "
                f"missing = 'drop' or 'fill' to the experiment"
            )


def _numbers_of(rows: RowGroups) -> Array:
    assert rows.order is not None
    return rows.order.numpy()
