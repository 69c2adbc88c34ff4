"""Masks: long streams of pseudo-random numbers from keys of 32 bytes.

Keys are derived with HKDF-SHA256 (RFC 5869), streams are ChaCha20's (RFC 8439). Every key is used for one stream, so
the nonce is zero.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

KEY_BYTES = 32
PROTOCOL = "ppfl secure sums 1"

Integers = npt.NDArray[np.unsignedinteger[Any]]


def derive_key(secret: bytes, *purpose: str | int, salt: bytes = b"") -> bytes:
    """A key for one purpose. Keys of different purposes tell nothing about each other or about the secret.

    >>> derive_key(b"s" * 32, "mask", 1) == derive_key(b"s" * 32, "mask", 2)
    False
    """
    info = json.dumps([PROTOCOL, *purpose]).encode()  # no two lists of purposes have the same text
    return HKDF(SHA256(), KEY_BYTES, salt, info).derive(secret)


def mask_stream(key: bytes, count: int, bits: int) -> Integers:
    """`count` unsigned integers of 32 or 64 bits, every value equally likely.

    >>> mask_stream(bytes(32), count=1, bits=32)
    array([2917185654], dtype=uint32)
    """
    numbers = np.zeros(count, dtype=f"<u{bits // 8}")
    cipher = Cipher(ChaCha20(key, bytes(16)), mode=None).encryptor()
    return np.frombuffer(cipher.update(numbers.tobytes()), dtype=numbers.dtype)


def part_key(seed: bytes, part: str) -> bytes:
    """The key of the mask on one part of a reply."""
    return derive_key(seed, "part", part)


def add_mask(onto: Integers, key: bytes, sign: int) -> None:
    """Add a mask, or take it away, in place and modulo 2^bits."""
    mask = mask_stream(key, len(onto), 8 * onto.dtype.itemsize)
    if sign > 0:
        np.add(onto, mask, out=onto)
    else:
        np.subtract(onto, mask, out=onto)


def pair_sign(one: str, other: str) -> int:
    """Of two sites, the first by name adds their common mask and the other one subtracts it."""
    return 1 if one < other else -1
