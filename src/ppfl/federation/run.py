"""An experiment over sites, into the same run folders as `ppfl run`.

The server has no data and no client states. Its checkpoint holds its own state, and of each site the last exchange that
was merged; `clients.json` has what the sites said of their data.
"""

from __future__ import annotations

import json
import logging
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from hashlib import sha256
from pathlib import Path
from typing import Any, cast

import torch
from pydantic import ValidationError
from torch import Tensor

from ..algorithms.contract import Rows
from ..core.affinity import Affinity, nothing
from ..core.ids import Roster
from ..core.population import Population
from ..data import Federation
from ..data.column_sums import Center, ColumnPlan, TableFacts, agree
from ..data.preparation import Preparation
from ..data.sample_spec import SampleSpec
from ..errors import DataError
from ..io.files import make_folder, read_json, write_json
from ..runs.experiment import Experiment
from ..runs.folder import RunFolder
from ..runs.record import RunRecord, load_run
from ..runs.run import OnRoundEnd, SeedRun, claim
from ..server import ServerState, Training
from ..server.loop import MAIN, in_roster_order
from ..sites import PredictionMetric, Reply
from .exchange import Channel, Exchange, Timeouts
from .ledger import Ledger
from .messages import ClientTable, FederationError, Join, PrepareRows, SumColumns
from .policy import experiment_hash, over_sites, refuse_unsupported
from .secure_sums import STEPS
from .transport import SiteTransport

log = logging.getLogger("ppfl.federation")
Record = dict[str, Any]


