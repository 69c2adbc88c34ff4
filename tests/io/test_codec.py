"""Values with tensors come back from bytes as they were, and bytes that `dump` did not write are refused."""

import json
from contextlib import suppress
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from types import UnionType
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from lazy_population import lazy_population

from kit.cases import CASES
from kit.refusals import CheckpointError, DataError, WriteError, assert_refused
from kit.training import kinds_of_messages
from ppfl.algorithms import Method
from ppfl.io import codec
from ppfl.io.codec import dump, join, load, memory_of, message, read_about, read_digest, size_of, specs_of, split
from ppfl.sites import Train


@message
@dataclass(frozen=True)
class Point:
    x: float
    values: Any = ()


def as_bytes(value: Any, **options: Any) -> bytes:
    file = BytesIO()
    dump(value, file, "test", **options)
    return file.getvalue()


def read(data: bytes) -> Any:
    return load(data, "test")


def same(one: Any, other: Any) -> bool:
    """Whether two values are equal, tensors bit by bit."""
    if isinstance(one, torch.Tensor):
        if not isinstance(other, torch.Tensor) or (one.dtype, one.shape) != (other.dtype, other.shape):
            return False
        return memory_of(one.contiguous()) == memory_of(other.contiguous())
    if isinstance(one, dict):
        return isinstance(other, dict) and [*one] == [*other] and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, Point):
        return isinstance(other, Point) and same((one.x, one.values), (other.x, other.values))
    return type(one) is type(other) and (one == other or (one != one and other != other))


# ---------------------------------------------------------------------- what comes back

NAMES = "bool uint8 int8 int16 int32 int64 uint16 uint32 uint64 float16 bfloat16 float32 float64 complex64"
TYPES = [getattr(torch, name) for name in f"{NAMES} float8_e4m3fn float8_e5m2".split()]
LAYOUTS = [
    lambda x: x,
    lambda x: x.mT if x.dim() > 1 else x,
    lambda x: x[:1].expand(x.shape) if x.dim() and len(x) else x,
    lambda x: x[::2] if x.dim() else x,
]


@st.composite
def tensors(draw) -> torch.Tensor:
    shape, dtype = draw(st.lists(st.integers(0, 7), max_size=3)), draw(st.sampled_from(TYPES))
    count, seed = torch.Size(shape).numel() * dtype.itemsize, draw(st.integers(0, 99))
    bits = torch.randint(2, (count,), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    made = bits.view(dtype).reshape(shape) if count else torch.zeros(shape, dtype=dtype)
    return draw(st.sampled_from(LAYOUTS))(made)


TEXT = st.text(max_size=5) | st.sampled_from(
    ["$tensor", "$kind", "structure", "sha256", "__metadata__", "a.b", "\ud800"]
)
PLAIN_VALUES = st.integers(-(2**60), 2**60) | st.floats() | st.booleans() | st.none() | TEXT
KEYS = TEXT | st.integers(-9, 9) | st.tuples(TEXT, TEXT)
TREES = st.recursive(
    tensors() | PLAIN_VALUES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(KEYS, inner, max_size=3)
        | st.tuples(inner, inner)
        | st.builds(Point, st.floats(), inner)
    ),
    max_leaves=5,
)


@given(TREES, st.booleans())
def test_a_value_comes_back_as_it_was_and_its_bytes_are_a_safetensors_file(value, digest):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(codec, "BLOCK", 64)
        written = as_bytes(value, digest=digest)
    assert written == as_bytes(value, digest=digest), "however large blocks are"
    assert same(read(written), value)
    assert same(join(*split(value)), value)
    found = safetensors.torch.load(written)
    ours = found.keys() - {"structure", "sha256"}
    assert sum(found[name].nbytes for name in ours) == size_of_any(value)


def size_of_any(value: Any) -> int:
    """Each tensor once, also those in dataclasses."""
    return sum(tensor.nbytes for tensor in split(value)[1])


FIELDS = {
    Any: TREES,
    torch.Tensor: tensors(),
    str: TEXT,
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
        return st.dictionaries(TEXT, any_value(inner[1]), max_size=2)
    if kind in (tuple, list):
        return st.lists(any_value(inner[0]), max_size=3).map(kind)
    if kind is Literal:
        return st.sampled_from(inner)
    if kind is UnionType:
        return st.one_of(*map(any_value, inner))
    return FIELDS[hint] if hint in FIELDS else st.builds(hint, *map(any_value, get_type_hints(hint).values()))


MESSAGES = [kind for kind in kinds_of_messages("ppfl.algorithms", "ppfl.sites") if hasattr(kind, "_fields")]


@pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.__name__)
@given(data=st.data())
def test_every_kind_of_message_comes_back_as_it_was(kind, data):
    value = data.draw(any_value(kind))
    assert same(read(as_bytes(value, digest=False)), value)


