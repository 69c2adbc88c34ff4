"""Clients and their data: `Federation` (named clients as slices of one tensor per field, checked when built),
partitions that split pooled data into clients, synthetic populations with known truth, readers of public formats,
and the settings that select all of these in an experiment file."""

from ppfl.data.cifar import read_cifar10
from ppfl.data.dataset_settings import DATASETS, DataSettings, build
from ppfl.data.domains import DOMAINS, digit_domains
from ppfl.data.drawn_digits import drawn_digits
from ppfl.data.federation import Assignment, Federation
from ppfl.data.femnist import FEMNIST_CLASSES, read_femnist
from ppfl.data.lazy_population import lazy_population
from ppfl.data.partitions import (
    MNIST_GROUPS,
    PARTITIONS,
    dirichlet_labels,
    dirichlet_sources,
    iid,
    label_groups,
)
from ppfl.data.readers import Pool, read_idx, read_mnist, read_npz
from ppfl.data.sample_spec import SampleSpec
from ppfl.data.samples import MappedRows, Samples
from ppfl.data.shakespeare import SHAKESPEARE_CHARACTERS, read_shakespeare
from ppfl.data.sklearn_digits import digits, digits_federation
from ppfl.data.stackexchange import read_stackexchange
from ppfl.data.synthetic import (
    bayes_accuracy,
    logistic_population,
    synthetic_classification,
    synthetic_groups,
    synthetic_linear,
)
from ppfl.data.tables import DataTable, read_table
from ppfl.data.truth import Truth

__all__ = [
    "DATASETS",
    "DOMAINS",
    "FEMNIST_CLASSES",
    "MNIST_GROUPS",
    "PARTITIONS",
    "SHAKESPEARE_CHARACTERS",
    "Assignment",
    "DataSettings",
    "DataTable",
    "Federation",
    "MappedRows",
    "Pool",
    "SampleSpec",
    "Samples",
    "Truth",
    "bayes_accuracy",
    "build",
    "digit_domains",
    "digits",
    "digits_federation",
    "dirichlet_labels",
    "dirichlet_sources",
    "drawn_digits",
    "iid",
    "label_groups",
    "lazy_population",
    "logistic_population",
    "read_cifar10",
    "read_femnist",
    "read_idx",
    "read_mnist",
    "read_npz",
    "read_shakespeare",
    "read_stackexchange",
    "read_table",
    "synthetic_classification",
    "synthetic_groups",
    "synthetic_linear",
]
