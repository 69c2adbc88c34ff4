"""What the owner of a site deletes from its store: one client in all runs, or one run.

A client that is forgotten is kept on a list, so that it takes no part in any round from then on; of each run its row of
the client states, what the server had sent for it alone, and the last reply are deleted. What was sent before cannot be
taken back: sums hold its part, and a server that reads memberships has its last one until the next round.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ..algorithms.contract import Rows
from ..errors import CheckpointError, DataError
from ..sites.messages import decode, encode
from .state_store import StateStore, pack, unpack

_TABLES = ("runs", "sessions", "states", "descriptions", "evaluated")


def forget_client(store: StateStore, name: str, site: str, others: Iterable[str] = ()) -> tuple[str, list[str]]:
    """The client's full name, and the runs it was deleted from. others: clients of the data, which the store may not
    have met yet."""
    with store.transaction():
        present = {run: _present(store, run) for run in store.runs()}
        known = {client for ids in present.values() for client in ids} | {*others, *store.forgotten()}
        client = full_name(name, site, known)
        store.database.execute("INSERT OR IGNORE INTO forgotten VALUES (?, ?)", (client, time.time()))
        runs = [run for run, ids in present.items() if client in ids]
        for run in runs:
            _forget_in_run(store, run, present[run], client)
    _empty_log(store)
    return client, runs


def forget_run(store: StateStore, run: str) -> None:
    """Delete all that the store has of a run."""
    if run not in (known := store.runs()):
        raise CheckpointError(f"there is no run {run!r:.80} in the store; its runs are: {', '.join(known) or 'none'}")
    with store.transaction():
        for table in _TABLES:
            store.database.execute(f"DELETE FROM {table} WHERE run = ?", (run,))
    _empty_log(store)


def full_name(name: str, site: str, known: Iterable[str]) -> str:
    """A client as all sites know it: in a site's own data "p7" is "site/p7". DataError where it is not known."""
    ids = set(known)
    for client in (name, f"{site}/{name}"):
        if client in ids:
            return client
    some = sorted(ids)[:5]
    more = f" and {len(ids) - len(some)} more" if len(ids) > len(some) else ""
    raise DataError(f"site {site!r} has no client {name!r:.80}; it has {', '.join(map(repr, some)) or 'none'}{more}")


def _empty_log(store: StateStore) -> None:
    """What was deleted is in the log of the last writes, too."""
    store.database.execute("PRAGMA wal_checkpoint(TRUNCATE)")


def _present(store: StateStore, run: str) -> tuple[str, ...]:
    described = store.description(run)
    if described is None:
        raise CheckpointError(
            f"run {run!r} does not say whose states it has, as it is of an older ppfl; delete it: forget --run"
        )
    return described.present


def _forget_in_run(store: StateStore, run: str, present: tuple[str, ...], client: str) -> None:
    stay = [at for at, other in enumerate(present) if other != client]

    def rewrite(table: str, column: str, change: Any) -> None:
        query = f"SELECT rowid, {column} FROM {table} WHERE run = ?"
        for rowid, value in store.database.execute(query, (run,)).fetchall():
            store.database.execute(f"UPDATE {table} SET {column} = ? WHERE rowid = ?", (change(value), rowid))

    def without_own(data: bytes) -> bytes:
        request = decode(data)
        return encode(request._replace(own=_at(stay, request.own)))

    def without_state(data: bytes) -> bytes:
        saved = unpack(data)
        ids = present if saved.rows.ids is None else saved.rows.ids
        stay = [at for at, other in enumerate(ids) if other != client]
        rows = Rows(tuple(ids[at] for at in stay), _at(stay, saved.rows.values))
        return pack(saved._replace(rows=rows))

    rewrite("states", "tensors", without_state)
    rewrite("evaluated", "request", without_own)
    rewrite("descriptions", "present", lambda _: json.dumps([other for other in present if other != client]))
    # that the message was done stays known, so that it is not done again
    store.database.execute("UPDATE runs SET reply = x'' WHERE run = ? AND reply IS NOT NULL", (run,))


def _at(positions: list[int], rows: dict[str, Tensor]) -> dict[str, Tensor]:
    at = torch.tensor(positions, dtype=torch.long)
    return {name: leaf[at] for name, leaf in rows.items()}