def test_every_method_comes_back_with_its_settings():
    for method, *_ in CASES.values():
        assert same(read(as_bytes(method)), method)


def test_a_tensor_in_several_places_is_carried_once_and_gets_memory_of_its_own():
    tensor = torch.zeros(1000)
    once, sent = as_bytes({"a": tensor, "b": 0}), as_bytes({"a": tensor, "b": tensor})
    assert len(sent) - len(once) < 100
    assert size_of({"a": tensor, "b": [tensor]}) == size_of(read(sent)) == tensor.nbytes
    back = read(sent)
    assert back["a"] is back["b"]
    back["a"] += 1
    assert read(sent)["a"].equal(tensor)


def test_what_no_file_can_hold_is_refused():
    refused = {"x": torch.zeros(1, dtype=torch.complex128)}
    assert_refused(lambda: as_bytes(refused), WriteError, "'x' is torch.complex128", "use one of")


def test_only_registered_types_are_written_and_two_of_one_name_are_refused():
    class Keep(NamedTuple):  # not the registered one of this name
        session: str

    for value in (Keep("main"), object(), {1, 2}):
        with pytest.raises(TypeError, match="cannot be written"):
            as_bytes(value)
    with pytest.raises(TypeError, match="has a message Keep already"):
        message(Keep)
    with pytest.raises(TypeError, match="no NamedTuple"):
        message(Path)


# ---------------------------------------------------------------------- files


@pytest.fixture
def file(tmp_path) -> Path:
    return tmp_path / "value.safetensors"


def test_a_file_says_what_it_is_and_has_a_digest(file):
    file.write_bytes(as_bytes([1, torch.ones(2)], about={"round": 3}))
    assert read_about(file, "test") == {"round": 3}
    assert same(load(file, "test"), [1, torch.ones(2)])
    assert bytes.fromhex(read_digest(file)) == file.read_bytes()[-32:]
    assert_refused(
        lambda: load(file, "fit"), CheckpointError, "value.safetensors", "holds 'test'", "'fit' was expected"
    )
    assert_refused(lambda: load(file.with_name("other"), "test"), CheckpointError, "there is no")
    file.write_bytes(as_bytes([1], digest=False))
    assert_refused(lambda: load(file, "test"), CheckpointError, "has no digest")
    safetensors.torch.save_file({"a": torch.ones(2)}, file)
    assert_refused(lambda: load(file, "test"), CheckpointError, "was not written by ppfl")


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="looks at the maps of this process")
def test_what_may_stay_in_the_file_is_not_copied_into_memory(file):
    x = torch.arange(40_000.0)
    file.write_bytes(as_bytes({"clients": {"x": x}, "server": x.clone()}))
    found = load(file, "test", mapped=("clients.",))
    maps = [line.split()[0] for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(str(file))]
    ranges = [[int(end, 16) for end in addresses.split("-")] for addresses in maps]
    for tensor, mapped in ((found["clients"]["x"], True), (found["server"], False)):
        assert any(first <= tensor.data_ptr() < last for first, last in ranges) == mapped
        assert tensor.equal(x)


# ---------------------------------------------------------------------- what is refused


def refused(data: bytes) -> bool:
    """Whether bytes are refused; any error but DataError fails the test."""
    try:
        read(data)
    except DataError as error:
        return "\n" not in str(error)
    return False


OWN = {"c": torch.zeros(2, dtype=torch.int64), "b": torch.tensor([True])}
REQUEST = Train("main", 3, 4, 3, ("a", "b"), 0.1, {"w": torch.ones(2, 3)}, OWN)


def test_a_changed_byte_is_noticed_and_without_a_digest_never_gives_another_error(file):
    whole, bare = as_bytes(REQUEST), as_bytes(REQUEST, digest=False)
    generator = torch.Generator().manual_seed(0)
    for data, noticed in ((whole, True), (bare, False)):
        for at in range(len(data)):
            for flip in torch.randint(1, 256, (3,), generator=generator).tolist():
                changed = data[:at] + bytes([data[at] ^ flip]) + data[at + 1 :]
                assert refused(changed) or not noticed
    for at in range(0, len(whole), 7):
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        assert_refused(lambda: load(file, "test"), CheckpointError, "value.safetensors", "nothing was changed")


def test_bytes_cut_anywhere_are_refused(file):
    for whole in (as_bytes(REQUEST), as_bytes(REQUEST, digest=False)):
        assert all(refused(whole[:length]) for length in range(len(whole)))
        assert refused(whole + b"\0")
    assert_refused(lambda: read(b"12345678"), DataError, "same version")
    file.write_bytes(as_bytes(REQUEST)[:-1])
    assert_refused(lambda: load(file, "test"), CheckpointError, "value.safetensors")


