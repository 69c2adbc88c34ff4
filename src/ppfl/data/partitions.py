"""Partitions divide the rows of pooled data among clients that differ in a known way, by their labels."""

from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import AfterValidator

from ppfl.core.registry import Functions
from ppfl.core.settings import Count, CountOrZero, Positive
from ppfl.data.arrays import as_targets
from ppfl.data.federation import Assignment, Truth
from ppfl.errors import DataError

MNIST_GROUPS = ((0, 6), (5, 8), (2, 3, 9), (1, 4, 7))  # of the paper

Groups = Annotated[Sequence[Sequence[CountOrZero]], AfterValidator(lambda groups: tuple(map(tuple, groups)))]
_Integers = np.ndarray[Any, np.dtype[np.int64]]
_Table = np.ndarray[Any, np.dtype[np.float64]]

PARTITIONS = Functions("partition", "data.partition", given=("y", "seed"), error=DataError)


@PARTITIONS.register("label_groups")
def label_groups(
    y: Any, groups: Groups = MNIST_GROUPS, clients: Count | tuple[Count, ...] = 25, seed: int = 0
) -> Assignment:
    """Clients that have labels of one group only (Table 1): the samples of a group are shuffled and split evenly.

    Args:
        y: The labels of all samples.
        groups: The labels of each group. Every label belongs to one group.
        clients: How many clients each group has: one number for all groups, or one number per group.
        seed: Seeds the shuffle.

    >>> clients = label_groups([0, 1, 2, 3] * 3, groups=[[0, 1], [2, 3]], clients=2)
    >>> clients.ids
    ('g0-c0', 'g0-c1', 'g1-c0', 'g1-c1')
    >>> clients.truth.memberships.argmax(1)
    tensor([0, 0, 1, 1])
    """
    rows = _rows_of_groups(_labels(y), groups)
    asked = [clients] * len(groups) if isinstance(clients, int) else list(clients)
    if len(asked) != len(groups):
        raise DataError(f"clients lists {len(asked)} numbers for {len(groups)} groups; give one number per group")
    for g, (own, count) in enumerate(zip(rows, asked, strict=True)):
        if not 1 <= count <= len(own):
            raise DataError(f"group {g} has {len(own)} samples, too few for {count} clients; ask for fewer")
    sizes = [_even_sizes(len(own), count)[:, None] for own, count in zip(rows, asked, strict=True)]
    counts: _Integers = torch.block_diag(*map(torch.from_numpy, sizes)).numpy()  # type: ignore[no-untyped-call]
    ids = tuple(f"g{g}-{name}" for g, count in enumerate(asked) for name in client_names(count))
    return _assign(rows, counts, np.random.default_rng(seed), ids, "label group")


@PARTITIONS.register("dirichlet_sources")
def dirichlet_sources(
    y: Any, groups: Groups = MNIST_GROUPS, clients: Count = 100, alpha: Positive = 0.5, seed: int = 0
) -> Assignment:
    """Clients of equal size that mix the label groups ("sources") in Dirichlet(alpha) proportions (Table 2).

    The paper says that samples are distributed to clients "following a Dirichlet distribution". Here each client draws
    its shares of the sources, and all clients have the same size, so that alpha changes the heterogeneity only. Every
    sample is used once. The truth is the mixture of the samples that each client actually has.

    Args:
        y: The labels of all samples.
        groups: The labels of each source. Every label belongs to one source.
        clients: Number of clients.
        alpha: Concentration of the Dirichlet distribution: clients differ more where it is small.
        seed: Seeds the draws.

    >>> dirichlet_sources([0, 1, 2] * 20, [[0], [1, 2]], clients=3, alpha=1.0).sizes.tolist()
    [20, 20, 20]
    """
    rows = _rows_of_groups(_labels(y), groups)
    rng = np.random.default_rng(seed)
    counts = equal_sizes(np.array([len(r) for r in rows]), clients, alpha, rng)
    return _assign(rows, counts, rng, client_names(clients), "source")


@PARTITIONS.register("dirichlet_labels")
def dirichlet_labels(
    y: Any, clients: Count = 100, alpha: Positive = 0.5, seed: int = 0, *, min_samples: Count = 10
) -> Assignment:
    """Label skew: the samples of each label are split among the clients in Dirichlet(alpha) shares.

    Args:
        y: The labels of all samples.
        clients: Number of clients.
        alpha: Concentration of the Dirichlet distribution: clients differ more where it is small.
        seed: Seeds the draws.
        min_samples: A client that would get fewer samples takes the missing ones from the largest client.

    >>> sizes = dirichlet_labels([0, 1, 2] * 30, clients=4, alpha=0.3).sizes
    >>> int(sizes.sum()), int(sizes.min()) >= 10
    (90, True)
    """
    labels = _labels(y)
    rows = [np.flatnonzero(labels == label) for label in np.unique(labels)]
    rng = np.random.default_rng(seed)
    counts = random_sizes(np.array([len(r) for r in rows]), clients, alpha, rng, min_samples)
    return _assign(rows, counts, rng, client_names(clients))


@PARTITIONS.register("iid")
def iid(y: Any, clients: Count = 100, seed: int = 0) -> Assignment:
    """Clients with the same distribution: the samples are shuffled and split evenly.

    >>> iid([0, 1] * 5, clients=3).ids
    ('c0', 'c1', 'c2')
    """
    n = len(y)
    if not 1 <= clients <= n:
        raise DataError(f"{clients} clients for {n} samples; ask for 1 to {n}")
    counts = _even_sizes(n, clients)[:, None]
    return _assign([np.arange(n)], counts, np.random.default_rng(seed), client_names(clients))


