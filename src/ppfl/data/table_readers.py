"""Readers of tables with a client column and a target column: csv and parquet."""

import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ppfl.core.errors import DataError
from ppfl.data.arrays import LearningTask, quoted
from ppfl.data.federation import Federation
from ppfl.data.readers import existing_file, one_line


def read_csv(path: str | Path, client: str, target: str, **settings: Any) -> Federation:
    """Clients from a csv file, which may be compressed (such as .gz); settings as for `from_table`.

    Client ids are read as text, so that 007 stays 007.
    """
    return from_table(_csv_frame(path, client), client, target, **{"name": stem(path), **settings})


def read_parquet(path: str | Path, client: str, target: str, **settings: Any) -> Federation:
    """Clients from a parquet file; settings as for `from_table`."""
    return from_table(_parquet_frame(path), client, target, **{"name": stem(path), **settings})


def read_frame(path: str | Path, client: str) -> Any:
    """A pandas table from a parquet file (.parquet or .pq), otherwise from a csv file with client ids as text."""
    return _parquet_frame(path) if Path(path).suffix in (".parquet", ".pq") else _csv_frame(path, client)


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
    apart = [client, target, *drop] + ([is_test] if is_test else [])
    features = [str(c) for c in frame.columns if c not in apart] if columns is None else list(columns)
    absent = [c for c in [*apart, *features] if c not in frame.columns]
    if absent:
        raise DataError(f"no column {quoted(absent)}; the table has {quoted(list(frame.columns), most=12)}")
    if not features:
        raise DataError("no column is left for features; list some in columns, or drop fewer")
    inputs = frame[features]
    _check_numeric(inputs)
    return Federation.from_arrays(
        inputs.to_numpy(dtype="float32"),
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


def _check_numeric(inputs: Any) -> None:
    is_numeric = _pandas().api.types.is_numeric_dtype
    text = [c for c in inputs.columns if not is_numeric(inputs[c].dtype)]
    if text:
        raise DataError(
            f"columns {quoted(text)} are not numeric; list them in drop, or encode them first, "
            f"for instance with pandas.get_dummies"
        )
    missing = inputs.isna().sum()
    missing = missing[missing > 0]
    if len(missing):
        counts = ", ".join(f"{c!r} ({n})" for c, n in missing.items())
        raise DataError(f"columns {counts} have missing values; fill them, or drop the rows or columns")


def _csv_frame(path: str | Path, client: str) -> Any:
    pandas = _pandas()
    path = existing_file(path, "a csv file")
    try:
        return pandas.read_csv(path, dtype={client: str}, skipinitialspace=True)
    except (ValueError, OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read as csv ({one_line(error)}); check the file") from error


def _parquet_frame(path: str | Path) -> Any:
    pandas = _pandas()
    path = existing_file(path, "a parquet file")
    try:
        return pandas.read_parquet(path)
    except (ValueError, OSError) as error:
        raise DataError(f"{path} cannot be read as parquet ({one_line(error)}); check the file") from error


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
