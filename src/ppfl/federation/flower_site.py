"""A site's end of Flower: the messages that its SuperNode has for it, answered in this very process.

A SuperNode with `--isolation process` starts no process for a message: whoever knows its secret may take it. So the
site that holds the data answers by itself, no code that a server sent is ever installed or run, and no process has to
be started for a message.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from .federation_errors import FederationError
from .flower_carrier import from_flower, to_flower
from .flower_client import Heartbeat, SuperLinkAddress, TaskQueue, runtime_client
from .flower_link import app_hash
from .flower_objects import IncomingMessage, LostMessageError

POLL_SECONDS = 0.1


class SiteConnection(NamedTuple):
    """How a site reaches the server, and proves who it is."""

    superlink: str  # host:port
    authority: Path  # the certificate that the server's must be signed by
    private_key: Path


def last_node_id(supernode_log: Path) -> int | None:
    """The number under which a SuperNode was known, from what it said when it started; None where it never did."""
    text = supernode_log.read_text(errors="replace") if supernode_log.is_file() else ""
    found = re.findall(r"SuperNode ID: (\d+)", text)
    return int(found[-1]) if found else None


def sign_off(connection: SiteConnection, node_id: int) -> None:
    """Tell the SuperLink that a SuperNode of ours which was killed is gone; else it refuses a new one for a minute."""
    import httpx
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key
    from flwr.proto.fleet_pb2 import DeactivateNodeRequest
    from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
    from flwr.supernode.fleet_http_client import FleetHttpClient
    from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

    key: Any = load_ssh_private_key(connection.private_key.read_bytes(), password=None)
    signed = NodeAuthHttpInterceptor(key, key.public_key())
    version = RuntimeVersionHttpInterceptor(component_name="SuperNode")
    authority = connection.authority.read_bytes()
    with (
        suppress(httpx.HTTPError, RuntimeError),  # it was gone already, or the server is not there yet
        FleetHttpClient.from_server_address(connection.superlink, False, authority, [version, signed]) as client,
    ):
        client.DeactivateNode(DeactivateNodeRequest(node_id=node_id))


class StuckSuperNodeError(FederationError):
    """A SuperNode that waits for a reply which will not come; it must be started again."""


class SuperNodeMessages:
    """Takes messages from a SuperNode and answers them."""

    def __init__(self, node: SuperLinkAddress, answer: Callable[[bytes], bytes]) -> None:
        from flwr.supercore.constant import TaskType

        self.node, self.answer, self.accepted = node, answer, app_hash()
        self._queue = TaskQueue(node, TaskType.CLIENT_APP)
        self._next: tuple[Any, str] | None = None  # a task that was taken and not begun
        self.answered = False  # the SuperNode, at least once

    def serve_one(self) -> bool:
        """Answer a message, if there is one."""
        from flwr.supercore.interceptors import RuntimeTokenHttpInterceptor

        found, self._next = self._next or self._queue.take(), None
        self.answered = True
        if found is None:
            return False
        client = runtime_client(self.node, [RuntimeTokenHttpInterceptor(found[1])], retry=False)
        try:
            with Heartbeat(client):
                self._serve(client)
        finally:
            client.close()
        return True

    def _serve(self, client: Any) -> None:
        import httpx
        from flwr.proto.runtime_pb2 import PullTaskInputRequest
        from flwr.supercore.inflatable.inflatable_utils import ObjectPushError
        from flwr.supercore.task_identity import TaskIdentity

        task = None
        try:
            task = client.PullTaskInput(PullTaskInputRequest())
            TaskIdentity.task_id, TaskIdentity.run_id = task.task_id, task.run.run_id  # replies take them from there
            TaskIdentity.node_id = task.context.node_id
            self._answer(client, task, self._receive(client, task))
        except (httpx.HTTPError, ObjectPushError, FederationError) as error:
            if task is None and isinstance(error, httpx.HTTPStatusError):
                return  # the SuperNode has given up this task since
            said = " ".join(str(error).split())[:300] or type(error).__name__
            raise StuckSuperNodeError(f"a message of the SuperNode was not answered: {said}") from error

    def _answer(self, client: Any, task: Any, message: Any | None) -> None:
        from flwr.app import Message
        from flwr.app.error import Error
        from flwr.common.constant import ErrorCode, SubStatus
        from flwr.common.serde import context_from_proto
        from flwr.supernode.runtime.run_clientapp import push_message, push_task_output

        context = context_from_proto(task.context)
        if message is None:
            push_task_output(client, context, SubStatus.FAILED, "the message was not sent to its end")
            return
        if {task.fab.hash_str, task.run.fab_hash} != {self.accepted}:
            said = f"the app {task.fab.hash_str[:12]} is not the one this site accepts ({self.accepted[:12]})"
            reply = Message(Error(code=ErrorCode.INVALID_FAB, reason=said), reply_to=message)
        else:
            reply = Message(to_flower(self.answer(from_flower(message.content))), reply_to=message)
        push_message(client, reply, context)
        push_task_output(client, context, SubStatus.COMPLETED, "")

    def _receive(self, client: Any, task: Any) -> Any | None:
        """The message of a task; None where it never comes whole: its sender was killed while it was sent."""
        from flwr.proto.runtime_pb2 import PullAppMessagesRequest

        found = client.PullMessages(PullAppMessagesRequest())
        if not found.messages_list:
            return None
        proto, tree = found.messages_list[0], found.message_object_trees[0]
        one = IncomingMessage(client, task.context.node_id, task.run.run_id, proto, tree)
        try:
            while (message := one.receive()) is None:
                # a SuperNode receives one message at a time: with another task it has given up this one
                if (newer := self._queue.take()) is not None:
                    self._next = newer
                    return None
                time.sleep(POLL_SECONDS)
        except LostMessageError:
            return None
        return message
