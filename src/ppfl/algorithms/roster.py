"""The clients that a server knows by name, and draws among them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from ..core.client_names import as_ids, client_keys, positions_of
from ..core.draws import hashed

Positions = Tensor | slice


class Roster:
    """The clients that a server knows by name, in the order of its rows."""

    def __init__(self, ids: Sequence[str]) -> None:
        self.ids = as_ids(ids)

    def __len__(self) -> int:
        return len(self.ids)

    @cached_property
    def keys(self) -> Tensor:
        """(M,) keys of the names, for draws."""
        return client_keys(self.ids)

    @cached_property
    def position(self) -> Mapping[str, int]:
        """Where each client stands."""
        return positions_of(self.ids)

    def positions(self, ids: Sequence[str] | None) -> Positions:
        """Where these clients stand; None: all of them, in order."""
        if ids is None or as_ids(ids) == self.ids:
            return slice(None)
        return torch.tensor([self.position[name] for name in ids], dtype=torch.long)

    def rows(self, table: Tensor, ids: Sequence[str] | None, default: float) -> Tensor:
        """The rows of a table (M, ...) that belong to these clients; `default` for those that are not known."""
        if ids is None or as_ids(ids) == self.ids:
            return table[:]
        at = torch.tensor([self.position.get(name, -1) for name in ids], dtype=torch.long, device=table.device)
        found = table[at] if len(table) else table.new_empty(len(ids), *table.shape[1:])
        found[at < 0] = default
        return found


@lru_cache(maxsize=4)  # a round asks several times
def drawn_ids(roster: Roster, seed: int, round: int, count: int) -> tuple[str, ...]:
    return tuple(roster.ids[at] for at in drawn_positions(roster, seed, round, count).tolist())


@lru_cache(maxsize=4)
def drawn_positions(roster: Roster, seed: int, round: int, count: int) -> Tensor:
    """Where the `count` clients with the smallest draws stand."""
    draws = hashed(seed, "participants", round, roster.keys)
    # draws are even over 64 bits; among ten million, topk of the few that can be smallest is 50 times as fast
    below = (draws < int(2**64 * min(1.0, 2 * count / len(draws)) - 2**63)).nonzero()[:, 0]
    candidates = below if len(below) >= count else torch.arange(len(draws))
    return candidates[draws[candidates].topk(count, largest=False).indices].sort().values
