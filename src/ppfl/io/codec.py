"""The one way in which values with tensors become bytes, for files and for messages.

The bytes are a valid safetensors file. Its tensors come first, those with large numbers before those with small ones,
so that all are aligned; each is named by its place in the value. Then comes the tensor `structure`, JSON that says how
the value is built, and last the tensor `sha256`, the digest of all bytes before it. Files always have a digest;
messages on a connection that checks its bytes itself (TLS) need none.

Nothing is pickled. Besides tensors, numbers, text, lists, tuples and dicts, only types that `message` has registered
are written and read. The codec checks structure, sizes and the digest; who uses the values checks these.
"""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from hashlib import sha256
from io import BytesIO
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar

import optree
import torch
from pydantic import BaseModel
from torch import Tensor

from ..errors import CheckpointError, DataError, WriteError
from .files import damaged

VERSION = 1
BLOCK = 4 * 2**20  # bytes that are copied at a time
MOST_TEXT = 64 * 2**20  # bytes of each JSON text in a message; as Python objects it takes up to twenty times as much

Json = Mapping[str, Any]
Spec = tuple[torch.dtype, Sequence[int]]  # type and shape
T = TypeVar("T", bound=type)

_METADATA, _OURS, _STRUCTURE, _DIGEST = "__metadata__", "ppfl", "structure", "sha256"
_TENSOR, _TUPLE, _DICT, _KIND = "$tensor", "$tuple", "$dict", "$kind"
_PLAIN = (str, int, float)  # and bool, which is an int
_DIGEST_BYTES = 32
_SHA256 = torch.uint8, [_DIGEST_BYTES]
_NAMES = {
    torch.uint64: "U64", torch.int64: "I64", torch.float64: "F64", torch.complex64: "C64", torch.float32: "F32",
    torch.uint32: "U32", torch.int32: "I32", torch.bfloat16: "BF16", torch.float16: "F16", torch.uint16: "U16",
    torch.int16: "I16", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.int8: "I8",
    torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
TYPES: dict[str, type] = {}  # that may be written and read, by name


class _FaultError(ValueError):
    """What is wrong with bytes, said so that it follows the name of a file."""


def message(cls: T) -> T:
    """Let a NamedTuple, a dataclass or settings be written and read, by the name of the class."""
    if not (hasattr(cls, "_fields") or is_dataclass(cls) or issubclass(cls, BaseModel)):
        raise TypeError(f"{cls.__name__} is no NamedTuple, dataclass or settings; make it one to register it")
    known = TYPES.setdefault(cls.__name__, cls)
    if (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
        raise TypeError(f"{known.__module__} has a message {cls.__name__} already; rename the one of {cls.__module__}")
    TYPES[cls.__name__] = cls  # a cell of a notebook may be run again
    return cls


def size_of(value: Any) -> int:
    """Bytes of the tensors in a value; a tensor that stands in several places counts once.

    >>> weight = torch.zeros(3)
    >>> size_of({"sums": [weight, weight], "round": 2})
    12
    """
    leaves = optree.tree_leaves(value, none_is_leaf=True)
    return sum(leaf.nbytes for leaf in {id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor)}.values())


# ---------------------------------------------------------------------- writing


def dump(value: Any, file: BinaryIO, kind: str, *, about: Json | None = None, digest: bool = True) -> None:
    """Write a value in blocks, so that it may be larger than memory. A tensor that stands in several places is written
    once.

    Args:
        value: a tree of tensors, numbers, text, lists, tuples, dicts and registered types.
        file: any binary file; only `write` is called.
        kind: what the value is, such as "checkpoint"; `load` refuses another kind.
        about: JSON that `read_about` gives without reading the rest.
        digest: whether the SHA-256 of all bytes is put at their end.

    >>> from safetensors.torch import load as load_by_package
    >>> file = BytesIO()
    >>> dump({"round": 3, "weight": torch.arange(3)}, file, "example")
    >>> load_by_package(file.getvalue())["weight"]
    tensor([0, 1, 2])
    >>> load(file.getvalue(), "example")
    {'round': 3, 'weight': tensor([0, 1, 2])}
    """
    tensors: dict[str, Tensor] = {}
    text = json.dumps(_described(value, "", tensors, {}), separators=(",", ":")).encode()
    specs: dict[str, Spec] = {name: (leaf.dtype, list(leaf.shape)) for name, leaf in tensors.items()}
    specs[_STRUCTURE] = torch.uint8, [len(text)]
    if digest:
        specs[_DIGEST] = _SHA256
    hashed = sha256()

    def write(data: bytes | memoryview) -> None:
        file.write(data)
        if digest:
            hashed.update(data)

    write(_header(specs, json.dumps({"kind": kind, "version": VERSION, "about": dict(about or {})})))
    for name in _in_file_order(specs):
        if name in tensors:
            for block in _blocks_of(tensors[name]):
                write(block)
    write(text)
    if digest:
        file.write(hashed.digest())


def _described(value: Any, path: str | None, tensors: dict[str, Tensor], names: dict[int, str]) -> Any:
    """A value as JSON. Its tensors are added to `tensors`, and their names by id to `names`. They are named by their
    place, or numbered where `path` is None."""

    def inner(key: object, item: Any) -> Any:
        if item is None or isinstance(item, _PLAIN):  # here, as there may be millions of ids
            return item
        below = path if path is None else f"{path}.{key}" if path else str(key)
        return _described(item, below, tensors, names)

    if value is None or isinstance(value, _PLAIN):
        return value
    if isinstance(value, Tensor):
        if id(value) not in names:
            names[id(value)] = name = str(len(tensors)) if path is None else _free_name(path, tensors)
            tensors[name] = value.detach()
            if value.dtype not in _NAMES:
                known = ", ".join(str(dtype).removeprefix("torch.") for dtype in _NAMES)
                raise WriteError(f"{name!r} is {value.dtype}, which a file cannot hold; use one of {known}")
        return {_TENSOR: names[id(value)]}
    if isinstance(value, dict):
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return {key: inner(key, item) for key, item in value.items()}
        return {_DICT: [[inner("key", key), inner(key, item)] for key, item in value.items()]}
    if type(value) is list:
        return [inner(at, item) for at, item in enumerate(value)]
    kind = type(value).__name__
    if TYPES.get(kind) is type(value):
        return {_KIND: kind, **{name: inner(name, item) for name, item in _fields(value).items()}}
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return {_TUPLE: [inner(at, item) for at, item in enumerate(value)]}
    raise TypeError(f"a {kind} cannot be written; decorate its class with ppfl.io.codec.message")


def _free_name(path: str, tensors: Mapping[str, Tensor]) -> str:
    """The path of a tensor, or something like it: keys with dots may give two tensors the same path."""
    name, count = path.encode("utf-8", "replace").decode(), 1
    while name in tensors or name in (_METADATA, _STRUCTURE, _DIGEST):
        name, count = f"{path}~{count}".encode("utf-8", "replace").decode(), count + 1
    return name


def _fields(value: Any) -> dict[str, Any]:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in fields(value) if field.init}
    found: dict[str, Any] = value._asdict()
    return found


