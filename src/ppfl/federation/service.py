"""A site: bytes come in, bytes go out. It knows nothing of Flower.

A call is judged by the policy, done, and stored with its answer in one transaction, so that the same call again gets
the same bytes. An error leaves as a code; its text, which may quote data, is in the site's log.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..algorithms.contract import Rows
from ..core.ids import Roster
from ..data import Federation
from ..data.column_sums import Center, ColumnPlan
from ..data.preparation import Preparation
from ..data.sample_spec import SampleSpec
from ..errors import CheckpointError, DataError, PPFLError, SettingError
from ..io.lock import locked
from ..server.loop import MAIN
from ..sites import Close, Describe, Evaluate, Refusal, Reply, Restore, Setup, Site, Train
from ..sites.messages import decode, encode
from ..sites.totals import Spread
from .ledger import Ledger, fields_of
from .messages import (
    Answer,
    Call,
    ClientTable,
    Join,
    Packed,
    PrepareRows,
    Refused,
    Reveal,
    SumColumns,
    digest_of,
    pack_answer,
    unpack,
)
from .policy import Approved, Known, check_request, load_approved, refuse_unsupported, rows_shown, who_was_asked
from .secure_sums import SUMS, SiteMasks, digest_of_request, ready, to_integers, took_part
from .site_settings import ClientNames, DataDescription, SiteData, SiteSettings
from .store import Joined, KeptSums, LastAnswer, StateStore, Used

log = logging.getLogger("ppfl.site")
SOCKET_SECONDS = 30.0  # in which a relay must have sent what it has begun to send
_NEWEST = 2**53
NOT_FINITE, TOO_LARGE = "its update is not finite", "its update is too large"


class _Opened(NamedTuple):
    """A run in memory."""

    run: str
    joined: Joined
    approved: Approved
    described: DataDescription
    site: Site | None  # None: the rows of its tables are not prepared yet


class SiteService:
    """Answers the calls of servers, one at a time."""

    def __init__(self, settings: SiteSettings, base: Path | None = None) -> None:
        """Relative paths and modules that experiments name start at `base`."""
        self.settings, self.base = settings, Path() if base is None else base
        self.store = StateStore(self.base / settings.state)
        self.data = SiteData(settings, base, self.store.forgotten())
        self.ledger = Ledger(self.base / settings.ledger)
        secure = settings.secure_sums
        self.masks = None if secure is None else SiteMasks(settings.name, secure, self.base)
        self._opened: _Opened | None = None
        self._work: dict[type, Callable[[Call, Any], Reply]] = {
            SumColumns: self._sum_columns, PrepareRows: self._prepare, ClientTable: self._table, Setup: self._setup,
            Train: self._train, Evaluate: self._evaluate, Close: self._close,
            Describe: lambda call, request: Reply(),
        }  # fmt: skip

    def close(self) -> None:
        self.store.close()

    def answer(self, shared: bytes, own: bytes) -> bytes:
        """The answer to a call. An error of any kind is an answer too, and changes nothing."""
        began, call = time.perf_counter(), Call("", self.settings.name, 0, 0, [])
        try:
            call = unpack(shared, own, self.settings.policy.max_message_bytes)
            return self._answer(call, Packed(shared, own), began)
        except Exception as error:  # whatever a server sends, the site goes on
            self._opened = None  # what is in memory may be ahead of the store
            code = error.code if isinstance(error, Refused) else "failed"
            text = error if isinstance(error, PPFLError) else repr(error)
            said = " ".join(str(text).split()).encode("unicode_escape").decode()[:1000]
            log.warning("run %s call %d.%d refused, %s: %s", call.run or "?", *call.order, code, said)
            # every refusal is noted, and the text stays here
            self.ledger.append(run=call.run, start=call.start, number=call.number, refused=code, text=said)
            return pack_answer(Answer(call.run, self.settings.name, call.start, call.number, code=code))

    def _answer(self, call: Call, packed: Packed, began: float) -> bytes:
        if call.site != self.settings.name:
            raise Refused("other-site", f"a call for site {call.site!r}, this is {self.settings.name!r}")
        digest, last = digest_of(packed), self.store.last_answer(call.run)
        if last is not None and call.order <= last.order:
            if (call.order, digest) == (last.order, last.digest) and last.answer:
                return last.answer
            raise Refused("old-call", f"call {call.order} comes after call {last.order} was answered")
        if (forgotten := self.store.forgotten()) != tuple(sorted(self.data.forgotten)):
            self.data.leave_out(forgotten)
            self._opened = None
        with self.store.transaction():  # of its own: a call that fails is counted too
            self._spend(call, len(packed.shared) + len(packed.own))
        with self.store.transaction(), _time_limit(self.settings.policy.max_seconds):
            replies = [self._reply(call, request) for request in call.requests]
            seconds = time.perf_counter() - began
            answer = pack_answer(
                Answer(call.run, self.settings.name, call.start, call.number, replies, seconds=seconds)
            )
            self.store.remember_answer(call.run, LastAnswer(call.order, digest, answer))
            self._note(call, replies, answer, seconds)
        return answer

    def _note(self, call: Call, replies: list[Any], answer: bytes, seconds: float) -> None:
        joined = self.store.joined(call.run)
        if joined is not None:
            self.store.use(joined.experiment, Used(0, len(answer), seconds))
        kinds = [type(request).__name__ for request in call.requests]
        rounds = [request.round + 1 for request in call.requests if isinstance(request, Train)]
        self.ledger.append(
            run=call.run, start=call.start, number=call.number, requests=kinds, bytes=len(answer),
            fields=fields_of(replies),
        )  # fmt: skip
        log.info(
            "run %s call %d.%d%s: %s in %.2f s, %d bytes sent", call.run, *call.order,
            f" round {rounds[0]}" if rounds else "", ", ".join(kinds), seconds, len(answer),
        )  # fmt: skip

    def _spend(self, call: Call, size: int) -> None:
        """Count a call with work against what the owner has approved."""
        joined = self.store.joined(call.run)
        if joined is None or not any(isinstance(one, SUMS | ClientTable) for one in call.requests):
            return
        approved, used = self._approved(joined.experiment), self.store.used(joined.experiment)
        most = self.settings.policy.max_exchanges * approved.most_calls
        if used.calls >= most:
            raise Refused("budget-spent", f"{used.calls} calls of {most} are used up; approve the experiment once more")
        self.store.use(joined.experiment, Used(1, size, 0.0))

    def _reply(self, call: Call, request: Any) -> Any:
        if isinstance(request, Join):
            return self._join(call.run, request)
        opened = self._open(call.run)
        check_request(self._known(opened), request)
        if isinstance(request, Reveal):
            return self._reveal(call, opened, request)
        reply = self._work[type(request)](call, request)
        if self.masks is None or not isinstance(request, SUMS):
            return reply
        return self._keep_sums(call, request, reply)

    # ------------------------------------------------------------------ before the first round

    def _approved(self, experiment: str) -> Approved:
        found = load_approved(self.base / self.settings.approved, self.base).get(experiment)
        if found is None:
            raise Refused("not-approved", f"experiment {experiment!r:.70} is not among the approved ones")
        return found

    def _join(self, run: str, request: Join) -> Reply:
        approved = self._approved(request.experiment)
        experiment, known = approved.experiment, self.store.joined(run)
        refuse_unsupported(experiment, secure=self.masks is not None)
        if request.seed not in experiment.seeds or (known is not None and known[:2] != request[:2]):
            raise Refused("not-in-experiment", f"seed {request.seed!r:.30}, or a run of another experiment")
        if lacking := [row for row in rows_shown(experiment) if row not in self.settings.policy.rows]:
            raise Refused("rows-not-allowed", f"the experiment shows {', '.join(lacking)} of each client")
        names, described = self._names(approved), self._describe(approved)
        effective = Spread.of(described.importance[:, None])
        if effective.is_few(self.settings.fewest):
            raise Refused(
                "too-few-clients",
                f"{len(described.ids)} clients, by their samples as many as {float(effective.clients):.1f} equal ones; "
                f"min_clients is {self.settings.fewest}",
            )
        ids = tuple(names.outside(described.ids))
        if known is None or ids != known.ids:
            if known is not None and not set(ids) <= {*known.ids}:
                raise Refused("data-changed", "there are clients that were not there when the run began")
            preparation, spec = "" if known is None else known.preparation, json.dumps(described.facts["agreed"])
            self.store.join(run, Joined(*request, ids, described.digest, spec, preparation))
            self._opened = None
        self._check_data(run, described)
        sums = {f"samples.{split}": float(count) for split, count in described.samples.items()}
        metrics = {"importance": float(described.importance.sum()), **sums}
        as_tensors = {name: torch.tensor(value, dtype=torch.float64) for name, value in metrics.items()}
        facts = {**described.facts, "data": names.token(described.digest)}
        return Reply(metrics=as_tensors, rows=Rows(ids, {}), facts=facts)

    def _names(self, approved: Approved) -> ClientNames:
        return ClientNames(self.settings, self.base, approved.hash)

    def _describe(self, approved: Approved) -> DataDescription:
        try:
            return self.data.describe(approved.experiment.preparation)
        except DataError as error:
            raise Refused("failed", f"the data do not fit the experiment: {error}") from None

    def _check_data(self, run: str, described: DataDescription) -> None:
        joined = self.store.joined(run)
        assert joined is not None
        if joined.data != described.digest:
            raise Refused("data-changed", "the data are not those that the run began with")

    def _sum_columns(self, call: Call, request: SumColumns) -> Reply:
        settings = self._open(call.run).approved.experiment.preparation
        assert settings is not None, "the policy has seen it"
        plan = ColumnPlan.model_validate(request.plan)
        center = Center.model_validate(request.center) if request.center else None
        return Reply(metrics=self.data.sums(settings, plan, center, self.settings.fewest))

    def _prepare(self, call: Call, request: PrepareRows) -> Reply:
        joined = self._open(call.run).joined
        preparation = json.dumps(Preparation.read(request.preparation).model_dump(mode="json"))
        if joined.preparation not in ("", preparation):
            raise Refused("not-in-experiment", "the rows are to be prepared in another way than before")
        if not joined.preparation:
            self.store.prepare(call.run, preparation)
            self._opened = None
        return Reply()

    def _table(self, call: Call, request: ClientTable) -> Reply:
        federation = self._site(call.run).federation
        table = {"label_counts": Federation.label_counts, "feature_means": Federation.feature_means}[request.name]
        return Reply(rows=Rows(federation.ids, {request.name: table(federation)}))

    # ------------------------------------------------------------------ the run in memory

    def _open(self, run: str) -> _Opened:
        """The run in memory, or made again from what the store has."""
        joined = self.store.joined(run)
        if joined is None:
            raise Refused("unknown-run", f"run {run!r:.80} was not joined")
        if self._opened is None or (self._opened.run, self._opened.joined) != (run, joined):
            approved = self._approved(joined.experiment)
            described = self._describe(approved)
            ids = tuple(self._names(approved).outside(described.ids))
            if ids != joined.ids:
                left = len(ids) < len(joined.ids) and set(ids) <= {*joined.ids} and self.data.forgotten
                raise Refused("clients-changed" if left else "data-changed", "the clients are not those of the run")
            self._check_data(run, described)
            is_ready = approved.experiment.preparation is None or joined.preparation
            site = self._make_site(joined, approved) if is_ready else None
            self._opened = _Opened(run, joined, approved, described, site)
            if site is not None:
                self._restore(run, site)
        return self._opened

    def _make_site(self, joined: Joined, approved: Approved) -> Site:
        experiment = approved.experiment
        agreed = json.loads(joined.preparation) if joined.preparation else {}
        federation = self.data.prepared(experiment.preparation, agreed)
        importance = self.data.importance(federation)
        federation = federation.rename(joined.ids)
        population = experiment.build_population(SampleSpec.of(federation), joined.seed, self.base)
        metrics = experiment.watch.with_functions(self.base).metrics
        return Site(
            federation, population, experiment.build_engine(), name=self.settings.name, metrics=metrics,
            importance=importance, states_on_disk=experiment.states_on_disk, fewest=self.settings.fewest,
        )  # fmt: skip

    def _restore(self, run: str, site: Site) -> None:
        """The sessions and client states that the store has."""
        for session, setup in self.store.sessions(run).items():
            site.setup(decode(setup))
            found = self.store.states_at(run, session, _NEWEST)
            if found is not None:
                site.restore(Restore(session, *found))

    def _known(self, opened: _Opened) -> Known:
        run, described = opened.run, opened.described
        sessions = {} if opened.site is None else opened.site.sessions
        return Known(
            opened.approved, opened.joined.seed, Roster(opened.joined.ids), tuple(described.samples),
            float(described.importance.sum()), {name: session.method for name, session in sessions.items()},
            self.store.rounds(run), self.store.refused(run),
        )  # fmt: skip

    # ------------------------------------------------------------------ rounds

    def _setup(self, call: Call, request: Setup) -> Reply:
        site = self._site(call.run)
        site.setup(request)
        self.store.begin_session(call.run, request.session, encode(request), site.saved_states(request.session))
        return Reply()

    def _train(self, call: Call, request: Train) -> Reply:
        site = self._site(call.run)
        if request.keep_states:
            self._go_back(call.run, site, request)
        reply = site.train(request)
        if request.keep_states:
            self.store.save_states(call.run, request.session, request.exchange, site.saved_states(request.session))
            refused = [client for client, _ in reply.refused]
            self.store.note_round(call.run, request.session, request.round, who_was_asked(request), refused)
        # a reason has the norm of one client's update
        names = tuple(
            Refusal(client, NOT_FINITE if "not finite" in reason else TOO_LARGE) for client, reason in reply.refused
        )
        return reply._replace(refused=names)

    def _go_back(self, run: str, site: Site, request: Train) -> None:
        """To the states after the exchange that the server merged last."""
        states = site.sessions[request.session].states
        if request.merged < states.exchange:
            found = self.store.states_at(run, request.session, request.merged)
            if found is None:
                raise Refused("unknown-states", f"states of exchange {request.merged}; it is at {states.exchange}")
            site.restore(Restore(request.session, *found))
        self.store.begin_exchange(run, request.session, request.merged, request.saved)

    def _evaluate(self, call: Call, request: Evaluate) -> Reply:
        site = self._site(call.run)
        reply = site.evaluate(request)
        session = site.sessions[request.session]
        if request.session == MAIN:  # so that the clients' models can be used here
            self.store.save_evaluated(call.run, session.states.exchange, encode(request))
        if "membership" in reply.rows.values and "membership" not in session.method.shows:  # they never leave
            values = {name: leaf for name, leaf in reply.rows.values.items() if name != "membership"}
            reply = reply._replace(rows=Rows(reply.rows.ids, values))
        return reply

    def _close(self, call: Call, request: Close) -> Reply:
        self.store.end_session(call.run, request.session)
        return self._site(call.run).close(request)

    def _site(self, run: str) -> Site:
        site = self._open(run).site
        if site is None:
            raise Refused("not-in-experiment", "the rows of the tables are not prepared yet")
        return site

    # ------------------------------------------------------------------ secure sums

    def _keep_sums(self, call: Call, request: Any, reply: Reply) -> Reply:
        digest = digest_of_request(request)
        answer, sums = ready(reply, digest, took_part=took_part(request, reply))
        if sums:
            trained = isinstance(request, Train) and request.keep_states
            purpose = f"{request.session} exchange {request.exchange}" if trained else digest
            nonce = answer.facts["ready"].nonce
            self.store.keep_sums(call.run, call.order, digest, KeptSums(purpose, nonce, sums))
        return answer

    def _reveal(self, call: Call, opened: _Opened, request: Reveal) -> Any:
        if self.masks is None:
            raise Refused("not-in-experiment", "there are no secure sums here")
        kept = self.store.kept_sums(call.run, (call.start, request.number), request.digest)
        if kept is None or request.nonces.get(self.settings.name) != kept.nonce:
            raise Refused("secure-set", "sums that were never kept, or with another nonce")
        approval = f"approval {opened.approved.times} of {opened.approved.hash}"
        self.masks.check_set(tuple(request.nonces), self.store.revealed(approval, "set"))
        before = self.store.revealed(call.run, kept.purpose)
        if before is not None and before != sorted(request.nonces):
            raise Refused("secure-set", "these sums were revealed for another set of sites")
        self.store.reveal(call.run, kept.purpose, tuple(request.nonces))
        self.store.reveal(approval, "set", tuple(request.nonces))
        seed = opened.joined.seed
        integers = to_integers(kept.sums, len(request.nonces), seed, kept.purpose, self.settings.name)
        return self.masks.mask(request, call.run, call.start, integers)


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Refused after so many seconds, in the main thread, which may be at work in C meanwhile."""
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return

    def stop(number: int, frame: object) -> None:
        raise Refused("out-of-time", f"the work took longer than max_seconds = {seconds:g}")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


