"""The Flower app: what its ServerApp does, Flower's Grid as a channel, and `flwr run` with waiting for its end.

This is the one module of the package that imports Flower, and only its public names: `flwr.app`, `flwr.serverapp`, and
the command `flwr`. Two small files in app/ are what Flower itself loads.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.registry import Imports
from ..errors import PPFLError
from ..io.files import make_folder, read_json, toml_text, write_json, write_text, write_toml
from ..runs.experiment import Experiment
from .exchange import Delivery, Timeouts, printable
from .messages import CODES, FederationError, Packed
from .policy import as_settings
from .run import are_finished, run_over_sites

if TYPE_CHECKING:
    from flwr.app import Context
    from flwr.serverapp import Grid

log = logging.getLogger("ppfl.federation")
APP = Path(__file__).with_name("app")
LOG, OUTCOME, NODES = "federation.log", "outcome.json", "nodes.json"  # in the folder of the runs
QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
STARTS = 20  # of a run that crashes again and again
POLL_SECONDS = 1.0


def require_flower() -> None:
    """An error that says what to install, where Flower is missing."""
    if find_spec("flwr") is None:
        raise FederationError("flwr is not installed; install it with: pip install 'ppfl[flower]'")


# ---------------------------------------------------------------------- in the ServerApp


def main(grid: Grid, context: Context) -> None:
    """One run, or what is left of it. What it says is in a log in its folder, and so is how it ended."""
    os.umask(0o077)
    asked: dict[str, Any] = dict(context.run_config)
    out, base = Path(str(asked["out"])), Path(str(asked["base"]))
    make_folder(out)
    with _logging_to(out / LOG):
        try:
            settings = tomllib.loads(str(asked["experiment"]))
            experiment = Experiment.model_validate(settings, context=Imports(base))
            at_least = int(asked["at-least"]) or None
            timeouts = Timeouts(deadline=float(asked["deadline"]), at_least=at_least)
            run_over_sites(
                experiment, out, GridChannel(grid, out / NODES, timeouts.deadline), int(asked["sites"]),
                timeouts=timeouts, base=base, secure=bool(asked["secure-sums"]), on_round_end=_log_round,
            )  # fmt: skip
        except PPFLError as error:
            log.error("%s", error)
            write_json(out / OUTCOME, {"error": str(error)})
            raise
        log.info("done")
        write_json(out / OUTCOME, {"error": ""})


def _log_round(seed: int, end: Any) -> None:
    record = end.record
    shown = [f"{name} {record[name]:.4g}" for name in ("loss", "accuracy", "test_loss") if record.get(name) is not None]
    absent = f", without {', '.join(record['absent'])}" if record.get("absent") else ""
    log.info("seed %d round %d: %s, %.1f s%s", seed, record["round"], ", ".join(shown), record["seconds"], absent)


@contextmanager
def _logging_to(file: Path) -> Iterator[None]:
    handler = logging.FileHandler(file, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    ours = logging.getLogger("ppfl")
    ours.setLevel(logging.INFO)
    ours.addHandler(handler)
    try:
        yield
    finally:
        ours.removeHandler(handler)
        handler.close()


class GridChannel:
    """Flower's Grid. Sites are called as their SuperNodes were registered, and known by the keys of these."""

    def __init__(self, grid: Grid, known: Path, deadline: float) -> None:
        """known: the file with the keys that names had when they were first seen."""
        from flwr.app import DEFAULT_TTL

        self._grid, self._file, self._ttl = grid, known, max(DEFAULT_TTL, 2 * deadline)
        self._keys: dict[str, str] = dict(read_json(known)) if known.is_file() else {}
        self._nodes: dict[str, int] = {}
        self._told: set[str] = set()

    def online(self) -> dict[str, str]:
        """The sites that can be reached, and when each was last started."""
        found: dict[str, list[Any]] = {}
        for node in self._grid.get_nodes():
            found.setdefault(printable(getattr(node, "name", "")) or f"node-{node.node_id}", []).append(node)
        self._nodes, since, before = {}, {}, dict(self._keys)
        for name, nodes in sorted(found.items()):
            own = [node for node in nodes if self._keys.get(name, _key_of(node)) == _key_of(node)]
            if len(own) != 1:
                self._tell(f"{len(nodes)} nodes are called {name!r}, {len(own)} of them with the key that it is known "
                           f"by in {self._file.name}: unregister the others, or delete its line there")  # fmt: skip
                continue
            self._keys[name], self._nodes[name] = _key_of(own[0]), own[0].node_id
            since[name] = str(getattr(own[0], "last_activated_at", ""))
        if self._keys != before:
            write_json(self._file, self._keys)
        return since

    def push(self, calls: Mapping[str, Packed]) -> dict[str, str]:
        """Send to sites. What all of them get is one object, which Flower stores once."""
        from flwr.app import Array, ArrayRecord, Message, MessageType, RecordDict

        def array(data: bytes) -> Array:
            return Array(dtype="uint8", shape=(len(data),), stype="bytes", data=data)

        names = [name for name in calls if name in self._nodes]
        messages = []
        for name in names:
            record = ArrayRecord({"shared": array(calls[name].shared), "own": array(calls[name].own)})
            content = RecordDict({"ppfl": record})
            messages.append(Message(content, self._nodes[name], MessageType.QUERY, ttl=self._ttl))
        ids = list(self._grid.push_messages(messages)) if messages else []
        return {name: message for name, message in zip(names, ids, strict=False) if message}

    def pull(self, messages: Collection[str]) -> list[Delivery]:
        """What came back."""
        found = []
        for reply in self._grid.pull_messages(list(messages)) if messages else ():
            about = reply.metadata.reply_to_message_id
            if reply.has_error():
                found.append(Delivery(about, None, f"Flower's error {reply.error.code}"))
                continue
            try:
                records: Any = reply.content["ppfl"]
                data = bytes(records["answer"].data)
            except Exception:  # whatever another app answers
                data = b""
            found.append(Delivery(about, data or None, "" if data else CODES["no-answer"]))
        return found

    def _tell(self, text: str) -> None:
        if text not in self._told:
            log.error(text)
            self._told.add(text)


