"""A site does a message once, keeps its client states to itself, and writes down all that it sends."""

import json
from contextlib import suppress

import pytest
import torch

from federation.test_federated_run import make_experiment
from kit.sites import make_services
from ppfl.algorithms import FedAvg
from ppfl.algorithms.contract import EVERYONE, Rows
from ppfl.federation.envelope import ERROR, REPLIES, REQUESTS, Envelope, seal, unseal
from ppfl.federation.site_requests import DescribeData, OpenRun
from ppfl.federation.state_store import LastReply, Snapshot, StateStore
from ppfl.server.transports import InProcess
from ppfl.sites import Evaluate, Keep, Restore, Save, Setup, Train
from ppfl.sites.wire import decode, encode, encoded_size

DATA = {"name": "digits", "partition": {"name": "label_groups", "clients": 1}}


class Talk:
    """A server's side of a conversation with one site."""

    def __init__(self, service, run="run"):
        self.service, self.run, self.number = service, run, 0

    def bytes(self, requests, number=None, **changes):
        self.number += 1
        sent = Envelope(REQUESTS, self.run, "a", 1, number or self.number, encode(requests))
        return self.service.answer(seal(sent._replace(**changes)))

    def ask(self, *requests, **options):
        found = unseal(self.bytes(list(requests), **options))
        return found, (decode(found.payload) if found.kind == REPLIES else found.payload.decode())


@pytest.fixture
def talk(tmp_path):
    services = make_services(tmp_path, ["a"], DATA)
    return Talk(services["a"])


def open_run(talk, method="ditto"):
    experiment = make_experiment(method)
    settings = experiment.model_dump(mode="json", exclude={"data"})
    federation = talk.service.federation
    population = experiment.build_population(federation, 0)
    start, importance = population.initial_network(), float(federation.importance.sum())
    setup = Setup("main", experiment.algorithm, start, 0, importance)
    talk.ask(OpenRun(settings, 0), setup)
    return setup, start


def states(talk):
    return talk.service._site("run").sessions["main"].states.named("now")


def train(start, exchange, merged, round=None):
    return Train("main", exchange - 1 if round is None else round, exchange, merged, EVERYONE, 0.1, start, {})


def test_the_same_message_again_gets_the_same_bytes_and_is_done_once(talk):
    _, start = open_run(talk)
    first = talk.bytes([train(start, 1, 0)])
    after = {name: leaf.clone() for name, leaf in states(talk).items()}
    again = talk.bytes([train(start, 1, 0)], number=talk.number)
    assert again == first
    assert all(torch.equal(leaf, after[name]) for name, leaf in states(talk).items())


def test_a_site_goes_on_from_its_store(talk, tmp_path):
    _, start = open_run(talk)
    talk.ask(train(start, 1, 0))
    before = {name: leaf.clone() for name, leaf in states(talk).items()}
    talk.service.close()
    restarted = Talk(make_services(tmp_path, ["a"], DATA)["a"])
    restarted.number = talk.number
    assert all(torch.equal(leaf, before[name]) for name, leaf in states(restarted).items())
    # and what the server has not merged is undone, also after the restart
    (_, one), (_, other) = talk_twice(restarted, start)
    assert encode(one) == encode(other)


def talk_twice(talk, start):
    return talk.ask(train(start, 2, 0, round=1)), talk.ask(train(start, 3, 0, round=1))


def test_an_older_message_is_not_done(talk):
    _, start = open_run(talk)
    talk.ask(train(start, 1, 0))
    before = {name: leaf.clone() for name, leaf in states(talk).items()}
    found, said = talk.ask(train(start, 2, 1), number=1)
    assert found.kind == ERROR and "late" in said
    assert all(torch.equal(leaf, before[name]) for name, leaf in states(talk).items())


@pytest.mark.parametrize("request_", [Save("main", 0), Restore("main", 0, Rows(None, {}))])
def test_client_states_do_not_leave_and_are_not_replaced(talk, request_):
    open_run(talk)
    found, said = talk.ask(request_)
    assert found.kind == ERROR and "client states stay here" in said


