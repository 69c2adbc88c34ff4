"""Sessions of a site on a machine of its own: what Site does, with client states that are durable.

The states after an exchange are in the store before the reply leaves, and go back with the server: every request names
the last exchange that was merged.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..algorithms.contract import Rows
from ..errors import CheckpointError
from ..server.loop import MAIN
from ..sites import Close, Evaluate, Keep, Reply, Restore, Setup, Site, Train, UseKept
from ..sites.messages import encode
from .run_clients import RunClients
from .state_store import Snapshot, StateStore

NOT_OPEN = "not open"  # how an error begins that the server answers by opening the run and its sessions again


class SiteSessions:
    """Answers the requests of a session, each for the site of its run."""

    def __init__(self, name: str, store: StateStore, open_run: Callable[[str], tuple[Site, RunClients]]) -> None:
        """name: of the site. open_run: the site of a run, and its clients."""
        self.store, self._name, self._open_run = store, name, open_run
        self.work: dict[type, Callable[[str, Any], Reply]] = {
            UseKept: self._use_kept,
            Setup: self._setup,
            Train: self._train,
            Evaluate: self._evaluate,
            Keep: self._keep,
            Close: self._close,
        }

    def _setup(self, run: str, request: Setup) -> Reply:
        site = self._open_run(run)[0]
        site.setup(request)
        states = Snapshot(0, site.saved_states(request.session))
        self.store.begin_session(run, request.session, encode(request), states)
        return Reply()

    def _train(self, run: str, request: Train) -> Reply:
        site, clients = self._open_session(run, request.session)
        if request.keep_states:
            self._go_back(run, site, request)
        reply = site.train(clients.for_present(request))
        if request.keep_states:
            snapshot = Snapshot(request.exchange, site.saved_states(request.session))
            self.store.save_states(run, request.session, snapshot)
        return clients.trained(request, reply)

    def _go_back(self, run: str, site: Site, request: Train) -> None:
        """To the states after the exchange that the server merged last."""
        states = site.sessions[request.session].states
        if request.merged < states.exchange:
            found = self.store.states_at(run, request.session, request.merged)
            if found is None:
                raise CheckpointError(
                    f"site {self._name!r} has no client states of exchange {request.merged} any more, it is at "
                    f"{states.exchange}; start the run anew"
                )
            site.restore(Restore(request.session, found.exchange, found.states))
        self.store.begin_exchange(run, request.session, request.round, request.merged, request.saved)

    def _evaluate(self, run: str, request: Evaluate) -> Reply:
        site, clients = self._open_session(run, request.session)
        request = clients.for_present(request)
        reply = clients.evaluated(site.evaluate(request))
        session = site.sessions[request.session]
        if request.session == MAIN:  # so that the clients' models can be used here
            self.store.save_evaluated(run, session.states.exchange, encode(request))
        shown = session.method.shows
        if "membership" in reply.rows.values and "membership" not in shown:  # they never leave
            values = {name: leaf for name, leaf in reply.rows.values.items() if name != "membership"}
            reply = reply._replace(rows=Rows(reply.rows.ids, values))
        return reply

    def _keep(self, run: str, request: Keep) -> Reply:
        site, _ = self._open_session(run, request.session)
        site.keep(request)
        states = site.sessions[request.session].states
        snapshot = Snapshot(states.exchange, site.saved_states(request.session, "kept"))
        self.store.save_states(run, request.session, snapshot, kept=True)
        return Reply()

    def _use_kept(self, run: str, request: UseKept) -> Reply:
        site, _ = self._open_session(run, request.session)
        kept = self.store.kept_states(run, request.session)
        if kept is None:
            raise CheckpointError(f"site {self._name!r} has kept no client states; they are to be kept first")
        site.restore(Restore(request.session, kept.exchange, kept.states))
        return Reply()

    def _close(self, run: str, request: Close) -> Reply:
        self.store.end_session(run, request.session)
        return self._open_run(run)[0].close(request)

    def _open_session(self, run: str, session: str) -> tuple[Site, RunClients]:
        site, clients = self._open_run(run)
        if session not in site.sessions:
            raise CheckpointError(f"{NOT_OPEN}: site {self._name!r} has no session {session!r:.80}")
        return site, clients

    def restore(self, run: str, site: Site, session: str) -> None:
        """Give a site that was made anew the states that the store has."""
        found = self.store.states_at(run, session, merged=2**62)
        kept = self.store.kept_states(run, session)
        if found is not None:
            site.restore(Restore(session, found.exchange, found.states))
        if kept is not None:
            site.restore(Restore(session, kept.exchange, kept.states, "kept"))
