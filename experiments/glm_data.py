"""A table with a client column, and its division into rows to fit and rows held out."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pandas as pd

Array = np.ndarray


class Table(NamedTuple):
    family: str  # gaussian, bernoulli, poisson or choice
    x: pd.DataFrame
    y: Array
    clients: Array
    situations: Array | None = None  # for choices: rows of one situation are alternatives

    @property
    def n_clients(self) -> int:
        return len(np.unique(self.clients))

    @property
    def slopes(self) -> list[int]:
        """Columns that vary within clients, which can have a random slope."""
        spread = self.x.groupby(self.clients).std().fillna(0.0)
        return [i for i, name in enumerate(self.x) if (spread[name] > 0).mean() > 0.5]

    def rows_by_client(self) -> dict[object, Array]:
        """The positions of each client's rows."""
        return pd.Series(self.clients).groupby(self.clients).indices

    def take(self, chosen: Array) -> Table:
        """Some rows, by position or as a mask."""
        situations = None if self.situations is None else self.situations[chosen]
        return Table(self.family, self.x.iloc[chosen], self.y[chosen], self.clients[chosen], situations)


def held_out(table: Table, fraction: float, seed: int) -> Array:
    """A mask with the same fraction of every client's rows, or of its situations."""
    random = np.random.default_rng(seed)
    unit = np.arange(len(table.y)) if table.situations is None else table.situations
    _, first = np.unique(unit, return_index=True)
    chosen = []
    for client in np.unique(table.clients):
        own = unit[first[table.clients[first] == client]]
        chosen.append(random.permutation(own)[: round(fraction * len(own))])
    return np.isin(unit, np.concatenate(chosen))


def standardise(train: Table, test: Table) -> tuple[Table, Table]:
    """Both tables, standardised by the training rows."""
    mean, scale = train.x.mean(), train.x.std(ddof=0)
    scale[scale == 0] = 1.0
    return train._replace(x=(train.x - mean) / scale), test._replace(x=(test.x - mean) / scale)
