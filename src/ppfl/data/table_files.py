"""Tables in csv and parquet files."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
from pyarrow import Table as ArrowTable
from pyarrow.parquet import ParquetFile

from ppfl.data.columns import refuse_repeated
from ppfl.data.files import check_limit, check_size, existing_file, open_bounded, reading
from ppfl.errors import DataError, SettingError

_ROWS_AT_A_TIME = 8192
# cells of a csv file that are missing values, as in pandas; in the column of clients they are ids
_MISSING_CELLS = (
    "", "#N/A", "#N/A N/A", "#NA", "-1.#IND", "-1.#QNAN", "-NaN", "-nan", "1.#IND", "1.#QNAN", "<NA>", "N/A", "NA",
    "NULL", "NaN", "None", "n/a", "nan", "null",
)  # fmt: skip


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
        with open_bounded(path, text=True) as stream:
            frame = pd.read_csv(
                stream, decimal=decimal, dtype={client: str}, keep_default_na=False,
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
    with open_bounded(path, text=True) as stream:
        first = pd.read_csv(stream, header=None, nrows=1, dtype=str, keep_default_na=False, **options)
    names = [str(name) for name in first.iloc[0]]
    refuse_repeated([name for name in names if name])
    return names


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
