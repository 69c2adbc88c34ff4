"""`[data]` of an experiment file: the data set, its files, and how it is split into clients."""

from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any, Literal, cast, get_args

import torch
from pydantic import BeforeValidator, Field, TypeAdapter
from pydantic import ValidationError as Invalid
from torch import Tensor

from ppfl.core.registry import FactorySettings, NamedCall, with_factory_name
from ppfl.core.settings import Count, Settings
from ppfl.data.arrays import LearningTask
from ppfl.data.by_client_settings import Femnist, Shakespeare, StackExchange
from ppfl.data.cifar import read_cifar10
from ppfl.data.domains import DOMAIN_SAMPLES, DOMAINS, Domain, digit_domains
from ppfl.data.federation import Federation
from ppfl.data.file_settings import HoldoutSettings, data_folder, dataset_folder, resolved
from ppfl.data.partitions import PARTITIONS, PartitionByName
from ppfl.data.preparation import Preparation, PreparationSettings
from ppfl.data.readers import read_mnist, read_npz, with_channels
from ppfl.data.samples import random_rows
from ppfl.data.sklearn_digits import digits
from ppfl.data.synthetic_settings import (
    LazyPopulation,
    LogisticPopulation,
    Synthetic,
    SyntheticGroups,
    SyntheticLinear,
)
from ppfl.data.tables import DataTable, file_stem, read_table
from ppfl.errors import DataError, SettingError

CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
CIFAR10_GROUPS = ((1, 9), (0, 8), (2, 3, 4, 5, 6, 7))  # road, sky and water, animals
CIFAR10_CLIENTS = (27, 27, 26)
# Mean and standard deviation of a pixel: published constants, so no data of clients are needed to compute them.
MNIST_PIXELS = 0.1307, 0.3081
CIFAR10_PIXELS = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


def _divided(x: Any, y: Any, asked: Any, base: Path | None, **about: Any) -> Federation:
    clients = asked.partition.call(base, y=y, seed=asked.seed)
    return Federation.from_arrays(x, y, clients, **asked.split(**about))


class Digits(HoldoutSettings):
    """scikit-learn's 1,797 digits; by default in the paper's groups, 10 clients each."""

    name: Literal["digits"] = "digits"
    partition: PartitionByName = PARTITIONS.make("label_groups", clients=10)

    def build(self, base: Path | None = None) -> Federation:
        """The federation these settings describe."""
        return _divided(*digits(), self, base, name="digits")


class _ImageSettings(HoldoutSettings):
    folder: Path | None = None
    standardise: bool = True
    samples: Count | None = None  # random subset taken before the partition; all images if not given

    def _subset(self, x: Tensor, y: Tensor, name: str) -> tuple[Tensor, Tensor]:
        if self.samples is None:
            return x, y
        rows = random_rows(len(y), self.samples, self.seed, name)
        return x[rows], y[rows]


class Mnist(_ImageSettings):
    """MNIST from its four files; by default as in Table 1."""

    name: Literal["mnist"] = "mnist"
    image: bool = False
    partition: PartitionByName = PARTITIONS.make("label_groups")

    def build(self, base: Path | None = None) -> Federation:
        """The federation these settings describe; a relative folder starts at `base`."""
        x, y = self._subset(*read_mnist(dataset_folder(self.folder, base, "mnist"), self.image), "mnist")
        if self.standardise:
            x = (x - MNIST_PIXELS[0]) / MNIST_PIXELS[1]
        return _divided(x, y, self, base, name="mnist")


class Cifar10(_ImageSettings):
    """CIFAR-10 from cifar-10-batches-py; by default as in Table 1."""

    name: Literal["cifar10"] = "cifar10"
    partition: PartitionByName = PARTITIONS.make("label_groups", groups=CIFAR10_GROUPS, clients=CIFAR10_CLIENTS)

    def build(self, base: Path | None = None) -> Federation:
        """The federation these settings describe; a relative folder starts at `base`."""
        x, y = self._subset(*read_cifar10(dataset_folder(self.folder, base, "cifar10")), "cifar10")
        if self.standardise:
            mean, deviation = torch.tensor(CIFAR10_PIXELS)[:, :, None, None]
            x = (x - mean) / deviation
        return _divided(x, y, self, base, name="cifar10", classes=CIFAR10_CLASSES)


class DigitDomains(HoldoutSettings):
    """Digits from several domains, by default one client per domain (Section O5.4)."""

    name: Literal["digit_domains"] = "digit_domains"
    folder: Path | None = None
    domains: tuple[Domain, ...] = Field(DOMAINS, min_length=1)
    samples: Count = DOMAIN_SAMPLES
    clients_per_domain: Count = 1

    def build(self, base: Path | None = None) -> Federation:
        """The federation these settings describe; a relative folder starts at `base`."""
        folder = Path() if self.folder is None else resolved(self.folder, base)
        if self.folder is None and set(self.domains) != {"drawn"}:
            folder = data_folder("digit_domains", "mnist/ and digits5/")
        return digit_domains(folder, self.domains, self.samples, self.clients_per_domain, **self.split())


