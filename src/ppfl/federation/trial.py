"""A whole federation on this machine, for a trial: SuperLink, SuperNodes and sites on loopback, by Flower's own
commands, with TLS and keys of the nodes."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import SettingError
from ..io.files import make_folder, write_toml
from ..runs.experiment import Experiment
from ..runs.record import RunRecord, load_run
from .exchange import Timeouts
from .flower_app import QUIET, Flower, program, require_flower, run_app
from .messages import FederationError
from .policy import experiment_hash, load_approved, over_sites, rows_shown
from .run import are_finished
from .site_settings import load_site
from .site_tools import approve

LOOPBACK = "127.0.0.1"
SUPERLINK = "trial"  # the name of the connection
START_SECONDS, END_SECONDS = 60.0, 10.0


class Trial(NamedTuple):
    """What is running."""

    folder: Path
    flower: Flower
    sites: dict[str, Path]  # site.toml of each
    processes: Processes
    superlink: str  # host:port
    sockets: Path


class Processes:
    """Programs with a log each; all of them end with the context, also after Ctrl-C."""

    def __init__(self, logs: Path, environment: Mapping[str, str]) -> None:
        self.logs, self.environment = logs, {**os.environ, **QUIET, **environment}
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        make_folder(logs)

    def start(self, name: str, *command: str | Path) -> None:
        """Start a program; what it prints goes to its log."""
        with (self.logs / f"{name}.log").open("ab") as log:
            self.running[name] = subprocess.Popen(
                [str(part) for part in command], stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
                env=self.environment, start_new_session=True,  # Ctrl-C reaches us alone, and we end them in order
            )  # fmt: skip

    def end(self, name: str) -> None:
        """End one of them, by force where it does not listen."""
        process = self.running.pop(name)
        process.terminate()
        try:
            process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def end_all(self) -> None:
        for process in reversed(self.running.values()):
            process.terminate()
        for name in list(reversed(self.running)):
            self.end(name)

    def refuse_dead(self) -> None:
        """An error with the last words of a program that has ended."""
        for name, process in self.running.items():
            if process.poll() is not None:
                file = self.logs / f"{name}.log"
                lines = [line.strip() for line in file.read_text(errors="replace").splitlines() if line.strip()]
                told = [line for line in lines if "rror" in line] or lines or ["it said nothing"]
                raise FederationError(f"{name} ended with code {process.returncode}: {told[-1][:300]} (see {file})")


def run_trial(
    experiment: Experiment,
    out: Path,
    base: Path,
    sites: int | Sequence[Path],
    *,
    timeouts: Timeouts | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> list[RunRecord]:
    """Run an experiment over sites on this machine, or go on with it.

    Args:
        experiment: What is run.
        out: The folder of its runs.
        base: Where relative paths start, and where modules that the experiment names are looked for first.
        sites: How many to split the experiment's data over, or the site.toml of each.
        timeouts: How long an exchange may take, and how many sites must answer.
        say: Called with each line of what happens.
    """
    if not are_finished(experiment, out):
        with trial(out / "federation", experiment, base, sites, say) as running:
            run_app(
                experiment, out, SUPERLINK, len(running.sites), base=base, say=say,
                check=running.processes.refuse_dead, environment=running.flower.environment,
                timeouts=Timeouts() if timeouts is None else timeouts,
            )  # fmt: skip
    return [load_run(out / f"seed-{seed}") for seed in experiment.seeds]


@contextmanager
def trial(
    folder: Path, experiment: Experiment, base: Path, sites: int | Sequence[Path], say: Callable[[str], None]
) -> Iterator[Trial]:
    """Start everything, and end it. Keys and certificates are made anew; the stores of sites that have a part of the
    experiment's data stay in `folder`, so that a run can be resumed."""
    require_flower()
    make_folder(folder)
    folder.chmod(0o700)
    say("making keys and sites")
    configs = _sites(folder, experiment, base, sites)
    port, server = free_port(), folder / "server"
    environment = {
        "FLWR_HOME": str(folder / "flwr"), "PYTHONUNBUFFERED": "1",
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
        "PYTHONPATH": os.pathsep.join([str(base.resolve()), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }  # fmt: skip
    _certificate(server)
    make_folder(folder / "flwr")
    write_toml(folder / "flwr" / "config.toml", {"superlink": {"default": SUPERLINK, SUPERLINK: {
        "address": f"{LOOPBACK}:{port}", "root-certificates": str((server / "server.pem").resolve()),
    }}})  # fmt: skip
    processes = Processes(folder / "logs", environment)
    # of their own, as paths of sockets have at most 107 letters
    with tempfile.TemporaryDirectory(prefix="ppfl-") as sockets:
        running = Trial(folder, Flower(SUPERLINK, environment), configs, processes, f"{LOOPBACK}:{port}", Path(sockets))
        try:
            start_superlink(running)
            for name, config in configs.items():
                say(f"starting site {name!r}")
                start_site(running, name, config)
                key = _node_key(folder / "nodes" / name)
                _register(running, key.with_suffix(".key.pub"), name)
                start_supernode(running, name)
            yield running
        finally:
            processes.end_all()


def start_superlink(running: Trial) -> None:
    """With TLS, on loopback; it lets in SuperNodes that are registered."""
    server, (host, port) = running.folder / "server", running.superlink.split(":")
    running.processes.start(
        "superlink", program("flower-superlink"), "--host", host, "--port", port, "--enable-supernode-auth",
        "--ssl-certfile", server / "server.pem", "--ssl-keyfile", server / "server.key",
        "--ssl-ca-certfile", server / "server.pem", "--database", server / "superlink.sqlite",
        "--disable-runtime-dependency-installation",
    )  # fmt: skip


def start_site(running: Trial, name: str, config: Path) -> None:
    """The process of a site, with its socket in the trial's folder for these."""
    running.processes.start(
        name, sys.executable, "-m", "ppfl", "site", "serve", config, "--socket", running.sockets / name,
        "--end-with-parent",
    )  # fmt: skip


def start_supernode(running: Trial, name: str) -> None:
    """The SuperNode of a site."""
    running.processes.start(
        f"{name}-node", program("flower-supernode"), "--superlink", running.superlink,
        "--root-certificates", running.folder / "server" / "server.pem",
        "--auth-supernode-private-key", running.folder / "nodes" / f"{name}.key",
        "--host", LOOPBACK, "--port", str(free_port()),
        "--node-config", f'ppfl-socket="{running.sockets / name}"',
    )  # fmt: skip


def _register(running: Trial, key: Path, name: str) -> None:
    """At a SuperLink that may just be starting."""
    end = time.monotonic() + START_SECONDS
    while True:
        running.processes.refuse_dead()
        try:
            return running.flower.register(key, name)
        except FederationError:
            if time.monotonic() > end:
                raise
            time.sleep(0.5)


def _sites(folder: Path, experiment: Experiment, base: Path, sites: int | Sequence[Path]) -> dict[str, Path]:
    """The config of each site; those that have a part of the experiment's data are made."""
    if not isinstance(sites, int):
        configs = {load_site(file).name: file.resolve() for file in sites}
        for name, file in configs.items():
            settings = load_site(file)
            if experiment_hash(experiment) not in load_approved(file.parent / settings.approved, file.parent):
                raise SettingError(f"site {name!r} has not approved {experiment.name}: ppfl site check FILE --approve")
        return configs
    found = {}
    data = _absolute_paths(experiment.model_dump(mode="json")["data"], base)
    for number in range(1, sites + 1):
        name = f"site-{number}"
        place = folder / name
        make_folder(place)
        # all sites are this machine's: a policy would protect nobody, and clients are called as in one process
        policy = {"min_clients": 1, "rows": list(rows_shown(over_sites(experiment))), "client_names": "plain"}
        own = {"name": name, "data": data, "part": {"number": number, "of": sites}, "policy": policy}
        write_toml(place / "site.toml", own)
        if experiment_hash(experiment) not in load_approved(place / "approved", base):
            approve(load_site(place / "site.toml"), place, experiment)
        found[name] = (place / "site.toml").resolve()
    return found


def _absolute_paths(data: dict[str, Any], base: Path) -> dict[str, Any]:
    """A site's config is in another folder than the file its data come from."""
    names = [name for name in ("file", "folder") if isinstance(data.get(name), str)]
    near = {name: base / str(data[name]) for name in names}
    return data | {name: str(path.resolve()) for name, path in near.items() if path.exists()}


def _certificate(folder: Path) -> None:
    """Of the SuperLink; it is its own authority."""
    make_folder(folder)
    _run(
        "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-384", "-nodes", "-days", "30",
        "-subj", "/CN=localhost", "-addext", f"subjectAltName=IP:{LOOPBACK},DNS:localhost",
        "-keyout", folder / "server.key", "-out", folder / "server.pem",
    )  # fmt: skip
    for left in folder.glob("superlink.sqlite*"):
        left.unlink()


def _node_key(place: Path) -> Path:
    """The key by which the SuperLink knows the SuperNode of a site."""
    make_folder(place.parent)
    key = place.with_name(f"{place.name}.key")
    for left in (key, key.with_suffix(".key.pub")):
        left.unlink(missing_ok=True)
    _run("ssh-keygen", "-q", "-t", "ecdsa", "-b", "384", "-N", "", "-f", key)
    return key


def _run(*command: str | Path) -> None:
    if shutil.which(str(command[0])) is None:
        raise FederationError(f"a trial needs the program {command[0]}, which makes its keys; install it")
    subprocess.run([str(part) for part in command], check=True, capture_output=True, stdin=subprocess.DEVNULL)


def free_port() -> int:
    """A port on loopback that nobody uses now."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        port: int = probe.getsockname()[1]
        return port
