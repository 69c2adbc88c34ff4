"""Client states at a site: an exchange can be undone, states are kept, saved and restored by client id."""

import threading

import pytest
import torch

from kit.problems import make_federation, make_net
from kit.training import assert_same, connect, copied, run
from ppfl.algorithms import PPFL, Ditto, Local, Rows
from ppfl.core.errors import CheckpointError
from ppfl.core.population import Population
from ppfl.server import InProcess, ServerState, begin, client_states, make_problem
from ppfl.server.loop import MAIN, ask_clients, make_request
from ppfl.sites import Close, Keep, Loop, Restore, Save, Site, Stacked, Train
from ppfl.sites.states import ClientStates

SIZES = (7, 12, 20, 5, 9, 4)
LOCAL = Local(lr=0.3, batch_size=4)
ENGINES = {"loop": Loop(), "chunks": Stacked(2), "threads": Stacked(1, threads=2)}


@pytest.fixture(params=["memory", "disk"], autouse=True)
def on_disk(request, monkeypatch) -> None:
    """Every test here runs with states in memory, and with states on disk."""
    monkeypatch.setattr(Served, "on_disk", request.param == "disk")


class Served:
    """A site and the requests of a server that asks its clients for one exchange after the other."""

    on_disk = False

    def __init__(self, method=LOCAL, engine=None, federation=None) -> None:
        self.federation = make_federation(SIZES) if federation is None else federation
        population = Population(make_net(), k=2 if method.name == "ppfl" else 1)
        self.method, self.transport = (
            method,
            connect(self.federation, population, engine or Loop(), on_disk=self.on_disk),
        )
        self.problem = make_problem(population, self.transport, rounds=10, seed=1)
        self.server = begin(method, self.problem, self.transport).server

    @property
    def states(self) -> ClientStates:
        return self.transport.sites[0].sessions[MAIN].states

    def request(self, exchange: int, merged: int, who=None, round: int | None = None) -> Train:
        round = exchange - 1 if round is None else round
        plan = self.method.plan(self.problem, self.server, round)
        shared, own = self.method.send(self.problem, self.server, who, plan.task)
        return Train(MAIN, round, exchange, merged, plan.who if who is None else who, plan.task, shared, own)

    def train(self, exchange: int, merged: int, **settings) -> None:
        self.transport.ask([self.request(exchange, merged, **settings)])

    def saved(self, merged: int, snapshot: str = "now") -> dict[str, torch.Tensor]:
        (reply,) = self.transport.ask([Save(MAIN, merged, snapshot)])
        return copied(reply.rows).values


# ---------------------------------------------------------------------- exchanges that are undone


@pytest.mark.parametrize("engine", ENGINES)
def test_a_reply_that_was_not_merged_is_undone_by_the_next_request(engine: str) -> None:
    lost, plain = Served(engine=ENGINES[engine]), Served(engine=ENGINES[engine])
    lost.train(1, merged=0)
    lost.train(2, merged=1)  # this reply is lost, and the server asks others in its next exchange
    lost.train(3, merged=1, who=("client-4", "client-1"))
    plain.train(1, merged=0)
    plain.train(3, merged=1, who=("client-4", "client-1"))
    assert_same(lost.saved(3), plain.saved(3), atol=0, rtol=0)


def test_the_same_exchange_may_be_asked_for_again_and_gives_the_same_bits() -> None:
    again, once = Served(), Served()
    for served in (again, once):
        served.train(1, merged=0)
    first = again.transport.ask([again.request(2, merged=1)])
    second = again.transport.ask([again.request(2, merged=1)])
    once.train(2, merged=1)
    assert_same(first[0].metrics, second[0].metrics, atol=0, rtol=0)
    assert_same(again.saved(2), once.saved(2), atol=0, rtol=0)


def test_saving_returns_the_states_of_the_last_merged_exchange() -> None:
    served = Served()
    start = served.saved(0)
    served.train(1, merged=0)
    after = served.saved(1)
    assert any(not after[name].equal(leaf) for name, leaf in start.items())
    served.train(2, merged=1)
    assert_same(served.saved(1), after, atol=0, rtol=0)
    assert_same(served.saved(1), after, atol=0, rtol=0)  # nothing is left to undo
    with pytest.raises(CheckpointError, match="restore the states of that time"):
        served.saved(0)


