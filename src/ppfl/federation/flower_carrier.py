"""Bytes through Flower's Grid, and how they are packed in its messages."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from .carrier import Delivery, OnlineSite
from .federation_errors import FederationError

log = logging.getLogger("ppfl.federation")

FIELD = "ppfl"  # of a Flower message: our bytes
LIFETIME = 24 * 3600.0  # seconds after which a message that nobody took is dropped


def key_bytes(public_key: bytes) -> bytes:
    """A public key as Flower has it, from the OpenSSH format."""
    from cryptography.hazmat.primitives.serialization import load_ssh_public_key
    from flwr.supercore.primitives.asymmetric import public_key_to_bytes

    key: Any = load_ssh_public_key(public_key)
    found: bytes = public_key_to_bytes(key)
    return found


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
    """A Grid as a carrier. A site is known by its key: whoever reaches a SuperLink may register under any name."""

    def __init__(self, grid: Any, public_keys: Mapping[str, bytes]) -> None:
        """public_keys: of each site that may take part, in the OpenSSH format."""
        self.grid = grid
        self._names = {key_bytes(key): name for name, key in public_keys.items()}
        self._strangers: set[int] = set()

    def online(self) -> Mapping[str, OnlineSite]:
        found: dict[str, OnlineSite] = {}
        for node in self.grid.get_nodes():
            if (name := self._names.get(node.public_key)) is not None:
                found[name] = OnlineSite(node.node_id, node.last_activated_at)
            elif node.node_id not in self._strangers:
                self._strangers.add(node.node_id)
                log.warning("a site with an unknown key is online as %r; nothing is sent to it", node.name)
        return found

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
