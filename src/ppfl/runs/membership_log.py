"""Memberships of many rounds in one file: a record is appended for every round, and carries its own checksum.

A record is a header of 24 bytes, little-endian, and then the memberships row by row:

    bytes  0-3   "PPFM"
    bytes  4-7   the round
    bytes  8-11  the number of clients M
    bytes 12-15  the number of canonical models K
    bytes 16-19  bytes per number: 4 or 8
    bytes 20-23  CRC-32 of the 20 bytes before it and of the memberships, begun from the run's salt
"""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..core.simplex import check
from ..errors import ModelError
from .checksums import memory_of
from .storage import damaged

_MAGIC = b"PPFM"
_FIELDS, _CHECKSUM = struct.Struct("<4s4I"), struct.Struct("<I")
_HEADER = _FIELDS.size + _CHECKSUM.size
_DTYPES = {4: torch.float32, 8: torch.float64}


def membership_record(round: int, memberships: Tensor, salt: int) -> bytes:
    """The record of a round. memberships: (M, K)."""
    values = memberships.detach().cpu().contiguous()
    fields = _FIELDS.pack(_MAGIC, round, *values.shape, values.element_size())
    data = memory_of(values)
    return fields + _CHECKSUM.pack(zlib.crc32(data, zlib.crc32(fields, salt))) + data


def read_membership_log(path: Path, length: int, clients: int, salt: int) -> dict[int, Tensor]:
    """Memberships (M, K) by round, from the first `length` bytes: what comes after them was cut short by a kill.

    A method that makes new models on the way (clustered FL) has fewer columns in its first rounds: they get zeros.
    """
    content = bytearray(length)
    if length:
        try:
            with path.open("rb") as file:
                there = file.readinto(content)
        except OSError as error:
            raise damaged(path, f"cannot be read ({error.strerror})") from None
        if there < length:
            raise damaged(path, f"has {there} bytes, fewer than the {length} in metrics.jsonl")
    found: dict[int, Tensor] = {}
    start = last = 0
    while start < length:
        round, memberships, end = _read_record(path, content, start, salt)
        if memberships.shape[0] > clients or round <= last:
            raise damaged(path, f"has round {round} of {memberships.shape[0]} clients after round {last}")
        # clients of sites that joined later are the last ones, and had no preference yet
        new = memberships.new_full((clients - memberships.shape[0], memberships.shape[1]), 1 / memberships.shape[1])
        found[round] = torch.cat([memberships, new])
        start, last = end, round
    most = max((memberships.shape[1] for memberships in found.values()), default=0)
    found = {round: pad(values, (0, most - values.shape[1])) for round, values in found.items()}
    if found:
        try:
            check(torch.cat(list(found.values())), "memberships")
        except (ModelError, RuntimeError) as error:
            raise damaged(path, f"has {error}") from None
    return found


def _read_record(path: Path, content: bytearray, start: int, salt: int) -> tuple[int, Tensor, int]:
    if len(content) < start + _HEADER:
        raise damaged(path, f"ends within a record, at byte {start}")
    magic, round, clients, models, width = _FIELDS.unpack_from(content, start)
    first = start + _HEADER
    size = clients * models * width
    if magic != _MAGIC or width not in _DTYPES or not size or first + size > len(content):
        raise damaged(path, f"has no whole record at byte {start}")
    (checksum,) = _CHECKSUM.unpack_from(content, start + _FIELDS.size)
    view = memoryview(content)
    expected = zlib.crc32(view[first : first + size], zlib.crc32(view[start : start + _FIELDS.size], salt))
    if checksum != expected:
        fault = f"the checksum at byte {start} is {checksum:08x} but the content has {expected:08x}"
        raise damaged(path, f"has changed since it was written: {fault}")
    values = torch.frombuffer(content, dtype=_DTYPES[width], count=clients * models, offset=first)
    return round, values.reshape(clients, models), first + size