# ---------------------------------------------------------------------- the socket


def serve(service: SiteService, *, stop: Callable[[], bool] = lambda: False) -> None:
    """Answer what the relay in the SuperNode brings, one call after the other, until the process is stopped."""
    settings, socket = service.settings, service.base / service.settings.socket
    with locked(socket):
        socket.unlink(missing_ok=True)
        before = os.umask(0o177)
        try:
            listener = Listener(_short(socket), "AF_UNIX", backlog=4)
        except OSError as error:
            raise SettingError(
                f"{socket} cannot be made ({error.strerror or error}); set a shorter or another path, socket = ... in "
                f"site.toml"
            ) from None
        finally:
            os.umask(before)
        with listener:
            if settings.socket_group is not None:
                shutil.chown(socket, group=settings.socket_group)
                socket.chmod(0o660)
            while not stop():
                try:
                    with listener.accept() as relay:
                        _serve_one(service, relay)
                except (OSError, EOFError) as error:  # the relay was killed, or sent too much
                    log.warning("a relay went away: %s", error)


def _serve_one(service: SiteService, relay: Connection) -> None:
    most = service.settings.policy.max_message_bytes
    parts = []
    for _ in range(2):
        if not relay.poll(SOCKET_SECONDS):
            raise EOFError("it sent nothing")
        parts.append(relay.recv_bytes(most))
    answer = service.answer(*parts)
    with suppress(OSError):  # the answer is in the store, and the call comes again
        relay.send_bytes(answer)


def _short(path: Path) -> str:
    """The shorter of the two ways to write a path: sockets have at most 107 letters."""
    whole = str(path.absolute())
    near = os.path.relpath(path)
    return min(whole, near, key=len)


def open_store(settings: SiteSettings, base: Path, wait: float = 5.0) -> StateStore:
    """The store of a site; an error where it has none yet."""
    if not (file := base / settings.state).is_file():
        raise CheckpointError(f"there is no {file}: site {settings.name!r} has taken part in no run yet")
    return StateStore(file, wait)