@pytest.mark.parametrize("merged", [0, 1])
def test_an_exchange_older_than_the_last_cannot_be_undone(merged: int) -> None:
    served = Served()
    for exchange in (1, 2, 3):
        served.train(exchange, merged=exchange - 1)
    before = served.saved(3)
    for ask in (lambda: served.train(4, merged=merged), lambda: served.saved(merged)):
        with pytest.raises(CheckpointError, match=f"no reply of theirs after exchange {merged}; restore"):
            ask()
    assert_same(served.saved(3), before, atol=0, rtol=0)  # and what was refused has changed nothing


def test_after_undone_work_a_server_may_go_on_as_if_it_had_never_been() -> None:
    undone, plain = Served(), Served()
    undone.train(1, merged=0)
    undone.saved(0)
    for served in (undone, plain):
        served.train(1, merged=0, who=("client-2", "client-5"))
        served.train(2, merged=1)
    assert_same(undone.saved(2), plain.saved(2), atol=0, rtol=0)


def test_a_measurement_leaves_states_as_they_are() -> None:
    served = Served()
    served.train(1, merged=0)
    before = served.saved(1)
    plan = served.method.plan(served.problem, served.server, 1)
    request = make_request(served.method, served.problem, served.server, plan, 1, 1, keep_states=False)
    ask_clients(served.transport, request)
    assert_same(served.saved(1), before, atol=0, rtol=0)


# ---------------------------------------------------------------------- work that is interrupted


class InterruptedWork(Local):
    """Ctrl-C in the second chunk of a round."""

    def work(self, *arguments):
        work = super().work(*arguments)
        with COUNT.lock:
            COUNT.chunks += 1
            if COUNT.chunks == COUNT.stop_at:
                raise KeyboardInterrupt
        return work


class COUNT:
    lock, chunks, stop_at = threading.Lock(), 0, 0


@pytest.mark.parametrize("engine", ENGINES)
def test_work_interrupted_in_the_middle_of_a_round_is_undone(engine: str) -> None:
    stopped = Served(InterruptedWork(lr=0.3, batch_size=4), ENGINES[engine])
    plain = Served(engine=ENGINES[engine])
    for served in (stopped, plain):
        COUNT.chunks, COUNT.stop_at = 0, 0
        served.train(1, merged=0)
    chunks = COUNT.chunks
    before = stopped.saved(1)
    COUNT.chunks, COUNT.stop_at = 0, 2
    with pytest.raises(KeyboardInterrupt):
        stopped.train(2, merged=1)
    assert chunks == 0 or COUNT.chunks >= 2
    assert any(not leaf.equal(stopped.states.named("now")[name]) for name, leaf in before.items())  # some had moved
    assert_same(stopped.saved(1), before, atol=0, rtol=0)
    COUNT.stop_at = 0
    for served in (stopped, plain):
        served.train(2, merged=1)
    assert_same(stopped.saved(2), plain.saved(2), atol=0, rtol=0)


def test_no_thread_goes_on_after_an_interrupt() -> None:
    served = Served(InterruptedWork(lr=0.3, batch_size=4), ENGINES["threads"])
    COUNT.chunks, COUNT.stop_at = 0, 2
    with pytest.raises(KeyboardInterrupt):
        served.train(1, merged=0)
    counted = COUNT.chunks
    threading.Event().wait(0.05)
    assert COUNT.chunks == counted


# ---------------------------------------------------------------------- kept states


def test_kept_states_stay_as_they_were_whatever_comes_after() -> None:
    served = Served()
    served.train(1, merged=0)
    served.transport.ask([Keep(MAIN)])
    kept = served.saved(1)
    for exchange in (2, 3):
        served.train(exchange, merged=exchange - 1)
        assert_same(served.saved(exchange, "kept"), kept, atol=0, rtol=0)
    served.transport.ask([Keep(MAIN)])
    assert_same(served.saved(3, "kept"), served.saved(3), atol=0, rtol=0)


def test_before_the_first_keep_the_kept_states_are_the_first_ones() -> None:
    served = Served()
    start = served.saved(0)
    served.train(1, merged=0)
    assert_same(served.saved(1, "kept"), start, atol=0, rtol=0)


