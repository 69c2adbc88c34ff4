"""An experiment run over real sites, into the same run folders as `ppfl run`.

The server has no data and no client states: its checkpoint holds its own state, and of each site the last exchange
that was counted. Client states are in the sites' stores.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

from torch import Tensor

from ..algorithms.contract import Method, Problem
from ..core.affinity import Affinity, nothing
from ..core.errors import PPFLError, SettingError
from ..core.trees import tree_map
from ..data import Federation
from ..data.sample_kind import SampleKind
from ..runs.checkpoint import Checkpoint
from ..runs.experiment import Experiment
from ..runs.folder import RunFolder, method_of
from ..runs.lock import locked
from ..runs.provenance import describe_environment
from ..runs.record import RunRecord, load_run
from ..runs.seed_run import Interrupted, OnRoundEnd
from ..runs.storage import read_json
from ..server import Kept, Measurement, RoundEnd, ServerState, begin, choose_lr, measure, train_and_measure
from ..server.loop import MAIN, in_roster_order
from ..sites import Setup
from .carrier import Carrier
from .column_agreement import agree_on_columns, refuse_other_columns
from .federation_errors import FederationError
from .flower_transport import FlowerTransport
from .ledger import Ledger
from .provisioning import SecureSumsFile
from .secure_flower import SecureFlowerTransport
from .secure_sums.secure_settings import METRIC_STEP
from .server_notes import ServerNotes
from .site_mail import Patience, SiteMail
from .site_requests import ClientTable, DescribeData, OpenRun, UseKept

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
                exchange = folder.read_checkpoint_exchange() if folder.started else None
                transport.connect(sites, None if exchange is None else notes.read_sites(exchange))
                FederatedRun(experiment.for_seed(seed), folder, notes, transport, base).go(on_round_end)
    return [load_run(folder.path) for folder in folders.values()]


def refuse_unsupported(experiment: Experiment, *, secure: bool) -> None:
    """Refuse what a federation cannot do before anyone waits for sites."""
    if experiment.newcomers:
        raise SettingError("newcomers are held out of data that a server has; leave newcomers out of a federation")
    if experiment.start is not None:
        raise SettingError("[start] is not possible in a federation yet; leave it out")
    if secure and experiment.watch.report_clients:
        raise SettingError("secure sums show no scores of single clients; set report_clients = false under [watch]")
    if secure and (shown := experiment.algorithm.visible_rows):
        raise SettingError(
            f"secure sums show totals alone, and {experiment.algorithm.title} sends {', '.join(shown)} of each client; "
            f"for PPFL set share_memberships = false and penalty = 0, or use another method"
        )


class _AskedFederation:
    """What an affinity asks of a federation, brought from the sites."""

    def __init__(self, transport: FlowerTransport, kind: SampleKind) -> None:
        self._transport = transport
        self.ids, self.n_classes, self.n_clients = transport.roster.ids, kind.n_classes, len(transport.roster)
        self.name = "the federation"

    def label_counts(self) -> Tensor:
        return self._table("label_counts")

    def feature_means(self) -> Tensor:
        return self._table("feature_means")

    def _table(self, name: str) -> Tensor:
        (reply,) = self._transport.ask([ClientTable(name)])
        if len(reply.rows.ids or ()) < self.n_clients:
            raise FederationError(f"{name} of some clients are missing; all sites must be there when a run begins")
        return in_roster_order(reply.rows, self._transport).values[name]


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
        self.experiment, self.folder, self.notes, self.transport = experiment, folder, notes, transport
        (self.seed,) = experiment.seeds
        self.resumes = folder.started
        self.watch = experiment.watch.build(base)
        self.kind = SampleKind.from_json(transport.facts)
        self.data = read_json(folder.clients_file)["data"] if self.resumes else self._data_digest()
        self.kind = self._with_preparation()
        preparation = None if self.kind.preparation is None else self.kind.preparation.to_json()
        population = experiment.build_population(self.kind.stand_in(), self.seed, base)
        settings = experiment.model_dump(mode="json", exclude={"data"})
        transport.ask([OpenRun(settings, self.seed, preparation or {})])
        self.problem = Problem(
            population, transport.roster, self._affinity(), experiment.rounds, self.seed,
            notes.first_importance(transport.described_total("importance")), tuple(transport.facts["splits"]),
            transport.device,
        )  # fmt: skip
        self.saved = 0  # the round of the last checkpoint
        self.method = self._choose()

    def _with_preparation(self) -> SampleKind:
        """What samples are once they are prepared: as all sites agree now, or agreed when the run began."""
        settings = self.experiment.preparation
        if settings is None:
            return self.kind
        if self.resumes:
            return SampleKind.from_json(read_json(self.folder.clients_file)["kind"])
        described = {name: site.described for name, site in self.transport.sites.items()}
        step = METRIC_STEP if isinstance(self.transport, SecureFlowerTransport) else 0.0
        found = agree_on_columns(self.transport.ask, described, settings, step)
        return self.kind._replace(shape=(len(found.terms),), preparation=found)

    def _affinity(self) -> Affinity:
        """Between all clients of the roster; it may need to ask the sites."""
        ids = self.transport.roster.ids
        asked = cast(Federation, _AskedFederation(self.transport, self.kind))
        found = self.experiment.affinity.build(asked, self.experiment.algorithm) or nothing(ids)
        return found.check(ids).to(self.transport.device)

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
            "kind": self.kind.to_json(), "sites": [[name, len(site.ids)] for name, site in sites.items()],
        }  # fmt: skip

    def _choose(self) -> Method:
        if self.resumes:
            return method_of(self.folder.read_experiment(), self.folder.chosen_file)
        return choose_lr(self.experiment.algorithm, self.problem, self.transport, self.experiment.dropout)

    def go(self, on_round_end: OnRoundEnd | None) -> None:
        """Train to the end, with a checkpoint after every round."""
        environment = describe_environment()
        state, kept = self._start()
        measured: Measurement | None = None
        clock, n_sites = _RoundClock(self.transport), len(self.transport.sites)
        try:
            for end in self._rounds(state, kept):
                end = end._replace(record=end.record | clock.lap())
                if end.state.round == 1 and not self.folder.started:
                    self.folder.begin(self.experiment, self.method, self.clients, environment)
                elif len(self.transport.sites) != n_sites:
                    self.folder.write_clients(self.clients)
                n_sites = len(self.transport.sites)
                self.folder.log.append(end.record, None if end.measured is None else end.measured.memberships)
                state, kept, measured = end.state, end.kept, end.measured
                self._save(state, kept)
                if on_round_end is not None:
                    on_round_end(self.seed, end)
            assert kept is not None, "an experiment has at least one round"
            self._finish(state, kept, measured)
        except KeyboardInterrupt:
            raise Interrupted(self.saved, self.problem.rounds, self.seed, self.folder.path.parent) from None

    def _rounds(self, state: ServerState, kept: Kept | None) -> Iterator[RoundEnd]:
        """Rounds to the last one. Sites that come online on the way take part from the next round on."""
        while state.round < self.problem.rounds:
            for end in train_and_measure(self.method, self.problem, self.transport, self.watch, state, kept):
                yield end
                state, kept = end.state, end.kept
                if state.round < self.problem.rounds and (names := self.transport.newcomers()):
                    state, kept = self._take_in(names, state, kept)
                    break

    def _take_in(self, names: list[str], state: ServerState, kept: Kept) -> tuple[ServerState, Kept]:
        """Onboard sites: their clients get the models as they are, and whatever a client begins with."""
        before = self.transport.roster
        try:
            self.transport.add_sites(names)
            if self.kind.preparation is not None:
                for name in names:
                    refuse_other_columns(self.kind.preparation, name, self.transport.sites[name].described)
            after, affinity = self.transport.roster, self._affinity()
        except PPFLError as error:
            for name in names:
                self.transport.turn_away(name, str(error))
            return state, kept
        self.problem = self.problem._replace(roster=after, affinity=affinity)
        log.info("%s joined after round %d", " and ".join(map(repr, names)), state.round)

        def moved(one: ServerState) -> ServerState:
            return one._replace(server=self.method.move_server(one.server, before, after))

        return moved(state), kept._replace(state=moved(kept.state))

    def _start(self) -> tuple[ServerState, Kept | None]:
        """The first state, or the one in the checkpoint; the sites have the states of their clients."""
        found = self._checkpoint() if self.resumes else None
        if found is None:
            return begin(self.method, self.problem, self.transport, dropout=self.experiment.dropout), None
        self.saved = found.state.round
        problem = self.problem
        setup = Setup(
            MAIN, self.method, problem.population.initial_network(), problem.seed, problem.importance,
            self.experiment.dropout,
        )  # fmt: skip
        self.transport.resume(setup, self.notes.read_merged(found.state.exchange))
        return found.state, found.kept

    def _checkpoint(self) -> Checkpoint | None:
        server = tree_map(lambda leaf: leaf.to(self.problem.device), self.method.init_server(self.problem))
        there = read_json(self.folder.clients_file)
        if there["sites"] != (here := self.clients)["sites"] == there["sites"][: len(here["sites"])]:
            self.folder.write_clients(here)  # killed after a site had joined, before the next checkpoint
        return self.folder.resume({"server": server, "clients": {}}, here)

    def _save(self, state: ServerState, kept: Kept) -> None:
        self.notes.save_sites(state.exchange, self.transport)
        self.folder.save_checkpoint(Checkpoint(state, {}, kept, {}))
        self.saved = state.round

    def _finish(self, last: ServerState, kept: Kept, measured: Measurement | None) -> None:
        if kept.state.round != last.round:
            self.transport.ask([UseKept(MAIN)])
            measured = None
        if measured is None:
            measured = measure(self.method, self.problem, self.transport, kept.state, self.watch)
        returned = {"server": kept.state.server, "clients": {}}
        self.folder.finish(returned, kept.state.round, measured.memberships, measured.record)


class _RoundClock:
    """How the seconds of a round split, and what went wrong in it."""

    def __init__(self, transport: FlowerTransport) -> None:
        self.mail = transport.mail
        self.began, self.times, self.counts = time.monotonic(), self.mail.times, self.mail.counts.copy()

    def lap(self) -> dict[str, Any]:
        """Since the last lap."""
        now, times = time.monotonic(), self.mail.times
        waiting, work = times.waiting - self.times.waiting, times.work - self.times.work
        found: dict[str, Any] = {
            "seconds_sites": work, "seconds_transport": max(0.0, waiting - work),
            "seconds_server": max(0.0, now - self.began - waiting),
        }  # fmt: skip
        found |= {f"sites_{name}": count for name, count in (self.mail.counts - self.counts).items()}
        self.began, self.times, self.counts = now, times, self.mail.counts.copy()
        return found
