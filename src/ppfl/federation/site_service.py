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
from ..core.errors import CheckpointError, PPFLError, SettingError
from ..data import Federation
from ..runs.experiment import Experiment
from ..sites import Close, Describe, Evaluate, Keep, Reply, Setup, Site, Train
from ..sites.client_round import Session
from ..sites.messages import AcceptKeys, Masked, OfferKey, Unmask
from ..sites.wire import decode, encode
from .column_agreement import center_from_json, plan_from_json
from .envelope import ERROR, REPLIES, REQUESTS, Envelope, seal, unseal
from .federation_errors import FederationError
from .ledger import Ledger
from .provisioning import load_secure_sums
from .secure_sums import MaskedSite
from .site_data import SiteData
from .site_requests import ClientTable, DescribeData, OpenRun, SumColumns, UseKept
from .site_settings import SiteSettings
from .state_store import LastReply, Snapshot, StateStore

NOT_OPEN = "not open"  # how an error begins that the server answers by opening the run and its sessions again
TABLES: dict[str, Callable[[Federation], torch.Tensor]] = {
    "label_counts": Federation.label_counts,
    "feature_means": Federation.feature_means,
}


class _OpenedRun(NamedTuple):
    run: str
    site: Site


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
        self.data = SiteData(settings, base)
        self.store = StateStore(folder / settings.state)
        self.ledger = Ledger(folder / settings.ledger)
        self._opened: _OpenedRun | None = None
        self._below = _Unmasked(self)
        self._masks = None if settings.secure_sums is None else self._make_masks(folder, settings.secure_sums)
        self._work: dict[type, Callable[[str, Any], Reply]] = {
            DescribeData: self._describe,
            OpenRun: self._open,
            SumColumns: self._sum_columns,
            ClientTable: self._table,
            UseKept: self._use_kept,
            Setup: self._setup,
            Train: self._train,
            Evaluate: self._evaluate,
            Keep: self._keep,
            Close: self._close,
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
                return last.reply
            raise FederationError(f"message {envelope.order} came after {last.order}; it is late, and is not done")
        requests = decode(envelope.payload)
        if not isinstance(requests, list) or not all(map(self._answers, requests)):
            raise FederationError("a message with requests that this site does not answer; client states stay here")
        self.ledger.write("to site", envelope, requests)
        with self.store.transaction():
            replies = [self._do(envelope.run, request) for request in requests]
            seconds = time.perf_counter() - began
            answer = envelope._replace(kind=REPLIES, payload=encode(replies), seconds=seconds)
            reply = seal(answer)
            self.store.remember_reply(envelope.run, LastReply(envelope.order, digest, reply))
        self.ledger.write("to server", answer, replies)
        return reply

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
        federation, importance, facts = self.data.describe(request.preparation)
        sums = {"importance": importance.sum()} | {
            f"samples.{split}": torch.tensor(float(len(part)), dtype=torch.float64)
            for split, part in federation.splits.items()
        }
        agreed = {**facts["agreed"], "units": dict(sorted(self.settings.units.items()))}
        # the digest of the data is the site's own: it tells whether they changed since a run began
        return Reply(metrics=sums, rows=Rows(federation.ids, {}), facts={**facts, "agreed": agreed})

    def _sum_columns(self, run: str, request: SumColumns) -> Reply:
        rows = self.data.rows(request.preparation)
        return Reply(metrics=rows.sums(plan_from_json(request.plan), center_from_json(request.center)))

    def _open(self, run: str, request: OpenRun) -> Reply:
        self.store.open_run(run, encode(request))
        self._opened = None
        self._site(run)
        return Reply()

    def _table(self, run: str, request: ClientTable) -> Reply:
        if request.name not in TABLES:
            raise SettingError(f"there is no table {request.name!r:.40} of clients; use one of {', '.join(TABLES)}")
        federation = self._site(run).federation
        return Reply(rows=Rows(federation.ids, {request.name: TABLES[request.name](federation)}))

    def _site(self, run: str) -> Site:
        """The site of a run: the one in memory, or made again from what the store has."""
        if self._opened is None or self._opened.run != run:
            opened = self.store.opened(run)
            if opened is None:
                raise CheckpointError(f"{NOT_OPEN}: site {self.settings.name!r} does not know the run {run!r:.80}")
            self._opened = _OpenedRun(run, self._make_site(decode(opened)))
            for session, setup in self.store.sessions(run).items():
                self._opened.site.setup(decode(setup))
                self._restore(self._opened, session)
        return self._opened.site

    def _make_site(self, request: OpenRun) -> Site:
        settings = {**request.settings, "data": self.settings.data.model_dump(mode="json"), "device": "cpu"}
        named = [settings.get("model", {}).get("factory"), *settings.get("watch", {}).get("metrics", ())]
        for name in named:
            if name is not None and name not in self.settings.allow:
                raise SettingError(
                    f"the server names the function {name!r:.80}, and site {self.settings.name!r} allows "
                    f"{', '.join(self.settings.allow) or 'none'}; its owner may add it to `allow` in site.toml"
                )
        try:
            experiment = Experiment.model_validate(settings)
        except ValueError as error:
            raise SettingError(
                f"the server's experiment cannot be used here ({' '.join(str(error).split())})"
            ) from None
        federation, importance = self.data.prepared(request.settings.get("preparation"), request.preparation)
        population = experiment.build_population(federation, request.seed, self.base)
        metrics = experiment.watch.build(self.base).known_metrics
        return Site(
            federation, population, experiment.build_engine(), name=self.settings.name, metrics=metrics,
            importance=importance, states_on_disk=experiment.states_on_disk,
        )  # fmt: skip

    # ------------------------------------------------------------------ sessions and their states

    def _setup(self, run: str, request: Setup) -> Reply:
        site = self._site(run)
        site.setup(request)
        states = Snapshot(0, site.sessions[request.session].states.named("now"))
        self.store.begin_session(run, request.session, encode(request), states)
        return Reply()

    def _train(self, run: str, request: Train) -> Reply:
        site = self._site_with(run, request.session)
        if request.keep_states:
            self._go_back(run, site, request)
        reply = site.train(request)
        if request.keep_states:
            states = site.sessions[request.session].states.named("now")
            self.store.save_states(run, request.session, Snapshot(request.exchange, states))
        return reply

    def _go_back(self, run: str, site: Site, request: Train) -> None:
        """To the states after the exchange that the server merged last."""
        states = site.sessions[request.session].states
        if request.merged < states.exchange:
            found = self.store.states_at(run, request.session, request.merged)
            if found is None:
                raise CheckpointError(
                    f"site {self.settings.name!r} has no client states of exchange {request.merged} any more, it is at "
                    f"{states.exchange}; start the run anew"
                )
            states.restore("now", found.states, found.exchange)
        self.store.begin_exchange(run, request.session, request.round, request.merged)

    def _evaluate(self, run: str, request: Evaluate) -> Reply:
        site = self._site_with(run, request.session)
        reply = site.evaluate(request)
        shown = site.sessions[request.session].method.visible_rows
        if "membership" in reply.rows.values and "membership" not in shown:  # they never leave
            values = {name: leaf for name, leaf in reply.rows.values.items() if name != "membership"}
            reply = reply._replace(rows=Rows(reply.rows.ids, values))
        return reply

    def _keep(self, run: str, request: Keep) -> Reply:
        site = self._site_with(run, request.session)
        site.keep(request)
        states = site.sessions[request.session].states
        snapshot = Snapshot(states.exchange, states.named("kept"))
        self.store.save_states(run, request.session, snapshot, kept=True)
        return Reply()

    def _use_kept(self, run: str, request: UseKept) -> Reply:
        states = self._site_with(run, request.session).sessions[request.session].states
        kept = self.store.kept_states(run, request.session)
        if kept is None:
            raise CheckpointError(f"site {self.settings.name!r} has kept no client states; they are to be kept first")
        states.restore("now", kept.states, kept.exchange)
        return Reply()

    def _close(self, run: str, request: Close) -> Reply:
        self.store.end_session(run, request.session)
        return self._site(run).close(request)

    def _site_with(self, run: str, session: str) -> Site:
        site = self._site(run)
        if session not in site.sessions:
            raise CheckpointError(f"{NOT_OPEN}: site {self.settings.name!r} has no session {session!r:.80}")
        return site

    def _restore(self, opened: _OpenedRun, session: str) -> None:
        states, last = opened.site.sessions[session].states, 2**62
        found = self.store.states_at(opened.run, session, last)
        kept = self.store.kept_states(opened.run, session)
        if found is not None:
            states.restore("now", found.states, found.exchange)
        if kept is not None:
            states.restore("kept", kept.states, kept.exchange)
