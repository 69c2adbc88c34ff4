"""Clients of Flower's Runtime API, which both a SuperLink and a SuperNode have: who knows the secret takes tasks."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from types import TracebackType
from typing import Any, NamedTuple, Self

from .flower_objects import bound_responses

HEARTBEAT_SECONDS = 10.0  # a task that is silent for a minute is taken to be dead
RETRY_SECONDS = 120.0  # for which a SuperLink may be away, as when it is started again


class SuperLinkAddress(NamedTuple):
    """Where a SuperLink is, and what proves that we may use it."""

    address: str  # host:port
    root_certificate: bytes | None  # PEM; None: without TLS
    secret: bytes  # of --superexec-auth-secret-file

    @property
    def insecure(self) -> bool:
        return self.root_certificate is None


def runtime_client(link: SuperLinkAddress, interceptors: Iterable[Any], *, retry: bool = True) -> Any:
    """A client of the Runtime API of a SuperLink or a SuperNode. retry: whether it tries again by itself."""
    from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
    from flwr.supercore.runtime import RuntimeHttpClient

    client = RuntimeHttpClient.from_server_address(
        server_address=link.address,
        insecure=link.insecure,
        root_certificates=link.root_certificate,
        interceptors=[RuntimeVersionHttpInterceptor(component_name="ppfl"), *interceptors],
        retry_invoker=_retry_for_a_while() if retry else None,
    )
    bound_responses(client)
    return client


def _retry_for_a_while() -> Any:
    """Flower's own way to try again never ends, and it interrupts the whole process where a token is refused."""
    import httpx
    from flwr.supercore.retry import make_simple_http_retry_invoker

    def is_final(error: Exception) -> bool:
        return isinstance(error, httpx.HTTPStatusError) and error.response.status_code not in (502, 503, 504)

    invoker = make_simple_http_retry_invoker()
    invoker.max_time, invoker.should_giveup = RETRY_SECONDS, is_final
    return invoker


class TaskQueue:
    """Takes the tasks that a SuperLink or a SuperNode has for us."""

    def __init__(self, link: SuperLinkAddress, kind: str) -> None:
        from flwr.supercore.interceptors import SuperExecAuthHttpInterceptor

        protected = frozenset({"/flwr.proto.Runtime/AcquireTask"})
        signed = SuperExecAuthHttpInterceptor(master_secret=link.secret, protected_methods=protected)
        self._client, self._kind = runtime_client(link, [signed], retry=False), kind

    def take(self) -> tuple[Any, str] | None:
        """The oldest task and the token that opens it; None where there is none."""
        from flwr.proto.runtime_pb2 import AcquireTaskRequest

        found = self._client.AcquireTask(AcquireTaskRequest(supported_task_types=[self._kind]))
        return (found.task, found.token) if found.HasField("task") and found.token else None

    def close(self) -> None:
        self._client.close()


class Heartbeat:
    """Tells Flower from time to time that a task is being worked on."""

    def __init__(self, client: Any, seconds: float = HEARTBEAT_SECONDS) -> None:
        self._client, self._seconds, self._stop = client, seconds, threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    def _beat(self) -> None:
        import httpx
        from flwr.proto.runtime_pb2 import SendTaskHeartbeatRequest

        while not self._stop.wait(self._seconds):
            try:
                self._client.SendTaskHeartbeat(SendTaskHeartbeatRequest())
            except httpx.HTTPError:
                continue  # it is tried again, and whoever pulls or pushes notices that nobody answers
