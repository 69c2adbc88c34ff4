"""How many samples of each source every client gets: a table of counts (M, S) that uses every sample once."""

from typing import Any

import numpy as np

from ppfl.core.errors import DataError

Counts = np.ndarray[Any, np.dtype[np.int64]]
_Table = np.ndarray[Any, np.dtype[np.float64]]


def equal_sizes(supply: Counts, clients: int, alpha: float, rng: np.random.Generator) -> Counts:
    """Clients of one size, each with its own Dirichlet(alpha) mixture of the sources.

    Mixtures drawn freely ask for more of a source than there is. Raking multiplies each source's share by
    one factor, the same for every client, until the demand is the supply: the nearest table to the draw (in
    relative entropy) that uses every sample, and no client is served before another.

    >>> counts = equal_sizes(np.array([30, 60]), 3, 1.0, np.random.default_rng(0))
    >>> counts.sum(0).tolist(), counts.sum(1).tolist()
    ([30, 60], [30, 30, 30])
    """
    _check(supply, clients, alpha, 1)
    total = int(supply.sum())
    sizes = total // clients + (np.arange(clients) < total % clients)
    drawn = np.maximum(rng.dirichlet(np.full(len(supply), alpha), clients), 1e-12)
    return _whole(_raked(drawn, sizes, supply), sizes, supply)


def random_sizes(supply: Counts, clients: int, alpha: float, rng: np.random.Generator, min_samples: int) -> Counts:
    """Each source spreads its samples over the clients in Dirichlet(alpha) shares; client sizes vary.

    Clients below `min_samples` take what they lack from the largest client.

    >>> counts = random_sizes(np.array([30, 60]), 3, 0.2, np.random.default_rng(0), min_samples=5)
    >>> counts.sum(0).sum(), counts.sum(1).min() >= 5
    (np.int64(90), np.True_)
    """
    _check(supply, clients, alpha, min_samples)
    shares = rng.dirichlet(np.full(clients, alpha), len(supply))
    counts = np.stack([rng.multinomial(n, share) for n, share in zip(supply, shares, strict=True)], axis=1)
    sizes = counts.sum(1)
    while sizes.min() < min_samples:
        taker, giver = sizes.argmin(), sizes.argmax()
        source = counts[giver].argmax()
        counts[giver, source] -= 1
        counts[taker, source] += 1
        sizes[giver] -= 1
        sizes[taker] += 1
    return counts


def _raked(weights: _Table, sizes: Counts, supply: Counts, sweeps: int = 2000) -> _Table:
    table = weights
    for _ in range(sweeps):
        table = table * (sizes / table.sum(1))[:, None]
        factor = supply / table.sum(0)
        table = table * factor
        if np.abs(factor - 1).max() < 1e-9:
            break
    return table


def _whole(table: _Table, sizes: Counts, supply: Counts) -> Counts:
    """Round to whole samples with the same sums: floors first, what is left by largest fraction."""
    counts = np.floor(table + 1e-9).astype(np.int64)
    lacking, left = sizes - counts.sum(1), supply - counts.sum(0)
    fractions = table - counts
    for cell in np.argsort(-fractions, axis=None, kind="stable"):
        i, s = divmod(int(cell), len(supply))
        if lacking[i] > 0 and left[s] > 0:
            counts[i, s] += 1
            lacking[i] -= 1
            left[s] -= 1
    for s in range(len(supply)):  # a few units no single fraction could place
        for _ in range(left[s]):
            i = int(lacking.argmax())
            counts[i, s] += 1
            lacking[i] -= 1
    return counts


def _check(supply: Counts, clients: int, alpha: float, min_samples: int) -> None:
    if not (np.isfinite(alpha) and alpha > 0):
        raise DataError(f"alpha is {alpha}; a Dirichlet needs a positive number, such as 0.5")
    if clients < 1 or supply.sum() < clients * min_samples:
        raise DataError(
            f"{supply.sum()} samples cannot give {clients} clients at least {min_samples} each; "
            f"ask for fewer clients or a lower min_samples"
        )
