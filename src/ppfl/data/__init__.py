"""Clients and their data: `Federation` (named clients as slices of one tensor per field, checked when built),
partitions that divide pooled data among clients, synthetic populations with known truth, data sets in public formats,
and the names of all of these in experiment files."""

from ppfl.data.datasets.cifar import cifar10
from ppfl.data.datasets.femnist import FEMNIST_CLASSES, femnist
from ppfl.data.datasets.images import digits, digits_federation, mnist, npz, read_idx
from ppfl.data.federation import Assignment, Federation, Truth
from ppfl.data.load import DATASETS, DataByName, Pool, build, load_data
from ppfl.data.partitions import (
    MNIST_GROUPS,
    PARTITIONS,
    dirichlet_labels,
    dirichlet_sources,
    iid,
    label_groups,
)
from ppfl.data.preparation import PreparationSettings
from ppfl.data.sample_spec import SampleSpec
from ppfl.data.samples import MappedRows, Samples
from ppfl.data.synthetic import (
    synthetic_classification,
    synthetic_groups,
    synthetic_linear,
)
from ppfl.data.table_files import read_table
from ppfl.data.tables import DataTable

__all__ = [
    "DATASETS",
    "FEMNIST_CLASSES",
    "MNIST_GROUPS",
    "PARTITIONS",
    "Assignment",
    "DataByName",
    "DataTable",
    "Federation",
    "MappedRows",
    "Pool",
    "PreparationSettings",
    "SampleSpec",
    "Samples",
    "Truth",
    "build",
    "cifar10",
    "digits",
    "digits_federation",
    "dirichlet_labels",
    "dirichlet_sources",
    "femnist",
    "iid",
    "label_groups",
    "load_data",
    "mnist",
    "npz",
    "read_idx",
    "read_table",
    "synthetic_classification",
    "synthetic_groups",
    "synthetic_linear",
]
