"""Readers of tables with a client column and a target column: csv and parquet."""

import io
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from ppfl.data.arrays import LearningTask, quoted
from ppfl.data.federation import Federation
from ppfl.data.files import check_limit, check_size, existing_file, open_bounded, reading
from ppfl.errors import DataError, SettingError

_ROWS_AT_A_TIME = 8192


class UnpreparedError(DataError):
    """A table with text or gaps, which [preparation] of an experiment can make numbers of."""


def read_csv(path: str | Path, client: str, target: str, **settings: Any) -> Federation:
    r"""Clients from a csv file; settings as for `from_table`.

    The file may be compressed as .gz, .bz2, .xz, .zst, or .zip with one file in it. Client ids are read as
    text, so that 007 stays 007.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     _ = Path(folder, "shops.csv").write_text("shop,price,sold\n007,1.5,yes\n007,2.5,no\n008,3.5,no\n")
    ...     read_csv(f"{folder}/shops.csv", client="shop", target="sold", test_fraction=0).ids
    ('007', '008')
    """
    return from_table(csv_frame(path, client), client, target, **{"name": stem(path), **settings})


def read_parquet(path: str | Path, client: str, target: str, **settings: Any) -> Federation:
    """Clients from a parquet file; settings as for `from_table`.

    >>> import pandas as pd
    >>> from tempfile import TemporaryDirectory
    >>> table = pd.DataFrame({"shop": ["a", "b"], "price": [1.5, 2.5], "sold": ["yes", "no"]})
    >>> with TemporaryDirectory() as folder:
    ...     table.to_parquet(f"{folder}/shops.parquet")
    ...     read_parquet(f"{folder}/shops.parquet", client="shop", target="sold", test_fraction=0).classes
    ('no', 'yes')
    """
    return from_table(parquet_frame(path), client, target, **{"name": stem(path), **settings})


def read_frame(path: str | Path, client: str, sep: str = ",", decimal: str = ".") -> Any:
    """A pandas table from a parquet file (.parquet or .pq), otherwise from a csv file with client ids as text.

    `sep` separates the cells of a csv file, and `decimal` is the decimal point in it.
    """
    if Path(path).suffix in (".parquet", ".pq"):
        if (sep, decimal) != (",", "."):
            raise SettingError(f"sep and decimal are for csv files, but {path} is a parquet file; leave them out")
        return parquet_frame(path)
    for name, value in (("sep", sep), ("decimal", decimal)):
        if len(value) != 1 or value in '\n\r"':
            raise SettingError(f"{name} is {value!r}; set one character, such as ; or , or a tab")
    frame = csv_frame(path, client, sep, decimal)
    if len(frame.columns) == 1 and (other := next((each for each in ";\t|," if each in str(frame.columns[0])), None)):
        raise DataError(
            f"{path} has one column only, {str(frame.columns[0])!r}; its cells seem to be separated by {other!r}, "
            f"so set sep to it"
        )
    return frame


def from_table(
    frame: Any,
    client: str,
    target: str,
    *,
    columns: Sequence[str] | None = None,
    drop: Sequence[str] = (),
    is_test: str | None = None,
    task: LearningTask = "auto",
    classes: Sequence[str] | None = None,
    test_fraction: float = 0.2,
    validation_fraction: float = 0.0,
    seed: int = 0,
    name: str = "table",
) -> Federation:
    """Clients from a pandas table. Features are `columns`, or by default all columns that no other argument names.

    A text target becomes integer codes, and its values become the `classes` of the federation. An integer target is
    a label unless task="regression".

    >>> import pandas as pd
    >>> table = pd.DataFrame({"shop": ["a", "a", "b"], "price": [1.0, 2.0, 3.0], "sold": ["no", "yes", "no"]})
    >>> f = from_table(table, "shop", "sold", test_fraction=0)
    >>> f.ids, f.features, f.classes
    (('a', 'b'), ('price',), ('no', 'yes'))
    """
    frame = with_text_names(frame)
    features = choose_columns(frame, client, target, columns, drop, is_test)
    inputs = frame[features]
    _check_numeric(inputs)
    with np.errstate(over="ignore"):  # what is too large becomes infinite, and a federation refuses that
        x = inputs.to_numpy(dtype="float32")
    return Federation.from_arrays(
        x,
        frame[target].to_numpy(),
        frame[client].to_numpy(),
        is_test=None if is_test is None else frame[is_test].to_numpy(),
        task=task,
        classes=classes,
        features=features,
        test_fraction=test_fraction,
        validation_fraction=validation_fraction,
        seed=seed,
        name=name,
    )


