"""The number of samples each client gets from each source: counts (M, S) that use every sample once."""

from typing import Any

import numpy as np

from ppfl.errors import DataError

Counts = np.ndarray[Any, np.dtype[np.int64]]
_Table = np.ndarray[Any, np.dtype[np.float64]]


def equal_sizes(supply: Counts, clients: int, alpha: float, rng: np.random.Generator) -> Counts:
    """Clients of equal size, each with its own Dirichlet(alpha) mixture of the sources.

    Independent draws would need more samples of some sources than there are. Raking multiplies the share of each
    source by one factor, the same for every client, until demand equals supply. The result is the table closest to
    the draws (in relative entropy) that uses every sample, and it does not depend on the order of the clients.

    >>> counts = equal_sizes(np.array([30, 60]), 3, 1.0, np.random.default_rng(0))
    >>> counts.sum(0).tolist(), counts.sum(1).tolist()
    ([30, 60], [30, 30, 30])
    """
    _check(supply, clients, alpha, 1)
    total = int(supply.sum())
    sizes = total // clients + (np.arange(clients) < total % clients)
    drawn = np.maximum(rng.dirichlet(np.full(len(supply), alpha), clients), 1e-12)
    return _round_to_counts(_rake(drawn, sizes, supply), sizes, supply)


def random_sizes(supply: Counts, clients: int, alpha: float, rng: np.random.Generator, min_samples: int) -> Counts:
    """The samples of each source are split among the clients in Dirichlet(alpha) shares; client sizes vary.

    A client with fewer than `min_samples` takes the missing samples from the largest client.

    >>> counts = random_sizes(np.array([30, 60]), 3, 0.2, np.random.default_rng(0), min_samples=5)
    >>> counts.sum(0).sum(), counts.sum(1).min() >= 5
    (np.int64(90), np.True_)
    """
    _check(supply, clients, alpha, min_samples)
    shares = rng.dirichlet(np.full(clients, alpha), len(supply))
    counts = np.stack([rng.multinomial(n, share) for n, share in zip(supply, shares, strict=True)], axis=1)
    sizes = counts.sum(1)
    while sizes.min() < min_samples:
        smallest, largest = sizes.argmin(), sizes.argmax()
        source = counts[largest].argmax()
        counts[largest, source] -= 1
        counts[smallest, source] += 1
        sizes[largest] -= 1
        sizes[smallest] += 1
    return counts


def _rake(weights: _Table, sizes: Counts, supply: Counts, sweeps: int = 2000) -> _Table:
    table = weights
    for _ in range(sweeps):
        table = table * (sizes / table.sum(1))[:, None]
        factor = supply / table.sum(0)
        table = table * factor
        if np.abs(factor - 1).max() < 1e-9:
            break
    return table


def _round_to_counts(table: _Table, sizes: Counts, supply: Counts) -> Counts:
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


def _check(supply: Counts, clients: int, alpha: float, min_samples: int) -> None:
    if not (np.isfinite(alpha) and alpha > 0):
        raise DataError(f"alpha is {alpha}; a Dirichlet distribution needs a positive number, such as 0.5")
    if clients < 1 or supply.sum() < clients * min_samples:
        raise DataError(
            f"{supply.sum()} samples cannot give {clients} clients at least {min_samples} each; "
            f"ask for fewer clients or a lower min_samples"
        )
