"""A message of Flower arrives object by object; each of them, and all together, have a largest size.

Flower's own functions wait up to two hours for an object that never comes, as when the sender was killed while it sent,
and pause for a second or more where it is just on its way. Here nobody waits: what has arrived is taken.
"""

from __future__ import annotations

from typing import Any

from .envelope import MOST_BYTES
from .federation_errors import FederationError

MOST_OBJECT_BYTES = 8 << 20  # Flower cuts arrays into pieces of 5 MB
WRAPPING_BYTES = 1 << 16  # of a message besides our own bytes


class LostMessageError(FederationError):
    """A message whose objects are gone: who sent it did not finish."""


def bound_responses(client: Any) -> None:
    """Refuse a response of Flower that is too large when its headers are there, before its body is read."""

    def refuse_large(response: Any) -> None:
        announced = int(response.headers.get("content-length", 0))
        if announced > MOST_OBJECT_BYTES:
            raise FederationError(f"an object of {announced:,} bytes; at most {MOST_OBJECT_BYTES:,} are taken")

    client._client.event_hooks = {"response": [refuse_large]}


class IncomingMessage:
    """A message that a SuperLink or a SuperNode has for us."""

    def __init__(
        self, client: Any, node_id: int, run_id: int, proto: Any, tree: Any, most_bytes: int = MOST_BYTES
    ) -> None:
        from flwr.supercore.inflatable.inflatable_object import iterate_object_tree

        self._client, self._node_id, self._run_id, self._most_bytes = client, node_id, run_id, most_bytes
        self.id: str = proto.metadata.message_id
        self.answers: str = proto.metadata.reply_to_message_id
        self._missing = list(dict.fromkeys(one.object_id for one in iterate_object_tree(tree)))
        self._contents: dict[str, bytes] = {}

    def receive(self) -> Any | None:
        """Take what has arrived: the message once it is whole, until then None."""
        from flwr.proto.message_pb2 import PullObjectRequest
        from flwr.proto.node_pb2 import Node
        from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

        node = Node(node_id=self._node_id)
        while self._missing:
            asked = PullObjectRequest(node=node, run_id=self._run_id, object_id=self._missing[-1])
            found = self._client.PullObject(asked)
            if not found.object_found:
                raise LostMessageError("it was not sent to its end")
            if not found.object_available:
                return None
            self._contents[self._missing.pop()] = found.object_content
            self._refuse_large()
        self.drop()
        try:
            message: Any = inflate_object_from_contents(self.id, self._contents)
        except Exception as error:  # whatever somebody else sent
            raise FederationError(f"a message that Flower cannot read ({error!r:.200})") from None
        message.metadata.__dict__["_message_id"] = self.id
        return message

    def drop(self) -> None:
        """Let Flower forget the objects."""
        from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest
        from flwr.proto.node_pb2 import Node

        node = Node(node_id=self._node_id)
        confirmed = ConfirmMessageReceivedRequest(node=node, run_id=self._run_id, message_object_id=self.id)
        self._client.ConfirmMessageReceived(confirmed)

    def _refuse_large(self) -> None:
        size = sum(map(len, self._contents.values()))
        if size > self._most_bytes + WRAPPING_BYTES:
            raise FederationError(f"a message of more than {self._most_bytes:,} bytes; no more are taken")