def client_names(count: int) -> tuple[str, ...]:
    """Ids for a number of clients.

    >>> client_names(11)[:2]
    ('c00', 'c01')
    """
    width = len(str(count - 1))
    return tuple(f"c{i:0{width}}" for i in range(count))


def equal_sizes(supply: _Integers, clients: int, alpha: float, rng: np.random.Generator) -> _Integers:
    """The samples of each source for clients of equal size, each with its own Dirichlet(alpha) mixture: counts (M, S).

    Independent draws would need more samples of some sources than there are. Raking multiplies the share of each
    source by one factor, the same for every client, until demand equals supply. The result is the table closest to
    the draws (in relative entropy) that uses every sample, and it does not depend on the order of the clients.

    >>> counts = equal_sizes(np.array([30, 60]), 3, 1.0, np.random.default_rng(0))
    >>> counts.sum(0).tolist(), counts.sum(1).tolist()
    ([30, 60], [30, 30, 30])
    """
    _check(supply, clients, alpha, 1)
    sizes = _even_sizes(int(supply.sum()), clients)
    drawn = np.maximum(rng.dirichlet(np.full(len(supply), alpha), clients), 1e-12)
    return _round_to_counts(_rake(drawn, sizes, supply), sizes, supply)


def random_sizes(
    supply: _Integers, clients: int, alpha: float, rng: np.random.Generator, min_samples: int
) -> _Integers:
    """The samples of each source, split among the clients in Dirichlet(alpha) shares: counts (M, S), sizes vary.

    A client with fewer than `min_samples` takes the missing samples from the largest client.

    >>> counts = random_sizes(np.array([30, 60]), 3, 0.2, np.random.default_rng(0), min_samples=5)
    >>> counts.sum(0).sum(), counts.sum(1).min() >= 5
    (np.int64(90), np.True_)
    """
    _check(supply, clients, alpha, min_samples)
    shares = rng.dirichlet(np.full(clients, alpha), len(supply))
    counts = np.stack([rng.multinomial(n, share) for n, share in zip(supply, shares, strict=True)], axis=1)
    while (sizes := counts.sum(1)).min() < min_samples:
        largest = sizes.argmax()
        source = counts[largest].argmax()
        counts[largest, source] -= 1
        counts[sizes.argmin(), source] += 1
    return counts


def _rake(weights: _Table, sizes: _Integers, supply: _Integers, sweeps: int = 2000) -> _Table:
    table = weights
    for _ in range(sweeps):
        table = table * (sizes / table.sum(1))[:, None]
        factor = supply / table.sum(0)
        table = table * factor
        if np.abs(factor - 1).max() < 1e-9:
            break
    return table


def _round_to_counts(table: _Table, sizes: _Integers, supply: _Integers) -> _Integers:
    """Round to whole samples with the same sums: round down, then give the rest to the largest fractions."""
    counts = np.floor(table + 1e-9).astype(np.int64)
    missing, left = sizes - counts.sum(1), supply - counts.sum(0)
    fractions = table - counts
    for cell in np.argsort(-fractions, axis=None, kind="stable"):
        i, s = divmod(int(cell), len(supply))
        if missing[i] > 0 and left[s] > 0:
            counts[i, s] += 1
            missing[i] -= 1
            left[s] -= 1
    for s in range(len(supply)):  # the few samples that are still left
        for _ in range(left[s]):
            i = int(missing.argmax())
            counts[i, s] += 1
            missing[i] -= 1
    return counts


def _check(supply: _Integers, clients: int, alpha: float, min_samples: int) -> None:
    if not (np.isfinite(alpha) and alpha > 0):
        raise DataError(f"alpha is {alpha}; a Dirichlet distribution needs a positive number, such as 0.5")
    if clients < 1 or supply.sum() < clients * min_samples:
        raise DataError(
            f"{supply.sum()} samples cannot give {clients} clients at least {min_samples} each; "
            f"ask for fewer clients or a lower min_samples"
        )


def _even_sizes(n: int, clients: int) -> _Integers:
    return n // clients + (np.arange(clients) < n % clients)


def _assign(
    rows: list[_Integers], counts: _Integers, rng: np.random.Generator, ids: tuple[str, ...], truth: str = ""
) -> Assignment:
    """Shuffle the rows of each source and give them to the clients according to the counts (M, S).

    truth: what a source is, where the shares of the sources are the true memberships.
    """
    clients = np.empty(sum(map(len, rows)), dtype=np.int64)
    for own, column in zip(rows, counts.T, strict=True):
        clients[rng.permutation(own)] = np.repeat(np.arange(len(counts)), column)
    shares = torch.from_numpy((counts / counts.sum(1, keepdims=True)).astype(np.float32))
    return Assignment(torch.from_numpy(clients), ids, Truth(shares, truth) if truth else None)


def _labels(y: Any) -> _Integers:
    labels, _ = as_targets(y)
    if labels.is_floating_point():
        raise DataError("y contains float targets, but a partition by label needs labels; use iid")
    array: _Integers = labels.numpy()
    return array


def _rows_of_groups(labels: _Integers, groups: Groups) -> list[_Integers]:
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
