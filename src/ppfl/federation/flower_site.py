"""A site's end of Flower: the messages that its SuperNode has for it, answered in this very process.

A SuperNode with `--isolation process` starts no process for a message: whoever knows its secret may take it. So the
site that holds the data answers by itself, no code that a server sent is ever installed or run, and no process has to
be started for a message.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from .flower_carrier import from_flower, to_flower
from .flower_link import Heartbeat, SuperLinkAddress, TaskQueue, app_hash, runtime_client

POLL_SECONDS = 0.2


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
