"""A site does a message once, keeps its client states to itself, and writes down all that it sends."""

import json
from contextlib import suppress

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kit.messages import encode, payload_of, size_of
from kit.refusals import assert_refused
from kit.sites import Talk, make_services, restarted, training
from kit.training import assert_same
from ppfl.federation.envelope import ERROR, MAGIC, PROTOCOL, REQUESTS, Envelope, seal, unseal
from ppfl.federation.federation_errors import FederationError
from ppfl.federation.site_requests import DescribeData
from ppfl.server import InProcess
from ppfl.sites import Evaluate, Keep, Save

DATA = {"name": "digits", "partition": {"name": "label_groups", "clients": 1}}
SENT = Envelope(REQUESTS, "run", "clinic", 1, 2, b"payload", 0.5)


@pytest.fixture
def talk(tmp_path):
    return Talk(make_services(tmp_path, ["a"], DATA)["a"])


def test_a_message_is_done_once_and_a_site_goes_on_from_its_store(talk):
    start = talk.open_run()
    first = talk.send([training(start, 1, 0)])
    before = talk.states()
    assert talk.send([training(start, 1, 0)], number=talk.number) == first
    assert_same(talk.states(), before, rtol=0, atol=0)
    talk.service = restarted(talk.service)
    assert_same(talk.states(), before, rtol=0, atol=0)
    # what the server has not merged is undone, also after the restart
    one, other = (talk.ask(training(start, exchange, 0, round=1)) for exchange in (2, 3))
    assert encode(one) == encode(other)


REFUSED = {  # requests, how the envelope differs, what the site says
    "older": (lambda start: [training(start, 2, 1)], {"number": 1}, "late"),
    "states asked for": (lambda start: [Save("main", 0)], {}, "client states stay here"),
    "of another site": (lambda start: [DescribeData()], {"site": "b"}, "'b'"),
    "of another run": (lambda start: [Keep("main")], {"run": "other"}, "not open"),
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
    assert_same(talk.states(), before, rtol=0, atol=0)
    talk.service = restarted(talk.service)
    assert_same(talk.states(), before, rtol=0, atol=0)  # in its store neither


def test_messages_have_the_bytes_that_a_transport_in_one_process_counts_and_the_ledger_names_each(talk):
    start = talk.open_run()
    requests = [training(start, 1, 0), Evaluate("main", ("test",), start, {})]
    reply = unseal(talk.send(requests))
    transport = InProcess(talk.service._site("run"))
    before = transport.bytes_carried
    transport.ask(requests)
    assert size_of(requests) + size_of(payload_of(seal(reply))) == transport.bytes_carried - before

    lines = [json.loads(line) for line in talk.service.ledger.file.read_text().splitlines()]
    *_, last = [line["messages"] for line in lines if line.get("direction") == "to server"]
    fields = {field["field"]: field for message in last for field in message["fields"]}
    sums = [field for name, field in fields.items() if name.startswith("totals")]
    assert sums and all("sum" in field["readers"] for field in sums)
    total = sum(field["bytes"] for name, field in fields.items() if name.startswith(("totals", "metrics")))
    assert 0 < total <= len(reply.payload)


@given(st.integers(0, len(seal(SENT)) - len(SENT.payload) - 1), st.integers(0, 255))
def test_a_message_comes_back_as_it_was_and_a_damaged_one_is_refused_or_says_something_else(at, value):
    assert unseal(seal(SENT)) == SENT
    assert_refused(lambda: unseal(MAGIC + bytes(200), most_bytes=100), FederationError, "at most 100")
    other = seal(SENT._replace(protocol=PROTOCOL + 1))
    assert_refused(lambda: unseal(other), FederationError, f"protocol {PROTOCOL + 1}", f"this is {PROTOCOL}")
    data = bytearray(seal(SENT))
    data[at] = value
    with suppress(FederationError):
        found = unseal(bytes(data))
        assert all(isinstance(part, type(whole)) or part == whole for part, whole in zip(found, SENT, strict=True))
