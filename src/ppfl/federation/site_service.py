"""A site on a machine of its own: it holds the data, the clients' states and an engine, and answers messages.

It knows nothing of Flower: bytes come in, bytes go out. A message is done once: what it changed and its reply become
durable together, and the same message again gets the same reply.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..algorithms.contract import Rows
from ..core.ids import ClientIds
from ..data import Federation
from ..data.sample_spec import SampleSpec
from ..errors import CheckpointError, PPFLError, SettingError
from ..sites import Describe, Reply, Site
from ..sites.messages import decode, encode
from ..sites.site import Session
from .column_agreement import center_from_json, plan_from_json
from .envelope import ERROR, REPLIES, REQUESTS, Envelope, seal, unseal
from .federation_errors import FederationError
from .ledger import Ledger
from .opened_run import experiment_of
from .provisioning import load_secure_sums
from .run_clients import RunClients
from .secure_sums import MaskedSite
from .secure_sums.messages import AcceptKeys, Masked, OfferKey, Unmask
from .site_data import SiteData
from .site_requests import ClientTable, DescribeData, OpenRun, SumColumns
from .site_sessions import NOT_OPEN, SiteSessions
from .site_settings import SiteSettings
from .state_store import Described, LastReply, StateStore

TABLES: dict[str, Callable[[Federation], torch.Tensor]] = {
    "label_counts": Federation.label_counts,
    "feature_means": Federation.feature_means,
}


class _OpenedRun(NamedTuple):
    run: str
    site: Site
    clients: RunClients


class _Unmasked:
    """The site of the run that a message is of, below its masks."""

    def __init__(self, service: SiteService) -> None:
        self.name, self.run, self._service = service.settings.name, "", service

    @property
    def sessions(self) -> Mapping[str, Session]:
        return self._service._site(self.run).sessions

    def answer(self, request: Any) -> Reply:
        return self._service._work[type(request)](self.run, request)


class SiteService:
    """Answers the messages of servers, one at a time."""

    def __init__(self, settings: SiteSettings, base: Path | None = None) -> None:
        """Relative paths and modules of factories start at `base`."""
        self.settings, self.base = settings, base
        folder = Path() if base is None else base
        self.store = StateStore(folder / settings.state)
        self._forgotten = self.store.forgotten()
        self.data = SiteData(settings, base, self._forgotten)
        self.ledger = Ledger(folder / settings.ledger)
        self._opened: _OpenedRun | None = None
        self._below = _Unmasked(self)
        self._masks = None if settings.secure_sums is None else self._make_masks(folder, settings.secure_sums)
        self._sessions = SiteSessions(settings.name, self.store, self._open_run)
        self._work: dict[type, Callable[[str, Any], Reply]] = {
            DescribeData: self._describe,
            OpenRun: self._open,
            SumColumns: self._sum_columns,
            ClientTable: self._table,
            **self._sessions.work,
            Describe: lambda run, request: self._site(run).answer(request),
        }

    @property
    def federation(self) -> Federation:
        """The site's clients, with their data as they are."""
        return self.data.plain()[0]

    def close(self) -> None:
        self.store.close()

    def answer(self, data: bytes) -> bytes:
        """The reply to a message; an error of ours is a reply too, and changes nothing."""
        began = time.perf_counter()
        envelope = Envelope(REQUESTS, "", self.settings.name, 0, 0, b"")
        try:
            envelope = unseal(data, self.settings.most_bytes)
            return self._answer(envelope, began)
        except Exception as error:  # whatever a server sends, the site goes on; what is no error of ours has its name
            self._opened = None  # what is in memory may be ahead of the store
            said = " ".join(str(error if isinstance(error, PPFLError) else repr(error)).split())[:1000]
            self.ledger.note(refused=said, run=envelope.run, start=envelope.start, number=envelope.number)
            return seal(envelope._replace(kind=ERROR, payload=said.encode(), site=self.settings.name))

    def _answer(self, envelope: Envelope, began: float) -> bytes:
        if envelope.site != self.settings.name or envelope.kind != REQUESTS:
            raise FederationError(f"a message for site {envelope.site!r}, this is {self.settings.name!r}")
        digest, last = hashlib.sha256(envelope.payload).hexdigest(), self.store.last_reply(envelope.run)
        if last is not None and envelope.order <= last.order:
            if envelope.order == last.order and digest == last.digest:
                if not last.reply:
                    raise FederationError(f"the reply to message {envelope.order} was deleted with a client's state")
                return last.reply
            raise FederationError(f"message {envelope.order} came after {last.order}; it is late, and is not done")
        opened = self.store.opened(envelope.run)
        if opened is not None and (self._opened is None or self._opened.run != envelope.run):
            experiment_of(decode(opened), self.settings, self.base)  # imports the classes that a message may hold
        requests = decode(envelope.payload)
        if not isinstance(requests, list) or not all(map(self._answers, requests)):
            raise FederationError("a message with requests that this site does not answer; client states stay here")
        self.ledger.write("to site", envelope, requests)
        with self.store.transaction():
            self._leave_out_forgotten()
            replies = [self._do(envelope.run, request) for request in requests]
            seconds = time.perf_counter() - began
            answer = envelope._replace(kind=REPLIES, payload=encode(replies), seconds=seconds)
            reply = seal(answer)
            self.store.remember_reply(envelope.run, LastReply(envelope.order, digest, reply))
        self.ledger.write("to server", answer, replies)
        return reply

    def _leave_out_forgotten(self) -> None:
        """The owner may have forgotten a client since the last message; within a transaction nobody else does."""
        if (forgotten := self.store.forgotten()) != self._forgotten:
            self.data.leave_out(forgotten)
            self._forgotten, self._opened = forgotten, None

    def _answers(self, request: Any) -> bool:
        masked = isinstance(request, OfferKey | AcceptKeys | Masked | Unmask)
        return type(request) in self._work or (masked and self._masks is not None)

    def _do(self, run: str, request: Any) -> Reply:
        self._below.run = run
        return self._below.answer(request) if self._masks is None else self._masks.answer(request)

    def _make_masks(self, folder: Path, file: Path) -> MaskedSite:
        secure, key = load_secure_sums(folder / file), self.settings.private_key
        if key is None:
            raise SettingError(f"site {self.settings.name!r} has secure sums and no private_key; use the one of init")
        return MaskedSite(self._below, (folder / key).read_bytes(), secure.public_keys, secure.settings)

    # ------------------------------------------------------------------ before the first round

    def _describe(self, run: str, request: DescribeData) -> Reply:
        reply, ids = self._new_description(request.preparation)
        found = self.store.description(run)
        if found is not None and found.present == ids and self._clients(found).left:
            known: Reply = decode(found.reply)  # the server goes on with the clients it knows
            return known
        self._save_description(run, reply, ids)
        return reply

    def _new_description(self, preparation: dict[str, Any]) -> tuple[Reply, ClientIds]:
        federation, importance, facts = self.data.describe(preparation)
        sums = {"importance": importance.sum()} | {
            f"samples.{split}": torch.tensor(float(len(part)), dtype=torch.float64)
            for split, part in federation.splits.items()
        }
        agreed = {**facts["agreed"], "units": dict(sorted(self.settings.units.items()))}
        # the digest of the data is the site's own: it tells whether they changed since a run began
        reply = Reply(metrics=sums, rows=Rows(tuple(federation.ids), {}), facts={**facts, "agreed": agreed})
        return reply, federation.ids

    def _save_description(self, run: str, reply: Reply, ids: ClientIds) -> None:
        if not self.store.sessions(run):  # else states of the clients that were described are there
            self.store.save_description(run, Described(encode(reply), tuple(ids)))

    def _clients(self, described: Described) -> RunClients:
        """Those that the server knows, and those that take part."""
        return RunClients(decode(described.reply).rows.ids, described.present)

    def _sum_columns(self, run: str, request: SumColumns) -> Reply:
        rows = self.data.rows(request.preparation)
        return Reply(metrics=rows.sums(plan_from_json(request.plan), center_from_json(request.center)))

    def _open(self, run: str, request: OpenRun) -> Reply:
        if self.store.description(run) is None:
            self._save_description(run, *self._new_description(request.settings.get("preparation") or {}))
        self.store.open_run(run, encode(request))
        self._opened = None
        self._site(run)
        return Reply()

    def _table(self, run: str, request: ClientTable) -> Reply:
        if request.name not in TABLES:
            raise SettingError(f"there is no table {request.name!r:.40} of clients; use one of {', '.join(TABLES)}")
        site, clients = self._open_run(run)
        rows = Rows(site.federation.ids, {request.name: TABLES[request.name](site.federation)})
        return Reply(rows=clients.table(rows))

    def _site(self, run: str) -> Site:
        return self._open_run(run)[0]

    def _open_run(self, run: str) -> tuple[Site, RunClients]:
        """The site of a run and its clients: those in memory, or made again from what the store has."""
        opened = self.store.opened(run)
        if opened is None:  # it may also have been deleted meanwhile
            raise CheckpointError(f"{NOT_OPEN}: site {self.settings.name!r} does not know the run {run!r:.80}")
        if self._opened is None or self._opened.run != run:
            sessions, described, site = self.store.sessions(run), self.store.description(run), self._make_site(opened)
            ids = site.federation.ids
            clients = RunClients(ids, ids) if described is None else self._clients(described)
            if sessions and clients.present != ids:
                raise CheckpointError(
                    f"the clients of site {self.settings.name!r} are not those of the run any more; bring the data back"
                )
            self._opened = _OpenedRun(run, site, clients)
            for session, setup in sessions.items():
                self._opened.site.setup(decode(setup))
                self._sessions.restore(run, self._opened.site, session)
        return self._opened.site, self._opened.clients

    def _make_site(self, opened: bytes) -> Site:
        request: OpenRun = decode(opened)
        experiment = experiment_of(request, self.settings, self.base)
        federation, importance = self.data.prepared(request.settings.get("preparation"), request.preparation)
        population = experiment.build_population(SampleSpec.of(federation), request.seed, self.base)
        metrics = experiment.watch.build(self.base).known_metrics
        return Site(
            federation, population, experiment.build_engine(), name=self.settings.name, metrics=metrics,
            importance=importance, states_on_disk=experiment.states_on_disk,
        )  # fmt: skip
