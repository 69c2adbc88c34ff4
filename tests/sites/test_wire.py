"""Messages as bytes come back as they were, and bytes that are no message are refused."""

import json
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kit.cases import CASES, SIZES
from kit.problems import make_federation, make_net
from kit.training import BytesTransport, run
from ppfl.algorithms import METHODS, Rows, Share, Sum, Total
from ppfl.algorithms.contract import MESSAGES
from ppfl.core.errors import DataError
from ppfl.core.population import Population
from ppfl.core.settings import Settings
from ppfl.sites import Close, Describe, Evaluate, Keep, Loop, Refusal, Reply, Restore, Save, Setup, Site, Train
from ppfl.sites.messages import AcceptKeys, KeyOffer, Masked, MaskedNote, NoKeys, OfferKey, Shares, Unmask
from ppfl.sites.wire import decode, encode, encoded_size

DTYPES = (
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.uint8, torch.bool,
)  # fmt: skip


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


# ---------------------------------------------------------------------- any message comes back


@st.composite
def any_tensor(draw, dtypes=DTYPES):
    dtype, shape = draw(st.sampled_from(dtypes)), draw(st.lists(st.integers(0, 4), max_size=3))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    values = torch.randint(-128, 128, shape, generator=generator)
    tensor = values.to(dtype) if not dtype.is_floating_point else (values / 7).to(dtype)
    layout = draw(st.sampled_from(["as it is", "turned", "spread", "every second"]))
    if layout == "turned" and tensor.dim() > 1:
        return tensor.transpose(0, -1)
    if layout == "spread":
        return tensor[None].expand(3, *tensor.shape)
    return tensor[::2] if layout == "every second" and tensor.dim() else tensor


TENSORS = any_tensor()
NAMES = st.text(max_size=8).filter(lambda name: not name.startswith("$"))
NUMBERS = st.integers(-(2**53), 2**53) | st.floats() | st.booleans() | st.none() | st.text(max_size=5)
TABLES = st.dictionaries(NAMES, TENSORS, max_size=3)
TREES = st.recursive(
    TENSORS | NUMBERS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3) | st.tuples(inner, inner),
    max_leaves=5,
)
IDS = st.lists(st.text(max_size=6), max_size=4).map(tuple)
ROWS = st.builds(Rows, st.none() | IDS, TABLES)
WHO = IDS | st.builds(Share, st.floats(0, 1), st.none() | st.integers(1, 9))
EXCHANGE = st.integers(0, 10**6)
TEXTS = st.dictionaries(NAMES, st.text(max_size=5), max_size=2)
KINDS = {
    Describe: st.builds(Describe),
    Setup: st.builds(
        Setup, NAMES, st.sampled_from([method for method, *_ in CASES.values()]), TABLES, EXCHANGE, st.floats(0, 1e9),
        st.floats(0, 1),
    ),
    Train: st.builds(Train, NAMES, EXCHANGE, EXCHANGE, EXCHANGE, WHO, TREES, TREES, TABLES, st.booleans()),
    Evaluate: st.builds(Evaluate, NAMES, IDS, TREES, TABLES, st.booleans(), st.booleans(), share=st.floats(0.1, 1)),
    Keep: st.builds(Keep, NAMES),
    Save: st.builds(Save, NAMES, EXCHANGE, st.sampled_from(["now", "kept"])),
    Restore: st.builds(Restore, NAMES, EXCHANGE, ROWS, st.sampled_from(["now", "kept"])),
    Close: st.builds(Close, NAMES),
    Reply: st.builds(
        Reply, st.dictionaries(NAMES, st.builds(Total, TENSORS, TABLES), max_size=2), TABLES, ROWS,
        st.dictionaries(NAMES, NUMBERS | st.lists(NUMBERS), max_size=2),
        st.lists(st.builds(Refusal, NAMES, NAMES), max_size=2).map(tuple),
        st.dictionaries(NAMES, st.builds(Shares, TEXTS, st.dictionaries(NAMES, TEXTS, max_size=2)), max_size=2),
    ),
    OfferKey: st.builds(OfferKey, NAMES),
    AcceptKeys: st.builds(
        AcceptKeys, NAMES, st.dictionaries(NAMES, st.builds(KeyOffer, NAMES, NAMES, NAMES), max_size=2)
    ),
    Masked: st.builds(Masked, NAMES, NAMES, EXCHANGE, st.builds(Evaluate, NAMES, IDS, TREES, TABLES)),
    Unmask: st.builds(Unmask, NAMES, NAMES, EXCHANGE, st.dictionaries(NAMES, TEXTS, max_size=2)),
}  # fmt: skip


def test_all_requests_and_replies_are_among_the_kinds() -> None:
    site = Site(make_federation(), Population(make_net(), k=1), Loop())
    secure = {OfferKey, AcceptKeys, Masked, Unmask}
    assert KINDS.keys() == {*site._answers, Reply} | secure
    inner = {Share, Sum, Total, Rows, Refusal, KeyOffer, MaskedNote, Shares, NoKeys}
    elsewhere = ("ppfl.algorithms", "ppfl.federation")  # tasks of methods, and requests of real machines
    others = {kind for kind in MESSAGES.values() if kind.__module__.startswith(elsewhere)} - inner
    assert set(MESSAGES.values()) == KINDS.keys() | inner | others


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@settings(max_examples=40)
@given(data=st.data())
def test_every_kind_of_message_comes_back_as_it_was_and_is_as_long_as_announced(kind, data) -> None:
    message = data.draw(KINDS[kind])
    sent = encode(message)
    assert encoded_size(message) == len(sent)
    assert same(decode(sent), message)


