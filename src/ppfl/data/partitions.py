"""Split pooled data (x, y) into clients that differ in a known way."""

from collections.abc import Sequence
from typing import Any, TypedDict, Unpack

import numpy as np
import torch

from ppfl.data.allocation import Counts, equal_sizes, random_sizes
from ppfl.data.arrays import as_targets
from ppfl.data.federation import Federation
from ppfl.data.truth import Truth
from ppfl.errors import DataError

MNIST_GROUPS = ((0, 6), (5, 8), (2, 3, 9), (1, 4, 7))
MNIST_CLIENTS = 25
CIFAR10_CLASSES = (
    "airplane",
    "automobile",
    "bird",
    "cat",
    "deer",
    "dog",
    "frog",
    "horse",
    "ship",
    "truck",
)
CIFAR10_GROUPS = ((1, 9), (0, 8), (2, 3, 4, 5, 6, 7))  # road, sky and water, animals
CIFAR10_CLIENTS = (27, 27, 26)

Groups = Sequence[Sequence[int]]
_Index = np.ndarray[Any, np.dtype[np.int64]]


class SplitSettings(TypedDict, total=False):
    """Settings that every partition passes to Federation.from_arrays."""

    test_fraction: float
    validation_fraction: float
    name: str
    classes: Sequence[str] | None
    tokens: bool


def by_label_groups(
    x: Any,
    y: Any,
    groups: Groups = MNIST_GROUPS,
    clients: int | Sequence[int] = MNIST_CLIENTS,
    seed: int = 0,
    **split: Unpack[SplitSettings],
) -> Federation:
    """Each client has labels of one group only (Table 1): the samples of a group are shuffled and split evenly.

    >>> f = by_label_groups(torch.zeros(12, 2), [0, 1, 2, 3] * 3, groups=[[0, 1], [2, 3]], clients=2)
    >>> f.ids
    ('g0-c0', 'g0-c1', 'g1-c0', 'g1-c1')
    >>> f.truth.memberships.argmax(1)
    tensor([0, 0, 1, 1])
    """
    labels = _labels(y)
    counts = [clients] * len(groups) if isinstance(clients, int) else list(clients)
    if len(counts) != len(groups):
        raise DataError(f"clients lists {len(counts)} numbers for {len(groups)} groups; give one number per group")
    rng = np.random.default_rng(seed)
    ids: list[str] = []
    parts: list[_Index] = []
    for g, (rows, count) in enumerate(zip(_rows_of_groups(labels, groups), counts, strict=True)):
        if not 1 <= count <= len(rows):
            raise DataError(f"group {g} has {len(rows)} samples, too few for {count} clients; ask for fewer")
        ids += [f"g{g}-{name}" for name in client_names(count)]
        parts += np.array_split(rng.permutation(rows), count)
    one_hot = np.repeat(np.eye(len(groups), dtype=np.float32), counts, axis=0)
    return _federation(x, y, ids, parts, seed, Truth(torch.from_numpy(one_hot), "label group"), split)


def dirichlet_sources(
    x: Any,
    y: Any,
    groups: Groups = MNIST_GROUPS,
    clients: int = 100,
    alpha: float = 0.5,
    seed: int = 0,
    *,
    equal: bool = True,
    min_samples: int = 10,
    **split: Unpack[SplitSettings],
) -> Federation:
    """Each client mixes the label groups ("sources") in its own proportions, Dirichlet(alpha) (Table 2).

    The paper says that samples are distributed to clients "following a Dirichlet distribution". This can mean that
    each client draws its shares of the sources, or that each source draws the shares of the clients (as Section O4
    says of Synthetic, after FedEM). Shares over many clients are nearly independent gamma variables, so in both cases
    the mixture of a client is Dirichlet(alpha) over the sources, up to one factor per source (its size); only the
    client sizes differ. With `equal=True` (default) all clients have the same size, so that alpha changes the
    heterogeneity only; `equal=False` is the other reading. Both use every sample once. The truth is the mixture of
    the samples that each client actually has.

    >>> f = dirichlet_sources(torch.zeros(60, 2), [0, 1, 2] * 20, [[0], [1, 2]], clients=3, alpha=1.0)
    >>> (f.train.sizes + f.test.sizes).tolist()
    [20, 20, 20]
    """
    rows = _rows_of_groups(_labels(y), groups)
    supply = np.array([len(r) for r in rows])
    rng = np.random.default_rng(seed)
    counts = (
        equal_sizes(supply, clients, alpha, rng) if equal else random_sizes(supply, clients, alpha, rng, min_samples)
    )
    mixtures = torch.from_numpy((counts / counts.sum(1, keepdims=True)).astype(np.float32))
    return _federation(
        x, y, client_names(clients), _assign_rows(rows, counts, rng), seed, Truth(mixtures, "source"), split
    )


