"""A site's durable memory: one SQLite file, written in one transaction per message.

It holds, for every run, what the site said of its data, how the run was opened, its sessions, the client states after
each exchange since the server's last checkpoint, the kept ones, the models of the last evaluation, and the last reply.
So a site that is killed at any instant goes on where it was, a message that comes again is answered with the same
bytes, and clients' own models can be used at the site. It also knows which clients take no part any more.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import CheckpointError, DataError
from ..io.codec import dump, load
from ..sites import SavedStates

_TABLES = """
CREATE TABLE IF NOT EXISTS runs (
    run TEXT PRIMARY KEY, opened BLOB, start INTEGER, number INTEGER, digest TEXT, reply BLOB);
CREATE TABLE IF NOT EXISTS sessions (
    run TEXT, session TEXT, setup BLOB, round INTEGER, PRIMARY KEY (run, session));
CREATE TABLE IF NOT EXISTS states (
    run TEXT, session TEXT, kept INTEGER, exchange INTEGER, tensors BLOB, PRIMARY KEY (run, session, kept, exchange));
CREATE TABLE IF NOT EXISTS descriptions (run TEXT PRIMARY KEY, reply BLOB, present TEXT);
CREATE TABLE IF NOT EXISTS evaluated (run TEXT PRIMARY KEY, time REAL, exchange INTEGER, request BLOB);
CREATE TABLE IF NOT EXISTS forgotten (client TEXT PRIMARY KEY, time REAL);
"""
_KIND = "client states"
_NOW, _KEPT, _EVALUATED = 0, 1, 2  # which states: of the last rounds, the kept ones, of the last evaluation


class LastReply(NamedTuple):
    """The last message of a run that was answered, and the answer."""

    order: tuple[int, int]
    digest: str
    reply: bytes


class Snapshot(NamedTuple):
    """Client states after an exchange."""

    exchange: int
    states: SavedStates


class Described(NamedTuple):
    """What the server of a run knows of this site's clients."""

    reply: bytes  # what the site said of its data, with the names of all clients that the server knows
    present: tuple[str, ...]  # those that are still here


class LastEvaluation(NamedTuple):
    """The last evaluation of a run: it brings the models of the server's state."""

    time: float
    request: bytes
    states: SavedStates  # of the clients, as they were then