class Recorded(BytesTransport):
    """Keeps every message to a site and from it."""

    def __init__(self, *sites, **settings) -> None:
        self.messages = []
        super().__init__(*sites, **settings)

    def deliver(self, site, requests):
        replies = super().deliver(site, requests)
        self.messages += [list(requests), replies]
        return replies


@pytest.mark.parametrize("name", CASES)
def test_every_message_of_every_method_comes_back_as_it_was(name: str) -> None:
    method, k, mix = CASES[name]
    population = Population(make_net(), k=k, mix=mix)
    ended = run(method, population, make_federation(SIZES), engine="stacked", rounds=2, kind=Recorded, sites=2)
    assert len(ended.transport.messages) > 10
    for message in ended.transport.messages:
        sent = encode(message)
        assert same(decode(sent), message) and encoded_size(message) == len(sent)


@pytest.mark.parametrize("name", METHODS)
def test_every_method_comes_back_with_its_settings(name: str) -> None:
    inner = {"method": METHODS["fedavg"](momentum=0.5)} if name == "finetune" else {}
    method = METHODS[name](lr=0.125, **inner) if name != "finetune" else METHODS[name](**inner)
    assert decode(encode(method)) == method and type(decode(encode(method))) is METHODS[name]


def test_a_tensor_in_several_places_is_carried_once() -> None:
    tensor = torch.zeros(1000)
    once, twice = (encoded_size({"a": tensor, "b": other}) for other in (0, tensor))
    assert twice - once < 100
    back = decode(encode({"a": tensor, "b": tensor}))
    assert back["a"] is back["b"]


def test_a_message_is_decoded_into_memory_of_its_own() -> None:
    sent = encode({"a": torch.arange(3)})
    back = decode(sent)
    back["a"] += 1
    assert decode(sent)["a"].tolist() == [0, 1, 2]


# ---------------------------------------------------------------------- what is no message


def refused_or_read(data: bytes) -> bool:
    """Whether bytes are refused; any error but DataError fails the test."""
    try:
        decode(data)
    except DataError:
        return True
    return False


MESSAGE = Train("main", 3, 4, 3, ("a", "b"), 0.1, {"w": torch.ones(2, 3)}, {"c": torch.zeros(2, dtype=torch.int64)})


def test_a_refusal_says_what_to_do() -> None:
    with pytest.raises(DataError, match="a message cannot be read .*; sender and receiver must run the same version"):
        decode(b"12345678")


def test_bytes_cut_anywhere_are_refused() -> None:
    whole = encode(MESSAGE)
    assert all(refused_or_read(whole[:length]) for length in range(len(whole)))
    assert refused_or_read(whole + b"\0")


@given(st.integers(0, len(encode(MESSAGE)) - 1), st.integers(1, 255))
@settings(max_examples=400)
def test_a_garbled_byte_never_gives_another_error(at: int, flip: int) -> None:
    data = bytearray(encode(MESSAGE))
    data[at] ^= flip
    refused_or_read(bytes(data))


@given(st.binary(max_size=200))
def test_random_bytes_are_refused(data: bytes) -> None:
    assert refused_or_read(data)
    assert refused_or_read(len(data).to_bytes(8, "big") + data)


def as_bytes(header, tensors: bytes = b"") -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "big") + text + tensors


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(["float32", "Train", "ppfl", "$tensor"]),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(
        st.sampled_from(["$tensor", "$kind", "$tuple", "$method", "tensors", "message", "session", "lr", "a"]), inner,
        max_size=3,
    ),
    max_leaves=8,
)  # fmt: skip


@given(JSON, JSON, st.binary(max_size=20))
@settings(max_examples=400)
def test_a_text_of_any_structure_never_gives_another_error(tensors, message, raw: bytes) -> None:
    refused_or_read(as_bytes({"tensors": tensors, "message": message}, raw))
    refused_or_read(as_bytes(tensors, raw))
    specs = [["float32", tensors]]
    refused_or_read(as_bytes({"tensors": specs, "message": message}, raw))


@pytest.mark.parametrize(
    "header",
    [
        {"tensors": [], "message": {"$kind": "Pickle"}},
        {"tensors": [], "message": {"$kind": "Keep"}},
        {"tensors": [], "message": {"$kind": "Keep", "session": "main", "extra": 1}},
        {"tensors": [], "message": {"$kind": ["Keep"]}},
        {"tensors": [], "message": {"$method": "gossip"}},
        {"tensors": [], "message": {"$method": "fedavg", "lr": -1}},
        {"tensors": [], "message": {"$tensor": 0}},
        {"tensors": [["float32", [0]]], "message": {"$tensor": -1}},
        {"tensors": [["complex64", [0]]], "message": 0},
        {"tensors": [["float32", [-1]]], "message": 0},
        {"tensors": [["float32", [2**40, 2**40]]], "message": 0},
        {"tensors": [["float32", [10**30]]], "message": 0},
        {"tensors": [["float32", [1]]], "message": 0},
        {"message": 0},
        [],
    ],
)
def test_what_is_unknown_or_does_not_add_up_is_refused(header) -> None:
    assert refused_or_read(as_bytes(header))


def test_a_deep_nest_is_refused() -> None:
    text = b'{"tensors":[],"message":' + b"[" * 10**5 + b"]" * 10**5 + b"}"
    assert refused_or_read(len(text).to_bytes(8, "big") + text)


class Unregistered(NamedTuple):
    field: int


def test_only_registered_messages_and_methods_are_sent() -> None:
    with pytest.raises(TypeError, match="Unregistered is no message; decorate it"):
        encode(Unregistered(1))

    class Keep(NamedTuple):
        session: str

    with pytest.raises(TypeError, match="Keep is no message"):
        encode(Keep("main"))

    class OtherSettings(Settings):
        x: int = 1

    with pytest.raises((TypeError, AttributeError)):
        encode(OtherSettings())
