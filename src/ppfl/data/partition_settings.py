"""`[data.partition]` of an experiment file: which partition, with which settings."""

from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from ppfl.core.settings import Count, CountOrZero, Positive, Settings
from ppfl.data import partitions
from ppfl.data.federation import Federation

GroupSettings = tuple[tuple[CountOrZero, ...], ...]


class _Partition(Settings):
    _function: ClassVar[Callable[..., Federation]]

    def split_into_clients(self, x: Any, y: Any, **split: Any) -> Federation:
        """Split pooled data into clients; `split` as for the partition functions."""
        return type(self)._function(x, y, **self.model_dump(exclude={"name"}), **split)


class LabelGroups(_Partition):
    """Each client has labels of one group only (Table 1)."""

    _function = staticmethod(partitions.by_label_groups)
    name: Literal["label_groups"] = "label_groups"
    groups: GroupSettings = partitions.MNIST_GROUPS
    clients: Count | tuple[Count, ...] = partitions.MNIST_CLIENTS


class DirichletSources(_Partition):
    """Each client mixes the label groups in Dirichlet(alpha) proportions (Table 2)."""

    _function = staticmethod(partitions.dirichlet_sources)
    name: Literal["dirichlet_sources"] = "dirichlet_sources"
    groups: GroupSettings = partitions.MNIST_GROUPS
    clients: Count = 100
    alpha: Positive = 0.5
    equal: bool = True
    min_samples: Count = 10


class DirichletLabels(_Partition):
    """The samples of each label are split among clients in Dirichlet(alpha) shares."""

    _function = staticmethod(partitions.dirichlet_labels)
    name: Literal["dirichlet_labels"] = "dirichlet_labels"
    clients: Count = 100
    alpha: Positive = 0.5
    min_samples: Count = 10


class Iid(_Partition):
    """Clients with the same distribution."""

    _function = staticmethod(partitions.iid)
    name: Literal["iid"] = "iid"
    clients: Count = 100


PartitionSettings = Annotated[LabelGroups | DirichletSources | DirichletLabels | Iid, Field(discriminator="name")]
