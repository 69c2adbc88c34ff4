"""`[data]` of an experiment file: the data set, how it is divided among clients, and how much of it is held out."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch

from ppfl.core.registry import Functions, NamedCall, find_function
from ppfl.data.arrays import LearningTask
from ppfl.data.federation import Assignment, Federation
from ppfl.data.ids import Holdout
from ppfl.data.partitions import PARTITIONS
from ppfl.data.preparation import Preparation, PreparationSettings
from ppfl.data.samples import Inputs
from ppfl.data.table_files import file_stem, read_table
from ppfl.data.tables import DataTable
from ppfl.errors import DataError, SettingError


@dataclass(frozen=True, eq=False)
class Pool:
    """The samples of a data set, with the client of each of them if the data set has clients of its own.

    Args:
        x: Inputs (n, ...); int64 for tokens.
        y: Targets (n, ...), of any kind that `Federation.from_arrays` takes.
        clients: Client ids (n,), or an `Assignment`; None if a partition has to divide the samples.
        is_test: Marks of the test samples (n,), if the data set has a test part of its own.
        name: The name of the data set.
        classes: The names of the classes.

    >>> pool = Pool(torch.zeros(4, 2), [0, 1, 0, 1], clients=["a", "a", "b", "b"])
    >>> pool.federation(test_fraction=0).ids
    ('a', 'b')
    """

    x: Inputs
    y: Any
    clients: Any = None
    is_test: Any = None
    name: str = "data"
    classes: Sequence[str] | None = None

    def federation(self, clients: Any = None, **settings: Any) -> Federation:
        """The clients and their samples; settings as for `Federation.from_arrays`.

        Args:
            clients: Client ids or an `Assignment`, where the data set has no clients of its own.
            settings: For example `test_fraction`, which the data set's own test part replaces.
        """
        if self.clients is None and clients is None:
            raise DataError(
                f"{self.name} has no clients of its own, such as an array 'client'; choose a partition: in a file, "
                f'partition = {{ name = "iid", clients = 10 }} under [data]'
            )
        if self.clients is not None and clients is not None:
            raise DataError(f"{self.name} has clients of its own, which a partition would ignore; leave it out")
        about = {"name": self.name, "classes": self.classes, "is_test": self.is_test, **settings}
        clients = self.clients if clients is None else clients
        return Federation.from_arrays(self.x, self.y, clients, tokens=self.x.dtype == torch.int64, **about)


class Pooled(Holdout):
    """The keys of data sets that a partition divides among clients."""

    partition: Annotated[NamedCall | None, PARTITIONS.field(optional=True)] = None


class TableSettings(Holdout):
    """The keys of tables with one row per sample."""

    client: str
    target: str
    columns: tuple[str, ...] | None = None
    drop: tuple[str, ...] = ()
    is_test: str | None = None
    task: LearningTask = "auto"
    classes: tuple[str, ...] | None = None

    def table(self, frame: Any, text: Collection[str] = (), *, choose: bool = True) -> DataTable:
        """The columns of a table that was read. text: columns of numbers that are names."""
        as_classes = self.task == "classification" or self.classes is not None
        return DataTable.of(
            frame, self.client, self.target, columns=self.columns, drop=self.drop, is_test=self.is_test,
            text=tuple(text), target_is_text=as_classes, choose=choose, name=file_stem(self.setting("file")),
        )  # fmt: skip

    def prepared(self, table: DataTable, how: Preparation | PreparationSettings | None = None) -> Federation:
        """The clients of a table, prepared or as it is."""
        return table.federation(self, how, task=self.task, classes=self.classes)


# Functions that return a Pool, a Federation, or, with TableSettings, a table
DATASETS = Functions("data set", "data", base=Pooled, error=DataError)
DataByName = Annotated[NamedCall, DATASETS.field()]


def load_data(asked: NamedCall, preparation: PreparationSettings | None = None, base: Path | None = None) -> Federation:
    """The clients and their data.

    Args:
        asked: `[data]`: the name of the data set, and its keys.
        preparation: How columns of a table become numbers; None: it has numbers alone, which stay as they are.
        base: The folder in which relative paths, and modules of one's own, begin.

    >>> load_data(DATASETS.make("synthetic_groups", n_clients=3)).n_clients
    3
    """
    if preparation is not None or isinstance(asked, TableSettings):
        settings = require_table(asked)
        names = () if preparation is None else preparation.names
        return settings.prepared(settings.table(asked.call(base), names), preparation)
    found = asked.call(base)
    if isinstance(found, Federation):
        _refuse_unused(asked, base)
        return found
    if not isinstance(found, Pool):
        raise DataError(
            f"[data]: {asked.name} returned a {type(found).__name__}; it must return a ppfl.data.Pool or a "
            "ppfl.Federation, such as Federation.from_arrays(x, y, clients)"
        )
    fractions = {key: getattr(asked, key) for key in Holdout.model_fields if hasattr(asked, key)}
    partition, clients = getattr(asked, "partition", None), None
    if partition is not None:
        clients = partition.call(base, y=found.y, seed=fractions["seed"])
        if not isinstance(clients, Assignment):
            raise DataError(
                f"[data.partition]: {partition.name} returned a {type(clients).__name__}; it must return a "
                "ppfl.data.Assignment(clients, ids): the position of each row's client in ids, and the names"
            )
    return found.federation(clients, **fractions)


def build(name: str, base: Path | None = None, **settings: Any) -> Federation:
    """The clients and their data, from the name of a data set and the keys of `[data]`.

    Args:
        name: One of `DATASETS`, or "module:function" for one of your own.
        base: The folder in which relative paths, and modules of one's own, begin.
        settings: The keys of `[data]`.

    >>> build("digits", partition={"name": "iid", "clients": 5}).n_clients
    5
    """
    return load_data(DATASETS.make(name, **settings), base=base)


def require_table(asked: NamedCall) -> TableSettings:
    """Data that can be prepared; SettingError for any other."""
    if not isinstance(asked, TableSettings):
        raise SettingError(
            f"[preparation] is for tables, data = 'csv' or 'parquet', and the data are {asked.name!r}; leave it out"
        )
    return asked


def _refuse_unused(asked: NamedCall, base: Path | None) -> None:
    """Refuse keys that a finished federation ignores; a function gets those that its signature names."""
    if not isinstance(asked, Pooled):
        return
    named = inspect.signature(find_function(asked.name, base, "data")).parameters
    unused = [key for key, value in Pooled() if key not in named and getattr(asked, key) != value]
    if unused:
        raise SettingError(
            f"[data]: {asked.name} returned a Federation, which {', '.join(unused)} cannot change; leave it out, let "
            "the function take it, or return a ppfl.data.Pool"
        )


@DATASETS.register("csv", base=TableSettings)
def csv(file: Path, client: str, sep: str = ",", decimal: str = ".") -> Any:
    """A csv file with a client column and a target column."""
    return read_table(file, client=client, sep=sep, decimal=decimal)


@DATASETS.register("parquet", base=TableSettings)
def parquet(file: Path) -> Any:
    """A parquet file with a client column and a target column."""
    return read_table(file)
