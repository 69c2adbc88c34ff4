"""Messages as bytes: one JSON text that says how the message is built, then the numbers of its tensors.

Nothing is pickled, and a message that names an unknown kind is refused. Layout: 8 bytes, the length of the text; the
text; the tensors' bytes, one after the other.
"""

from __future__ import annotations

import json
import math
from typing import Any

import torch
from torch import Tensor

from ..algorithms import METHODS
from ..algorithms.contract import MESSAGES
from ..core.client_names import NumberedIds
from ..core.settings import Settings
from ..errors import DataError

_TENSOR, _KIND, _TUPLE, _METHOD, _IDS = "$tensor", "$kind", "$tuple", "$method", "$ids"
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8, torch.int16, torch.int32, torch.int64,
        torch.uint8, torch.bool,
    )
}  # fmt: skip
_LENGTH = 8
_PLAIN = (str, int, float, bool)


def encode(message: Any) -> bytes:
    """A message as bytes. A tensor that stands in several places is carried once."""
    text, tensors = describe(message)
    return b"".join([len(text).to_bytes(_LENGTH, "big"), text, *map(_raw, tensors)])


def encoded_size(message: Any) -> int:
    """How many bytes `encode` would give, without copying a tensor."""
    text, tensors = describe(message)
    return _LENGTH + len(text) + sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def decode(data: bytes) -> Any:
    """The message, in memory of its own, of which it takes no more than it has bytes."""
    at = _LENGTH + int.from_bytes(data[:_LENGTH], "big")
    try:
        specs, body = parse(data[_LENGTH:at])
        tensors = []
        for dtype, shape in specs:
            size = _numel(shape) * dtype.itemsize
            if size > len(data) - at:
                raise ValueError(f"a tensor of {size} bytes, and {max(0, len(data) - at)} bytes are left")
            part = bytearray(data[at : at + size])
            raw = torch.frombuffer(part, dtype=dtype) if size else torch.empty(0, dtype=dtype)
            tensors.append(raw.reshape(shape))
            at += size
        if at != len(data):
            raise ValueError(f"{len(data)} bytes where {at} were announced")
        return build(body, tensors)
    except (ValueError, KeyError, TypeError, RuntimeError, IndexError) as error:  # also of nesting too deep
        raise DataError(f"a message cannot be read ({error}); sender and receiver must run the same version") from None


def describe(message: Any) -> tuple[bytes, list[Tensor]]:
    """The text of a message, and the tensors it speaks of."""
    found: dict[int, tuple[int, Tensor]] = {}
    body = _described(message, found)
    tensors = [tensor for _, tensor in found.values()]
    specs = [[str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for tensor in tensors]
    return json.dumps({"tensors": specs, "message": body}, separators=(",", ":")).encode(), tensors


def parse(text: bytes) -> tuple[list[tuple[torch.dtype, list[int]]], Any]:
    """Types and shapes of the tensors that a text speaks of, and how the message is built."""
    header = json.loads(text)
    return [(_DTYPES[name], shape) for name, shape in header["tensors"]], header["message"]


def _numel(shape: Any) -> int:
    """How many numbers a tensor has; its shape comes from outside, and -1 would mean any number to torch."""
    if not isinstance(shape, list) or any(type(size) is not int or size < 0 for size in shape):
        raise ValueError(f"a tensor of shape {shape!r:.60}")
    return math.prod(shape)


def _raw(tensor: Tensor) -> bytes:
    flat = tensor.detach().cpu().contiguous().flatten()
    return flat.as_strided((len(flat),), (1,)).view(torch.uint8).numpy().tobytes()  # one element may have any stride


def _described(value: Any, tensors: dict[int, tuple[int, Tensor]]) -> Any:
    if type(value) in _PLAIN:
        return value
    if isinstance(value, Tensor):
        return {_TENSOR: tensors.setdefault(id(value), (len(tensors), value))[0]}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        kind = type(value).__name__
        if MESSAGES.get(kind) is not type(value):
            raise TypeError(f"{kind} is no message; decorate it with ppfl.algorithms.message")
        return {_KIND: kind, **{name: _described(getattr(value, name), tensors) for name in value._fields}}
    if isinstance(value, Settings):
        return {_METHOD: value.name, **value.model_dump(mode="json")}  # type: ignore[attr-defined]
    if isinstance(value, NumberedIds):
        return {_IDS: [value.n_clients, value.prefix]}
    if isinstance(value, dict):
        return {name: _described(item, tensors) for name, item in value.items()}
    if isinstance(value, tuple):
        return {_TUPLE: [_described(item, tensors) for item in value]}
    if isinstance(value, list):
        return [_described(item, tensors) for item in value]
    return value


def build(value: Any, tensors: list[Tensor]) -> Any:
    """A message from its parsed text and its tensors."""
    if isinstance(value, list):
        return [build(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if _TENSOR in value:
        if not 0 <= value[_TENSOR] < len(tensors):
            raise IndexError(f"there is no tensor {value[_TENSOR]}")
        return tensors[value[_TENSOR]]
    if _TUPLE in value:
        return tuple(build(item, tensors) for item in value[_TUPLE])
    if _IDS in value:
        return NumberedIds(*value[_IDS])
    if _METHOD in value:
        settings = {name: item for name, item in value.items() if name != _METHOD}
        return METHODS[value[_METHOD]](**settings)
    built = {name: build(item, tensors) for name, item in value.items() if name != _KIND}
    return MESSAGES[value[_KIND]](**built) if _KIND in value else built