def dirichlet_labels(
    x: Any,
    y: Any,
    clients: int,
    alpha: float,
    seed: int = 0,
    *,
    min_samples: int = 10,
    **split: Unpack[SplitSettings],
) -> Federation:
    """Label skew: the samples of each label are split among the clients in Dirichlet(alpha) shares.

    >>> f = dirichlet_labels(torch.zeros(90, 2), [0, 1, 2] * 30, clients=4, alpha=0.3)
    >>> len(f.train) + len(f.test), int((f.train.sizes + f.test.sizes).min()) >= 10
    (90, True)
    """
    labels = _labels(y)
    rows = [np.flatnonzero(labels == label) for label in np.unique(labels)]
    rng = np.random.default_rng(seed)
    counts = random_sizes(np.array([len(r) for r in rows]), clients, alpha, rng, min_samples)
    return _federation(x, y, client_names(clients), _assign_rows(rows, counts, rng), seed, None, split)


def iid(x: Any, y: Any, clients: int, seed: int = 0, **split: Unpack[SplitSettings]) -> Federation:
    """Shuffle and split evenly: clients with the same distribution.

    >>> iid(torch.zeros(10, 2), [0, 1] * 5, clients=3).ids
    ('c0', 'c1', 'c2')
    """
    n = len(y)
    if not 1 <= clients <= n:
        raise DataError(f"{clients} clients for {n} samples; ask for 1 to {n}")
    parts = np.array_split(np.random.default_rng(seed).permutation(n), clients)
    return _federation(x, y, client_names(clients), parts, seed, None, split)


def by_column(x: Any, y: Any, column: Any, seed: int = 0, **split: Unpack[SplitSettings]) -> Federation:
    """Clients as given by a column, one id per sample.

    >>> by_column([[0.0], [1.0], [2.0]], [0.5, 0.1, 0.2], ["a", "b", "b"], test_fraction=0).ids
    ('a', 'b')
    """
    return Federation.from_arrays(x, y, column, seed=seed, **split)


def _federation(
    x: Any,
    y: Any,
    ids: list[str],
    parts: list[_Index],
    seed: int,
    truth: Truth | None,
    split: SplitSettings,
) -> Federation:
    column = np.empty(len(y), dtype=object)
    for id, rows in zip(ids, parts, strict=True):
        column[rows] = id
    return Federation.from_arrays(x, y, column, seed=seed, ids=ids, truth=truth, **split)


def _assign_rows(rows: list[_Index], counts: Counts, rng: np.random.Generator) -> list[_Index]:
    """Shuffle the rows of each source and give them to the clients according to the counts (M, S)."""
    cut = [np.split(rng.permutation(r), np.cumsum(counts[:-1, s])) for s, r in enumerate(rows)]
    return [np.concatenate(parts) for parts in zip(*cut, strict=True)]


def _labels(y: Any) -> _Index:
    labels, _ = as_targets(y)
    if labels.is_floating_point():
        raise DataError("y contains float targets, but a partition by label needs labels; use iid or by_column")
    array: _Index = labels.numpy()
    return array


def _rows_of_groups(labels: _Index, groups: Groups) -> list[_Index]:
    listed = [label for group in groups for label in group]
    if len(set(listed)) != len(listed):
        raise DataError(f"a label is in two groups of {[list(g) for g in groups]}; groups must not overlap")
    left_out = sorted(set(np.unique(labels).tolist()) - set(listed))
    if left_out:
        raise DataError(f"labels {left_out} are not in any group; add them, or drop their samples first")
    rows = [np.flatnonzero(np.isin(labels, list(group))) for group in groups]
    for group, found in zip(groups, rows, strict=True):
        if len(found) == 0:
            raise DataError(f"no sample has a label of the group {list(group)}; check the groups")
    return rows


def client_names(count: int) -> list[str]:
    """Ids for a number of clients.

    >>> client_names(11)[:2]
    ['c00', 'c01']
    """
    width = len(str(count - 1))
    return [f"c{i:0{width}}" for i in range(count)]
