"""Tensors as a safetensors file, written in blocks: no tensor is copied as a whole, whether it is spread out in memory,
on another device, or rows of a file. The bytes are those that the safetensors package writes.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Any, BinaryIO

import torch
from torch import Tensor

from ..errors import WriteError
from .checksums import checksum_of_parts, memory_of

HEADER = "ppfl"  # the one key of the file's metadata: with two, their order would differ by process
BLOCK = 4 * 2**20  # bytes that are copied at a time

Stored = Any  # a tensor, or rows with a shape, a dtype, blocks() that are slices, and a tensor for each (`MappedRows`)

_ZEROS = "0" * 8  # where the checksum goes; a space and a text about the tensors follow
# from the first in a file to the last, so that numbers of every size are aligned
_TYPES = {
    torch.uint64: "U64", torch.int64: "I64", torch.float64: "F64", torch.complex64: "C64", torch.float32: "F32",
    torch.uint32: "U32", torch.int32: "I32", torch.bfloat16: "BF16", torch.float16: "F16", torch.uint16: "U16",
    torch.int16: "I16", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.int8: "I8",
    torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
_ORDER = {dtype: place for place, dtype in enumerate(_TYPES)}


def write_tensors(file: BinaryIO, named: Mapping[str, Stored], about: str) -> None:
    """Write tensors and a text about them from the beginning of a file, and last the checksum into its header.

    >>> import io
    >>> from safetensors.torch import load
    >>> file = io.BytesIO()
    >>> write_tensors(file, {"a": torch.arange(3)}, "{}")
    >>> load(file.getvalue())
    {'a': tensor([0, 1, 2])}
    """
    stored = {name: leaf if hasattr(leaf, "blocks") else leaf.detach() for name, leaf in named.items()}
    for name, leaf in stored.items():
        if leaf.dtype not in _TYPES:
            known = ", ".join(str(dtype).removeprefix("torch.") for dtype in _TYPES)
            raise WriteError(f"{name!r} is {leaf.dtype}, which a safetensors file cannot hold; use one of {known}")
    order = sorted(stored, key=lambda name: (_ORDER[stored[name].dtype], name))
    header = _header({name: stored[name] for name in order}, about)
    file.write(header)
    parts = {}
    for name in order:
        length = checksum = 0
        for block in _blocks_of(stored[name]):
            memory = memory_of(block)
            file.write(memory)
            checksum, length = zlib.crc32(memory, checksum), length + len(memory)
        if length != _size(stored[name]):
            raise WriteError(f"{name!r} gave {length:,} bytes instead of {_size(stored[name]):,}; look at its blocks")
        parts[name] = checksum, length
    start = f'"{HEADER}":"'.encode()
    file.seek(header.index(start + _ZEROS.encode()) + len(start))
    file.write(checksum_of_parts(stored, parts, about).encode())


def split_header(metadata: Mapping[str, str] | None) -> tuple[str, str]:
    """The checksum and the text about the tensors, from the metadata of a file.

    >>> split_header({"ppfl": '00c0ffee {"round": 3}'})
    ('00c0ffee', '{"round": 3}')
    """
    checksum, _, about = (metadata or {})[HEADER].partition(" ")
    return checksum, about


def blocks_of(tensor: Tensor) -> Iterator[Tensor]:
    """A tensor in parts of at most BLOCK bytes, in the order of its elements.

    >>> [len(block) for block in blocks_of(torch.zeros(3 * 2**20))]
    [1048576, 1048576, 1048576]
    """
    if tensor.nbytes <= BLOCK:
        yield tensor
        return
    if tensor.is_contiguous():
        tensor = tensor.reshape(-1)
    rows = BLOCK * len(tensor) // tensor.nbytes  # that fit into a block
    if not rows:
        for row in tensor:
            yield from blocks_of(row)
    else:
        for at in range(0, len(tensor), rows):
            yield from blocks_of(tensor[at : at + rows])


def _blocks_of(leaf: Stored) -> Iterator[Tensor]:
    """Contiguous on the CPU."""
    parts = (leaf[block] for block in leaf.blocks()) if hasattr(leaf, "blocks") else (leaf,)
    for part in parts:
        for block in blocks_of(part):
            yield block.cpu().contiguous()


def _header(stored: Mapping[str, Stored], about: str) -> bytes:
    """The length of the JSON in 8 bytes, and the JSON: what is where. Spaces at its end align what follows."""
    ends = list(accumulate(_size(leaf) for leaf in stored.values()))
    places = {
        name: {"dtype": _TYPES[leaf.dtype], "shape": list(leaf.shape), "data_offsets": [end - _size(leaf), end]}
        for (name, leaf), end in zip(stored.items(), ends, strict=True)
    }
    content = {"__metadata__": {HEADER: f"{_ZEROS} {about}"}} | places
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _size(leaf: Stored) -> int:
    return int(torch.Size(leaf.shape).numel() * leaf.dtype.itemsize)
