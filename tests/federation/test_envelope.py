"""Bytes from outside are bounded and checked before they are taken apart."""

import json
from contextlib import suppress

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ppfl.core.errors import DataError, PPFLError
from ppfl.federation.envelope import MAGIC, PROTOCOL, REQUESTS, Envelope, seal, unseal
from ppfl.federation.federation_errors import FederationError
from ppfl.sites.wire import decode, encode

SENT = Envelope(REQUESTS, "run", "clinic", 1, 2, b"payload", 0.5)


@given(st.binary(max_size=200), st.text(max_size=20), st.integers(0, 2**60))
def test_a_message_comes_back_as_it_was(payload, run, number):
    sent = SENT._replace(payload=payload, run=run, number=number)
    assert unseal(seal(sent)) == sent


def test_a_message_that_is_too_large_is_refused_by_its_length_alone():
    with pytest.raises(FederationError, match="at most 100"):
        unseal(MAGIC + bytes(200), most_bytes=100)


def test_another_protocol_is_refused():
    with pytest.raises(FederationError, match=f"protocol {PROTOCOL + 1}, this is {PROTOCOL}"):
        unseal(seal(SENT._replace(protocol=PROTOCOL + 1)))


@given(st.integers(0, len(seal(SENT)) - len(SENT.payload) - 1), st.integers(0, 255))
@settings(max_examples=100, deadline=None)
def test_a_damaged_header_is_refused_or_says_something_else(at, value):
    data = bytearray(seal(SENT))
    data[at] = value
    try:
        found = unseal(bytes(data))
    except FederationError:
        return
    assert all(isinstance(part, type(whole)) or part == whole for part, whole in zip(found, SENT, strict=True))


def wire(specs, message, numbers=b""):
    text = json.dumps({"tensors": specs, "message": message}).encode()
    return len(text).to_bytes(8, "big") + text + numbers


@pytest.mark.parametrize("shape", [[-1], [2**62, 2**62], [2.0], [True], "3", [[1]], [10**9]])
def test_a_tensor_that_is_not_there_is_not_allocated(shape):
    with pytest.raises(DataError, match="cannot be read"):
        decode(wire([["float32", shape]], {"$tensor": 0}, bytes(4)))


def test_a_message_that_is_nested_too_deep_is_refused():
    text = b'{"tensors": [], "message": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    with pytest.raises(DataError, match="cannot be read"):
        decode(len(text).to_bytes(8, "big") + text)


@given(st.integers(0, 400), st.integers(0, 255))
@settings(max_examples=200, deadline=None)
def test_damaged_payloads_are_refused_or_read(at, value):
    data = bytearray(encode([{"a": torch.arange(6.0), "b": ("x", 1)}]))
    data[at % len(data)] = value
    with suppress(PPFLError):
        decode(bytes(data))
