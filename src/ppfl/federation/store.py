"""A site's durable memory: one SQLite file, written in one transaction per call.

It holds, for every run, how it was joined and prepared, its sessions, the client states after each exchange since the
server's last checkpoint, the models of the last evaluation, and the last answer; of every approved experiment what it
has used up; and which clients take no part any more. So a site that is killed at any instant goes on where it was, a
call that comes again is answered with the same bytes, and clients' own models can be used at the site.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..algorithms.contract import Rows
from ..errors import CheckpointError, DataError
from ..io.codec import dump, load
from ..sites import Evaluate, SavedStates

_TABLES = """
CREATE TABLE IF NOT EXISTS runs (
    run TEXT PRIMARY KEY, experiment TEXT, seed INTEGER, ids TEXT, data TEXT, spec TEXT, preparation TEXT,
    start INTEGER, number INTEGER, digest TEXT, answer BLOB);
CREATE TABLE IF NOT EXISTS sessions (run TEXT, session TEXT, setup BLOB, PRIMARY KEY (run, session));
CREATE TABLE IF NOT EXISTS rounds (run TEXT, session TEXT, round INTEGER, who TEXT, PRIMARY KEY (run, session, round));
CREATE TABLE IF NOT EXISTS refused (run TEXT, session TEXT, client TEXT, PRIMARY KEY (run, session, client));
CREATE TABLE IF NOT EXISTS states (
    run TEXT, session TEXT, exchange INTEGER, tensors BLOB, PRIMARY KEY (run, session, exchange));
CREATE TABLE IF NOT EXISTS evaluated (run TEXT PRIMARY KEY, time REAL, exchange INTEGER, request BLOB);
CREATE TABLE IF NOT EXISTS used (experiment TEXT PRIMARY KEY, calls INTEGER, bytes INTEGER, seconds REAL);
CREATE TABLE IF NOT EXISTS kept (
    run TEXT, start INTEGER, number INTEGER, digest TEXT, purpose TEXT, nonce TEXT, sums BLOB,
    PRIMARY KEY (run, start, number, digest));
CREATE TABLE IF NOT EXISTS revealed (run TEXT, purpose TEXT, sites TEXT, PRIMARY KEY (run, purpose));
CREATE TABLE IF NOT EXISTS forgotten (client TEXT PRIMARY KEY, time REAL);
"""
_OF_RUNS = ("runs", "sessions", "rounds", "refused", "states", "evaluated", "kept", "revealed")
_KIND = "kept by a site"


class Joined(NamedTuple):
    """How a site takes part in a run."""

    experiment: str  # its hash
    seed: int
    ids: tuple[str, ...]  # of its clients, as the server knows them
    data: str  # digest
    spec: str  # JSON: what a sample is, before it is prepared
    preparation: str  # JSON; empty before the sites have agreed


class LastAnswer(NamedTuple):
    """The last call of a run that was answered, and the answer."""

    order: tuple[int, int]
    digest: str
    answer: bytes


class Used(NamedTuple):
    """What an approved experiment has used up, in all its runs."""

    calls: int = 0
    bytes: int = 0
    seconds: float = 0.0


class KeptSums(NamedTuple):
    """Sums that wait for a reveal."""

    purpose: str  # of which exchange they are, whenever it is asked for
    nonce: str
    sums: dict[str, torch.Tensor]


class LastEvaluation(NamedTuple):
    """The last evaluation of a run: it brings the models of the server's state."""

    time: float
    request: Evaluate
    states: SavedStates  # of the clients, as they were then


