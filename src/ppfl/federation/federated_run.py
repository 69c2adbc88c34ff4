"""An experiment run over real sites, into the same run folders as `ppfl run`.

The server has no data and no client states: its checkpoint holds its own state, and of each site the last exchange
that was counted. Client states are in the sites' stores.
"""

from __future__ import annotations

import hashlib
import json
import logging
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

from ..algorithms.contract import Method, Roster, Rows
from ..core.affinity import Affinity, nothing
from ..core.population import Population
from ..data import Federation
from ..data.sample_spec import SampleSpec
from ..errors import PPFLError
from ..io.files import read_json
from ..io.lock import locked
from ..runs.experiment import Experiment
from ..runs.folder import Result, RunFolder, StartNetwork, method_that_ran
from ..runs.provenance import describe_environment
from ..runs.record import RunRecord, load_run
from ..runs.run import Interrupted, OnRoundEnd
from ..runs.start import load_start, start_population_from
from ..server import Checkpoint, RoundEnd, Training
from ..server.loop import MAIN, make_setup
from ..sites import SavedStates
from .asked_federation import AskedFederation
from .carrier import Carrier
from .column_agreement import agree_on_columns, refuse_other_columns
from .flower_transport import FlowerTransport
from .ledger import Ledger
from .provisioning import SecureSumsFile
from .round_clock import RoundClock
from .secure_flower import SecureFlowerTransport
from .secure_sums.secure_settings import METRIC_STEP
from .server_notes import ServerNotes
from .site_mail import Patience, SiteMail
from .site_requests import DescribeData, OpenRun
from .unsupported import refuse_unsupported

log = logging.getLogger("ppfl.federation")


def run_federated(
    experiment: Experiment,
    out: Path,
    carrier: Carrier,
    *,
    sites: tuple[str, ...] | None = None,
    patience: Patience | None = None,
    base: Path | None = None,
    resume: bool = False,
    on_round_end: OnRoundEnd | None = None,
    secure: SecureSumsFile | None = None,
    **mail_options: Any,
) -> list[RunRecord]:
    """Run every seed into `out`/seed-<seed> over the sites that a carrier reaches. sites: names to wait for.

    secure: by which only totals over sites are read; None: the server reads each site's sums.
    """
    refuse_unsupported(experiment, secure=secure is not None)
    folders = {seed: RunFolder(out / f"seed-{seed}") for seed in experiment.seeds}
    with ExitStack() as locks:
        for seed, folder in folders.items():
            if not folder.finished:
                locks.enter_context(locked(folder.path))
            folder.claim(experiment.for_seed(seed), resume=resume)
        for seed, folder in folders.items():
            if not folder.finished:
                notes = ServerNotes(folder.path.with_name(f"{folder.path.name}.federation"))
                mail = SiteMail(
                    carrier, notes.run, start=notes.starts, patience=patience, ledger=Ledger(notes.ledger_file),
                    **mail_options,
                )  # fmt: skip
                if secure is None:
                    transport = FlowerTransport(mail, experiment.device)
                else:
                    transport = SecureFlowerTransport(mail, experiment.device, secure, notes.run)
                if experiment.preparation is not None:
                    transport.describe = DescribeData(experiment.preparation.model_dump(mode="json"))
                saved = folder.saved_at()
                transport.connect(sites, None if saved is None else notes.read_sites(saved["exchange"]))
                FederatedRun(experiment.for_seed(seed), folder, notes, transport, base).go(on_round_end)
    return [load_run(folder.path) for folder in folders.values()]