def run_over_sites(
    experiment: Experiment,
    out: Path,
    channel: Channel,
    sites: int,
    *,
    timeouts: Timeouts | None = None,
    base: Path | None = None,
    secure: bool = False,
    on_round_end: OnRoundEnd | None = None,
    now: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> list[RunRecord]:
    """Runs every seed of an experiment into `out`/seed-<seed> over the sites that a channel reaches.

    A run that was stopped goes on.

    Args:
        experiment: What is run. Its [data] are not used: every site has its own.
        out: The folder for the folders of all seeds.
        channel: Carries calls to the sites.
        sites: How many there are. The run never begins with fewer.
        timeouts: How long an exchange may take, and how many sites must answer.
        base: Where modules that the experiment names are looked for first.
        secure: Whether only totals over sites are read.
        on_round_end: Called with the seed and the end of each round.
        now, sleep: The clock.

    Returns:
        What each seed left behind.

    Raises:
        FederationError: If too few sites answer. Called again, the run goes on.
    """
    refuse_unsupported(experiment, secure=secure)
    hash, experiment = experiment_hash(experiment), over_sites(experiment)
    folders = {seed: RunFolder(out / f"seed-{seed}") for seed in experiment.seeds}
    make_folder(out)
    with ExitStack() as locks:
        for seed in claim(experiment, folders, locks, resume=True):
            folder, one = folders[seed], experiment.for_seed(seed)
            notes = RunNotes(folder.path.with_name(f"{folder.path.name}.federation"))
            exchange = Exchange(
                channel, notes.run, start=notes.starts, timeouts=timeouts, ledger=Ledger(notes.ledger), now=now,
                sleep=sleep,
            )  # fmt: skip
            log.info("run %s, start %d, experiment %s", notes.run, notes.starts, hash)
            transport = SiteTransport(exchange, Join(hash, seed), experiment.device, secure=secure)
            clients = ClientsAtSites(one, transport, folder, sites, base)
            SeedRun(one, clients, folder, base=base).go(1, on_round_end)
    return [load_run(folder.path) for folder in folders.values()]


def are_finished(experiment: Experiment, out: Path) -> bool:
    """Whether all seeds are done. What cannot be run, and a folder with another experiment, is refused before anything
    is started."""
    refuse_unsupported(experiment)
    folders = {seed: RunFolder(out / f"seed-{seed}") for seed in experiment.seeds}
    for seed, folder in folders.items():
        folder.claim(over_sites(experiment).for_seed(seed), resume=True)
    return all(folder.finished for folder in folders.values())


class RunNotes:
    """What is kept beside a run folder: the id of the run, how often it was started, and the ledger."""

    def __init__(self, folder: Path) -> None:
        make_folder(folder)
        file, self.ledger = folder / "federation.json", folder / "ledger.jsonl"
        before = read_json(file) if file.is_file() else {}
        # a run that is begun again in the same place is another run, and its sites must not take it for the old one
        self.run = str(before.get("run") or f"{folder.stem}-{uuid.uuid4().hex}")
        self.starts = int(before.get("starts", 0)) + 1
        write_json(file, {"run": self.run, "starts": self.starts})


class ClientsAtSites:
    """The clients of a run over sites."""

    def __init__(
        self, experiment: Experiment, transport: SiteTransport, folder: RunFolder, sites: int, base: Path | None
    ) -> None:
        self.experiment, self.transport, self.base = experiment, transport, base
        folder.finish_change()
        there = read_json(folder.clients_file) if folder.started else None
        self._changes: list[Any] = [] if there is None else list(there["changes"])
        self._round = 0  # that is done
        transport.connect(sites, None if there is None else _read_sites(there))
        self._data = _digest_of_data(transport) if there is None else str(there["data"])
        transport.importance = transport.described_total("importance") if there is None else there["importance"]
        if there is None:
            self.spec = SampleSpec.model_validate({name: transport.agreed[name] for name in SampleSpec.model_fields})
            if experiment.preparation is not None:
                self.spec = self.spec.prepared_by(agree_on_columns(transport, experiment))
        else:
            self.spec = SampleSpec.model_validate(there["spec"])
        if self.spec.preparation is not None:
            transport.prepare(PrepareRows(self.spec.preparation.model_dump(mode="json")))
        self._clock = _Clock(transport)

    def describe(self) -> Record:
        """With one number of samples per site instead of one per client."""
        sites = self.transport.sites
        samples = {split: [int(site.facts.samples[split]) for site in sites.values()]
                   for split in self.transport.agreed["splits"]}  # fmt: skip
        return {
            "ids": list(self.transport.roster.ids), "samples": samples, "truth": None, "data": self._data,
            "spec": self.spec.model_dump(mode="json"), "importance": self.transport.importance,
            "changes": self._changes,
            "sites": [[name, _to_json(site.described)] for name, site in sites.items()],
        }  # fmt: skip

    def connect(self, population: Population, metrics: Mapping[str, PredictionMetric]) -> SiteTransport:
        """The transport, which reaches the sites already."""
        self.transport.bound_scores(population)
        return self.transport

    def affinity(self, roster: Roster) -> Affinity | None:
        """Between all clients of the roster; it may need to ask the sites."""
        asked = cast(Federation, _AskedFederation(self.transport, self.spec))
        return self.experiment.build_affinity(asked, self.base) or nothing(roster.ids)

    def notes(self) -> Record:
        """Where the seconds of the round went, and which sites it and its scores lack."""
        unscored = self.transport.unscored
        return self._clock.lap() | ({"unscored": unscored} if unscored else {})

    def safe(self, state: ServerState) -> None:
        """Sites need no states before this one any more."""
        self.transport.saved[MAIN], self._round = state.exchange, state.round

    def changed(self) -> bool:
        """Whether sites have other clients now. Those that left are named nowhere any more."""
        before = self.transport.roster
        if not self.transport.join_again():
            return False
        stayed = [before.position[client] for client in self.transport.roster.ids]
        self._changes.append([self._round, stayed])
        return True

    def last_scores(self, training: Training) -> Record:
        """The sites that the scores leave out."""
        return {"unscored": self.transport.unscored} if self.transport.unscored else {}


class _AskedFederation:
    """What an affinity asks of a federation, brought from the sites."""

    def __init__(self, transport: SiteTransport, spec: SampleSpec) -> None:
        self._transport = transport
        self.ids, self.n_classes, self.n_clients = transport.roster.ids, spec.n_classes, len(transport.roster)
        self.name, self.weights = "the federation", torch.zeros(0)

    def label_counts(self) -> Tensor:
        """One row per client."""
        return self._table("label_counts")

    def feature_means(self) -> Tensor:
        """One row per client."""
        return self._table("feature_means")

    def _table(self, name: str) -> Tensor:
        (reply,) = self._transport.ask([ClientTable(name)])
        rows = in_roster_order(reply.rows, self._transport)
        if rows.n_clients < self.n_clients:
            raise FederationError(f"{name} of some clients are missing; all sites must be there when a run begins")
        return rows.values[name]


def agree_on_columns(transport: SiteTransport, experiment: Experiment) -> Preparation:
    """The preparation of the rows of all sites, from sums over the rows of each."""
    settings, sites = experiment.preparation, len(transport.sites)
    assert settings is not None

    def ask(plan: ColumnPlan, center: Center | None) -> dict[str, Tensor]:
        about = {} if center is None else center.model_dump(mode="json")
        (reply,) = transport.ask([SumColumns(plan.model_dump(mode="json"), about)])
        if (answered := round(float(reply.metrics["sites"]))) < sites:
            raise FederationError(
                f"{answered} of {sites} sites have summed their columns; all must be there when a run begins, so look "
                f"at the logs here and at the sites"
            )
        return {name: part.cpu() for name, part in reply.metrics.items()}

    said = {name: _column_facts(name, site.described) for name, site in transport.sites.items()}
    return agree(said, settings, ask, STEPS["metrics"] * sites if transport.secure else 0.0)


def _column_facts(site: str, described: Reply) -> TableFacts:
    try:
        facts = TableFacts.model_validate({name: described.facts[name] for name in ("kinds", "left_out", "named")})
    except (KeyError, ValidationError):
        facts = TableFacts(kinds={})
    if not facts.kinds or not {*facts.left_out} <= {*facts.kinds}:
        raise DataError(f"site {site!r} does not say what its columns are; install the same ppfl there")
    return facts


def _digest_of_data(transport: SiteTransport) -> str:
    said = {name: site.described.facts.get("data") for name, site in sorted(transport.sites.items())}
    return sha256(json.dumps(said).encode()).hexdigest()[:32]


def _to_json(described: Reply) -> Record:
    sums = {name: float(value) for name, value in described.metrics.items()}
    return {"ids": list(described.rows.ids or ()), "sums": sums, "facts": described.facts}


def _read_sites(there: Record) -> dict[str, Reply]:
    found = {}
    for name, said in there["sites"]:
        sums = {key: torch.tensor(value, dtype=torch.float64) for key, value in said["sums"].items()}
        found[str(name)] = Reply(metrics=sums, rows=Rows(tuple(said["ids"]), {}), facts=said["facts"])
    return found


class _Clock:
    """How the seconds of a round split, and what went wrong in it."""

    def __init__(self, transport: SiteTransport) -> None:
        self.transport, self.exchange = transport, transport.exchange
        self.began, self.times, self.carried = time.monotonic(), self.exchange.times, self.exchange.bytes_carried
        self.counts: Counter[str] = self.exchange.counts.copy()

    def lap(self) -> Record:
        """Since the last lap. A round's training travels with the scores of the one before, so that seconds and bytes
        are those of a whole round."""
        exchange, now = self.exchange, time.monotonic()
        counts, absent = self.transport.noted
        waiting, work = exchange.times.waiting - self.times.waiting, exchange.times.work - self.times.work
        found: Record = {
            "seconds": now - self.began, "bytes_carried": exchange.bytes_carried - self.carried,
            "seconds_sites": work, "seconds_transport": max(0.0, waiting - work),
            "seconds_server": max(0.0, now - self.began - waiting),
        }  # fmt: skip
        found |= {f"sites_{name}": count for name, count in (counts - self.counts).items()}
        if absent:
            found["absent"] = absent  # of whom the round has no part, and why
        self.began, self.times, self.counts = now, exchange.times, counts
        self.carried = exchange.bytes_carried
        return found