def _key_of(node: Any) -> str:
    return bytes(getattr(node, "public_key", b"")).hex()


# ---------------------------------------------------------------------- beside it: `ppfl federation run`


def write_app(folder: Path) -> None:
    """The folder of the Flower app, for `flwr run`."""
    package = folder / "ppfl_app"
    make_folder(package)
    shutil.copyfile(APP / "pyproject.toml", folder / "pyproject.toml")
    write_text(package / "__init__.py", '"""ppfl over sites."""\n')
    for name in ("relay.py", "server.py"):
        shutil.copyfile(APP / name, package / name)


def run_app(
    experiment: Experiment,
    out: Path,
    superlink: str,
    sites: int,
    *,
    base: Path,
    timeouts: Timeouts,
    secure: bool = False,
    environment: Mapping[str, str] | None = None,
    say: Callable[[str], None] = lambda line: None,
    check: Callable[[], None] = lambda: None,
) -> None:
    """Start the app at a SuperLink, show what it logs, and start it again when it crashes, until the run is done.

    Args:
        experiment: What is run.
        out: The folder of its runs, which the ServerApp can write to.
        superlink: The name of a connection in Flower's config.toml.
        sites: How many there are.
        base: Where modules that the experiment names are looked for first.
        timeouts: As for `run_over_sites`.
        secure: Whether only totals over sites are read.
        environment: For Flower's commands, besides that of this process.
        say: Called with each new line of the log.
        check: Called now and then; may raise.
    """
    if are_finished(experiment, out):
        return
    make_folder(out)
    out.chmod(0o700)
    app, flower = out / "app", Flower(superlink, environment)
    write_app(app)
    text = toml_text(as_settings(experiment))
    write_toml(out / "run.toml", {
        "experiment": text, "base": str(base.resolve()), "out": str(out.resolve()), "sites": sites,
        "deadline": float(timeouts.deadline), "at-least": timeouts.at_least or 0, "secure-sums": secure,
    })  # fmt: skip
    lines = _NewLines(out / LOG)

    def look() -> None:
        for line in lines.read():
            say(line)
        check()

    for start in range(STARTS):
        (out / OUTCOME).unlink(missing_ok=True)
        run = flower.run(app, out / "run.toml")
        say(f"{'started' if start == 0 else 'started again'} as run {run} of SuperLink {superlink!r}")
        try:
            status = flower.wait(run, look)
        except KeyboardInterrupt:
            flower.stop(run)
            raise
        if (out / OUTCOME).is_file():
            if error := str(read_json(out / OUTCOME)["error"]):
                raise FederationError(error)
            return
        if "stopped" in status:
            raise FederationError("the run was stopped by hand; the same command goes on with it")
        say(f"the app ended, {status}, and is started again")
    raise FederationError(f"the app crashed {STARTS} times; look at flwr log {run} {superlink} and {out / LOG}")


