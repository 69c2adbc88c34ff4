"""Processes of a federation on this machine: they are started with a log each, and all of them are ended."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

from .federation_errors import FederationError
from .flower_client import SuperLinkAddress

END_SECONDS = 10.0  # after which a process that was asked to end is killed
LOOPBACK = "127.0.0.1"


class LinkFiles(NamedTuple):
    """Files of a server: its certificate and the key to it, the authority's certificate, and a secret of its own."""

    certificate: Path
    private_key: Path
    authority: Path
    secret: Path


class Processes:
    """Use it as a context: everything that was started in it ends with it, also after Ctrl-C."""

    def __init__(self, logs: Path) -> None:
        self.logs = logs
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        logs.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in reversed(self.running.values()):
            process.terminate()
        for name in list(reversed(self.running)):
            self.end(name)

    def start(self, name: str, command: Sequence[str | Path], environment: Mapping[str, str] | None = None) -> None:
        """Start a program; what it prints goes to a log."""
        with (self.logs / f"{name}.log").open("ab") as log:
            self.running[name] = subprocess.Popen(
                [str(part) for part in command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **flower_environment(self.logs), **(environment or {})},
                start_new_session=True,  # Ctrl-C reaches us alone, and we end them in order
            )

    def end(self, name: str) -> None:
        """End one of them, by force where it does not listen."""
        process = self.running.pop(name)
        process.terminate()
        try:
            process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def refuse_dead(self) -> None:
        """An error with the last words of a process that has ended."""
        for name, process in self.running.items():
            if process.poll() is not None:
                raise FederationError(f"{name} ended with code {process.returncode}: {self.last_words(name)}")

    def last_lines(self, name: str) -> list[str]:
        """The end of its log, without empty lines."""
        file = self.logs / f"{name}.log"
        text = file.read_text(errors="replace") if file.is_file() else ""
        return [line.strip() for line in text.splitlines() if line.strip()][-20:]

    def last_words(self, name: str) -> str:
        """The line of its log that says most likely why it ended."""
        lines = self.last_lines(name)
        told = [line for line in lines if "rror" in line or "code:" in line] or lines
        return f"{told[-1][:300] if told else 'it said nothing'} (see {self.logs / f'{name}.log'})"


def require_flower() -> None:
    """An error that says what to install, where Flower is missing."""
    for name in ("flwr", "cryptography"):
        try:
            import_module(name)
        except ImportError:
            raise FederationError(f"{name} is not installed; install it with: pip install 'ppfl[flower]'") from None


def flower_environment(home: Path) -> dict[str, str]:
    """What programs of Flower are told: no telemetry, no look for updates, files in a folder of ours."""
    return {
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_HOME": str(home / "flwr"),
        "PYTHONUNBUFFERED": "1",
    }


def free_port() -> int:
    """A port on loopback that nobody uses now."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        port: int = probe.getsockname()[1]
        return port


def start_superlink(
    processes: Processes, files: LinkFiles, database: Path, host: str = LOOPBACK, port: int | None = None
) -> SuperLinkAddress:
    """A SuperLink with TLS and authentication of sites. It starts no app: whoever has the secret takes a run's task."""
    port = free_port() if port is None else port
    processes.start(
        "superlink",
        [
            *_flower("flower-superlink"), "--host", host, "--port", str(port), "--database", database,
            "--ssl-certfile", files.certificate, "--ssl-keyfile", files.private_key,
            "--ssl-ca-certfile", files.authority, "--enable-supernode-auth", "--isolation", "process",
            "--superexec-auth-secret-file", files.secret, "--disable-runtime-dependency-installation",
        ],
    )  # fmt: skip
    address = f"{LOOPBACK if host == '0.0.0.0' else host}:{port}"
    return SuperLinkAddress(address, files.authority.read_bytes(), files.secret.read_bytes())


def start_supernode(
    processes: Processes, superlink: str, authority: Path, private_key: Path, secret: Path
) -> SuperLinkAddress:
    """A SuperNode on loopback that starts no app: whoever has the secret takes its messages."""
    port = free_port()
    processes.start(
        "supernode",
        [
            *_flower("flower-supernode"), "--superlink", superlink, "--root-certificates", authority,
            "--auth-supernode-private-key", private_key, "--isolation", "process", "--host", LOOPBACK,
            "--port", str(port), "--superexec-auth-secret-file", secret,
        ],
    )  # fmt: skip
    return SuperLinkAddress(f"{LOOPBACK}:{port}", None, secret.read_bytes())


def _flower(program: str) -> list[str]:
    return [sys.executable, "-m", "ppfl.federation.flower_child", program]
