"""The state from which a run can be resumed."""

from __future__ import annotations

from typing import Any, NamedTuple

from pydantic import BaseModel, NonNegativeInt
from torch import Tensor

from ..server import Kept, ServerState


class Checkpoint(NamedTuple):
    """Where a run can be resumed: after the last round that is recorded in full."""

    state: ServerState
    clients: dict[str, Tensor]  # their states by name, leaves (M, ...) in the order of clients.json
    kept: Kept  # the state to return so far
    kept_clients: dict[str, Tensor]

    @property
    def numbers(self) -> CheckpointNumbers:
        """All but the tensors."""
        state, kept = self.state, self.kept.state
        return CheckpointNumbers(
            round=state.round, exchange=state.exchange, kept_round=kept.round, kept_exchange=kept.exchange,
            criterion=self.kept.criterion,
        )  # fmt: skip

    @classmethod
    def of(cls, numbers: CheckpointNumbers, tensors: dict[str, Any]) -> Checkpoint:
        """Put together again, from `tensors` as `tensors` has them."""
        now, kept = tensors["state"], tensors.get("kept", tensors["state"])
        state = ServerState(numbers.round, numbers.exchange, now["server"])
        kept_state = ServerState(numbers.kept_round, numbers.kept_exchange, kept["server"])
        return cls(state, now["clients"], Kept(kept_state, numbers.criterion), kept["clients"])

    @property
    def tensors(self) -> dict[str, Any]:
        """As a tree; the kept state only where it is another one."""
        parts = {"state": {"server": self.state.server, "clients": self.clients}}
        if self.numbers.has_kept:
            parts["kept"] = {"server": self.kept.state.server, "clients": self.kept_clients}
        return parts


class CheckpointNumbers(BaseModel):
    """What a checkpoint says of itself."""

    round: NonNegativeInt
    exchange: NonNegativeInt
    kept_round: NonNegativeInt
    kept_exchange: NonNegativeInt
    criterion: float

    @property
    def has_kept(self) -> bool:
        """Whether the kept state is another one than the last."""
        return self.kept_round != self.round
