"""An experiment over sites on other machines, from the server's folder that `ppfl federation init` made."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from ..runs import load_experiment
from ..runs.record import RunRecord
from ..runs.run import OnRoundEnd
from .federated_run import run_federated
from .federation_errors import FederationError
from .flower_carrier import FlowerCarrier
from .flower_client import SuperLinkAddress
from .flower_link import FlowerRun, register_only, wait_for
from .flower_processes import LinkFiles, Processes, flower_environment, start_superlink
from .local_federation import WatchedCarrier
from .provisioning import load_secure_sums, registered_sites
from .site_mail import Patience
from .unsupported import refuse_unsupported

EVERY_ADDRESS = "0.0.0.0"


def run_server(
    folder: Path,
    out: Path,
    *,
    host: str = EVERY_ADDRESS,
    secure: bool = False,
    patience: Patience | None = None,
    resume: bool = False,
    on_round_end: OnRoundEnd | None = None,
) -> list[RunRecord]:
    """Start a SuperLink that the sites of this folder can reach, wait for them, and train.

    host: where the SuperLink listens. secure: only totals over sites are read, and all sites must have it so.
    """
    files = LinkFiles(*(folder / name for name in ("server.pem", "server.key", "authority.pem", "secret")))
    if missing := [file.name for file in (*files, folder / "address.txt") if not file.is_file()]:
        raise FederationError(f"{folder} has no {missing[0]}; give the server's folder that ppfl federation init made")
    experiment, keys = load_experiment(folder / "experiment.toml"), registered_sites(folder)
    refuse_unsupported(experiment, secure=secure)
    if not keys:
        raise FederationError(f"{folder / 'sites'} has no key of a site; add a site with ppfl federation init --sites")
    port = int((folder / "address.txt").read_text().strip().rpartition(":")[2])
    sums = load_secure_sums(folder / "secure_sums.toml") if secure else None
    os.environ.update(flower_environment(folder / "logs"))
    logging.getLogger("flwr").setLevel(logging.ERROR)
    with Processes(folder / "logs") as processes:
        link = start_superlink(processes, files, folder / "superlink.sqlite", host, port)
        _register(link, keys, processes)
        with FlowerRun(link) as grid:
            return run_federated(
                experiment, out, WatchedCarrier(FlowerCarrier(grid, keys), processes), sites=tuple(keys),
                patience=patience, base=folder, resume=resume, on_round_end=on_round_end, secure=sums,
            )  # fmt: skip


def _register(link: SuperLinkAddress, keys: dict[str, bytes], processes: Processes) -> None:
    """The database has the keys of earlier starts; those that were revoked since are taken out."""

    def once() -> bool:
        processes.refuse_dead()
        register_only(link, keys)
        return True

    wait_for(once, "the SuperLink")
