"""A site's durable memory: one SQLite file, written in one transaction per message.

It holds, for every run, how it was opened, its sessions, the client states after each exchange since the server's last
checkpoint, the kept ones, and the last reply. So a site that is killed at any instant goes on where it was, and a
message that comes again is answered with the same bytes.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from ..core.errors import CheckpointError

_TABLES = """
CREATE TABLE IF NOT EXISTS runs (
    run TEXT PRIMARY KEY, opened BLOB, start INTEGER, number INTEGER, digest TEXT, reply BLOB);
CREATE TABLE IF NOT EXISTS sessions (
    run TEXT, session TEXT, setup BLOB, PRIMARY KEY (run, session));
CREATE TABLE IF NOT EXISTS states (
    run TEXT, session TEXT, kept INTEGER, exchange INTEGER, tensors BLOB, PRIMARY KEY (run, session, kept, exchange));
"""


class LastReply(NamedTuple):
    """The last message of a run that was answered, and the answer."""

    order: tuple[int, int]
    digest: str
    reply: bytes


class Snapshot(NamedTuple):
    """Client states after an exchange, by name."""

    exchange: int
    states: dict[str, Tensor]


class StateStore:
    """Use `transaction` around everything that belongs to one message."""

    def __init__(self, file: Path) -> None:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            self._database = sqlite3.connect(file, isolation_level=None, timeout=5, check_same_thread=False)
            self._database.execute("PRAGMA journal_mode=WAL")
            self._database.execute("PRAGMA synchronous=FULL")
            self._database.executescript(_TABLES)
        except (sqlite3.Error, OSError) as error:
            raise CheckpointError(f"{file} cannot be used as a site's store ({error}); move it away") from None

    def close(self) -> None:
        self._database.close()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All that is written inside becomes durable together, or not at all."""
        self._database.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._database.execute("ROLLBACK")
            raise
        self._database.execute("COMMIT")

    # ------------------------------------------------------------------ runs and replies

    def open_run(self, run: str, opened: bytes) -> None:
        """How the run was opened; what was known of it before stays."""
        self._database.execute(
            "INSERT INTO runs (run, opened) VALUES (?, ?) ON CONFLICT (run) DO UPDATE SET opened = excluded.opened",
            (run, opened),
        )

    def opened(self, run: str) -> bytes | None:
        opened: bytes | None = self._one("SELECT opened FROM runs WHERE run = ?", run)
        return opened

    def remember_reply(self, run: str, last: LastReply) -> None:
        self._database.execute(
            "INSERT INTO runs (run, start, number, digest, reply) VALUES (?, ?, ?, ?, ?) ON CONFLICT (run) DO UPDATE "
            "SET start = excluded.start, number = excluded.number, digest = excluded.digest, reply = excluded.reply",
            (run, *last.order, last.digest, last.reply),
        )

    def last_reply(self, run: str) -> LastReply | None:
        row = self._database.execute("SELECT start, number, digest, reply FROM runs WHERE run = ?", (run,)).fetchone()
        return None if row is None or row[0] is None else LastReply((row[0], row[1]), row[2], row[3])

    # ------------------------------------------------------------------ sessions and states

    def begin_session(self, run: str, session: str, setup: bytes, states: Snapshot) -> None:
        """A session with fresh states; one of the same name is replaced."""
        self.end_session(run, session)
        self._database.execute("INSERT INTO sessions (run, session, setup) VALUES (?, ?, ?)", (run, session, setup))
        self.save_states(run, session, states)

    def end_session(self, run: str, session: str) -> None:
        for table in ("sessions", "states"):
            self._database.execute(f"DELETE FROM {table} WHERE run = ? AND session = ?", (run, session))

    def sessions(self, run: str) -> dict[str, bytes]:
        """The setup of each."""
        return dict(self._database.execute("SELECT session, setup FROM sessions WHERE run = ?", (run,)).fetchall())

    def begin_exchange(self, run: str, session: str, merged: int, saved: int) -> None:
        """Forget states after `merged`, which the server does not know, and before `saved`, to which no server goes
        back."""
        found = self.states_at(run, session, min(merged, saved))
        self._database.execute(
            "DELETE FROM states WHERE run = ? AND session = ? AND kept = 0 AND (exchange > ? OR exchange < ?)",
            (run, session, merged, 0 if found is None else found.exchange),
        )

    def save_states(self, run: str, session: str, snapshot: Snapshot, *, kept: bool = False) -> None:
        if kept:
            self._database.execute("DELETE FROM states WHERE run = ? AND session = ? AND kept = 1", (run, session))
        row = (run, session, int(kept), snapshot.exchange, _pack(snapshot.states))
        self._database.execute("INSERT OR REPLACE INTO states VALUES (?, ?, ?, ?, ?)", row)

    def states_at(self, run: str, session: str, merged: int) -> Snapshot | None:
        """Those after the last exchange up to `merged`; None where they are not known any more."""
        return self._snapshot("kept = 0 AND exchange <= ?", run, session, merged)

    def kept_states(self, run: str, session: str) -> Snapshot | None:
        return self._snapshot("kept = 1", run, session)

    def _snapshot(self, condition: str, *values: str | int) -> Snapshot | None:
        query = f"SELECT exchange, tensors FROM states WHERE run = ? AND session = ? AND {condition}"
        row = self._database.execute(f"{query} ORDER BY exchange DESC LIMIT 1", values).fetchone()
        return None if row is None else Snapshot(row[0], _unpack(row[1]))

    def _one(self, query: str, *values: str | int) -> Any:
        row = self._database.execute(query, values).fetchone()
        return None if row is None else row[0]


def _pack(states: Mapping[str, Tensor]) -> bytes:
    # clones, as safetensors refuses tensors that share memory
    return safetensors.torch.save({name: leaf.detach().cpu().contiguous().clone() for name, leaf in states.items()})


def _unpack(blob: bytes) -> dict[str, Tensor]:
    try:
        return dict(safetensors.torch.load(blob))
    except SafetensorError as error:
        raise CheckpointError(
            f"client states in a site's store are damaged ({error}); restore a backup of it"
        ) from None
