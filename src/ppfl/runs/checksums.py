"""Checksums inside files, so that a changed bit, or a file of another run, is noticed when it is read.

A JSON text ends with the key `checksum`: the CRC-32 of the whole text with zeros in its place. `salt` is mixed in
first: texts of different runs have different salts, so a text of another run does not pass.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

_KEY = "checksum"
_ZEROS = b"0" * 8
_ENDING = re.compile(rb'"checksum": "([0-9a-f]{8})"\s*\}\s*\Z')


class ChecksumError(ValueError):
    """A text without a checksum, or with another one than its content has."""


def checked_json(content: Mapping[str, Any], salt: int = 0, indent: int | None = None) -> bytes:
    """A JSON object with its checksum.

    >>> checked_json({"round": 3})
    b'{"round": 3, "checksum": "07c65497"}\\n'
    """
    text = json.dumps({**content, _KEY: _ZEROS.decode()}, indent=indent, ensure_ascii=False, allow_nan=False) + "\n"
    # a lone surrogate becomes a backslash and its number, which is how JSON writes it
    zeroed = text.encode("utf-8", "backslashreplace")
    place = _place(zeroed)
    return zeroed[: place.start] + _checksum(zeroed, place, salt) + zeroed[place.stop :]


def parse_checked_json(text: bytes, salt: int = 0) -> dict[str, Any]:
    """What `checked_json` wrote.

    >>> parse_checked_json(b'{"round": 2, "checksum": "07c65497"}\\n')
    Traceback (most recent call last):
    ppfl.runs.checksums.ChecksumError: its checksum is 07c65497 but its content has 694a4fd6
    """
    place = _place(text)
    found, expected = text[place], _checksum(text, place, salt)
    if found != expected:
        raise ChecksumError(f"its checksum is {found.decode()} but its content has {expected.decode()}")
    return {key: value for key, value in json.loads(text).items() if key != _KEY}


def _place(text: bytes) -> slice:
    """Where the checksum is."""
    found = _ENDING.search(text)
    if found is None:
        raise ChecksumError("it does not end with a checksum")
    return slice(*found.span(1))


def _checksum(text: bytes, place: slice, salt: int) -> bytes:
    zeroed = text[: place.start] + _ZEROS + text[place.stop :]
    return f"{zlib.crc32(zeroed, salt):08x}".encode()


def checksum_of_tensors(tensors: Mapping[str, Tensor], about: str) -> str:
    """Of names, types, shapes and every bit of contiguous tensors on the CPU, and of a text about them."""
    parts = {name: (zlib.crc32(memory_of(tensor)), tensor.nbytes) for name, tensor in tensors.items()}
    return checksum_of_parts(tensors, parts, about)


def checksum_of_parts(tensors: Mapping[str, Any], parts: Mapping[str, tuple[int, int]], about: str) -> str:
    """The same from the CRC-32 and the length in bytes of each tensor's memory; `tensors` have a type and a shape.

    >>> checksum_of_parts({"a": torch.zeros(2)}, {"a": (zlib.crc32(bytes(8)), 8)}, "")
    '14dbd945'
    """
    shapes = [(name, str(tensors[name].dtype), tuple(tensors[name].shape)) for name in sorted(tensors)]
    found = zlib.crc32(f"{about} {shapes}".encode("utf-8", "backslashreplace"))
    for name, _, _ in shapes:
        found = joined(found, *parts[name])
    return f"{found:08x}"


def joined(first: int, second: int, length: int) -> int:
    """The CRC-32 of two texts one after the other, from those of each and the length of the second in bytes.

    >>> joined(zlib.crc32(b"ab"), zlib.crc32(b"cde"), 3) == zlib.crc32(b"abcde")
    True
    """
    # A CRC is a polynomial modulo another. A text after it multiplies it by x to the power of the text's bits, here by
    # repeated squaring.
    power = _X8
    while length:
        if length & 1:
            first = _product(first, power)
        power, length = _product(power, power), length >> 1
    return first ^ second


_POLYNOMIAL = 0xEDB88320  # of CRC-32; the highest bit belongs to x^0
_X8 = 1 << 23  # x^8, one byte


def _product(a: int, b: int) -> int:
    """Of two polynomials, modulo that of CRC-32."""
    found = 0
    for bit in range(31, -1, -1):  # a term of a, and b times its power of x
        if a >> bit & 1:
            found ^= b
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return found


def memory_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU."""
    flat = tensor.detach().reshape(-1)
    if flat.stride(0) != 1:  # at most one number, which counts as contiguous whatever its stride is
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8).numpy().data