class StateStore:
    """Use `transaction` around everything that belongs to one message."""

    def __init__(self, file: Path, wait: float = 5.0) -> None:
        """wait: seconds, where another process is writing."""
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
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

    # ------------------------------------------------------------------ runs and replies

    def open_run(self, run: str, opened: bytes) -> None:
        """How the run was opened; what was known of it before stays."""
        self.database.execute(
            "INSERT INTO runs (run, opened) VALUES (?, ?) ON CONFLICT (run) DO UPDATE SET opened = excluded.opened",
            (run, opened),
        )

    def opened(self, run: str) -> bytes | None:
        opened: bytes | None = self._one("SELECT opened FROM runs WHERE run = ?", run)
        return opened

    def remember_reply(self, run: str, last: LastReply) -> None:
        self.database.execute(
            "INSERT INTO runs (run, start, number, digest, reply) VALUES (?, ?, ?, ?, ?) ON CONFLICT (run) DO UPDATE "
            "SET start = excluded.start, number = excluded.number, digest = excluded.digest, reply = excluded.reply",
            (run, *last.order, last.digest, last.reply),
        )

    def last_reply(self, run: str) -> LastReply | None:
        row = self.database.execute("SELECT start, number, digest, reply FROM runs WHERE run = ?", (run,)).fetchone()
        return None if row is None or row[0] is None else LastReply((row[0], row[1]), row[2], row[3])

    # ------------------------------------------------------------------ sessions and states

    def begin_session(self, run: str, session: str, setup: bytes, states: Snapshot) -> None:
        """A session with fresh states; one of the same name is replaced."""
        self.end_session(run, session)
        self.database.execute("INSERT INTO sessions VALUES (?, ?, ?, -1)", (run, session, setup))
        self.save_states(run, session, states)

    def end_session(self, run: str, session: str) -> None:
        for table in ("sessions", "states"):
            self.database.execute(f"DELETE FROM {table} WHERE run = ? AND session = ?", (run, session))

    def sessions(self, run: str) -> dict[str, bytes]:
        """The setup of each."""
        return dict(self.database.execute("SELECT session, setup FROM sessions WHERE run = ?", (run,)).fetchall())

    def begin_exchange(self, run: str, session: str, round: int, merged: int, saved: int) -> None:
        """Forget states after `merged`, which the server does not know, and before `saved`, to which no server goes
        back; those of the last evaluation are put aside."""
        found = self.states_at(run, session, min(merged, saved))
        keep_from = 0 if found is None else found.exchange
        if (evaluated := self._one("SELECT exchange FROM evaluated WHERE run = ?", run)) is not None:
            self.database.execute(
                "UPDATE OR REPLACE states SET kept = ? WHERE run = ? AND session = ? AND kept = ? AND exchange = ? "
                "AND exchange < ?",
                (_EVALUATED, run, session, _NOW, evaluated, keep_from),
            )
            self.database.execute(
                "DELETE FROM states WHERE run = ? AND session = ? AND kept = ? AND exchange != ?",
                (run, session, _EVALUATED, evaluated),
            )
        self.database.execute(
            "DELETE FROM states WHERE run = ? AND session = ? AND kept = 0 AND (exchange > ? OR exchange < ?)",
            (run, session, merged, keep_from),
        )
        self.database.execute("UPDATE sessions SET round = ? WHERE run = ? AND session = ?", (round, run, session))

    def save_states(self, run: str, session: str, snapshot: Snapshot, *, kept: bool = False) -> None:
        which = _KEPT if kept else _NOW
        if kept:
            self.database.execute("DELETE FROM states WHERE run = ? AND session = ? AND kept = 1", (run, session))
        row = (run, session, which, snapshot.exchange, pack(snapshot.states))
        self.database.execute("INSERT OR REPLACE INTO states VALUES (?, ?, ?, ?, ?)", row)

    def states_at(self, run: str, session: str, merged: int) -> Snapshot | None:
        """Those after the last exchange up to `merged`; None where they are not known any more."""
        return self._snapshot("kept = 0 AND exchange <= ?", run, session, merged)

    def kept_states(self, run: str, session: str) -> Snapshot | None:
        return self._snapshot("kept = 1", run, session)

    # ------------------------------------------------------------------ what a site's own commands ask for

    def save_description(self, run: str, described: Described) -> None:
        row = (run, described.reply, json.dumps(described.present))
        self.database.execute("INSERT OR REPLACE INTO descriptions VALUES (?, ?, ?)", row)

    def description(self, run: str) -> Described | None:
        row = self.database.execute("SELECT reply, present FROM descriptions WHERE run = ?", (run,)).fetchone()
        return None if row is None else Described(row[0], tuple(json.loads(row[1])))

    def save_evaluated(self, run: str, exchange: int, request: bytes) -> None:
        """The models that came with an evaluation, and the exchange after which the client states were."""
        row = (run, time.time(), exchange, request)
        self.database.execute("INSERT OR REPLACE INTO evaluated VALUES (?, ?, ?, ?)", row)

    def evaluated(self, run: str, session: str) -> LastEvaluation | None:
        """The last evaluation of a session; None where there was none."""
        row = self.database.execute(
            "SELECT time, request, tensors FROM evaluated JOIN states USING (run, exchange) "
            "WHERE run = ? AND session = ? ORDER BY kept LIMIT 1",
            (run, session),
        ).fetchone()
        return None if row is None else LastEvaluation(row[0], row[1], unpack(row[2]))

    def runs(self) -> dict[str, tuple[int, int]]:
        """Of each run, in the order they came, the rounds that were begun and the bytes that it takes here."""
        query = (
            "SELECT run, (SELECT coalesce(max(round), -1) + 1 FROM sessions WHERE sessions.run = runs.run), "
            "(SELECT coalesce(sum(length(tensors)), 0) FROM states WHERE states.run = runs.run) + "
            "(SELECT coalesce(sum(length(request)), 0) FROM evaluated WHERE evaluated.run = runs.run) "
            "+ coalesce(length(reply), 0) FROM runs ORDER BY rowid"
        )
        return {run: (rounds, size) for run, rounds, size in self.database.execute(query)}

    def evaluated_runs(self) -> list[str]:
        """Runs whose models are here, the latest first."""
        return [run for (run,) in self.database.execute("SELECT run FROM evaluated ORDER BY time DESC")]

    def forgotten(self) -> tuple[str, ...]:
        """Clients that take no part any more."""
        return tuple(client for (client,) in self.database.execute("SELECT client FROM forgotten ORDER BY client"))

    def _snapshot(self, condition: str, *values: str | int) -> Snapshot | None:
        query = f"SELECT exchange, tensors FROM states WHERE run = ? AND session = ? AND {condition}"
        row = self.database.execute(f"{query} ORDER BY exchange DESC LIMIT 1", values).fetchone()
        return None if row is None else Snapshot(row[0], unpack(row[1]))

    def _one(self, query: str, *values: str | int) -> Any:
        row = self.database.execute(query, values).fetchone()
        return None if row is None else row[0]


def pack(states: SavedStates) -> bytes:
    """Client states as they are stored."""
    file = BytesIO()
    dump(states, file, _KIND)
    return file.getvalue()


def unpack(blob: bytes) -> SavedStates:
    """Client states that were stored."""
    try:
        states = load(blob, _KIND)
    except DataError as error:
        raise CheckpointError(
            f"client states in a site's store are damaged ({error}); restore a backup of it"
        ) from None
    assert isinstance(states, SavedStates)
    return states
