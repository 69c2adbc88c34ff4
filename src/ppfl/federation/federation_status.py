"""How a federation is doing, from files alone: the server's notes and ledger, or a site's store and ledger.

Nothing is asked of a process, so it works while a run is going on, and after it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import CheckpointError
from ..io.files import read_json
from ..io.lock import is_locked
from ..runs.folder import RunFolder
from ..runs.record import load_run
from .federation_errors import FederationError
from .ledger import REFUSED, TO_SERVER
from .site_settings import SiteSettings
from .state_store import StateStore

NOTES = ".federation"  # ends the name of the folder that the server keeps beside a run folder


class SiteTraffic(NamedTuple):
    """Messages between the server and a site in one run, from a ledger."""

    last: float | None = None  # when the site last sent something
    to_site: int = 0  # bytes
    to_server: int = 0
    refused: int = 0  # replies at the server, messages at a site
    reason: str = ""  # of the last refusal

    def add(self, line: dict[str, Any]) -> SiteTraffic:
        """With one more line of the ledger."""
        if REFUSED in line:
            return self._replace(refused=self.refused + 1, reason=str(line[REFUSED]))
        if line.get("direction") == TO_SERVER:
            return self._replace(last=float(line["time"]), to_server=self.to_server + int(line["bytes"]))
        return self._replace(to_site=self.to_site + int(line["bytes"]))


class ServerRun(NamedTuple):
    """A run, as the server's files have it."""

    run: str
    folder: Path
    state: str  # running, finished or stopped
    round: int  # rounds done
    rounds: int | None  # of how many; None before the first one is done
    starts: int  # of the server
    sites: dict[str, SiteTraffic]


class SiteRun(NamedTuple):
    """A run, as a site's files have it."""

    run: str
    rounds: int  # that were begun
    stored: int  # bytes in the store
    has_models: bool  # whether predict and export can use it
    traffic: SiteTraffic


class SiteStatus(NamedTuple):
    """All runs of a site, and the clients that take no part any more."""

    runs: list[SiteRun]
    forgotten: tuple[str, ...]


def server_status(folder: Path) -> list[ServerRun]:
    """The runs of a server's folder, or of any folder of runs over sites."""
    places = (
        [folder] if folder.name.endswith(NOTES) else sorted([*folder.glob(f"*{NOTES}"), *folder.glob(f"*/*{NOTES}")])
    )
    notes = [place for place in places if (place / "server.json").is_file()]
    if not notes:
        raise FederationError(
            f"{folder} has no run over sites and no site.toml; give the server's folder, a folder of runs, or a site's"
        )
    registered = [key.stem for key in sorted((folder / "sites").glob("*.pub"))]
    return [_server_run(place, registered) for place in notes]


def site_status(settings: SiteSettings, base: Path) -> SiteStatus:
    """What a site's store and ledger say."""
    traffic = _read_ledger(base / settings.ledger, "run")
    if not (file := base / settings.state).is_file():
        return SiteStatus([], ())
    store = StateStore(file)
    try:
        models, runs = set(store.evaluated_runs()), store.runs()
        found = [
            SiteRun(run, rounds, size, run in models, traffic.get(run, SiteTraffic()))
            for run, (rounds, size) in runs.items()
        ]
        return SiteStatus(found, store.forgotten())
    finally:
        store.close()


def _server_run(notes: Path, registered: list[str]) -> ServerRun:
    about, folder = read_json(notes / "server.json"), notes.with_name(notes.name.removesuffix(NOTES))
    done, rounds, finished = 0, None, False
    if RunFolder(folder).started:
        try:
            record = load_run(folder)
            done, rounds, finished = record.rounds_done, record.experiment["rounds"], record.finished
        except CheckpointError:  # it is just being written, or is damaged, which the run itself will say
            pass
    state = "finished" if finished else "running" if is_locked(folder) else "stopped"
    traffic = dict.fromkeys(registered, SiteTraffic()) | _read_ledger(notes / "ledger.jsonl", "site")
    return ServerRun(str(about["run"]), folder, state, done, rounds, int(about["starts"]), traffic)


def _read_ledger(file: Path, key: str) -> dict[str, SiteTraffic]:
    """What a ledger says, by site or by run."""
    found: dict[str, SiteTraffic] = {}
    for line in _lines(file):
        name = str(line.get(key, ""))
        found[name] = found.get(name, SiteTraffic()).add(line)
    return found


def _lines(file: Path) -> Iterator[dict[str, Any]]:
    if not file.is_file():
        return
    with file.open(encoding="utf-8") as opened:
        for text in opened:
            try:
                line = json.loads(text)
            except ValueError:  # the last one, which is just being written
                continue
            if isinstance(line, dict):
                yield line
