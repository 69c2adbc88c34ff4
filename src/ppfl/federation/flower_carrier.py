"""Bytes through Flower's Grid, and how they are packed in its messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .carrier import Delivery, OnlineSite
from .federation_errors import FederationError

FIELD = "ppfl"  # of a Flower message: our bytes
LIFETIME = 24 * 3600.0  # seconds after which a message that nobody took is dropped


def to_flower(data: bytes) -> Any:
    """Bytes as the content of a Flower message; an Array, as Flower carries those in pieces where they are large."""
    from flwr.app import Array, ArrayRecord, RecordDict

    array = Array(dtype="uint8", shape=(len(data),), stype=FIELD, data=data)
    return RecordDict({FIELD: ArrayRecord({FIELD: array})})


def from_flower(content: Any) -> bytes:
    """The bytes in a Flower message."""
    try:
        data: bytes = content.array_records[FIELD][FIELD].data
        return data
    except (AttributeError, KeyError):
        raise FederationError("a message of Flower without ppfl's content; is the other side another app?") from None


class FlowerCarrier:
    """A Grid as a carrier."""

    def __init__(self, grid: Any) -> None:
        self.grid = grid

    def online(self) -> Mapping[str, OnlineSite]:
        nodes = self.grid.get_nodes()
        return {node.name: OnlineSite(node.node_id, node.last_activated_at) for node in nodes if node.name}

    def push(self, messages: Mapping[int, bytes]) -> Mapping[int, str]:
        from flwr.app import Message

        sent = [Message(to_flower(data), address, "query", ttl=LIFETIME) for address, data in messages.items()]
        ids = self.grid.push_messages(sent)  # what they hold is sent piece by piece, side by side
        return {address: message for address, message in zip(messages, ids, strict=True) if message}

    def pull(self, messages: Sequence[str]) -> Sequence[Delivery]:
        return [_delivery(message) for message in self.grid.pull_messages(list(messages))]


def _delivery(message: Any) -> Delivery:
    answered = message.metadata.reply_to_message_id
    if message.has_error():
        return Delivery(answered, None, f"{message.error.reason} (code {message.error.code})")
    try:
        return Delivery(answered, from_flower(message.content))
    except FederationError as error:
        return Delivery(answered, None, str(error))
