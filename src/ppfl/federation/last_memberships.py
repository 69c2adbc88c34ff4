"""Clients of sites that are absent keep the memberships that they last reported."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..algorithms.contract import Rows
from ..core.ids import ClientIds


class LastMemberships:
    """As last reported, by client."""

    def __init__(self) -> None:
        self._memberships: dict[str, Tensor] = {}

    def with_absent(self, rows: Rows, all_ids: ClientIds, absent: Sequence[str]) -> Rows:
        """Scores of no samples for clients that are not there, and their memberships as last reported."""
        ids = all_ids if rows.ids is None else rows.ids
        if (c := rows.values.get("membership")) is not None:
            self._memberships |= dict(zip(ids, c, strict=True))
        if not absent:
            return rows

        def filled(name: str, leaf: Tensor) -> Tensor:
            if name == "membership":
                even = torch.full_like(leaf[0], 1 / leaf.shape[1])
                return torch.cat([leaf, torch.stack([self._memberships.get(client, even) for client in absent])])
            return torch.cat([leaf, leaf.new_full((len(absent), *leaf.shape[1:]), float("nan"))])

        return Rows((*ids, *absent), {name: filled(name, leaf) for name, leaf in rows.values.items()})
