"""A site does a message once, keeps its client states to itself, and writes down all that it sends."""

import json
from contextlib import suppress

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kit.messages import encode, payload_of
from kit.refusals import assert_refused
from kit.sites import Talk, make_services, training
from ppfl.algorithms import Rows
from ppfl.federation.envelope import ERROR, MAGIC, PROTOCOL, REQUESTS, Envelope, seal, unseal
from ppfl.federation.federation_errors import FederationError
from ppfl.federation.site_requests import ClientTable, DescribeData
from ppfl.federation.state_store import LastReply, Snapshot, StateStore
from ppfl.server import InProcess
from ppfl.sites import Evaluate, Keep, Restore, Save

DATA = {"name": "digits", "partition": {"name": "label_groups", "clients": 1}}
SENT = Envelope(REQUESTS, "run", "clinic", 1, 2, b"payload", 0.5)


@pytest.fixture
def talk(tmp_path):
    return Talk(make_services(tmp_path, ["a"], DATA)["a"])


def assert_equal_states(one, other):
    assert one.keys() == other.keys()
    assert all(torch.equal(leaf, other[name]) for name, leaf in one.items())


def test_the_same_message_again_gets_the_same_bytes_and_is_done_once(talk):
    start = talk.open_run()
    first = talk.send([training(start, 1, 0)])
    after = talk.states()
    assert talk.send([training(start, 1, 0)], number=talk.number) == first
    assert_equal_states(talk.states(), after)


def test_a_site_goes_on_from_its_store(talk, tmp_path):
    start = talk.open_run()
    talk.ask(training(start, 1, 0))
    before = talk.states()
    talk.service.close()
    restarted = Talk(make_services(tmp_path, ["a"], DATA)["a"])
    restarted.number = talk.number
    assert_equal_states(restarted.states(), before)
    # what the server has not merged is undone, also after the restart
    one, other = (restarted.ask(training(start, exchange, 0, round=1)) for exchange in (2, 3))
    assert encode(one) == encode(other)


REFUSED = {  # requests, how the envelope differs, what the site says
    "older": (lambda start: [training(start, 2, 1)], {"number": 1}, "late"),
    "states asked for": (lambda start: [Save("main", 0)], {}, "client states stay here"),
    "states replaced": (lambda start: [Restore("main", 0, Rows(None, {}))], {}, "client states stay here"),
    "of another site": (lambda start: [DescribeData()], {"site": "b"}, "'b'"),
    "of another run": (lambda start: [Keep("main")], {"run": "other"}, "not open"),
    "unknown table": (lambda start: [ClientTable("names")], {}, "label_counts"),
    "half done": (lambda start: [training(start, 2, 1), training({"no such": torch.zeros(1)}, 3, 2)], {}, ""),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_message_that_is_refused_changes_nothing(case, talk):
    make, changes, said = REFUSED[case]
    start = talk.open_run()
    talk.ask(training(start, 1, 0))
    before = talk.states()
    reply = talk.send(make(start), **changes)
    assert unseal(reply).kind == ERROR and said in payload_of(reply)
    assert_equal_states(talk.states(), before)


def test_payloads_have_the_bytes_that_a_transport_in_one_process_counts_and_the_ledger_names_each(talk):
    start = talk.open_run()
    requests = [training(start, 1, 0), Evaluate("main", ("test",), start, {})]
    reply = unseal(talk.send(requests))
    transport = InProcess(talk.service._site("run"))
    before = transport.bytes_carried
    transport.ask(requests)
    assert len(encode(requests)) + len(reply.payload) == transport.bytes_carried - before

    lines = [json.loads(line) for line in talk.service.ledger.file.read_text().splitlines()]
    *_, last = [line["messages"] for line in lines if line.get("direction") == "to server"]
    fields = {field["field"]: field for message in last for field in message["fields"]}
    sums = [field for name, field in fields.items() if name.startswith("totals")]
    assert sums and all("sum" in field["readers"] for field in sums)
    total = sum(field["bytes"] for name, field in fields.items() if name.startswith(("totals", "metrics")))
    assert 0 < total <= len(reply.payload)


# ---------------------------------------------------------------------- envelopes


@given(st.binary(max_size=200), st.text(max_size=20), st.integers(0, 2**60))
def test_a_message_comes_back_as_it_was(payload, run, number):
    sent = SENT._replace(payload=payload, run=run, number=number)
    assert unseal(seal(sent)) == sent


def test_a_message_is_refused_by_its_length_or_protocol_alone():
    assert_refused(lambda: unseal(MAGIC + bytes(200), most_bytes=100), FederationError, "at most 100")
    other = seal(SENT._replace(protocol=PROTOCOL + 1))
    assert_refused(lambda: unseal(other), FederationError, f"protocol {PROTOCOL + 1}", f"this is {PROTOCOL}")


@given(st.integers(0, len(seal(SENT)) - len(SENT.payload) - 1), st.integers(0, 255))
def test_a_damaged_header_is_refused_or_says_something_else(at, value):
    data = bytearray(seal(SENT))
    data[at] = value
    with suppress(FederationError):
        found = unseal(bytes(data))
        assert all(isinstance(part, type(whole)) or part == whole for part, whole in zip(found, SENT, strict=True))


# ---------------------------------------------------------------------- the store


@pytest.fixture
def store(tmp_path):
    store = StateStore(tmp_path / "s.sqlite")
    with store.transaction():
        store.begin_session("run", "main", b"setup", Snapshot(0, {"a": torch.tensor([0.0])}))
    yield store
    store.close()


def test_a_transaction_is_whole_or_not_at_all(store):
    with suppress(ZeroDivisionError), store.transaction():
        store.save_states("run", "main", Snapshot(1, {"a": torch.tensor([1.0])}))
        store.remember_reply("run", LastReply((1, 1), "digest", b"reply"))
        raise ZeroDivisionError
    assert store.last_reply("run") is None
    assert store.states_at("run", "main", 5).exchange == 0


def test_states_are_kept_as_long_as_a_server_may_go_back_to_them(store):
    for exchange, saved in [(1, 0), (2, 0), (3, 0), (4, 2)]:
        store.begin_exchange("run", "main", (exchange - 1) // 2, exchange - 1, saved)
        store.save_states("run", "main", Snapshot(exchange, {"a": torch.tensor([float(exchange)])}))
    known = {e for e in range(5) if (found := store.states_at("run", "main", e)) and found.exchange == e}
    assert known == {2, 3, 4}  # a server that resumes is after exchange 2 at least
    store.begin_exchange("run", "main", 1, 2, 2)  # it was killed, and goes on from there
    assert float(store.states_at("run", "main", 99).states["a"]) == 2
