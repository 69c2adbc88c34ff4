"""Messages as bytes come back as they were, and bytes that are no message are refused."""

import json
from types import UnionType
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kit.cases import CASES
from kit.refusals import DataError, assert_refused
from kit.training import kinds_of_messages
from ppfl.algorithms import Method
from ppfl.data import lazy_population
from ppfl.sites import Train
from ppfl.sites.wire import decode, encode, encoded_size

DTYPES = ["float16", "bfloat16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "bool"]


def same(one, other) -> bool:
    """Whether two messages are equal, tensors number by number."""
    if isinstance(one, torch.Tensor):
        if not isinstance(other, torch.Tensor) or (one.dtype, one.shape) != (other.dtype, other.shape):
            return False
        return torch.equal(one.isnan(), other.isnan()) and torch.equal(one.nan_to_num(), other.nan_to_num())
    if isinstance(one, dict):
        return isinstance(other, dict) and one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and (one == other or (one != one and other != other))


@st.composite
def any_tensor(draw):
    dtype, shape = getattr(torch, draw(st.sampled_from(DTYPES))), draw(st.lists(st.integers(0, 4), max_size=3))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    values = torch.randint(-128, 128, shape, generator=generator)
    tensor = values.to(dtype) if not dtype.is_floating_point else (values / 7).to(dtype)
    layout = draw(st.sampled_from(["as it is", "turned", "spread", "every second"]))
    if layout == "turned" and tensor.dim() > 1:
        return tensor.transpose(0, -1)
    if layout == "spread":
        return tensor[None].expand(3, *tensor.shape)
    return tensor[::2] if layout == "every second" and tensor.dim() else tensor


NAMES = st.text(max_size=8).filter(lambda name: not name.startswith("$"))
NUMBERS = st.integers(-(2**53), 2**53) | st.floats() | st.booleans() | st.none() | st.text(max_size=5)
TREES = st.recursive(
    any_tensor() | NUMBERS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3) | st.tuples(inner, inner),
    max_leaves=5,
)
PLAIN = {
    Any: TREES,
    torch.Tensor: any_tensor(),
    str: NAMES,
    int: st.integers(-(2**53), 2**53),
    float: st.floats(),
    bool: st.booleans(),
    type(None): st.none(),
    Method: st.sampled_from([method for method, *_ in CASES.values()]),
    type(lazy_population(3).ids): st.sampled_from([lazy_population(n).ids for n in (3, 1000)]),  # counted, not listed
}


def any_value(hint):
    """What a field with this type may hold, also a message inside a message."""
    inner, kind = get_args(hint), get_origin(hint)
    if kind is dict:
        return st.dictionaries(NAMES, any_value(inner[1]), max_size=2)
    if kind is tuple:
        return st.lists(any_value(inner[0]), max_size=3).map(tuple)
    if kind is Literal:
        return st.sampled_from(inner)
    if kind is UnionType:
        return st.one_of(*map(any_value, inner))
    return PLAIN[hint] if hint in PLAIN else st.builds(hint, *map(any_value, get_type_hints(hint).values()))


@pytest.mark.parametrize("kind", kinds_of_messages("ppfl.algorithms", "ppfl.sites"), ids=lambda kind: kind.__name__)
@given(data=st.data())
def test_every_kind_of_message_comes_back_as_it_was_and_is_as_long_as_announced(kind, data):
    message = data.draw(any_value(kind))
    sent = encode(message)
    assert encoded_size(message) == len(sent)
    assert same(decode(sent), message)


def test_a_tensor_in_several_places_is_carried_once_and_gets_memory_of_its_own():
    tensor = torch.zeros(1000)
    once, sent = encode({"a": tensor, "b": 0}), encode({"a": tensor, "b": tensor})
    assert len(sent) - len(once) < 100
    back = decode(sent)
    assert back["a"] is back["b"]
    back["a"] += 1
    assert decode(sent)["a"].equal(tensor)


def refused_or_read(data: bytes) -> bool:
    """Whether bytes are refused; any error but DataError fails the test."""
    try:
        decode(data)
    except DataError:
        return True
    return False


def as_bytes(header, tensors: bytes = b"") -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "big") + text + tensors


def test_bytes_cut_anywhere_are_refused_and_a_garbled_one_never_gives_another_error():
    own, generator = {"c": torch.zeros(2, dtype=torch.int64)}, torch.Generator().manual_seed(0)
    whole = encode(Train("main", 3, 4, 3, ("a", "b"), 0.1, {"w": torch.ones(2, 3)}, own))
    assert all(refused_or_read(whole[:length]) for length in range(len(whole)))
    assert refused_or_read(whole + b"\0")
    assert_refused(lambda: decode(b"12345678"), DataError, "cannot be read", "same version")
    for at in range(len(whole)):
        for flip in torch.randint(1, 256, (4,), generator=generator).tolist():
            refused_or_read(whole[:at] + bytes([whole[at] ^ flip]) + whole[at + 1 :])


JSON_NAMES = st.sampled_from(["$tensor", "$kind", "$tuple", "$method", "$ids", "tensors", "message", "session", "a"])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(["float32", "Train", "ppfl", "$tensor"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(JSON_NAMES, inner, max_size=3),
    max_leaves=8,
)


@given(st.lists(st.tuples(JSON, JSON), min_size=10, max_size=10), st.binary(max_size=200))
def test_random_bytes_are_refused_and_a_text_of_any_structure_never_gives_another_error(texts, raw):
    assert refused_or_read(raw) and refused_or_read(len(raw).to_bytes(8, "big") + raw)
    for tensors, message in texts:
        refused_or_read(as_bytes({"tensors": tensors, "message": message}, raw))
        refused_or_read(as_bytes(tensors, raw))
        refused_or_read(as_bytes({"tensors": [["float32", tensors]], "message": message}, raw))


MESSAGES = [{"$kind": "Pickle"}, {"$kind": "Keep"}, {"$kind": "Keep", "session": "main", "extra": 1}]
MESSAGES += [{"$kind": ["Keep"]}, {"$method": "gossip"}, {"$method": "fedavg", "lr": -1}, {"$tensor": 0}]
TENSORS = [["complex64", [0]], ["float32", [-1]], ["float32", [2**40, 2**40]], ["float32", [10**30]], ["float32", [1]]]


def test_what_is_unknown_does_not_add_up_or_is_nested_very_deep_is_refused():
    assert all(refused_or_read(as_bytes({"tensors": [], "message": message})) for message in MESSAGES)
    assert all(refused_or_read(as_bytes({"tensors": [tensor], "message": 0})) for tensor in TENSORS)
    assert refused_or_read(as_bytes({"tensors": [["float32", [0]]], "message": {"$tensor": -1}}))
    assert refused_or_read(as_bytes([])) and refused_or_read(as_bytes({"message": 0}))
    text = b'{"tensors":[],"message":' + b"[" * 10**5 + b"]" * 10**5 + b"}"
    assert refused_or_read(len(text).to_bytes(8, "big") + text)


def test_only_registered_messages_and_methods_are_sent():
    class Keep(NamedTuple):  # not the registered one of this name
        session: str

    with pytest.raises(TypeError, match="is no message"):
        encode(Keep("main"))
    with pytest.raises((TypeError, AttributeError)):
        encode(object())
