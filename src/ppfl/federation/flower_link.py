"""The server's end of Flower: a run at the SuperLink, and its Grid in this very process.

A SuperLink with `--isolation process` starts no process for a run: whoever knows its secret may take the task. We do
that here, so that the server loop runs where its command was given, with its own progress and its own Ctrl-C. The app
that Flower wants for a run is empty (`app_bundle`): sites run what is installed there, never what a server sends.
"""

from __future__ import annotations

import hashlib
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any

from .federation_errors import FederationError
from .flower_carrier import key_bytes
from .flower_client import Heartbeat, SuperLinkAddress, TaskQueue, runtime_client

APP_PUBLISHER, APP_NAME, APP_VERSION = "ppfl", "ppfl-federation", "1.0.0"
CONNECT_SECONDS = 60.0


def app_bundle() -> bytes:
    """The app of every run: it has no code of ours, so its hash is the same everywhere and sites can pin it."""
    from flwr.cli.build import build_fab_from_files

    components = "\n".join(f'{kind} = "ppfl_app:app"' for kind in ("serverapp", "clientapp"))
    text = f"""[project]
name = "{APP_NAME}"
version = "{APP_VERSION}"
license = "Apache-2.0"
description = "Nothing is run from here; ppfl is installed at every site."
dependencies = []

[tool.flwr.app]
publisher = "{APP_PUBLISHER}"

[tool.flwr.app.components]
{components}
"""
    files = {"pyproject.toml": text.encode(), "ppfl_app.py": b"app = None\n"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a library that flwr uses
        bundle: bytes = build_fab_from_files(files)[0]
    return bundle


def app_hash() -> str:
    """What a site compares the app of a message with."""
    return hashlib.sha256(app_bundle()).hexdigest()


def control_client(link: SuperLinkAddress) -> Any:
    """A client of the Control API: it starts runs and registers sites."""
    from flwr.supercore.control import ControlHttpClient
    from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor

    return ControlHttpClient.from_server_address(
        server_address=link.address,
        insecure=link.insecure,
        root_certificates=link.root_certificate,
        interceptors=[RuntimeVersionHttpInterceptor(component_name="ppfl")],
    )


def wait_for(ready: Callable[[], Any], what: str, seconds: float = CONNECT_SECONDS, pause: float = 0.2) -> Any:
    """What `ready` returns once it is true; connection errors on the way are tried again."""
    import httpx

    end = time.monotonic() + seconds
    reason = "no answer"
    while time.monotonic() < end:
        try:
            if found := ready():
                return found
        except httpx.HTTPError as error:
            reason = " ".join(str(error).split()) or type(error).__name__
        time.sleep(pause)
    raise FederationError(f"{what}: nothing after {seconds:.0f} s ({reason}); look at its log")


def register_site(link: SuperLinkAddress, name: str, public_key: bytes) -> int:
    """Let the SuperNode with this key (OpenSSH) join, under this name."""
    from flwr.proto.control_pb2 import RegisterNodeRequest

    client = control_client(link)
    try:
        request = RegisterNodeRequest(public_key=key_bytes(public_key), name=name)
        node: int = client.RegisterNode(request).node_id
        return node
    finally:
        client.close()


def register_only(link: SuperLinkAddress, public_keys: Mapping[str, bytes]) -> None:
    """Let the SuperNodes with these keys (OpenSSH, by name) join, and no others."""
    from flwr.proto.control_pb2 import ListNodesRequest, UnregisterNodeRequest

    wanted = {key_bytes(key): name for name, key in public_keys.items()}
    client = control_client(link)
    try:
        known = [node for node in client.ListNodes(ListNodesRequest()).nodes_info if not node.unregistered_at]
        for node in known:
            if node.public_key not in wanted:
                client.UnregisterNode(UnregisterNodeRequest(node_id=node.node_id))
    finally:
        client.close()
    there = {node.public_key for node in known}
    for name, key in public_keys.items():
        if key_bytes(key) not in there:
            register_site(link, name, key)


def _stop_runs_of_dead_servers(control: Any) -> None:
    """A SuperLink serves one server at a time. One that was killed may have left a message that was not sent to its
    end: SuperNodes wait for the rest of it, and look at nothing else, until its run ends."""
    import httpx
    from flwr.common.constant import Status
    from flwr.proto.control_pb2 import ListRunsRequest, StopRunRequest

    for run_id, run in control.ListRuns(ListRunsRequest()).run_dict.items():
        if run.status.status != Status.FINISHED:
            with suppress(httpx.HTTPStatusError):  # it has just ended by itself
                control.StopRun(StopRunRequest(run_id=run_id))


class FlowerRun:
    """A run at a SuperLink that this process works on; use it as a context."""

    def __init__(self, link: SuperLinkAddress) -> None:
        self.link = link

    def __enter__(self) -> Any:
        from flwr.common.serde import fab_to_proto, run_from_proto
        from flwr.proto.control_pb2 import StartRunRequest
        from flwr.proto.runtime_pb2 import PullTaskInputRequest
        from flwr.supercore.constant import TaskType
        from flwr.supercore.fab import Fab
        from flwr.supercore.interceptors import RuntimeTokenHttpInterceptor
        from flwr.supercore.task_identity import TaskIdentity
        from flwr.superlink.grid import HttpGrid

        control, queue = control_client(self.link), TaskQueue(self.link, TaskType.SERVER_APP)
        try:
            _stop_runs_of_dead_servers(control)
            started = control.StartRun(StartRunRequest(fab=fab_to_proto(Fab(app_hash(), app_bundle(), {}))))
            self.run_id: int = started.run_id

            def own_task() -> str | None:  # tasks of runs that a dead server left are taken and dropped
                found = queue.take()
                return found[1] if found is not None and found[0].run_id == self.run_id else None

            token = wait_for(own_task, f"run {self.run_id} at the SuperLink {self.link.address}", pause=0.05)
        finally:
            control.close()
            queue.close()
        grid = HttpGrid(self.link.address, self.link.insecure, self.link.root_certificate, token=token)
        opened = [RuntimeTokenHttpInterceptor(token)]
        grid._client = runtime_client(self.link, opened)
        self._client = runtime_client(self.link, opened, retry=False)  # nobody waits for a heartbeat or a last word
        self._heartbeat = Heartbeat(self._client).__enter__()
        task = grid._client.PullTaskInput(PullTaskInputRequest())
        TaskIdentity.task_id, TaskIdentity.run_id = task.task_id, task.run.run_id  # messages take them from there
        TaskIdentity.node_id = task.context.node_id
        grid.set_run(run_from_proto(task.run))
        self.grid = grid
        return grid

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        import httpx
        from flwr.common.constant import SubStatus
        from flwr.proto.runtime_pb2 import PushTaskOutputRequest

        self._heartbeat.__exit__(None, None, None)
        status = SubStatus.COMPLETED if kind is None else SubStatus.STOPPED
        with suppress(httpx.HTTPError):  # the SuperLink notices by itself
            self._client.PushTaskOutput(PushTaskOutputRequest(sub_status=status, details=""))
        self._client.close()
        self.grid.close()