class StateStore:
    """Use `transaction` around everything that belongs to one call."""

    def __init__(self, file: Path, wait: float = 5.0) -> None:
        """wait: seconds, where another process is writing."""
        try:
            file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            file.touch(mode=0o600)
            self.database = sqlite3.connect(file, isolation_level=None, timeout=wait, check_same_thread=False)
            self.database.execute("PRAGMA journal_mode=WAL")
            self.database.execute("PRAGMA synchronous=FULL")
            self.database.execute("PRAGMA secure_delete=ON")  # what is deleted is overwritten
            self.database.executescript(_TABLES)
        except (sqlite3.Error, OSError) as error:
            raise CheckpointError(f"{file} cannot be used as a site's store ({error}); move it away") from None

    def close(self) -> None:
        self.database.close()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All that is written inside becomes durable together, or not at all."""
        try:
            self.database.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError as error:
            raise CheckpointError(f"the site's store is in use ({error}); try again when the round is over") from None
        try:
            yield
        except BaseException:
            self.database.execute("ROLLBACK")
            raise
        self.database.execute("COMMIT")

    # ------------------------------------------------------------------ runs and answers

    def join(self, run: str, joined: Joined) -> None:
        """Take part in a run, or again with other clients."""
        self._do(
            "INSERT INTO runs (run, experiment, seed, ids, data, spec, preparation) VALUES (?, ?, ?, ?, ?, ?, ?) "
            "ON CONFLICT (run) DO UPDATE SET experiment = excluded.experiment, seed = excluded.seed, "
            "ids = excluded.ids, data = excluded.data, spec = excluded.spec, preparation = excluded.preparation",
            run, *joined[:2], json.dumps(joined.ids), *joined[3:],
        )  # fmt: skip

    def joined(self, run: str) -> Joined | None:
        row = self._row("SELECT experiment, seed, ids, data, spec, preparation FROM runs WHERE run = ?", run)
        return None if row is None or row[0] is None else Joined(row[0], row[1], tuple(json.loads(row[2])), *row[3:])

    def prepare(self, run: str, preparation: str) -> None:
        """How the rows of the run's tables are prepared."""
        self._do("UPDATE runs SET preparation = ? WHERE run = ?", preparation, run)

    def remember_answer(self, run: str, last: LastAnswer) -> None:
        self._do(
            "INSERT INTO runs (run, start, number, digest, answer) VALUES (?, ?, ?, ?, ?) ON CONFLICT (run) DO UPDATE "
            "SET start = excluded.start, number = excluded.number, digest = excluded.digest, answer = excluded.answer",
            run, *last.order, last.digest, last.answer,
        )  # fmt: skip

    def last_answer(self, run: str) -> LastAnswer | None:
        row = self._row("SELECT start, number, digest, answer FROM runs WHERE run = ?", run)
        return None if row is None or row[0] is None else LastAnswer((row[0], row[1]), row[2], row[3])

    def use(self, experiment: str, used: Used) -> None:
        """Add to what an experiment has used up."""
        self._do(
            "INSERT INTO used (experiment, calls, bytes, seconds) VALUES (?, ?, ?, ?) ON CONFLICT (experiment) DO "
            "UPDATE SET calls = calls + excluded.calls, bytes = bytes + excluded.bytes, "
            "seconds = seconds + excluded.seconds",
            experiment, *used,
        )  # fmt: skip

    def used(self, experiment: str) -> Used:
        row = self._row("SELECT calls, bytes, seconds FROM used WHERE experiment = ?", experiment)
        return Used() if row is None else Used(*row)

    # ------------------------------------------------------------------ sessions and states

    def begin_session(self, run: str, session: str, setup: bytes, states: SavedStates) -> None:
        """A session with fresh states; one of the same name is replaced."""
        self.end_session(run, session)
        self._do("INSERT INTO sessions VALUES (?, ?, ?)", run, session, setup)
        self.save_states(run, session, 0, states)

    def end_session(self, run: str, session: str) -> None:
        for table in ("sessions", "states", "refused", "rounds"):
            self._do(f"DELETE FROM {table} WHERE run = ? AND session = ?", run, session)

    def sessions(self, run: str) -> dict[str, bytes]:
        """The setup of each."""
        return dict(self.database.execute("SELECT session, setup FROM sessions WHERE run = ?", (run,)).fetchall())

    def begin_exchange(self, run: str, session: str, merged: int, saved: int) -> None:
        """Forget states after `merged`, which the server does not know, and before `saved`, to which no server goes
        back; those of the last evaluation stay."""
        keep_from = self._one(
            "SELECT max(exchange) FROM states WHERE run = ? AND session = ? AND exchange <= ?",
            run, session, min(merged, saved),
        )  # fmt: skip
        self._do(
            "DELETE FROM states WHERE run = ? AND session = ? AND (exchange > ? OR exchange < ?) AND NOT (session = "
            "'main' AND exchange IN (SELECT exchange FROM evaluated WHERE evaluated.run = states.run) AND "
            "exchange <= ?)",
            run, session, merged, keep_from or 0, merged,
        )  # fmt: skip

    def save_states(self, run: str, session: str, exchange: int, states: SavedStates) -> None:
        self._do("INSERT OR REPLACE INTO states VALUES (?, ?, ?, ?)", run, session, exchange, pack(states))

    def states_at(self, run: str, session: str, merged: int) -> tuple[int, SavedStates] | None:
        """Those after the last exchange up to `merged`, and which that is; None where they are not known any more."""
        row = self._row(
            "SELECT exchange, tensors FROM states WHERE run = ? AND session = ? AND exchange <= ? "
            "ORDER BY exchange DESC LIMIT 1",
            run, session, merged,
        )  # fmt: skip
        return None if row is None else (row[0], unpack(row[1]))

    def note_round(self, run: str, session: str, round: int, who: str, refused: Iterable[str]) -> None:
        """Who was asked in a round, and whose updates were not counted."""
        self._do("INSERT OR REPLACE INTO rounds VALUES (?, ?, ?, ?)", run, session, round, who)
        for client in refused:
            self._do("INSERT OR IGNORE INTO refused VALUES (?, ?, ?)", run, session, client)

    def rounds(self, run: str) -> dict[tuple[str, int], str]:
        """Who was asked, by session and round."""
        rows = self.database.execute("SELECT session, round, who FROM rounds WHERE run = ?", (run,))
        return {(session, round): who for session, round, who in rows}

    def refused(self, run: str) -> dict[str, frozenset[str]]:
        """Clients whose updates were not counted, by session."""
        found: dict[str, frozenset[str]] = {}
        for session, client in self.database.execute("SELECT session, client FROM refused WHERE run = ?", (run,)):
            found[session] = found.get(session, frozenset()) | {client}
        return found

    # ------------------------------------------------------------------ secure sums

    def keep_sums(self, run: str, order: tuple[int, int], digest: str, kept: KeptSums) -> None:
        """Until they are revealed; those of earlier calls are not any more. digest: of the request."""
        self._do("DELETE FROM kept WHERE run = ? AND (start, number) <> (?, ?)", run, *order)
        row = (run, *order, digest, *kept[:2], _packed(kept.sums))
        self._do("INSERT OR REPLACE INTO kept VALUES (?, ?, ?, ?, ?, ?, ?)", *row)

    def kept_sums(self, run: str, order: tuple[int, int], digest: str) -> KeptSums | None:
        row = self._row(
            "SELECT purpose, nonce, sums FROM kept WHERE (run, start, number, digest) = (?, ?, ?, ?)",
            run, *order, digest,
        )  # fmt: skip
        return None if row is None else KeptSums(row[0], row[1], load(row[2], _KIND))

    def reveal(self, run: str, purpose: str, sites: Sequence[str]) -> None:
        """Note the set of sites for which sums were revealed."""
        self._do("INSERT OR REPLACE INTO revealed VALUES (?, ?, ?)", run, purpose, json.dumps(sorted(sites)))

    def revealed(self, run: str, purpose: str) -> list[str] | None:
        """The set for which these sums were revealed."""
        text = self._one("SELECT sites FROM revealed WHERE run = ? AND purpose = ?", run, purpose)
        return None if text is None else list(json.loads(text))

    # ------------------------------------------------------------------ what a site's own commands ask for

    def save_evaluated(self, run: str, exchange: int, request: bytes) -> None:
        """The models that came with an evaluation, and the exchange after which the client states were."""
        self._do("INSERT OR REPLACE INTO evaluated VALUES (?, ?, ?, ?)", run, time.time(), exchange, request)

    def evaluated(self, run: str, session: str) -> LastEvaluation | None:
        """The last evaluation of a session; None where there was none."""
        row = self._row(
            "SELECT time, request, tensors FROM evaluated JOIN states USING (run, exchange) "
            "WHERE run = ? AND session = ?",
            run, session,
        )  # fmt: skip
        return None if row is None else LastEvaluation(row[0], load(row[1], "messages"), unpack(row[2]))

    def runs(self) -> dict[str, tuple[int, int]]:
        """Of each run, in the order they came, the rounds that were begun and the bytes that it takes here."""
        query = (
            "SELECT run, (SELECT coalesce(max(round), -1) + 1 FROM rounds WHERE rounds.run = runs.run AND "
            "session = 'main'), (SELECT coalesce(sum(length(tensors)), 0) FROM states WHERE states.run = runs.run) + "
            "(SELECT coalesce(sum(length(request)), 0) FROM evaluated WHERE evaluated.run = runs.run) "
            "+ coalesce(length(answer), 0) FROM runs ORDER BY rowid"
        )
        return {run: (rounds, size) for run, rounds, size in self.database.execute(query)}

    def evaluated_runs(self) -> list[str]:
        """Runs whose models are here, the latest first."""
        return [run for (run,) in self.database.execute("SELECT run FROM evaluated ORDER BY time DESC")]

    def forgotten(self) -> tuple[str, ...]:
        """Clients that take no part any more, by the names of the data."""
        return tuple(client for (client,) in self.database.execute("SELECT client FROM forgotten ORDER BY client"))

    def _do(self, query: str, *values: Any) -> None:
        self.database.execute(query, values)

    def _row(self, query: str, *values: Any) -> Any:
        return self.database.execute(query, values).fetchone()

    def _one(self, query: str, *values: Any) -> Any:
        row = self._row(query, *values)
        return None if row is None else row[0]


