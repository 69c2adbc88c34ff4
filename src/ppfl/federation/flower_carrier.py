"""Bytes through Flower's Grid, and how they are packed in its messages."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from .carrier import Delivery, OnlineSite
from .envelope import MOST_BYTES
from .federation_errors import FederationError
from .flower_objects import IncomingMessage, LostMessageError

log = logging.getLogger("ppfl.federation")

FIELD = "ppfl"  # of a Flower message: our bytes
LIFETIME = 24 * 3600.0  # seconds after which a message that nobody took is dropped
ONE_PIECE = 4 << 20  # bytes up to which a message is not cut into pieces


def key_bytes(public_key: bytes) -> bytes:
    """A public key as Flower has it, from the OpenSSH format."""
    from cryptography.hazmat.primitives.serialization import load_ssh_public_key
    from flwr.supercore.primitives.asymmetric import public_key_to_bytes

    key: Any = load_ssh_public_key(public_key)
    found: bytes = public_key_to_bytes(key)
    return found


def to_flower(data: bytes) -> Any:
    """Bytes as the content of a Flower message: in one piece, or, where they are many, as an Array, which Flower cuts
    into pieces. Each piece, and each record around it, is a request of its own, and a transaction at the SuperLink."""
    from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

    if len(data) <= ONE_PIECE:
        return RecordDict({FIELD: ConfigRecord({FIELD: data})})
    array = Array(dtype="uint8", shape=(len(data),), stype=FIELD, data=data)
    return RecordDict({FIELD: ArrayRecord({FIELD: array})})


def from_flower(content: Any) -> bytes:
    """The bytes in a Flower message."""
    try:
        small = content.config_records.get(FIELD)
        data = content.array_records[FIELD][FIELD].data if small is None else small[FIELD]
    except (AttributeError, KeyError):
        data = None
    if not isinstance(data, bytes):
        raise FederationError("a message of Flower without ppfl's content; is the other side another app?")
    return data


@contextmanager
def superlink_errors() -> Iterator[None]:
    """One line for whatever a SuperLink does not do."""
    import httpx
    from flwr.supercore.inflatable.inflatable_utils import ObjectPushError

    try:
        yield
    except (httpx.HTTPError, ObjectPushError) as error:
        if isinstance(error, httpx.HTTPStatusError) and error.response.status_code in (401, 403):
            raise FederationError(
                "the SuperLink has ended this run: another server began one, or it heard nothing of this one for a "
                "minute; resume"
            ) from None
        said = " ".join(str(error).split())[:300] or type(error).__name__
        raise FederationError(f"the SuperLink does not answer ({said}); look at its log, then resume") from None


class FlowerCarrier:
    """A Grid as a carrier. A site is known by its key: whoever reaches a SuperLink may register under any name."""

    def __init__(self, grid: Any, public_keys: Mapping[str, bytes], most_bytes: int = MOST_BYTES) -> None:
        """public_keys: of each site that may take part, in the OpenSSH format."""
        self.grid, self.most_bytes = grid, most_bytes
        self._names = {key_bytes(key): name for name, key in public_keys.items()}
        self._strangers: set[int] = set()
        self._arriving: list[IncomingMessage] = []

    def online(self) -> Mapping[str, OnlineSite]:
        found: dict[str, OnlineSite] = {}
        with superlink_errors():
            nodes = self.grid.get_nodes()
        for node in nodes:
            if (name := self._names.get(node.public_key)) is not None:
                found[name] = OnlineSite(node.node_id, node.last_activated_at)
            elif node.node_id not in self._strangers:
                self._strangers.add(node.node_id)
                log.warning("a site with an unknown key is online as %r; nothing is sent to it", node.name)
        return found

    def push(self, messages: Mapping[int, bytes]) -> Mapping[int, str]:
        from flwr.app import Message

        sent = [Message(to_flower(data), address, "query", ttl=LIFETIME) for address, data in messages.items()]
        with superlink_errors():
            ids = self.grid.push_messages(sent)  # what they hold is sent piece by piece, side by side
        return {address: message for address, message in zip(messages, ids, strict=True) if message}

    def pull(self, messages: Sequence[str]) -> Sequence[Delivery]:
        from flwr.proto.runtime_pb2 import PullAppMessagesRequest

        client, run_id = self.grid._runtime_client, self.grid.run.run_id
        on_their_way = {one.answers for one in self._arriving}
        # a SuperLink hands out a message once: asked again, it says that there is none
        asked = [message for message in messages if message not in on_their_way]
        with superlink_errors():
            if asked:
                found = client.PullMessages(PullAppMessagesRequest(message_ids=asked))
                self._arriving += [
                    IncomingMessage(client, self.grid.node.node_id, run_id, proto, tree, self.most_bytes)
                    for proto, tree in zip(found.messages_list, found.message_object_trees, strict=True)
                ]
            seen = [(one, _receive(one)) for one in self._arriving]
        self._arriving = [one for one, delivery in seen if delivery is None]
        return [delivery for _, delivery in seen if delivery is not None]


def _receive(one: IncomingMessage) -> Delivery | None:
    """What a message says; None where parts of it are still on their way."""
    try:
        message = one.receive()
        if message is None:
            return None
        if message.has_error():
            return Delivery(one.answers, None, f"{message.error.reason} (code {message.error.code})")
        return Delivery(one.answers, from_flower(message.content))
    except LostMessageError as error:
        return Delivery(one.answers, None, str(error))
    except FederationError as error:
        one.drop()
        return Delivery(one.answers, b"", str(error))