def choose_columns(
    frame: Any, client: str, target: str, columns: Sequence[str] | None, drop: Sequence[str], is_test: str | None
) -> list[str]:
    """The feature columns: `columns`, or all that no other argument names.

    >>> import pandas as pd
    >>> choose_columns(pd.DataFrame(columns=["shop", "price", "sold"]), "shop", "sold", None, (), None)
    ['price']
    """
    apart = [client, target, *drop] + ([is_test] if is_test else [])
    features = [c for c in frame.columns if c not in apart] if columns is None else list(columns)
    absent = [c for c in [*apart, *features] if c not in frame.columns]
    if absent:
        raise DataError(f"no column {quoted(absent)}; the table has {quoted(list(frame.columns), most=12)}")
    if not features:
        raise DataError("no column is left for features; list some in columns, or drop fewer")
    if len(set(features)) < len(features):
        raise DataError(f"columns {quoted(features, 12)} name one of them twice; name each once")
    return features


def with_text_names(frame: Any) -> Any:
    """The table with its column names as text, none of them twice.

    >>> import pandas as pd
    >>> list(with_text_names(pd.DataFrame({0: [1.0], "a": [2.0]})).columns)
    ['0', 'a']
    """
    names = [str(name) for name in frame.columns]
    if repeated := sorted(name for name, times in Counter(names).items() if times > 1):
        raise DataError(f"the table has two columns {repeated[0]!r}; rename one of them")
    return frame.set_axis(names, axis=1)


def _check_numeric(inputs: Any) -> None:
    types = _pandas().api.types
    text = [
        name
        for name, dtype in inputs.dtypes.items()
        if not types.is_numeric_dtype(dtype) or types.is_complex_dtype(dtype)
    ]
    if text:
        raise UnpreparedError(
            f"columns {quoted(text)} are not numeric; list them in drop, encode them first, for instance with "
            f"pandas.get_dummies, or add [preparation] to the experiment"
        )
    missing = inputs.isna().sum()
    missing = missing[missing > 0]
    if len(missing):
        counts = ", ".join(f"{c!r} ({n})" for c, n in missing.items())
        raise UnpreparedError(
            f"columns {counts} have missing values; fill them, drop the rows or columns, or add [preparation] with "
            f"missing = 'drop' or 'fill' to the experiment"
        )


def csv_frame(path: str | Path, client: str, sep: str = ",", decimal: str = ".") -> Any:
    """A pandas table from a csv file, with client ids as text."""
    pandas = _pandas()
    path = existing_file(path, "a csv file")
    with reading(path, "cannot be read as csv", "check the file"):
        _check_columns(path, sep)
        with open_bounded(path) as stream:
            return pandas.read_csv(
                _WithoutNul(stream, path),
                sep=sep,
                decimal=decimal,
                dtype={client: str},
                skipinitialspace=sep != "\t",  # an empty cell between two tabs is no space to skip
                low_memory=False,
            )


def _check_columns(path: Path, sep: str) -> None:
    with open_bounded(path) as stream:
        header = next((line for line in stream if line.strip()), b"")
    count = header.count(sep.encode()) + 1
    check_limit("features", count, f"{path} has {count:,} columns")


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


def parquet_frame(path: str | Path) -> Any:
    """A pandas table from a parquet file."""
    _pandas()
    from pyarrow import Table
    from pyarrow.parquet import ParquetFile

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
        return Table.from_batches(batches, file.schema_arrow).to_pandas()


def _pandas() -> Any:
    try:
        import pandas
        import pyarrow  # noqa: F401 (pandas needs it to read parquet)
    except ImportError as error:
        raise DataError(f"tables need {error.name}; install it with: pip install 'ppfl[tables]'") from error
    return pandas


def stem(path: str | Path) -> str:
    """The name of a table: its file name up to the first dot.

    >>> stem("data/sales.csv.gz")
    'sales'
    """
    return Path(path).name.split(".")[0]