def forget_client(store: StateStore, client: str, names: dict[str, tuple[str, ...]]) -> list[str]:
    """Delete a client's states for good, and leave it out from now on; the runs that had it.

    client: by its name in the data. names: of each run, what it may be called there.
    """
    with store.transaction():
        store._do("INSERT OR IGNORE INTO forgotten VALUES (?, ?)", client, time.time())
        runs = []
        for run in store.runs():
            joined = store.joined(run)
            known = {*names.get(run, ())} & {*joined.ids} if joined is not None else set()
            if joined is not None and known:
                _forget_in_run(store, run, joined.ids, known.pop())
                runs.append(run)
    store.database.execute("PRAGMA wal_checkpoint(TRUNCATE)")  # what was deleted is in the log of the last writes, too
    return runs


def forget_run(store: StateStore, run: str) -> None:
    """Delete all that the store has of a run. What its experiment has used up stays used."""
    if run not in (known := store.runs()):
        raise CheckpointError(f"there is no run {run!r:.80} in the store; its runs are: {', '.join(known) or 'none'}")
    with store.transaction():
        for table in _OF_RUNS:
            store._do(f"DELETE FROM {table} WHERE run = ?", run)
    store.database.execute("PRAGMA wal_checkpoint(TRUNCATE)")


def _forget_in_run(store: StateStore, run: str, ids: tuple[str, ...], client: str) -> None:
    """Its states, what the server had sent for it alone, and the last answer, which may have its rows."""
    for rowid, blob in store.database.execute("SELECT rowid, tensors FROM states WHERE run = ?", (run,)).fetchall():
        saved = unpack(blob)
        there = ids if saved.rows.ids is None else saved.rows.ids
        stay = [at for at, other in enumerate(there) if other != client]
        values = {name: leaf[stay] for name, leaf in saved.rows.values.items()}
        rows = Rows(tuple(there[at] for at in stay), values)
        store._do("UPDATE states SET tensors = ? WHERE rowid = ?", pack(saved._replace(rows=rows)), rowid)
    stay = [at for at, other in enumerate(ids) if other != client]
    if (blob := store._one("SELECT request FROM evaluated WHERE run = ?", run)) is not None:
        request = load(blob, "messages")
        own = {name: leaf[stay] for name, leaf in request.own.items()}
        file = BytesIO()
        dump(request._replace(own=own), file, "messages", digest=False)
        store._do("UPDATE evaluated SET request = ? WHERE run = ?", file.getvalue(), run)
    # that the call was done stays known, so that it is not done again
    store._do("UPDATE runs SET answer = x'' WHERE run = ? AND answer IS NOT NULL", run)
    for table in ("refused", "rounds", "kept"):  # the next round has another roster
        store._do(f"DELETE FROM {table} WHERE run = ?", run)


def pack(states: SavedStates) -> bytes:
    """Client states as they are stored."""
    return _packed(states)


def unpack(blob: bytes) -> SavedStates:
    """Client states that were stored."""
    try:
        states = load(blob, _KIND)
    except DataError as error:
        raise CheckpointError(f"client states in the store are damaged ({error}); restore a backup of it") from None
    assert isinstance(states, SavedStates)
    return states


def _packed(value: Any) -> bytes:
    file = BytesIO()
    dump(value, file, _KIND)
    return file.getvalue()
