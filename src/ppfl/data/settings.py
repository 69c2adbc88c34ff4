"""`[data]` of an experiment file: which data set, from where, cut how."""

import os
from pathlib import Path
from typing import Annotated, Any, Literal, cast, get_args

import torch
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, TypeAdapter
from pydantic import ValidationError as Invalid

from ppfl.core.errors import DataError, SettingError
from ppfl.core.settings import Settings
from ppfl.data.arrays import Task
from ppfl.data.cifar import read_cifar10
from ppfl.data.embedded import digits
from ppfl.data.federation import Federation
from ppfl.data.partition_settings import LabelGroups, PartitionSettings
from ppfl.data.partitions import CIFAR10_CLASSES, CIFAR10_CLIENTS, CIFAR10_GROUPS
from ppfl.data.readers import read_mnist, read_npz
from ppfl.data.synthetic import logistic_population, synthetic_classification, synthetic_groups, synthetic_linear
from ppfl.data.tables import read_csv, read_parquet

# Public constants of the two sets, mean and standard deviation of a pixel: no client's own data is asked for them.
MNIST_PIXELS = 0.1307, 0.3081
CIFAR10_PIXELS = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)


class _Held(Settings):
    test_fraction: float = Field(0.2, ge=0, lt=1)
    validation_fraction: float = Field(0.0, ge=0, lt=1)
    seed: NonNegativeInt = 0

    def _split(self, **named: Any) -> dict[str, Any]:
        return {key: getattr(self, key) for key in _Held.model_fields} | named


class Digits(_Held):
    """scikit-learn's 1,797 digits; by default in the paper's groups, 10 clients each."""

    name: Literal["digits"] = "digits"
    partition: PartitionSettings = LabelGroups(clients=10)

    def build(self, base: Path | None = None) -> Federation:
        """The federation these settings describe."""
        return self.partition.cut(*digits(), **self._split(name="digits"))


class Mnist(_Held):
    """MNIST from its four files; by default as in Table 1."""

    name: Literal["mnist"] = "mnist"
    folder: Path | None = None
    image: bool = False
    standardise: bool = True
    partition: PartitionSettings = LabelGroups()

    def build(self, base: Path | None = None) -> Federation:
        """The federation these settings describe; a relative folder starts at `base`."""
        x, y = read_mnist(_folder(self.folder, base, "mnist"), self.image)
        if self.standardise:
            x = (x - MNIST_PIXELS[0]) / MNIST_PIXELS[1]
        return self.partition.cut(x, y, **self._split(name="mnist"))


class Cifar10(_Held):
    """CIFAR-10 from cifar-10-batches-py; by default as in Table 1."""

    name: Literal["cifar10"] = "cifar10"
    folder: Path | None = None
    standardise: bool = True
    partition: PartitionSettings = LabelGroups(groups=CIFAR10_GROUPS, clients=CIFAR10_CLIENTS)

    def build(self, base: Path | None = None) -> Federation:
        """The federation these settings describe; a relative folder starts at `base`."""
        x, y = read_cifar10(_folder(self.folder, base, "cifar10"))
        if self.standardise:
            mean, deviation = torch.tensor(CIFAR10_PIXELS)[:, :, None, None]
            x = (x - mean) / deviation
        return self.partition.cut(x, y, **self._split(name="cifar10", classes=CIFAR10_CLASSES))


class Npz(_Held):
    """A numpy archive, with its own clients (array `client`) or a partition."""

    name: Literal["npz"] = "npz"
    file: Path
    tokens: bool = False
    partition: PartitionSettings | None = None

    def build(self, base: Path | None = None) -> Federation:
        """The federation these settings describe; a relative file starts at `base`."""
        pool = read_npz(_resolved(self.file, base), self.tokens)
        if self.partition is None:
            return pool.federation(**self._split(name=self.file.stem))
        return self.partition.cut(pool.x, pool.y, **self._split(name=self.file.stem, tokens=self.tokens))


class _Table(_Held):
    file: Path
    client: str
    target: str
    columns: tuple[str, ...] | None = None
    drop: tuple[str, ...] = ()
    is_test: str | None = None
    task: Task = "auto"
    classes: tuple[str, ...] | None = None