class Npz(HoldoutSettings):
    """A numpy archive with client ids (array `client`) or with a partition."""

    name: Literal["npz"] = "npz"
    file: Path
    tokens: bool = False
    image: bool = False  # adds the channel axis that cnn expects
    partition: Annotated[NamedCall | None, PARTITIONS.field(optional=True)] = None

    def build(self, base: Path | None = None) -> Federation:
        """The federation these settings describe; a relative file starts at `base`."""
        pool = read_npz(resolved(self.file, base), self.tokens)
        pool = pool._replace(x=with_channels(pool.x)) if self.image else pool
        if self.partition is None:
            return pool.federation(**self.split(name=self.file.stem))
        return _divided(pool.x, pool.y, self, base, name=self.file.stem, tokens=self.tokens)


class TableFileSettings(HoldoutSettings):
    """What files with one row per sample have in common."""

    file: Path
    client: str
    target: str
    columns: tuple[str, ...] | None = None
    drop: tuple[str, ...] = ()
    is_test: str | None = None
    task: LearningTask = "auto"
    classes: tuple[str, ...] | None = None

    def read(self, base: Path | None = None) -> Any:
        """The whole table as it is in the file; a relative file starts at `base`."""
        return read_table(resolved(self.file, base), client=self.client)

    def build(self, base: Path | None = None) -> Federation:
        """The federation these settings describe; a relative file starts at `base`."""
        return self.prepared(self.table(self.read(base)))

    def table(self, frame: Any, text: Collection[str] = (), *, choose: bool = True) -> DataTable:
        """The columns of a table that was read. text: columns of numbers that are names."""
        as_classes = self.task == "classification" or self.classes is not None
        return DataTable.of(
            frame, self.client, self.target, columns=self.columns, drop=self.drop, is_test=self.is_test,
            text=tuple(text), target_is_text=as_classes, choose=choose, name=file_stem(self.file),
        )  # fmt: skip

    def prepared(self, table: DataTable, how: Preparation | PreparationSettings | None = None) -> Federation:
        """The federation of a table, prepared or as it is."""
        return table.federation(self, how, task=self.task, classes=self.classes)


class Csv(TableFileSettings):
    """A csv file with a client column and a target column."""

    name: Literal["csv"] = "csv"
    sep: str = ","
    decimal: str = "."

    def read(self, base: Path | None = None) -> Any:
        """The whole table; a relative file starts at `base`."""
        return read_table(resolved(self.file, base), client=self.client, sep=self.sep, decimal=self.decimal)


class Parquet(TableFileSettings):
    """A parquet file with a client column and a target column."""

    name: Literal["parquet"] = "parquet"


class DataFactory(FactorySettings):
    """A federation that a Python function makes. It may ask for `folder`, that of the experiment file."""

    name: Literal["factory"] = "factory"

    def build(self, base: Path | None = None) -> Federation:
        """What the function returns."""
        found = self.call("data", base, {"folder": Path() if base is None else base}, DataError)
        if not isinstance(found, Federation):
            raise DataError(
                f"[data]: {self.factory} returned a {type(found).__name__}; it must return a ppfl.Federation, such as "
                "Federation.from_arrays(x, y, clients)"
            )
        return found


_ByClient = Femnist | Shakespeare | StackExchange
_ReadData = Digits | DigitDomains | Mnist | Cifar10 | Npz | Csv | Parquet | DataFactory
_AnyData = _ReadData | _ByClient | Synthetic | SyntheticGroups | SyntheticLinear | LogisticPopulation | LazyPopulation
DataSettings = Annotated[_AnyData, Field(discriminator="name"), BeforeValidator(with_factory_name)]
DATASETS: dict[str, type[Settings]] = {model.model_fields["name"].default: model for model in get_args(_AnyData)}
_ADAPTER: TypeAdapter[Any] = TypeAdapter(DataSettings)


def build_data(data: DataSettings, preparation: PreparationSettings | None, base: Path | None = None) -> Federation:
    """The federation of `[data]`, prepared by `[preparation]` where there is one."""
    if preparation is None:
        return data.build(base)
    file = require_table(data)
    return file.prepared(file.table(file.read(base), preparation.names), preparation)


def require_table(data: DataSettings) -> TableFileSettings:
    """Data that can be prepared; SettingError for any other."""
    if not isinstance(data, TableFileSettings):
        raise SettingError(
            f"[preparation] is for tables, data = 'csv' or 'parquet', and the data are {data.name!r}; leave it out"
        )
    return data


def build(name: str, base: Path | None = None, **settings: Any) -> Federation:
    """Build a federation from the name of a data set and the keys of `[data]`; relative paths start at `base`.

    >>> build("digits", partition={"name": "iid", "clients": 5}).n_clients
    5
    """
    try:
        data = _ADAPTER.validate_python({"name": name, **settings})
    except Invalid as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        raise SettingError(
            f"data setting {key or 'name'!r}: {first['msg']}; data sets are {', '.join(DATASETS)}"
        ) from error
    return cast(Federation, data.build(base))
