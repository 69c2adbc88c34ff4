"""The server: plan, send, merge, again. It sees sums over clients, and the rows that a method asks for."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from ..algorithms.contract import Method, Plan, Problem, Rows
from ..core.affinity import Affinity, nothing
from ..core.population import Population
from ..core.trees import Tree, named_leaves, tree_map
from ..errors import SettingError
from ..io.codec import message, size_of
from ..sites import Close, Describe, Refusal, Reply, Save, SavedStates, Setup, Train
from ..sites.messages import Snapshot, number
from .transports import Transport

MAIN = "main"  # the session of the run itself; trials have sessions of their own


@message
class ServerState(NamedTuple):
    """All that the server has between two rounds. Client states are at the sites."""

    round: int  # rounds done
    exchange: int  # exchanges done
    server: Tree


class RoundReport(NamedTuple):
    """What a round did and cost."""

    round: int  # from 1
    loss: float  # mean training loss of the clients on the way; nan where they report none
    participants: int  # clients whose work was counted
    bytes_up: int  # of all clients together, before sites add them up
    bytes_down: int  # to all who were asked
    bytes_carried: int  # between server and sites, as the transport counts it
    seconds: float
    lost: int  # clients that were asked and did not come back
    refused: int  # clients whose upload a filter refused
    refusals: tuple[Refusal, ...]  # their names, and why


class DivergedError(SettingError):
    """Training whose numbers are no longer finite."""


class DivergedWarning(UserWarning):
    """Training ended with a loss far above the one it began with.

    To make it an error:

    >>> from torch import nn
    >>> from ppfl import FedAvg, Population, fit
    >>> from ppfl.data import digits_federation
    >>> with warnings.catch_warnings():
    ...     warnings.simplefilter("error", DivergedWarning)
    ...     fit(Population(nn.Linear(64, 10), k=1), digits_federation(), FedAvg(lr=100), rounds=2)
    Traceback (most recent call last):
    ppfl.server.loop.DivergedWarning: training diverged: ...
    """


class RefusedUpdateWarning(UserWarning):
    """An upload was refused, and the round went on without it."""


def make_problem(
    population: Population, transport: Transport, affinity: Affinity | None = None, *, rounds: int, seed: int = 0
) -> Problem:
    """The problem as the server knows it; refuses an affinity that does not fit the clients."""
    if rounds < 1:
        raise SettingError(f"rounds is {rounds}; train for at least one round")
    ids = transport.roster.ids
    (described,) = transport.ask([Describe()])
    pull = nothing(ids) if affinity is None else affinity.check(ids)
    facts = number(described, "importance"), tuple(described.facts["splits"]), transport.device
    return Problem(population, transport.roster, pull.to(transport.device), rounds, seed, *facts)


def begin(
    method: Method, problem: Problem, transport: Transport, *, session: str = MAIN, dropout: float = 0.0
) -> ServerState:
    """The server state before the first round, with clients at the sites that are ready for it."""
    if not 0 <= dropout < 1:
        raise SettingError(f"dropout is {dropout}; it is the share of clients a round loses: set 0 <= dropout < 1")
    method.check(problem)
    setup_sites(method, problem, transport, session=session, dropout=dropout)
    return ServerState(0, 0, first_server(method, problem))


def first_server(method: Method, problem: Problem) -> Tree:
    """What the server has before the first round."""
    return tree_map(lambda leaf: leaf.to(problem.device), method.init_server(problem))


def setup_sites(
    method: Method, problem: Problem, transport: Transport, *, session: str = MAIN, dropout: float = 0.0
) -> None:
    """Clients at the sites that are ready for the first round."""
    transport.ask([make_setup(method, problem, session, dropout)])


def make_setup(method: Method, problem: Problem, session: str = MAIN, dropout: float = 0.0) -> Setup:
    """What sites are told of a run before its first round."""
    return Setup(session, method, problem.population.initial_network(), problem.seed, problem.importance, dropout)


def train(
    method: Method, problem: Problem, transport: Transport, state: ServerState, session: str = MAIN
) -> Iterator[tuple[ServerState, RoundReport]]:
    """From `state` to the last round, one state per round; the same bits wherever it is stopped and resumed."""
    warned: set[str] = set()
    while state.round < problem.rounds:
        state, report = run_round(method, problem, transport, state, warned, session)
        yield state, report


def run_round(
    method: Method,
    problem: Problem,
    transport: Transport,
    state: ServerState,
    warned: set[str],
    session: str = MAIN,
) -> tuple[ServerState, RoundReport]:
    """One round. warned: the clients that a warning has named, which is given once in a run."""
    clock, carried = time.perf_counter(), transport.bytes_carried
    counts = _RoundCounts(warned)
    server, exchange = state.server, state.exchange
    while True:
        plan = method.plan(problem, server, state.round)
        exchange += 1
        reply = ask_clients(transport, make_request(method, problem, server, plan, state.round, exchange, session))
        counts.add(reply)
        if number(reply, "participants"):
            server = method.merge(problem, server, plan.task, reply.totals, reply.rows)
        else:  # no client answered: the round ends, and changes nothing
            server = state.server
        if plan.ends_round or server is state.server:  # an exchange that changed nothing would not when asked again
            break
    state = ServerState(state.round + 1, exchange, server)
    _refuse_divergence(state)
    return state, counts.report(state.round, transport.bytes_carried - carried, time.perf_counter() - clock)


def _refuse_divergence(state: ServerState) -> None:
    """Parameters that are not finite never come back, and a checkpoint of them is worth nothing."""
    for name, leaf in named_leaves(state.server).items():
        # a finite sum is the answer at a small part of the cost; one that is not may have overflowed
        if not math.isfinite(leaf.sum()) and not bool(leaf.isfinite().all()):
            raise DivergedError(
                f"training diverged: after round {state.round} {name} is not finite; use a smaller lr or membership_lr"
            )


def ask_clients(transport: Transport, request: Train) -> Reply:
    """One exchange: the reply of all clients together, with the bytes that they were sent."""
    (reply,) = transport.ask([request])
    sent = size_of(request.shared), size_of(request.own) // max(1, len(next(iter(request.own.values()), ())))
    down = torch.tensor(number(reply, "asked") * sum(sent), dtype=torch.float64)
    return reply._replace(metrics={**reply.metrics, "bytes_down": down})


def make_request(
    method: Method,
    problem: Problem,
    server: Tree,
    plan: Plan,
    round: int,
    exchange: int,
    session: str = MAIN,
    *,
    keep_states: bool = True,
) -> Train:
    """What the clients of a plan are sent."""
    shared, own = method.send(problem, server, plan.who, plan.task)
    return Train(session, round, exchange, exchange - 1, plan.who, plan.task, shared, own, keep_states)


def next_request(method: Method, problem: Problem, state: ServerState) -> Train | None:
    """What `train` asks first from this state on; None after the last round."""
    if state.round >= problem.rounds:
        return None
    plan = method.plan(problem, state.server, state.round)
    return make_request(method, problem, state.server, plan, state.round, state.exchange + 1)


def client_states(transport: Transport, state: ServerState, snapshot: Snapshot = "now") -> SavedStates:
    """The states that clients have when the server is at `state`: of those that were ever written to, in order."""
    (reply,) = transport.ask([Save(MAIN, state.exchange, snapshot)])
    return SavedStates(in_roster_order(reply.rows, transport), reply.by_site)


def in_roster_order(rows: Rows, transport: Transport) -> Rows:
    """Rows of clients, named and ordered as the roster has them."""
    roster = transport.roster
    if rows.ids is None or rows.ids == roster.ids:
        return Rows(roster.ids, rows.values)
    order = torch.tensor([roster.position[client] for client in rows.ids], dtype=torch.long).argsort()
    ids = roster.ids if len(order) == len(roster) else tuple(rows.ids[at] for at in order.tolist())
    return Rows(ids, {name: leaf[order.to(leaf.device)] for name, leaf in rows.values.items()})


def warn_if_diverged(losses: Sequence[float], lr: float, stacklevel: int = 3) -> None:
    """Warn where the last training loss is far above the first, or not a number."""
    known = [loss for loss in losses if not math.isnan(loss)]
    if not known or not (known[-1] - known[0] > 2 * abs(known[0]) or math.isnan(losses[-1])):
        return
    warnings.warn(
        f"training diverged: the training loss went from {known[0]:.3g} to {losses[-1]:.3g} with lr = {lr:g}; use a "
        f"smaller lr, or lr = 'auto' (the default), which finds one",
        DivergedWarning,
        stacklevel=stacklevel,
    )


def close(transport: Transport, session: str) -> None:
    """Let the sites forget a session."""
    transport.ask([Close(session)])


class _RoundCounts:
    """Counts over the exchanges of a round."""

    def __init__(self, warned: set[str]) -> None:
        self.warned = warned
        self.refusals: tuple[Refusal, ...] = ()
        self.sums = dict.fromkeys(("loss", "samples", "bytes_up", "bytes_down", "participants", "lost", "refused"), 0.0)

    def add(self, reply: Reply) -> None:
        for name in ("loss", "samples", "bytes_up", "bytes_down"):
            self.sums[name] += number(reply, name)
        for name in ("participants", "lost"):
            self.sums[name] = number(reply, name)
        self.sums["refused"] = max(self.sums["refused"], number(reply, "refused"))
        self._look_at_refusals(reply)

    def _look_at_refusals(self, reply: Reply) -> None:
        if not reply.refused:
            return
        broken = sum("not finite" in refusal.reason for refusal in reply.refused)
        if broken > number(reply, "participants"):
            raise DivergedError(
                f"training diverged: the updates of {broken} of {broken + int(number(reply, 'participants'))} clients "
                f"are not finite; use a smaller lr or membership_lr"
            )
        self.refusals = reply.refused
        for client, reason in reply.refused:
            if client not in self.warned:  # once in a run; records have them all
                said = f"client {client!r} was left out of a round: {reason}; look at its data"
                warnings.warn(said, RefusedUpdateWarning, stacklevel=2)
                self.warned.add(client)

    def report(self, round: int, carried: int, seconds: float) -> RoundReport:
        sums = self.sums
        loss = sums["loss"] / sums["samples"] if sums["samples"] else float("nan")
        counts = {name: int(sums[name]) for name in ("participants", "bytes_up", "bytes_down", "lost", "refused")}
        return RoundReport(round, loss, bytes_carried=carried, seconds=seconds, refusals=self.refusals, **counts)