def test_kept_states_stay_as_they_were_where_the_exchange_before_them_is_undone() -> None:
    served = Served()
    served.train(1, merged=0)
    served.train(2, merged=1)
    served.transport.ask([Keep(MAIN)])
    kept = served.saved(2, "kept")
    served.train(3, merged=1)  # the server has not merged the second exchange after all
    assert_same(served.saved(3, "kept"), kept, atol=0, rtol=0)
    undone = Served()
    undone.train(1, merged=0)
    undone.transport.ask([Keep(MAIN)])
    kept = undone.saved(1, "kept")
    assert_same(undone.saved(0, "kept"), kept, atol=0, rtol=0)


# ---------------------------------------------------------------------- restored by id


@pytest.mark.parametrize("method", [LOCAL, Ditto(lr=0.3, batch_size=4), PPFL(lr=0.3, batch_size=4)])
@pytest.mark.parametrize("sites", [1, 2, 3])
def test_states_are_restored_by_id_in_any_order_and_at_any_sites(method, sites: int) -> None:
    federation = make_federation(SIZES, dtype=torch.float64)
    k = 2 if method.name == "ppfl" else 1

    def train(until=None, **settings):
        population = Population(make_net(dtype=torch.float64), k=k)
        return run(method, population, federation, rounds=4, until=until, **settings)

    whole, half = train(), train(until=2)
    states = half.clients[-1]
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    shuffled = Rows(tuple(states.ids[at] for at in order), {name: leaf[order] for name, leaf in states.values.items()})
    resumed = train(resume=half._replace(clients=[shuffled]), sites=sites)
    assert_same(resumed.everything(), whole.everything(), atol=1e-10, rtol=1e-9)


def test_a_site_takes_the_states_of_its_own_clients_from_those_of_all() -> None:
    federation = make_federation(SIZES)
    whole = Served(federation=federation)
    whole.train(1, merged=0)
    states = client_states(whole.transport, ServerState(1, 1, whole.server))
    own = ("client-4", "client-0")
    part = Served(federation=federation.select(own))
    part.transport.ask([Restore(MAIN, 1, states)])
    at = [federation.ids.index(client) for client in own]
    for name, leaf in part.saved(1).items():
        assert leaf.equal(states.values[name][at])


def test_restored_states_are_not_written_to() -> None:
    served = Served()
    served.train(1, merged=0)
    saved = served.saved(1)
    for snapshot in ("now", "kept"):
        given = Rows(None, {name: leaf.clone() for name, leaf in saved.items()})
        served.transport.ask([Restore(MAIN, 1, given, snapshot)])
    served.train(2, merged=1)
    assert_same(given.values, saved, atol=0, rtol=0)
    assert_same(served.saved(2, "kept"), saved, atol=0, rtol=0)


def test_after_a_restore_no_older_work_is_undone() -> None:
    served = Served()
    served.train(1, merged=0)
    served.train(2, merged=1)
    older = served.saved(2)
    served.train(3, merged=2)
    served.transport.ask([Restore(MAIN, 2, Rows(None, older))])
    assert_same(served.saved(2), older, atol=0, rtol=0)
    with pytest.raises(CheckpointError, match="after exchange 2"):
        served.saved(1)


def test_states_that_lack_a_client_are_refused_by_its_name() -> None:
    served = Served()
    states = Rows(("client-0",), {name: leaf[:1] for name, leaf in served.saved(0).items()})
    with pytest.raises(CheckpointError, match="no client 'client-1' of site 'site'"):
        served.transport.ask([Restore(MAIN, 0, states)])


# ---------------------------------------------------------------------- sessions


def test_a_session_that_was_not_set_up_or_was_closed_is_an_error() -> None:
    served = Served()
    served.transport.ask([Close(MAIN)])
    for request in (Save(MAIN, 0), Keep(MAIN), served.request(1, 0)):
        with pytest.raises(CheckpointError, match="no session 'main'; send it a Setup"):
            served.transport.ask([request])
    served.transport.ask([Close(MAIN)])  # twice does no harm


def test_a_client_of_another_site_is_refused_by_its_name() -> None:
    site = Site(make_federation(), Population(make_net(), k=1), Loop(), name="ward")
    transport = InProcess(site)
    problem = make_problem(site.backend.population, transport, rounds=1)
    begin(LOCAL, problem, transport)
    with pytest.raises(ValueError, match="site 'ward' has no client 'stranger'"):
        site.answer(Train(MAIN, 0, 1, 0, ("stranger",), 0.1, {}, {}))