class Csv(_Table):
    """A csv file with a client column and a target column."""

    name: Literal["csv"] = "csv"

    def build(self, base: Path | None = None) -> Federation:
        """The federation these settings describe; a relative file starts at `base`."""
        return read_csv(_resolved(self.file, base), **self.model_dump(exclude={"name", "file"}))


class Parquet(_Table):
    """A parquet file with a client column and a target column."""

    name: Literal["parquet"] = "parquet"

    def build(self, base: Path | None = None) -> Federation:
        """The federation these settings describe; a relative file starts at `base`."""
        return read_parquet(_resolved(self.file, base), **self.model_dump(exclude={"name", "file"}))


class Synthetic(Settings):
    """The paper's Synthetic."""

    name: Literal["synthetic"] = "synthetic"
    n_clients: PositiveInt = 300
    dim: PositiveInt = 150
    sources: PositiveInt = 3
    alpha: PositiveFloat = 0.4
    noise: NonNegativeFloat = 0.1
    test_points: NonNegativeInt = 5000
    seed: NonNegativeInt = 0
    min_size: PositiveInt = 50
    max_size: PositiveInt = 1000

    def build(self, base: Path | None = None) -> Federation:
        """The federation these settings describe."""
        return synthetic_classification(**self.model_dump(exclude={"name"}))


class SyntheticGroups(Settings):
    """Clients in groups that are easy to tell apart."""

    name: Literal["synthetic_groups"] = "synthetic_groups"
    n_clients: PositiveInt = 12
    groups: PositiveInt = 3
    dim: PositiveInt = 8
    samples: PositiveInt = 40
    test_points: NonNegativeInt = 20
    noise: NonNegativeFloat = 0.05
    task: Literal["classification", "regression"] = "classification"
    seed: NonNegativeInt = 0

    def build(self, base: Path | None = None) -> Federation:
        """The federation these settings describe."""
        return synthetic_groups(**self.model_dump(exclude={"name"}))


class SyntheticLinear(Settings):
    """A Gaussian linear population with mixed memberships."""

    name: Literal["synthetic_linear"] = "synthetic_linear"
    n_clients: PositiveInt = 50
    dim: PositiveInt = 5
    k: PositiveInt = 3
    alpha: PositiveFloat = 0.5
    samples: PositiveInt = 40
    test_points: NonNegativeInt = 20
    noise: NonNegativeFloat = 0.1
    seed: NonNegativeInt = 0

    def build(self, base: Path | None = None) -> Federation:
        """The federation these settings describe."""
        return synthetic_linear(**self.model_dump(exclude={"name"}))


class LogisticPopulation(Settings):
    """Logistic regressions with mixed memberships, for many clients with few samples."""

    name: Literal["logistic_population"] = "logistic_population"
    n_clients: PositiveInt = 1000
    samples: PositiveInt = 10
    dim: PositiveInt = 20
    k: PositiveInt = 5
    alpha: PositiveFloat = 0.3
    scale: NonNegativeFloat = 2.0
    test_points: NonNegativeInt = 5
    seed: NonNegativeInt = 0

    def build(self, base: Path | None = None) -> Federation:
        """The federation these settings describe."""
        return logistic_population(**self.model_dump(exclude={"name"}))


_AnyData = (
    Digits | Mnist | Cifar10 | Npz | Csv | Parquet | Synthetic | SyntheticGroups | SyntheticLinear | LogisticPopulation
)
DataSettings = Annotated[_AnyData, Field(discriminator="name")]
DATASETS: dict[str, type[Settings]] = {model.model_fields["name"].default: model for model in get_args(_AnyData)}
_ADAPTER: TypeAdapter[Any] = TypeAdapter(DataSettings)


def build(name: str, base: Path | None = None, **settings: Any) -> Federation:
    """A federation by the name of its data set, with the keys of `[data]`; relative paths start at `base`.

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


def _resolved(path: Path, base: Path | None) -> Path:
    return path.expanduser() if base is None else base / path.expanduser()


def _folder(folder: Path | None, base: Path | None, name: str) -> Path:
    if folder is not None:
        return _resolved(folder, base)
    data = os.environ.get("PPFL_DATA")
    if not data:
        raise DataError(
            f'no folder for {name}; set folder = "..." under [data], or PPFL_DATA to a folder that has {name}/'
        )
    return Path(data) / name