class Flower:
    """The command `flwr`, for one SuperLink."""

    def __init__(self, superlink: str, environment: Mapping[str, str] | None = None) -> None:
        require_flower()
        self.superlink, self.environment = superlink, {**os.environ, **QUIET, **(environment or {})}

    def call(self, *arguments: str | Path) -> Any:
        """What a command says in JSON; FederationError with its last words where it fails."""
        command = [program("flwr"), *map(str, arguments), "--format", "json"]
        done = subprocess.run(command, capture_output=True, text=True, env=self.environment, stdin=subprocess.DEVNULL)
        try:
            said = json.loads(done.stdout[done.stdout.index("{") :])
        except ValueError:
            said = {"success": False, "error-message": f"{done.stdout} {done.stderr}"}
        if not said.get("success", True):
            reason = printable(str(said.get("error-message") or done.stderr))[-300:]
            raise FederationError(f"flwr {arguments[0]} at SuperLink {self.superlink!r} failed: {reason}")
        return said

    def run(self, app: Path, config: Path) -> str:
        """Start an app; the id of its run."""
        return str(self.call("run", app, self.superlink, "--run-config", config)["run-id"])

    def register(self, key: Path, name: str) -> None:
        """Let the SuperNode with this public key in."""
        self.call("supernode", "register", key, self.superlink, "--name", name)

    def wait(self, run: str, meanwhile: Callable[[], object]) -> str:
        """The status of a run when it has ended. A SuperLink that is away is waited for."""
        away = False
        while True:
            try:
                status, away = str(self.call("ls", self.superlink, "--run-id", run)["runs"][0]["status"]), False
            except (FederationError, LookupError) as error:
                if not away:
                    log.warning("%s; it is asked again", error)
                status, away = "away", True
            meanwhile()
            if status.startswith("finished"):
                return status
            time.sleep(POLL_SECONDS)

    def stop(self, run: str) -> None:
        """End a run."""
        with suppress(FederationError):
            self.call("stop", run, self.superlink)


def program(name: str) -> str:
    """One of Flower's programs: beside this Python, or on the path."""
    beside = Path(sys.executable).with_name(name)
    return str(beside) if beside.exists() else name


class _NewLines:
    """The lines that were added to a file."""

    def __init__(self, file: Path) -> None:
        self._file, self._at = file, file.stat().st_size if file.is_file() else 0

    def read(self) -> list[str]:
        if not self._file.is_file():
            return []
        with self._file.open("rb") as opened:
            opened.seek(self._at)
            data = opened.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._at += len(whole)
        return whole.decode(errors="replace").splitlines()