class FederatedRun:
    """One seed."""

    def __init__(
        self,
        experiment: Experiment,
        folder: RunFolder,
        notes: ServerNotes,
        transport: FlowerTransport,
        base: Path | None,
    ) -> None:
        self.experiment, self.folder, self.notes, self.transport, self.base = experiment, folder, notes, transport, base
        (self.seed,) = experiment.seeds
        self.resumes = folder.started
        self.spec = SampleSpec.model_validate({name: transport.facts[name] for name in SampleSpec.model_fields})
        self.data = read_json(folder.clients_file)["data"] if self.resumes else self._data_digest()
        self.spec = self._with_preparation()
        preparation = None if self.spec.preparation is None else self.spec.preparation.model_dump(mode="json")
        population = experiment.build_population(self.spec, self.seed, base)
        self.start = self._load_start(population, base)
        settings = experiment.model_dump(mode="json", exclude={"data"})
        transport.ask([OpenRun(settings, self.seed, preparation or {})])
        transport.importance = notes.first_importance(transport.described_total("importance"))
        self.training = Training(
            transport, population, self._method(), rounds=experiment.rounds, seed=self.seed, affinity=self._affinity,
            watch=experiment.watch.with_functions(base), dropout=experiment.dropout,
        )  # fmt: skip
        self.saved = 0  # the round of the last checkpoint

    def _load_start(self, population: Population, base: Path | None) -> StartNetwork | None:
        """The network that the experiment begins with; sites get it with the first message."""
        if self.experiment.start is None:
            return None
        start = self.folder.read_start() if self.resumes else load_start(self.experiment, base)
        if start is not None:
            start_population_from(population, start)
        return start

    def _with_preparation(self) -> SampleSpec:
        """What samples are once they are prepared: as all sites agree now, or agreed when the run began."""
        settings = self.experiment.preparation
        if settings is None:
            return self.spec
        if self.resumes:
            return SampleSpec.model_validate(read_json(self.folder.clients_file)["spec"])
        described = {name: site.described for name, site in self.transport.sites.items()}
        step = METRIC_STEP if isinstance(self.transport, SecureFlowerTransport) else 0.0
        found = agree_on_columns(self.transport.ask, described, settings, step)
        return self.spec.prepared_by(found)

    def _affinity(self, roster: Roster) -> Affinity:
        """Between all clients of the roster; it may need to ask the sites."""
        asked = cast(Federation, AskedFederation(self.transport, self.spec))
        return self.experiment.build_affinity(asked, self.base) or nothing(roster.ids)

    def _data_digest(self) -> str:
        said = {name: site.described.facts["data"] for name, site in sorted(self.transport.sites.items())}
        return hashlib.sha256(json.dumps(said).encode()).hexdigest()[:32]

    @property
    def clients(self) -> dict[str, Any]:
        """As a run folder has them, with one number of samples per site instead of one per client. The digest stays
        that of the first sites, as it says which run this is."""
        sites = self.transport.sites
        samples = {
            split: [int(site.described.metrics[f"samples.{split}"]) for site in sites.values()]
            for split in self.transport.facts["splits"]
        }
        return {
            "ids": list(self.transport.roster.ids), "samples": samples, "truth": None, "data": self.data,
            "spec": self.spec.model_dump(mode="json"), "sites": [[name, len(site.ids)] for name, site in sites.items()],
        }  # fmt: skip

    def _method(self) -> Method:
        """As the experiment has it; a run that is resumed has chosen what was left to it."""
        if not self.resumes:
            return self.experiment.method
        return method_that_ran(self.experiment, self.folder.about)

    def go(self, on_round_end: OnRoundEnd | None) -> None:
        """Train to the end, with a checkpoint after every round."""
        environment, training = describe_environment(), self._start()
        clock, n_sites = RoundClock(self.transport), len(self.transport.sites)
        try:
            for end in training.rounds():
                end = end._replace(record=end.record | clock.lap())
                if end.state.round == 1 and not self.folder.started:
                    self.folder.begin(self.experiment, training.method, self.clients, environment, self.start)
                elif len(self.transport.sites) != n_sites:
                    self.folder.write_clients(self.clients)
                n_sites = len(self.transport.sites)
                self.folder.log.append(end.record, None if end.measured is None else end.measured.memberships)
                self._save(end)
                if on_round_end is not None:
                    on_round_end(self.seed, end)
                if end.state.round < training.problem.rounds and (names := self.transport.newcomers()):
                    self._take_in(names)
            self._finish()
        except KeyboardInterrupt:
            raise Interrupted(self.saved, training.problem.rounds, self.seed, self.folder.path.parent) from None

    def _take_in(self, names: list[str]) -> None:
        """Onboard sites that came online: their clients get the models as they are, and what a client begins with."""
        try:
            self.transport.add_sites(names)
            if self.spec.preparation is not None:
                for name in names:
                    refuse_other_columns(self.spec.preparation, name, self.transport.sites[name].described)
            self.training.add_clients()
        except PPFLError as error:
            for name in names:
                self.transport.turn_away(name, str(error))
        else:
            log.info("%s joined after round %d", " and ".join(map(repr, names)), self.training.state.round)

    def _start(self) -> Training:
        """From the first round on, or from the checkpoint; the sites have the states of their clients."""
        found = self._checkpoint() if self.resumes else None
        if found is None:
            return self.training.begin()
        self.saved, self.transport.saved[MAIN] = found.state.round, found.state.exchange
        setup = make_setup(self.training.method, self.training.problem, dropout=self.experiment.dropout)
        self.transport.resume(setup, self.notes.read_merged(found.state.exchange))
        return self.training.resume(found)

    def _checkpoint(self) -> Checkpoint | None:
        there = read_json(self.folder.clients_file)
        if there["sites"] != (here := self.clients)["sites"] == there["sites"][: len(here["sites"])]:
            self.folder.write_clients(here)  # killed after a site had joined, before the next checkpoint
        server, _ = self.training.first_states
        return self.folder.resume(server, {}, here)

    def _save(self, end: RoundEnd) -> None:
        self.notes.save_sites(end.state.exchange, self.transport)
        self.folder.checkpoint(self.training.checkpoint(end))
        self.saved, self.transport.saved[MAIN] = end.state.round, end.state.exchange

    def _finish(self) -> None:
        measured, state = self.training.finish(), self.training.state
        # the sites keep the states of their clients
        nothing_here = SavedStates(Rows((), {}))
        self.folder.finish(Result(state, nothing_here, measured.memberships, measured.record))