def hostile(body: Any, specs: dict[str, Any] | None = None, data: bytes = b"", text: bytes | None = None, **said: Any):
    """A message without a digest whose structure and header say what they like. specs: dtype, shape, bytes."""
    text = json.dumps(body).encode() if text is None else text
    about = json.dumps({"kind": "test", "version": codec.VERSION, "about": {}} | said)
    content: dict[str, Any] = {"__metadata__": {"ppfl": about}}
    at = 0
    for name, (dtype, shape, size) in {**(specs or {}), "structure": ("U8", [len(text)], len(text))}.items():
        content[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    header = json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header + data + text


A = {"a": {"$tensor": "a"}}
BODIES = [{"$kind": "Pickle"}, {"$kind": "Keep"}, {"$kind": "Keep", "session": "main", "extra": 1}, {"$kind": ["Keep"]}]
BODIES += [{"$kind": "FedAvg", "lr": -1}, {"$tensor": "a"}, {"$tensor": ["a"]}, {"$tuple": 3}, {"$dict": [[[], 1]]}]
IDS = [{"$kind": "NumberedIds", "n_clients": count} for count in (10**12, 10**30, -1, 2.5, "3", None, True)]
SPECS = {
    "no such type": ("F128", [1], 16),
    "another size": ("F32", [2], 4),
    "below 0": ("F32", [-1], 4),
    "more than there is": ("F32", [2**40, 2**40], 4),
    "no number": ("F32", [10**30], 4),
    "not whole": ("F32", [1.0], 4),
    "true": ("F32", [True], 4),
    "no list": ("F32", 1, 4),
    "not aligned": ("U8", [4], 4),
}


def test_what_is_unknown_does_not_add_up_or_is_nested_very_deep_is_refused():
    assert not refused(hostile(A, {"a": ("F32", [1], 4)}, bytes(4))), "the same without a fault"
    assert all(refused(hostile(body)) for body in (*BODIES, *IDS))
    for spec in [*SPECS.values()][:-1]:
        assert refused(hostile(A, {"a": spec}, bytes(spec[2])))
    assert refused(hostile({**A, "b": {"$tensor": "b"}}, {"b": SPECS["not aligned"], "a": ("F32", [1], 4)}, bytes(8)))
    assert refused(hostile({}, {"a": ("F32", [1], 4)}, bytes(4))), "a tensor that belongs to nothing"
    assert refused(hostile(A, {"a": ("BOOL", [1], 1)}, b"\2"))
    assert refused(hostile({}, version=codec.VERSION + 1)) and refused(hostile({}, kind="another"))
    for deep in (b"[" * 10**5 + b"]" * 10**5, b'{"a":' * 2000 + b"1" + b"}" * 2000):
        assert refused(hostile(None, text=deep))
    assert refused((2**62).to_bytes(8, "little") + bytes(100))


NAMES_IN_JSON = st.sampled_from(["$tensor", "$kind", "$tuple", "$dict", "session", "n_clients", "a"])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(["F32", "Train", "NumberedIds", "a"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES_IN_JSON, inner, max_size=3),
    max_leaves=8,
)


@given(st.lists(st.tuples(JSON, JSON), min_size=10, max_size=10), st.binary(max_size=200))
def test_random_bytes_are_refused_and_any_json_never_gives_another_error(texts, raw):
    assert refused(raw) and refused(len(raw).to_bytes(8, "little") + raw)
    for one, other in texts:
        refused(hostile(one, {"a": ("U8", [len(raw)], len(raw))}, raw))
        refused(hostile(one, {"a": ("F32", other, len(raw))}, raw))
        for text in (json.dumps({"tensors": one, "value": other}).encode(), json.dumps(one).encode(), raw):
            for call in (specs_of, lambda text: join(text, [])):
                with suppress(DataError):
                    call(text)


@given(st.sampled_from([*SPECS.values(), ("F32", [1000], 4000)]), st.integers(0, 3), st.booleans())
def test_reading_takes_no_more_memory_for_tensors_than_the_message_has_bytes(spec, copies, whole):
    taken: list[int] = []
    empty = torch.empty

    def counted(*args: Any, **options: Any) -> torch.Tensor:
        made = empty(*args, **options)
        taken.append(made.nbytes)
        return made

    body = [{"$tensor": f"{at}"} for at in range(copies)] * 3
    data = hostile(body, {f"{at}": spec for at in range(copies)}, bytes(spec[2] * copies if whole else 7))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", counted)
        refused(data)
    assert sum(taken) <= len(data)


def test_a_message_with_very_much_text_is_refused_before_it_is_parsed(monkeypatch):
    data = as_bytes(["a" * 1000])
    assert not refused(data)
    monkeypatch.setattr(codec, "MOST_TEXT", 900)
    assert_refused(lambda: read(data), DataError, "1,004 bytes of text", "at most 900")
