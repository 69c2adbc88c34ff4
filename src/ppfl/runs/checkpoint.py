"""A checkpoint as a file has it: numbers, and a tree of tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from pydantic import BaseModel, NonNegativeInt

from ..algorithms.contract import Roster, Rows
from ..core.ids import ClientIds, positions_of
from ..core.trees import Tree, named_leaves, tree_map
from ..errors import CheckpointError
from ..server import Checkpoint, Kept, ServerState
from ..sites import SavedStates
from ..sites.filters import FilterMemory

AT = "at"  # the part of a file that says whose rows of `clients` it has


def numbers_of(checkpoint: Checkpoint) -> CheckpointNumbers:
    """All of a checkpoint but its tensors."""
    state, kept = checkpoint.state, checkpoint.kept.state
    return CheckpointNumbers(
        round=state.round, exchange=state.exchange, kept_round=kept.round, kept_exchange=kept.exchange,
        criterion=checkpoint.kept.criterion, clients=checkpoint.clients.rows.n_clients,
        kept_clients=checkpoint.kept_clients.rows.n_clients, filters=checkpoint.clients.filters,
        kept_filters=checkpoint.kept_clients.filters,
    )  # fmt: skip


def tensors_of(checkpoint: Checkpoint) -> dict[str, Any]:
    """The tensors of a checkpoint as a tree; of the kept state only where it is another one."""
    (state, clients, kept, kept_clients, roster) = checkpoint
    parts = {"state": {"server": state.server, **with_positions(clients.rows, roster.ids)}}
    if kept.state.round != state.round:
        parts["kept"] = {"server": kept.state.server, **with_positions(kept_clients.rows, roster.ids)}
    return parts


def make_checkpoint(numbers: CheckpointNumbers, tensors: dict[str, Any], roster: Roster) -> Checkpoint:
    """Put together again what `numbers_of` and `tensors_of` took apart."""
    now, kept = tensors["state"], tensors.get("kept", tensors["state"])
    state = ServerState(numbers.round, numbers.exchange, now["server"])
    kept_state = ServerState(numbers.kept_round, numbers.kept_exchange, kept["server"])
    clients = SavedStates(rows_at(now, roster.ids), numbers.filters)
    kept_clients = SavedStates(rows_at(kept, roster.ids), numbers.kept_filters)
    return Checkpoint(state, clients, Kept(kept_state, numbers.criterion), kept_clients, roster)


class CheckpointNumbers(BaseModel):
    """What a checkpoint says of itself."""

    round: NonNegativeInt
    exchange: NonNegativeInt
    kept_round: NonNegativeInt
    kept_exchange: NonNegativeInt
    criterion: float
    clients: NonNegativeInt  # that have a row
    kept_clients: NonNegativeInt
    filters: dict[str, FilterMemory]
    kept_filters: dict[str, FilterMemory]

    @property
    def has_kept(self) -> bool:
        """Whether the kept state is another one than the last."""
        return self.kept_round != self.round

    def template(self, server: Tree, client: Tree) -> dict[str, Any]:
        """What the tensors look like, given a server's state and the state that every client begins with."""
        parts = {"state": {"server": server, **rows_like(client, self.clients)}}
        if self.has_kept:
            parts["kept"] = {"server": server, **rows_like(client, self.kept_clients)}
        return parts


def with_positions(rows: Rows, ids: ClientIds) -> dict[str, Any]:
    """Rows of some of these clients as a file has them: the values, and where their clients stand among all."""
    if rows.ids == ids:
        return {"clients": rows.values, AT: torch.arange(len(ids))}
    where = positions_of(ids)
    return {"clients": rows.values, AT: torch.tensor([where[client] for client in rows.ids or ()], dtype=torch.long)}


def rows_at(found: Mapping[str, Any], ids: ClientIds) -> Rows:
    """The rows that `with_positions` took apart."""
    at = found[AT].tolist()
    if not all(0 <= position < len(ids) for position in at) or len(set(at)) < len(at):
        raise CheckpointError(f"client states are of other clients than the {len(ids)} that are known; start again")
    return Rows(ids if at == [*range(len(ids))] else tuple(ids[position] for position in at), found["clients"])


def rows_like(client: Tree, clients: int) -> dict[str, Any]:
    """What `with_positions` gives for so many clients, given the state that every client begins with."""
    rows = tree_map(lambda leaf: leaf.expand(clients, *leaf.shape), client)
    return {"clients": named_leaves(rows), AT: torch.zeros(clients, dtype=torch.long)}
