"""A whole federation on this machine, for a trial: SuperLink, SuperNodes and sites, with TLS and authentication."""

from __future__ import annotations

import logging
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from ..core.registry import python_names
from ..io.files import write_toml
from ..runs.experiment import Experiment
from ..runs.record import RunRecord
from ..runs.run import OnRoundEnd
from .carrier import OnlineSite
from .certificates import create_authority, create_certificate, create_key_pair
from .federated_run import run_federated
from .flower_carrier import FlowerCarrier
from .flower_client import SuperLinkAddress
from .flower_link import FlowerRun, register_site, wait_for
from .flower_processes import (
    LOOPBACK,
    LinkFiles,
    Processes,
    flower_environment,
    start_superlink,
)
from .private_files import write_private_file, write_secret
from .site_mail import Patience
from .site_settings import load_site


class LocalFederation(NamedTuple):
    """What is running."""

    folder: Path
    link: SuperLinkAddress
    sites: tuple[str, ...]
    processes: Processes
    modules: tuple[Path, ...] = ()  # folders in which functions are that the configs of sites name

    @property
    def public_keys(self) -> dict[str, bytes]:
        """Of each site."""
        return {name: (self.folder / name / "site.pub").read_bytes() for name in self.sites}

    def last_lines(self, each: int = 15) -> str:
        """The end of every log, to find out what went wrong."""
        logs = [self.folder / "logs" / f"{name}.log" for name in ("superlink", *self.sites)]
        logs += [self.folder / name / f"{name}.run" / "supernode.log" for name in self.sites]
        there = [file for file in logs if file.is_file()]
        return "\n".join(
            line for file in there for line in (f"== {file}", *file.read_text(errors="replace").splitlines()[-each:])
        )

    def start_site(self, name: str) -> None:
        """Start the process of a site: the first time, or again after it ended."""
        config = self.folder / name / "site.toml"
        command = [sys.executable, "-m", "ppfl", "federation", "site", str(config), "--end-with-parent"]
        path = os.pathsep.join([*map(str, self.modules), *filter(None, [os.environ.get("PYTHONPATH")])])
        self.processes.start(name, command, {"PYTHONPATH": path})


@contextmanager
def local_federation(
    folder: Path, experiment: Experiment, base: Path, sites: int | Sequence[Path]
) -> Iterator[LocalFederation]:
    """Start everything on loopback, and end it. sites: how many to split the experiment's data over, or their configs.

    Keys and certificates are made anew; the sites' stores stay in `folder`, so that a run can be resumed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    os.environ.update(flower_environment(folder / "logs"))
    logging.getLogger("flwr").setLevel(logging.ERROR)
    files = _write_server_files(folder / "server")
    database = folder / "server" / "superlink.sqlite"
    for left in folder.glob("server/superlink.sqlite*"):
        left.unlink()
    with Processes(folder / "logs") as processes:
        link = start_superlink(processes, files, database)
        configs = _write_sites(folder, link, files.authority, experiment, base, sites)

        def register_first() -> bool:
            processes.refuse_dead()
            return bool(register_site(link, *next(iter(configs.items()))))

        wait_for(register_first, "the SuperLink")
        for name, public_key in list(configs.items())[1:]:
            register_site(link, name, public_key)
        near = [base] if isinstance(sites, int) else [config.parent for config in sites]
        modules = tuple(dict.fromkeys(one.resolve() for one in near))
        running = LocalFederation(folder, link, tuple(configs), processes, modules)
        for name in configs:
            running.start_site(name)
        yield running


def run_local_federation(
    experiment: Experiment,
    out: Path,
    base: Path,
    sites: int | Sequence[Path],
    *,
    patience: Patience | None = None,
    resume: bool = False,
    on_round_end: OnRoundEnd | None = None,
) -> list[RunRecord]:
    """Run an experiment over sites on this machine; everything that was started ends, also after Ctrl-C."""
    with (
        local_federation(out / "federation", experiment, base, sites) as federation,
        FlowerRun(federation.link) as grid,
    ):
        carrier = WatchedCarrier(FlowerCarrier(grid, federation.public_keys), federation.processes)
        return run_federated(
            experiment, out, carrier, sites=federation.sites, patience=patience, base=base, resume=resume,
            on_round_end=on_round_end,
        )  # fmt: skip


class WatchedCarrier:
    """A carrier that says so when a process on this machine has ended, rather than waiting for it."""

    def __init__(self, carrier: FlowerCarrier, processes: Processes) -> None:
        self.push, self.pull = carrier.push, carrier.pull
        self._carrier, self._processes = carrier, processes

    def online(self) -> dict[str, OnlineSite]:
        """The sites that can be reached."""
        self._processes.refuse_dead()
        return dict(self._carrier.online())


def _write_server_files(folder: Path) -> LinkFiles:
    folder.mkdir(parents=True, exist_ok=True)
    authority = create_authority()
    server = create_certificate(authority, [LOOPBACK, "localhost"])
    files = LinkFiles(folder / "server.pem", folder / "server.key", folder / "authority.pem", folder / "secret")
    files.certificate.write_bytes(server.certificate)
    write_private_file(files.private_key, server.private_key)
    files.authority.write_bytes(authority.certificate)
    write_secret(files.secret)
    return files


def _write_sites(
    folder: Path,
    link: SuperLinkAddress,
    authority: Path,
    experiment: Experiment,
    base: Path,
    sites: int | Sequence[Path],
) -> dict[str, bytes]:
    """The config and the keys of each site in a folder of its own; the public keys by name."""
    found: dict[str, bytes] = {}
    if isinstance(sites, int):
        all_settings = [_part_of(experiment, base, number, sites) for number in range(1, sites + 1)]
    else:
        all_settings = [_of_config(config) for config in sites]
    for settings in all_settings:
        name = str(settings["name"])
        place = folder / name
        place.mkdir(parents=True, exist_ok=True)
        keys = create_key_pair()
        write_private_file(place / "site.key", keys.private_key)
        (place / "site.pub").write_bytes(keys.public_key)
        shutil.copyfile(authority, place / "authority.pem")
        reached = {"superlink": link.address, "root_certificate": "authority.pem", "private_key": "site.key"}
        write_toml(place / "site.toml", settings | reached)
        found[name] = keys.public_key
    return found


def _part_of(experiment: Experiment, base: Path, number: int, sites: int) -> dict[str, Any]:
    """A site that has a part of the experiment's clients."""
    asked = experiment.model_dump(mode="json")
    named = python_names(asked)
    data, part = _absolute_paths(asked["data"], base), {"number": number, "of": sites}
    return {"name": f"site-{number}", "data": data, "part": part, "allow": named}


def _of_config(file: Path) -> dict[str, Any]:
    settings = load_site(file).model_dump(mode="json", exclude_none=True)
    return settings | {"data": _absolute_paths(settings["data"], file.parent)}


def _absolute_paths(data: dict[str, Any], base: Path) -> dict[str, Any]:
    """A site's config is in another folder than the file its data come from."""
    names = [name for name in ("file", "folder") if isinstance(data.get(name), str)]
    near = {name: base / str(data[name]) for name in names}
    return data | {name: str(path.resolve()) for name, path in near.items() if path.exists()}
