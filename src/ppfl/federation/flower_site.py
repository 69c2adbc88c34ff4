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

from .flower_carrier import from_flower, to_flower
from .flower_link import Heartbeat, SuperLinkAddress, TaskQueue, app_hash, runtime_client

POLL_SECONDS = 0.2


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


class SuperNodeMessages:
    """Takes messages from a SuperNode and answers them."""

    def __init__(self, node: SuperLinkAddress, answer: Callable[[bytes], bytes]) -> None:
        from flwr.supercore.constant import TaskType

        self.node, self.answer, self.accepted = node, answer, app_hash()
        self._queue = TaskQueue(node, TaskType.CLIENT_APP)

    def serve(self, stop: Callable[[], bool]) -> None:
        """Answer messages until `stop`."""
        while not stop():
            if not self.serve_one():
                time.sleep(POLL_SECONDS)

    def serve_one(self) -> bool:
        """Answer a message, if there is one."""
        from flwr.app import Message
        from flwr.app.error import Error
        from flwr.common.constant import ErrorCode, SubStatus
        from flwr.supercore.interceptors import RuntimeTokenHttpInterceptor
        from flwr.supernode.runtime.run_clientapp import pull_task_input, push_message, push_task_output

        found = self._queue.take()
        if found is None:
            return False
        client = runtime_client(self.node, [RuntimeTokenHttpInterceptor(found[1])])
        try:
            with Heartbeat(client):
                message, context, run, fab = pull_task_input(client)
                if fab.hash_str != self.accepted or run.fab_hash != self.accepted:
                    said = f"the app {fab.hash_str[:12]} is not the one this site accepts ({self.accepted[:12]})"
                    reply = Message(Error(code=ErrorCode.INVALID_FAB, reason=said), reply_to=message)
                else:
                    reply = Message(to_flower(self.answer(from_flower(message.content))), reply_to=message)
                push_message(client, reply, context)
                push_task_output(client, context, SubStatus.COMPLETED, "")
        finally:
            client.close()
        return True