def _in_file_order(specs: Mapping[str, Spec]) -> list[str]:
    """From large numbers to small ones, so that all are aligned; structure and digest stay the last."""
    return sorted(specs, key=lambda name: -specs[name][0].itemsize)


def _header(specs: Mapping[str, Spec], about: str) -> bytes:
    """The length of the JSON in 8 bytes, and the JSON: what is where. Spaces at its end align what follows."""
    content: dict[str, Any] = {_METADATA: {_OURS: about}}  # one key: the package writes several in any order
    end = 0
    for name in _in_file_order(specs):
        start, end = end, end + _size(specs[name])
        dtype, shape = specs[name]
        content[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _size(spec: Spec) -> int:
    return math.prod(spec[1]) * spec[0].itemsize


def _blocks_of(leaf: Tensor) -> Iterator[memoryview]:
    """The bytes of a tensor. What is spread out in memory or on another device is copied in parts."""
    parts: Sequence[Tensor]
    if leaf.nbytes <= BLOCK or (leaf.is_contiguous() and leaf.device.type == "cpu"):
        parts = (leaf,)
    else:
        parts = torch.split(leaf, max(1, BLOCK * len(leaf) // leaf.nbytes))
    for part in parts:
        memory = memory_of(part.cpu().contiguous())
        yield from (memory[at : at + BLOCK] for at in range(0, len(memory), BLOCK))


def memory_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU."""
    flat = tensor.reshape(-1)
    if flat.stride(0) != 1:  # at most one number, which counts as contiguous whatever its stride is
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8).numpy().data


# ---------------------------------------------------------------------- reading


def load(source: Path | bytes, kind: str, *, mapped: Sequence[str] = ()) -> Any:
    """What `dump` wrote, in memory of its own, of which tensors take no more than they have bytes.

    Args:
        source: a file, which must have a digest; or the bytes of a message, whose digest is checked if it has one.
        kind: as it was written.
        mapped: tensors of a file whose names begin with one of these stay in the file: copy them before it can change.
    """
    with _refusing(source), _opened(source) as (file, size):
        header = _read_header(file, size, kind, source)
        _check_digest(file, size, header)
        text = _read(file, header, _STRUCTURE)
        if isinstance(source, bytes) and len(text) > MOST_TEXT:
            raise _FaultError(f"has {len(text):,} bytes of text; at most {MOST_TEXT:,} are read")
        body = json.loads(bytes(memory_of(text)))
        named = [name for name in header.specs if name not in (_STRUCTURE, _DIGEST)]
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) if mapped else b""
        tensors = {
            name: _mapped(memory, header, name) if name.startswith(tuple(mapped)) else _read(file, header, name)
            for name in named
        }
        used: set[str] = set()
        value = _built(body, tensors, used)
        if unused := tensors.keys() - used:
            raise _FaultError(f"has a tensor {min(unused)!r:.80} that belongs to nothing")
        return value


def read_about(path: Path, kind: str) -> dict[str, Any]:
    """What was said about a value when it was written; the rest of the file is neither read nor checked."""
    with _refusing(path), _opened(path) as (file, size):
        return dict(_read_header(file, size, kind, path).about)


def read_digest(path: Path) -> str:
    """The SHA-256 at the end of a file, which stands for all of its content; it is not checked."""
    with _refusing(path), path.open("rb") as file:
        file.seek(-_DIGEST_BYTES, 2)
        return file.read().hex()


class _Header(NamedTuple):
    """What a file says of its tensors."""

    specs: dict[str, Spec]
    starts: dict[str, int]  # in the file
    about: Json


@contextmanager
def _refusing(source: Path | bytes) -> Iterator[None]:
    """Turn all that can be wrong with bytes into one error."""
    try:
        yield
    except FileNotFoundError:
        raise CheckpointError(f"there is no {source!s}; check the folder") from None
    except (ValueError, TypeError, LookupError, ArithmeticError, AttributeError, RuntimeError, OSError) as error:
        fault = " ".join(str(error).split())[:500]
        fault = fault if isinstance(error, _FaultError) else f"cannot be read ({fault})"
        if isinstance(source, Path):
            raise damaged(source, fault) from None
        raise DataError(f"a message {fault}; sender and receiver must run the same version") from None


@contextmanager
def _opened(source: Path | bytes) -> Iterator[tuple[BinaryIO, int]]:
    """A file or bytes as a binary file, and its size."""
    with BytesIO(source) if isinstance(source, bytes) else source.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(0)
        yield file, size


def _read_header(file: BinaryIO, size: int, kind: str, source: Path | bytes) -> _Header:
    length = int.from_bytes(file.read(8), "little")
    most = size - 8 if isinstance(source, Path) else min(size - 8, MOST_TEXT)
    if length > most:
        raise _FaultError(f"has a header of {length:,} bytes where there are at most {most:,}")
    text = file.read(length)
    content = json.loads(text)
    ours = content.pop(_METADATA, {}).get(_OURS)
    if ours is None:
        raise _FaultError("was not written by ppfl")
    specs: dict[str, Spec] = {
        name: (_DTYPES[spec["dtype"]], _checked_shape(spec["shape"])) for name, spec in content.items()
    }
    # only what `dump` would write for these names, types and shapes is read: no gaps, no overlaps, no false sizes
    if _header(specs, ours) != length.to_bytes(8, "little") + text:
        raise _FaultError("has a header that does not add up")
    said = json.loads(ours)
    if said["kind"] != kind:
        raise _FaultError(f"holds {said['kind']!r:.60}, and {kind!r} was expected")
    if said["version"] != VERSION:
        raise _FaultError(f"has version {said['version']!r:.20} of the format, and this is {VERSION}")
    *starts, end = accumulate(map(_size, specs.values()), initial=8 + length)
    if end != size:
        raise _FaultError(f"has {size:,} bytes where its header announces {end:,}")
    last = [*specs][-2 if _DIGEST in specs else -1 :]
    if last[0] != _STRUCTURE or specs[_STRUCTURE][0] is not torch.uint8 or specs.get(_DIGEST, _SHA256) != _SHA256:
        raise _FaultError("does not end with its structure and a digest")
    if isinstance(source, Path) and _DIGEST not in specs:
        raise _FaultError("has no digest")
    return _Header(specs, dict(zip(specs, starts, strict=True)), said["about"])


def _checked_shape(shape: Any) -> list[int]:
    if not isinstance(shape, list) or any(type(size) is not int or size < 0 for size in shape):
        raise _FaultError(f"has a tensor of shape {shape!r:.60}")
    return shape


def _check_digest(file: BinaryIO, size: int, header: _Header) -> None:
    if _DIGEST not in header.specs:
        return
    file.seek(0)
    hashed, left = sha256(), size - _DIGEST_BYTES
    while left:
        block = file.read(min(BLOCK, left))
        if not block:
            raise _FaultError("became shorter while it was read")
        hashed.update(block)
        left -= len(block)
    if file.read() != hashed.digest():
        raise _FaultError("has changed since it was written: its content does not have the SHA-256 at its end")


def _read(file: BinaryIO, header: _Header, name: str) -> Tensor:
    """A tensor in memory of torch's own: memory that is aligned otherwise gives other bits."""
    dtype, shape = header.specs[name]
    tensor = torch.empty(shape, dtype=dtype)
    file.seek(header.starts[name])
    memory = memory_of(tensor)
    if file.readinto(memory) != len(memory):  # type: ignore[attr-defined]
        raise _FaultError("became shorter while it was read")
    if dtype is torch.bool and bool((tensor.view(torch.uint8) > 1).any()):
        raise _FaultError(f"has {name!r:.80} with numbers that are neither true nor false")
    return tensor


def _mapped(memory: mmap.mmap | bytes, header: _Header, name: str) -> Tensor:
    dtype, shape = header.specs[name]
    count = math.prod(shape)
    if not count:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=header.starts[name]).reshape(shape)


def _built(value: Any, tensors: Mapping[str, Tensor], used: set[str]) -> Any:
    """A value from its JSON; `used` gets the names of its tensors."""
    if isinstance(value, list):
        return [_built(item, tensors, used) for item in value]
    if not isinstance(value, dict):
        return value
    if _KIND in value:
        kind = value[_KIND]
        if kind not in TYPES:
            raise _FaultError(f"names the unknown kind {kind!r:.60}")
        given = {name: _built(item, tensors, used) for name, item in value.items() if name != _KIND}
        return TYPES[kind](**given)
    if _TENSOR in value:
        name = value[_TENSOR]
        used.add(name)
        return tensors[name]
    if _TUPLE in value:
        return tuple(_built(item, tensors, used) for item in value[_TUPLE])
    if _DICT in value:
        return {_built(key, tensors, used): _built(item, tensors, used) for key, item in value[_DICT]}
    return {name: _built(item, tensors, used) for name, item in value.items()}


# ---------------------------------------------------------------------- values and their tensors apart


def split(value: Any) -> tuple[bytes, list[Tensor]]:
    """JSON that says how a value is built, with types and shapes; and the tensors of the value.

    >>> split({"a": torch.zeros(2), "b": 1})
    (b'{"tensors":[["F32",[2]]],"value":{"a":{"$tensor":"0"},"b":1}}', [tensor([0., 0.])])
    """
    tensors: dict[str, Tensor] = {}
    body = _described(value, None, tensors, {})
    specs = [[_NAMES[leaf.dtype], list(leaf.shape)] for leaf in tensors.values()]
    return json.dumps({"tensors": specs, "value": body}, separators=(",", ":")).encode(), [*tensors.values()]


def specs_of(text: bytes) -> list[Spec]:
    """Types and shapes of the tensors of a value that was split."""
    with _refusing(text):
        return [(_DTYPES[dtype], _checked_shape(shape)) for dtype, shape in json.loads(text)["tensors"]]


def join(text: bytes, tensors: Sequence[Tensor]) -> Any:
    """A value that was split, with these tensors."""
    with _refusing(text):
        return _built(json.loads(text)["value"], {str(at): tensor for at, tensor in enumerate(tensors)}, set())