def test_a_message_for_another_site_or_without_a_session_is_refused(talk):
    found, said = talk.ask(DescribeData(), site="b")
    assert found.kind == ERROR and "'b'" in said
    found, said = talk.ask(Keep("main"))
    assert found.kind == ERROR and said.startswith("not open")


def test_a_request_that_fails_halfway_changes_nothing(talk):
    _, start = open_run(talk)
    talk.ask(train(start, 1, 0))
    before = {name: leaf.clone() for name, leaf in states(talk).items()}
    found, _ = talk.ask(train(start, 2, 1), train({"no such": torch.zeros(1)}, 3, 2))
    assert found.kind == ERROR
    assert all(torch.equal(leaf, before[name]) for name, leaf in states(talk).items())


def test_payloads_have_the_bytes_that_a_transport_in_one_process_counts(talk):
    setup, start = open_run(talk)
    requests = [setup, train(start, 1, 0), Evaluate("main", ("test",), start, {})]
    found, _ = talk.ask(*requests)
    transport = InProcess(talk.service._site("run"))
    before = transport.bytes_carried
    transport.ask(requests)
    assert len(encode(requests)) + len(found.payload) == transport.bytes_carried - before


# ---------------------------------------------------------------------- the ledger


def fields(file, direction):
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    return [
        (message["kind"], field)
        for line in lines
        if line.get("direction") == direction
        for message in line["messages"]
        for field in message["fields"]
    ]


def test_the_ledger_has_every_field_that_left_with_its_bytes_and_readers(talk):
    _, start = open_run(talk)
    _, replies = talk.ask(train(start, 1, 0))
    left = fields(talk.service.ledger.file, "to server")
    named = {field["field"]: field for _, field in left}
    sums = [field for name, field in named.items() if name.startswith("totals")]
    assert sums and all("sum" in field["readers"] for field in sums)
    total = sum(field["bytes"] for name, field in named.items() if name.startswith(("totals", "metrics")))
    assert 0 < total <= encoded_size(replies)


# ---------------------------------------------------------------------- the store


def test_a_transaction_is_whole_or_not_at_all(tmp_path):
    store = StateStore(tmp_path / "s.sqlite")
    with store.transaction():
        store.begin_session("run", "main", b"setup", Snapshot(0, {"a": torch.zeros(2)}))
    with suppress(ZeroDivisionError), store.transaction():
        store.save_states("run", "main", Snapshot(1, {"a": torch.ones(2)}))
        store.remember_reply("run", LastReply((1, 1), "digest", b"reply"))
        raise ZeroDivisionError
    assert store.last_reply("run") is None
    assert store.states_at("run", "main", 5).exchange == 0
    store.close()


def test_states_are_kept_as_long_as_a_server_may_go_back_to_them(tmp_path):
    store = StateStore(tmp_path / "s.sqlite")
    store.begin_session("run", "main", b"", Snapshot(0, {"a": torch.tensor([0.0])}))
    for exchange, saved in [(1, 0), (2, 0), (3, 0), (4, 2)]:
        store.begin_exchange("run", "main", (exchange - 1) // 2, exchange - 1, saved)
        store.save_states("run", "main", Snapshot(exchange, {"a": torch.tensor([float(exchange)])}))
    known = {e for e in range(5) if (found := store.states_at("run", "main", e)) and found.exchange == e}
    assert known == {2, 3, 4}  # a server that resumes is after exchange 2 at least
    store.begin_exchange("run", "main", 1, 2, 2)  # it was killed, and goes on from there
    assert float(store.states_at("run", "main", 99).states["a"]) == 2
    store.close()


def test_methods_are_read_back_with_their_settings():
    setup = Setup("main", FedAvg(lr=0.5, local_epochs=3), {}, 0, 1.0)
    assert decode(encode(setup)).method == setup.method
